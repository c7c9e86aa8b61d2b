# SPDX-License-Identifier: Apache-2.0
"""Connections outside every boundary: noticed while recording, stopped while replaying, loud where a model answered."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes.util
import gc
import multiprocessing
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
import opentelemetry.instrumentation.auto_instrumentation
import pytest
from opentelemetry import context

from sftrace_otel import ReplayMismatchError, ReplayPolicyError, ReplaySession, record, recorder, trace_tool
from sftrace_otel.bundle.read import open_bundle, validate_bundle
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


def stopped(bundle: Path, act: Callable[[], object], **options: Any) -> str:
    """What a replay said of `act`, whose own exception the program catches."""
    with pytest.raises(ReplayPolicyError) as raised, ReplaySession.from_trace(bundle, **options):
        one()
        with contextlib.suppress(Exception):
            act()
    return str(raised.value)


@pytest.fixture
def recorded_one(bundle_path: Path) -> Path:
    with record("agent", output=bundle_path):
        one()
    return bundle_path


LOOK_UPS: dict[str, Callable[[], object]] = {
    "getaddrinfo": lambda: socket.getaddrinfo("name.invalid", 443),
    "bytes": lambda: socket.getaddrinfo(b"name.invalid", 443),
    "gethostbyname": lambda: socket.gethostbyname("name.invalid"),
    "gethostbyname_ex": lambda: socket.gethostbyname_ex("name.invalid"),
    "gethostbyaddr": lambda: socket.gethostbyaddr("name.invalid"),
}


@pytest.mark.parametrize("how", LOOK_UPS)
def test_replay_stops_look_ups_of_names(how: str, recorded_one: Path) -> None:
    said = stopped(recorded_one, LOOK_UPS[how])
    assert "look up the name name.invalid" in said and "REPLAY_ALLOW=name.invalid:" in said


def test_names_and_addresses_of_this_host_need_no_look_up(recorded_one: Path) -> None:
    with ReplaySession.from_trace(recorded_one) as replay:
        one()
        socket.getaddrinfo("localhost", 80)
        socket.getaddrinfo("127.0.0.1", 80)
        socket.getaddrinfo(None, 80, flags=socket.AI_PASSIVE)
        socket.getaddrinfo("::1", 80)
        with contextlib.suppress(OSError):  # whether it resolves is the machine's affair
            socket.getaddrinfo(socket.gethostname(), 80)
        replay.verify_complete()


def test_an_allowed_name_may_be_looked_up(recorded_one: Path) -> None:
    with ReplaySession.from_trace(recorded_one, allow=["name.invalid:443"]) as replay:
        one()
        with pytest.raises(OSError):
            socket.getaddrinfo("Name.Invalid", 443)
        replay.verify_complete()


def _connect_to(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen()
        yield path


def test_replay_stops_sockets_of_this_machine(recorded_one: Path, listener: str) -> None:
    said = stopped(recorded_one, lambda: _connect_to(listener))
    assert f"REPLAY_ALLOW=unix:{listener}" in said
    with ReplaySession.from_trace(recorded_one, allow=[f"unix:{listener}"]):
        one()
        _connect_to(listener)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_of_multiprocessing_start_under_replay(method: str, recorded_one: Path) -> None:
    context = multiprocessing.get_context(method)
    with ReplaySession.from_trace(recorded_one) as replay:
        one()
        worker = context.Process(target=print, args=("started",))
        worker.start()
        worker.join(30)
        assert worker.exitcode == 0
        replay.verify_complete()


COMMANDS: dict[str, Callable[[], object]] = {
    "run": lambda: subprocess.run(["true", "sk-abcdefgh12345678"], check=True),
    "shell": lambda: subprocess.run("true sk-abcdefgh12345678", shell=True, check=True),
    "path": lambda: subprocess.run([Path("/usr/bin/env"), "true"], check=True),
    "system": lambda: os.system("TOKEN=sk-abcdefgh12345678 true"),
    "popen": lambda: os.popen("true").close(),
    "posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "python": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "async": lambda: asyncio.run(_started()),
}


async def _started() -> None:
    await (await asyncio.create_subprocess_exec("true")).wait()


@pytest.mark.parametrize("how", COMMANDS)
def test_replay_stops_programs_that_are_started(how: str, recorded_one: Path) -> None:
    said = stopped(recorded_one, COMMANDS[how])
    name = {"shell": "sh", "popen": "sh", "path": "env", "python": Path(sys.executable).name}.get(how, "true")
    assert f"start the program {name}," in said and f"REPLAY_ALLOW=exec:{name}" in said
    assert "sk-" not in said


def test_what_a_forked_child_starts_is_stopped_there(recorded_one: Path) -> None:
    with ReplaySession.from_trace(recorded_one):
        one()
        assert os.spawnv(os.P_WAIT, "/bin/true", ["true"]) == 127


def test_an_allowed_program_and_the_standard_librarys_own_questions_start(recorded_one: Path) -> None:
    with ReplaySession.from_trace(recorded_one, allow=["exec:true"]) as replay:
        one()
        subprocess.run(["true"], check=True)
        ctypes.util.find_library("c")
        replay.verify_complete()


def test_a_python_process_under_the_same_replay_answers_by_itself(
    recorded_one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(opentelemetry.instrumentation.auto_instrumentation.__file__).parent
    environ = {**os.environ, "PYTHONPATH": str(path), "OTEL_SFTRACE_REPLAY": str(recorded_one)}
    with ReplaySession.from_trace(recorded_one) as replay:
        one()
        subprocess.run([sys.executable, "-c", ""], env=environ, check=True, capture_output=True)
        replay.verify_complete()
    del environ["OTEL_SFTRACE_REPLAY"]
    assert "start the program python" in stopped(
        recorded_one, lambda: subprocess.run([sys.executable, "-c", ""], env=environ, check=True)
    )


def test_programs_and_connections_outside_are_obstacles_and_those_of_tools_are_none(
    openai_server: Any, tmp_path: Path
) -> None:
    made = recorder.acquire(Settings(dir=tmp_path / "out", quiet=True))
    made.connections, made.commands = guard.connections, guard.commands
    guard.notice_connections()

    @trace_tool
    def outward() -> None:
        subprocess.run(["true"], check=True)
        urllib.request.urlopen(openai_server.url + "/json").close()

    outward()
    subprocess.run(["cat", "/dev/null"], check=True)
    made.close()
    (path,) = (tmp_path / "out").glob("*.sftrace")
    assert validate_bundle(path, verify_integrity=True).exit_code == 0
    run = open_bundle(path).run
    assert run["connections"] == [] and [one["program"] for one in run["programs"]] == ["cat"]
    (obstacle,) = run["verdict"]["obstacles"]
    assert obstacle["kind"] == "program" and "REPLAY_ALLOW=exec:cat" in obstacle["do"]
    with ReplaySession.from_trace(path, allow=["exec:cat"]) as replay:
        outward()
        subprocess.run(["cat", "/dev/null"], check=True)
        replay.verify_complete()
