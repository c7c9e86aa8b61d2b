# SPDX-License-Identifier: Apache-2.0
"""Runs, the journal and what survives: faults of ours never reach the program, and what ended is on disk."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sftrace_otel import (
    ReplayPolicyError,
    ReplaySession,
    allm_request,
    instrumentation,
    llm_request,
    record,
    record_state_change,
    recorder,
    set_output,
    trace_tool,
)
from sftrace_otel.bundle import journal
from sftrace_otel.bundle.read import open_bundle, validate_bundle
from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.recorder import Recorder, Scope, current_scope, entered, spawn
from sftrace_otel.settings import Settings

Run = Callable[..., Any]


@trace_tool
def double(x: int) -> int:
    return x * 2


def valid(path: Path) -> None:
    result = validate_bundle(path, strict=True, verify_integrity=True)
    assert result.exit_code == 0, result.issues


def child(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- record() ---------------------------------------------------------------------------------------------------------


def test_a_block_is_a_valid_bundle(bundle_path: Path) -> None:
    with record("agent", output=str(bundle_path), run_input={"q": 1}) as session:
        double(2)
        session.record_state_change(key="budget", before=3, after={"left": 2})
        session.set_output([4])
    bundle = open_bundle(bundle_path)
    assert [event.type for event in bundle.events] == [
        "run_start", "tool_call", "tool_result", "state_change", "run_end",
    ]  # fmt: skip
    assert bundle.events[0].input == {"q": 1} and bundle.events[-1].output == [4]
    assert bundle.manifest.agent_name == "agent" and bundle.manifest.status == "completed"
    valid(bundle_path)


def test_a_block_that_raises_is_a_failed_run_and_passes_the_exception_on(bundle_path: Path) -> None:
    error = RuntimeError("it broke")
    with pytest.raises(RuntimeError) as raised, record("agent", output=bundle_path):
        raise error
    assert raised.value is error
    manifest = open_bundle(bundle_path).manifest
    assert manifest.status == "failed" and manifest.failure is not None
    assert (manifest.failure.type, manifest.failure.message) == ("RuntimeError", "it broke")
    assert open_bundle(bundle_path).events[manifest.failure.step].type == "error"
    valid(bundle_path)


def test_an_existing_path_is_kept_unless_overwritten(bundle_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for number, overwrite in enumerate((False, False, True)):
        with record("agent", output=bundle_path, overwrite=overwrite) as session:
            double(number)
        paths.append(session.path)
    assert paths[0] == paths[2] == bundle_path and paths[1] not in (None, bundle_path)
    assert "exists" in capsys.readouterr().err
    assert open_bundle(bundle_path).events[1].input == {"x": 2}


def test_an_inner_block_joins_and_one_with_a_path_of_its_own_does_not(bundle_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sftrace"
    with record("outer", output=bundle_path):
        with record("inner"):
            double(1)
        with record("own", output=other):
            double(2)
    assert [event.input for event in open_bundle(bundle_path).events if event.type == "tool_call"] == [{"x": 1}]
    assert [event.input for event in open_bundle(other).events if event.type == "tool_call"] == [{"x": 2}]


def test_wrong_arguments_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name"):
        record("")
    with pytest.raises(TraceStorageError, match=r"\.sftrace"):
        record("agent", output=tmp_path / "run.json")


def test_async_blocks_do_not_mix(tmp_path: Path) -> None:
    async def one(number: int) -> None:
        async with record(f"agent{number}", output=tmp_path / f"{number}.sftrace"):
            for turn in range(3):
                double(number * 10 + turn)
                await asyncio.sleep(0.001)

    async def main() -> None:
        await asyncio.gather(*[one(number) for number in range(50)])

    asyncio.run(main())
    for number in range(50):
        events = open_bundle(tmp_path / f"{number}.sftrace").events
        assert [event.input["x"] for event in events if event.type == "tool_call"] == [
            number * 10 + turn for turn in range(3)
        ]


# --- llm_request ------------------------------------------------------------------------------------------------------


def test_llm_request_is_recorded_and_replayed(recorded: Run, frozen: Run, read: Run) -> None:
    calls: list[str] = []

    def program() -> list[Any]:
        def call() -> dict[str, Any]:
            calls.append("made")
            return {"text": "hello", "pair": (1, 2)}

        async def acall() -> str:
            calls.append("made")
            return "async"

        first = llm_request(model="m", provider="own", input={"prompt": "hi"}, call=call)
        return [first, asyncio.run(allm_request(model="m", input=["x"], call=acall))]

    want = recorded(program)
    assert len(calls) == 2
    assert frozen(program) == want
    assert len(calls) == 2
    request = next(event for event in read().events if event.type == "llm_request")
    assert (request.provider, request.model, request.input) == ("own", "m", {"prompt": "hi"})


def test_llm_request_passes_errors_on(recorded: Run, frozen: Run) -> None:
    def program() -> str:
        def call() -> None:
            raise LookupError("no model")

        try:
            llm_request(model="m", input=1, call=call)
        except LookupError as error:
            return str(error)
        return ""

    assert recorded(program) == frozen(program) == "no model"


def test_llm_request_needs_a_model() -> None:
    with pytest.raises(ValueError, match="model"):
        llm_request(model="", input=1, call=lambda: 1)


def test_state_and_output_without_a_run_do_nothing() -> None:
    set_output(1)
    record_state_change(key="k", after=1)


# --- the process's run ------------------------------------------------------------------------------------------------


def test_threads_and_the_main_thread_share_the_process_run(tmp_path: Path) -> None:
    made = recorder.acquire(Settings(dir=tmp_path / "out", quiet=True))
    threads = [threading.Thread(target=double, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    double(99)
    made.close()
    (path,) = (tmp_path / "out").glob("*.sftrace")
    valid(path)
    assert len([event for event in open_bundle(path).events if event.type == "tool_call"]) == 21
    assert {row["lineage"] for row in open_bundle(path).calls} >= {None, "0"}


def test_nothing_recorded_leaves_nothing(tmp_path: Path) -> None:
    recorder.acquire(Settings(dir=tmp_path / "out", quiet=True)).close()
    assert not (tmp_path / "out").exists()


def test_files_are_private(bundle_path: Path) -> None:
    with record("agent", output=bundle_path):
        double(1)
    assert stat.S_IMODE(bundle_path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in bundle_path.iterdir()} == {0o600}


def test_what_ended_is_in_the_journal_when_the_process_is_killed(tmp_path: Path) -> None:
    done = child(
        f"""
        import os, signal
        from sftrace_otel import record, trace_tool
        @trace_tool
        def work(x): return x
        session = record("agent", output={str(tmp_path / "run.sftrace")!r}).__enter__()
        for number in range(25): work(number)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert done.returncode == -signal.SIGKILL
    lines = (tmp_path / ".run.sftrace.journal" / "journal.jsonl").read_bytes().splitlines()
    kinds = [json.loads(line)["k"] for line in lines]
    assert kinds == ["h", "v"] + ["b", "e"] * 25


