# SPDX-License-Identifier: Apache-2.0
"""Each behaviour recorded once and replayed under many schedules, with the server stopped: the same every time.

`make test` draws a few schedules; `make test-full` fifteen of each in this process, two in fresh ones, and one where
there is no network. With SFTRACE_AT_LENGTH set it draws a hundred of each, and ten in fresh processes. An audit hook
sees to it that no replay even tries to connect.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sftrace_otel import ReplayPolicyError, recorder
from sftrace_otel.bundle.read import validate_bundle
from sftrace_otel.instrumentation import guard

HERE = Path(__file__).resolve().parent

WHOLE = bool(os.environ.get("SFTRACE_AT_LENGTH"))
"""Whether the long tests try as often as they can; `make test-full` has time for a part."""

pytestmark = [  # agents leave clients open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("schedule_behaviours", HERE / "behaviours.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


behaviours = _load()


@pytest.fixture(autouse=True)
def _nothing_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    recorder.restart_lineage()
    guard.forget_connections()
    behaviours.deal(None)
    yield
    recorder.release()
    with warnings.catch_warnings():  # a connection that was stopped leaves a socket
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture(params=behaviours.BEHAVIOURS)
def made(request: pytest.FixtureRequest, openai_server: Any, tmp_path: Path) -> tuple[str, str, Path, Any]:
    """A behaviour's name, the origin of the server that is stopped now, the bundle, and what the program gave."""
    answers = sys.modules["openai_server"]
    numbers = itertools.count()

    def answer(body: Any) -> Any:
        said = body["messages"][-1]["content"]
        return answers.text(f"{next(numbers)}: {said}" if said == "the same" else f"answer to {said}")

    def reply(received: Any) -> Any:
        if received.json["messages"][-1]["content"] == "refuse":
            return answers.json_reply({"error": {"message": "no", "type": "invalid_request_error"}}, status=400)
        return None

    openai_server.answer = answer
    if request.param.startswith("model_error"):
        openai_server.replies["POST /v1/chat/completions"] = lambda got: (
            reply(got) or answers.json_reply(answers.completion(got.json, answer(got.json)))
        )
    bundle = tmp_path / "run.sftrace"
    want = behaviours.recording(request.param, openai_server.url, bundle)
    openai_server.stop()
    assert validate_bundle(bundle, verify_integrity=True).exit_code == 0
    return request.param, openai_server.url, bundle, want


def test_some_schedules(made: tuple[str, str, Path, Any]) -> None:
    name, url, bundle, want = made
    for seed in range(2):
        assert behaviours.replaying(name, url, bundle, seed) == want, f"schedule {seed}"


@pytest.mark.full
def test_many_schedules(made: tuple[str, str, Path, Any]) -> None:
    name, url, bundle, want = made
    for seed in range(100, 200 if WHOLE else 115):
        assert behaviours.replaying(name, url, bundle, seed) == want, f"schedule {seed}"


@pytest.mark.full
def test_fresh_processes(made: tuple[str, str, Path, Any]) -> None:
    name, url, bundle, want = made
    for seed in range(10 if WHOLE else 2):
        command = [sys.executable, str(HERE / "behaviours.py"), name, str(bundle), url, str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == want, f"schedule {seed}"


@pytest.mark.full
def test_in_a_network_namespace_without_interfaces(made: tuple[str, str, Path, Any]) -> None:
    name, url, bundle, want = made
    alone = ["unshare", "--map-root-user", "--net"]
    try:
        able = subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        able = False
    if not able:
        pytest.skip("network namespaces are not permitted here")
    command = [*alone, sys.executable, str(HERE / "behaviours.py"), name, str(bundle), url, "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == want


def test_a_connection_that_is_tried_is_seen(openai_server: Any, tmp_path: Path) -> None:
    """The audit hook by which every replay here is watched notices one that the guard stops."""
    bundle = tmp_path / "run.sftrace"
    behaviours.recording("async_tools", "", bundle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(behaviours.BEHAVIOURS, "async_tools", lambda _: urllib.request.urlopen(openai_server.url))
        with pytest.raises(ReplayPolicyError):
            behaviours.replaying("async_tools", "", bundle, None)
    assert [one.partition(" ")[0] for one in behaviours.tried] == ["socket.getaddrinfo", "socket.connect"]
    assert openai_server.requests == []


def test_the_schedules_differ(tmp_path: Path) -> None:
    """Across seeds, tasks and threads reach the boundary in different orders: else nothing was tried."""
    orders: dict[str, set[tuple[int, ...]]] = {"async_tools": set(), "thread_pool": set()}
    for name, seen in orders.items():
        bundle = tmp_path / f"{name}.sftrace"
        behaviours.recording(name, "", bundle)
        for seed in range(12):
            behaviours.deal(seed)
            with behaviours.ReplaySession.from_trace(bundle) as replay:
                behaviours.BEHAVIOURS[name]("")
                seen.add(tuple(call.index for call in replay._made))
    assert all(len(seen) > 3 for seen in orders.values()), orders
