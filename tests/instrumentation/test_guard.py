# SPDX-License-Identifier: Apache-2.0
"""Connections outside every boundary: noticed while recording, stopped while replaying, loud where a model answered."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import textwrap
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import context

from sftrace_otel import ReplayMismatchError, ReplayPolicyError, ReplaySession, record, recorder, trace_tool
from sftrace_otel.bundle.read import open_bundle
from sftrace_otel.instrumentation import guard
from sftrace_otel.settings import Settings

Run = Callable[..., Any]

pytestmark = [  # a connection that is stopped leaves a socket for the collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _collect() -> Iterator[None]:
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@trace_tool
def one() -> int:
    return 1


def test_connections_outside_are_named_in_the_bundle(openai_server: Any, tmp_path: Path) -> None:
    made = recorder.acquire(Settings(dir=tmp_path / "out", quiet=True))
    made.connections = guard.connections
    guard.notice_connections()
    one()
    urllib.request.urlopen(openai_server.url + "/json").close()
    httpx.get(openai_server.url + "/json")
    made.close()
    (path,) = (tmp_path / "out").glob("*.sftrace")
    (connection,) = open_bundle(path).run["connections"]
    assert (connection["port"], connection["library"]) == (int(openai_server.url.rpartition(":")[2]), "urllib")
    (obstacle,) = open_bundle(path).run["verdict"]["obstacles"]
    assert obstacle["kind"] == "connection" and "urllib connected to" in obstacle["what"]


@pytest.mark.parametrize("key", ["suppress_instrumentation", context._SUPPRESS_INSTRUMENTATION_KEY], ids=["old", "new"])
def test_an_exporters_own_connection_is_nobodys_dependency(key: str, openai_server: Any, bundle_path: Path) -> None:
    guard.notice_connections()
    with record("agent", output=bundle_path):
        token = context.attach(context.set_value(key, True))
        try:
            urllib.request.urlopen(openai_server.url + "/json").close()
            httpx.get(openai_server.url + "/json")
        finally:
            context.detach(token)
    assert guard.connections() == []
    assert [event.type for event in open_bundle(bundle_path).events] == ["run_start", "run_end"]


def test_a_process_that_talked_to_a_model_uncaptured_says_so_at_exit(tmp_path: Path) -> None:
    code = f"""
    import socket, sys
    from pathlib import Path
    from sftrace_otel import recorder
    from sftrace_otel.instrumentation import guard
    from sftrace_otel.settings import Settings
    recorder.acquire(Settings(dir=Path({str(tmp_path)!r}))).connections = guard.connections
    guard.notice_connections()
    sys.audit("socket.getaddrinfo", "api.openai.com", 9, 0, 0, 0)  # what a resolver that answers would raise
    try:
        socket.create_connection(("127.0.0.1", 9), timeout=1)
    except OSError:
        pass
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "connected to api.openai.com and NO call was captured" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["socket", "urllib", "dns"])
def test_replay_stops_connections_outside_and_says_who_tried(how: str, openai_server: Any, bundle_path: Path) -> None:
    with record("agent", output=bundle_path):
        one()
    port = int(openai_server.url.rpartition(":")[2])

    def connect() -> None:
        if how == "socket":
            socket.create_connection(("127.0.0.1", port)).close()
        elif how == "urllib":
            urllib.request.urlopen(openai_server.url + "/json").close()
        else:
            socket.create_connection(("localhost", port)).close()

    with pytest.raises(ReplayPolicyError, match=f":{port}") as raised, ReplaySession.from_trace(bundle_path) as replay:
        one()
        try:
            connect()
        except Exception:
            pass
        assert replay.latched is not None
    assert "REPLAY_ALLOW" in str(raised.value)
    assert openai_server.requests == []


def test_allowed_connections_go_through(openai_server: Any, bundle_path: Path) -> None:
    with record("agent", output=bundle_path):
        one()
    where = openai_server.url.removeprefix("http://")
    with ReplaySession.from_trace(bundle_path, allow=[where]) as replay:
        one()
        urllib.request.urlopen(openai_server.url + "/json").close()
        replay.verify_complete()
    assert len(openai_server.requests) == 1


def test_after_the_replay_connections_are_free_again(openai_server: Any, bundle_path: Path) -> None:
    with record("agent", output=bundle_path):
        one()
    with ReplaySession.from_trace(bundle_path):
        one()
    urllib.request.urlopen(openai_server.url + "/json").close()
    assert len(openai_server.requests) == 1


def test_the_suppression_key_opens_no_way_out_of_a_replay(openai_server: Any, bundle_path: Path) -> None:
    with record("agent", output=bundle_path):
        one()
    with pytest.raises(ReplayMismatchError), ReplaySession.from_trace(bundle_path):
        one()
        token = context.attach(context.set_value(context._SUPPRESS_INSTRUMENTATION_KEY, True))
        try:
            httpx.get(openai_server.url + "/json")
        finally:
            context.detach(token)
    assert openai_server.requests == []


def test_a_name_that_is_allowed_allows_its_addresses_only(openai_server: Any, bundle_path: Path) -> None:
    with record("agent", output=bundle_path):
        one()
    port = int(openai_server.url.rpartition(":")[2])
    with (
        pytest.raises(ReplayPolicyError),
        ReplaySession.from_trace(bundle_path, allow=[f"localhost:{port}"]),
    ):
        one()
        socket.create_connection(("127.0.0.1", port)).close()
        with contextlib.suppress(Exception):
            socket.create_connection(("127.0.0.2", port)).close()