def test_a_forked_child_writes_a_bundle_of_its_own(tmp_path: Path) -> None:
    done = child(
        f"""
        import os, sys
        from pathlib import Path
        from sftrace_otel import recorder, trace_tool
        from sftrace_otel.settings import Settings
        recorder.acquire(Settings(dir=Path({str(tmp_path)!r}), quiet=True))
        @trace_tool
        def work(x): return x
        work("parent")
        pid = os.fork()
        if pid == 0:
            work("child")
            sys.exit(0)
        os.waitpid(pid, 0)
        work("parent again")
        """
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for path in tmp_path.glob("*.sftrace"):
        valid(path)
        bundle = open_bundle(path)
        inputs = [event.input["x"] for event in bundle.events if event.type == "tool_call"]
        found[inputs[0]] = (inputs, bundle.run["origin"], bundle.manifest.run_id)
    assert found["parent"][0] == ["parent", "parent again"] and found["child"][0] == ["child"]
    assert found["child"][1] == {"parent_run": found["parent"][2]}


def test_events_are_in_order_when_the_wall_clock_steps_back(tmp_path: Path) -> None:
    wall = iter(range(10**18, 0, -(10**9)))
    made = Recorder(Settings(dir=tmp_path, quiet=True), RedactionPolicy.default({}), clock=lambda: next(wall))
    scope = Scope()
    for number in range(3):
        call = made.begin("tool", "t", made.prepare(number), scope=scope, lineage=scope.place())
        made.end(call, made.prepare(number))
    made.close()
    (path,) = tmp_path.glob("*.sftrace")
    valid(path)
    assert [event.type for event in open_bundle(path).events] == [
        "run_start", *["tool_call", "tool_result"] * 3, "run_end",
    ]  # fmt: skip


def test_a_call_ends_once_and_a_late_end_is_counted(tmp_path: Path) -> None:
    made = Recorder(Settings(dir=tmp_path, quiet=True), RedactionPolicy.default({}))
    scope = Scope()
    first = made.begin("tool", "t", made.prepare(1), scope=scope, lineage="0")
    late = made.begin("tool", "t", made.prepare(2), scope=scope, lineage="1")
    made.end(first, made.prepare("a"))
    made.end(first, made.prepare("b"))
    run = first.run if first is not None else None
    made.close()
    made.end(late, made.prepare("c"))
    assert run is not None and run.losses == {"calls ended after the run closed": 1}
    (path,) = tmp_path.glob("*.sftrace")
    bundle = open_bundle(path)
    assert [row["end"] for row in bundle.calls] == ["finished", "open"]
    assert bundle.run["verdict"]["offline"] is False
    assert [event.output for event in bundle.events if event.type == "tool_result"] == ["a"]


def test_a_recording_without_payloads_refuses_to_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recorder.acquire(Settings(dir=tmp_path / "out", quiet=True, capture="metadata"))
    double(21)
    made.close()
    (path,) = (tmp_path / "out").glob("*.sftrace")
    valid(path)
    assert [event.input for event in open_bundle(path).events if event.type == "tool_call"] == [None]
    assert [event.output for event in open_bundle(path).events if event.type == "tool_result"] == [None]
    with pytest.raises(ReplayPolicyError, match="without payloads"):
        ReplaySession.from_trace(path)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[name for name, _ in inspect.getmembers(Recorder, inspect.isfunction) if name not in (
    "__init__", "fault", "close", "say",
)])  # fmt: skip
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each method of the recorder made to raise, in turn."""

    def raises(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(Recorder, request.param, raises)
    return str(request.param)


def test_a_fault_in_any_part_of_the_recorder_leaves_tools_and_http_alone(
    broken: str, openai_server: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    instrumentation.install()
    recorder.acquire(Settings(dir=tmp_path / "out", quiet=True))

    @trace_tool
    def refuse() -> None:
        raise KeyError("mine")

    assert double(4) == 8
    assert httpx.get(openai_server.url + "/json").status_code == 200
    with pytest.raises(KeyError, match="mine"):
        refuse()


@pytest.mark.parametrize("name", ["record", "row", "blob", "_open", "__init__"])
def test_a_fault_in_any_part_of_the_journal_leaves_the_program_alone(
    name: str, openai_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.Journal, name, raises)
    instrumentation.install()
    made = recorder.acquire(Settings(dir=tmp_path / "out", quiet=True))
    for number in range(3):
        assert double(number) == number * 2
    assert httpx.get(openai_server.url + "/json").status_code == 200
    made.close()
    if name != "blob":  # nothing here is large enough for a blob
        assert 1 <= caplog.text.count("No space left on device") <= 3


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    made = recorder.acquire(Settings(dir=blocked, quiet=True))
    assert [double(number) for number in range(5)] == [0, 2, 4, 6, 8]
    made.close()
    assert [line for line in caplog.messages if "nothing is recorded" in line] == caplog.messages
    assert len(caplog.messages) == 1


# --- lineage ----------------------------------------------------------------------------------------------------------


def test_slots_are_taken_where_things_are_spawned() -> None:
    with entered(Scope()) as scope:
        assert scope.place() == "0"
        task = spawn()
        assert (task.path, scope.place()) == ("t1/", "2")
        with entered(task):
            assert current_scope().place() == "t1/0"


def test_a_scope_used_in_another_thread_gives_no_lineage() -> None:
    scope = Scope()
    assert scope.place() == "0"
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(scope.place()))
    thread.start()
    thread.join()
    assert found == [None] and scope.place() == "1"


def test_gathered_tasks_have_the_lineage_of_their_spawn(recorded: Run, read: Run) -> None:
    async def one(number: int, wait: float) -> None:
        await asyncio.sleep(wait)
        double(number)

    async def main() -> None:
        await asyncio.gather(one(0, 0.02), one(1, 0.0))

    recorded(lambda: asyncio.run(main()))
    bundle = read()
    inputs = {event.id: event.input["x"] for event in bundle.events if event.type == "tool_call"}
    lineage = {inputs[row["request"]]: row["lineage"] for row in bundle.calls}
    assert lineage == {0: "t0/t0/0", 1: "t0/t1/0"}
