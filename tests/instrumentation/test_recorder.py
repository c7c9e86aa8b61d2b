# SPDX-License-Identifier: Apache-2.0
"""Runs, the journal and what survives: faults of ours never reach the program, and what ended is on disk."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import inspect
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sftrace_otel import (
    ReplayPolicyError,
    ReplaySession,
    allm_request,
    instrumentation,
    keep,
    llm_request,
    record,
    record_state_change,
    recorder,
    set_input,
    set_output,
    trace_tool,
)
from sftrace_otel.bundle import journal
from sftrace_otel.bundle.read import open_bundle, validate_bundle
from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.recorder import Recorder, Scope, current_scope, entered, spawn
from sftrace_otel.settings import Settings
from sftrace_otel.trace import Trace

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


# --- notices, gates and leaks -----------------------------------------------------------------------------------------


class Shipping(logging.Handler):
    """Sends each record from a worker thread that makes a recorded call, and waits for it, as log shippers do."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.pool = concurrent.futures.ThreadPoolExecutor(1)

    def emit(self, entry: logging.LogRecord) -> None:
        self.pool.submit(double, 1).result(timeout=60)
        double(2)
        self.sent.append(entry.getMessage())


@pytest.fixture
def shipping() -> Iterator[Shipping]:
    handler = Shipping()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)
    handler.pool.shutdown()


def test_a_notice_may_wait_for_a_thread_that_is_recorded_too(tmp_path: Path, shipping: Shipping) -> None:
    made = recorder.acquire(Settings(dir=tmp_path / "out"))
    made.notify = lambda line: logging.getLogger("stderr").error(line)
    assert double(21) == 42
    made.close()
    assert any("recording to" in line for line in shipping.sent)
    assert any("replays offline" in line for line in shipping.sent)  # the last line: its call begins another run
    (path,) = (tmp_path / "out").glob("*.sftrace")
    inputs = [event.input["x"] for event in open_bundle(path).events if event.type == "tool_call"]
    assert 21 in inputs and 1 in inputs and 2 not in inputs


def test_a_log_line_may_wait_for_a_thread_that_is_recorded_too(tmp_path: Path, shipping: Shipping) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    recorder.acquire(Settings(dir=blocked, quiet=True))
    assert double(21) == 42
    assert [line for line in shipping.sent if "nothing is recorded" in line]


def test_a_notice_that_raises_leaves_the_program_alone(tmp_path: Path) -> None:
    def broken_stream(line: str) -> None:
        raise OSError(32, "Broken pipe")

    made = recorder.acquire(Settings(dir=tmp_path / "out"))
    made.notify = broken_stream
    assert double(21) == 42
    made.close()
    valid(next((tmp_path / "out").glob("*.sftrace")))


def test_metadata_alone_keeps_every_payload_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @trace_tool
    def refuse(text: str) -> None:
        raise ValueError("PAYLOAD of an error", text)

    monkeypatch.setattr(sys, "argv", ["agent.py", "--query", "PAYLOAD"])
    made = recorder.acquire(Settings(dir=tmp_path / "out", quiet=True, capture="metadata"))
    set_input({"q": "PAYLOAD"})
    record_state_change(key="k", before="PAYLOAD", after={"z": "PAYLOAD"})
    with pytest.raises(ValueError, match="PAYLOAD"):
        refuse("PAYLOAD")
    keep("PAYLOAD of a reason")
    set_output("PAYLOAD")
    made.set_failure(KeyError("PAYLOAD"))
    made.close()
    (path,) = (tmp_path / "out").glob("*.sftrace")
    valid(path)
    assert [file.name for file in path.iterdir() if b"PAYLOAD" in file.read_bytes()] == []
    assert open_bundle(path).run["kept"] == "" and open_bundle(path).run["command"] == ["agent.py"]


def test_a_secret_option_hides_the_word_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["agent.py", "--password", "hunter2Secret91", "--city", "Rome", "odd\udcff"])
    made = recorder.acquire(Settings(dir=tmp_path / "out", quiet=True))
    double(1)
    (journal_file,) = (tmp_path / "out").glob(".*/journal.jsonl")
    head = json.loads(journal_file.read_bytes().splitlines()[0])
    made.close()
    (path,) = (tmp_path / "out").glob("*.sftrace")
    want = ["agent.py", "--password", "[REDACTED]", "--city", "Rome", "odd\\udcff"]
    assert head["command"] == open_bundle(path).run["command"] == want


def test_secrets_that_are_set_while_it_runs_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @trace_tool
    def load() -> str:
        monkeypatch.setenv("LATE_PASSWORD", "lateEnvSecret77")
        return "loaded lateEnvSecret77"

    made = recorder.acquire(Settings(dir=tmp_path / "out", quiet=True))
    load()
    monkeypatch.setenv("LATE_PASSWORD", "nextEnvSecret88")
    with record("agent"):
        assert double("lateEnvSecret77 nextEnvSecret88 ") is not None  # type: ignore[arg-type]
    made.close()
    files = [file for path in (tmp_path / "out").glob("*.sftrace") for file in path.iterdir()]
    assert files and [file for file in files if b"EnvSecret" in file.read_bytes()] == []


@pytest.mark.parametrize("error", [UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates"), OSError(28, "full")])
def test_a_run_that_cannot_begin_is_given_up_once(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*args: Any) -> None:
        raise error

    monkeypatch.setattr(journal.Journal, "record", raises)
    made = recorder.acquire(Settings(dir=tmp_path / "out", quiet=True))
    assert [double(number) for number in range(5)] == [0, 2, 4, 6, 8]
    made.close()
    assert list((tmp_path / "out").iterdir()) == []
    assert len(caplog.messages) == 1 and type(error).__name__ in caplog.messages[0]


def test_a_folder_that_is_gone_is_said_and_paths_are_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    lines: list[str] = []
    made = recorder.acquire(Settings(dir=tmp_path / "out"))
    made.notify = lines.append
    assert double(2) == 4
    recorder.acquire(Settings(dir=Path("sftraces"), quiet=True))
    assert double(3) == 6
    recorder.close_all()
    assert str(tmp_path / "out") in lines[0] and not gone.exists()
    assert [line for line in caplog.messages if "nothing is recorded" in line] == caplog.messages


def test_a_block_in_a_folder_that_is_gone_leaves_the_program_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with record("agent", output="run.sftrace") as session:
        assert double(2) == 4
    assert session.path is None
    assert len(caplog.messages) == 1 and "nothing is recorded: run.sftrace cannot be written" in caplog.messages[0]


def test_calls_of_ended_runs_are_let_go_whoever_hears_of_their_spans(tmp_path: Path) -> None:
    made = recorder.acquire(Settings(dir=tmp_path, quiet=True))
    scope = Scope(run=made.new_run("record"))
    call = made.begin("tool", "t", made.prepare(1), scope=scope, lineage="0")
    assert call is not None
    made.refer(7, call)
    made.fold(8)
    made.span_started(9, 1, None, "INTERNAL", None)
    with entered(scope):
        made.span_started(10, 1, None, "INTERNAL", None)
    made.close_run(call.run)
    assert not made._refs and set(made._live) == {9} and not call.run.refs and not call.run.spans
    assert made.span_reference(7, "s") and made.span_reference(8, "s") and not made.span_reference(7, "s")
    assert made.span_arrived(7, "s") is None


def test_what_is_remembered_of_spans_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recorder.acquire(Settings(dir=tmp_path, quiet=True))
    call = made.begin("tool", "t", made.prepare(1), scope=Scope(), lineage="0")
    assert call is not None
    monkeypatch.setattr("sftrace_otel.recorder.recorder._EXPECTED", 10)
    monkeypatch.setattr("sftrace_otel.recorder.recorder._RECORDED", 20)
    for span in range(1, 100):
        made.refer(span, call)
        made.fold(1000 + span)
    assert len(made._refs) == len(call.run.refs) == 10 and len(made._recorded) == 20
    assert made.span_arrived(99, "s") is call and 99 not in call.run.refs


def test_runs_may_open_and_close_while_others_look_for_theirs(tmp_path: Path) -> None:
    made = recorder.acquire(Settings(dir=tmp_path, quiet=True))
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            made.close_run(made.new_run("record"))

    threads = [threading.Thread(target=churn) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(3000):
            made.run_for(recorder.UNPLACED)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()


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


def test_a_recorded_block_by_itself_puts_every_boundary_on(tmp_path: Path) -> None:
    for module in (
        "aiohttp", "anthropic", "anthropic.lib.tools", "httpx", "httpx2", "mcp", "openai", "urllib3",
        "websockets.client",
    ):  # fmt: skip
        importlib.import_module(module)
    assert [boundary.__name__ for boundary in instrumentation.boundaries() if boundary.patched()] == []
    with record("agent", output=tmp_path / "run.sftrace"):
        left = [boundary.__name__ for boundary in instrumentation.boundaries() if not boundary.patched()]
        assert [name.rpartition(".")[2] for name in left] == [
            "nondeterminism",  # not asked for; the others are not there
            "openai_agents",
            "langchain",
            "pydantic_ai",
        ]


# --- the end of an async block ----------------------------------------------------------------------------------------


def test_an_async_block_waits_for_calls_of_other_tasks(tmp_path: Path) -> None:
    """The call goes on only after the block began to end, so it can be whole only if the end let the loop run."""

    async def main() -> Path | None:
        begun, ending = asyncio.Event(), asyncio.Event()

        @trace_tool
        async def slow() -> str:
            begun.set()
            await ending.wait()
            return "whole"

        async with record("agent", output=tmp_path / "a.sftrace") as session:
            task = asyncio.create_task(slow())
            await begun.wait()
            asyncio.get_running_loop().call_soon(ending.set)
        assert await task == "whole"
        return session.path

    path = asyncio.run(main())
    assert path is not None
    assert validate_bundle(path, verify_integrity=True).issues == ()
    assert [event.output for event in Trace.load(path).events if event.type == "tool_result"] == ["whole"]


def test_a_cancelled_end_of_an_async_block_still_writes_the_bundle(tmp_path: Path) -> None:
    async def main() -> None:
        begun, never = asyncio.Event(), asyncio.Event()

        @trace_tool
        async def stuck() -> None:
            begun.set()
            await never.wait()

        async def block() -> None:
            async with record("agent", output=tmp_path / "a.sftrace"):
                other.append(asyncio.create_task(stuck()))
                await begun.wait()
                asyncio.get_running_loop().call_soon(task.cancel)

        other: list[asyncio.Task[None]] = []
        task = asyncio.create_task(block())
        with pytest.raises(asyncio.CancelledError):
            await task
        other[0].cancel()

    asyncio.run(main())
    assert validate_bundle(tmp_path / "a.sftrace", strict=False, verify_integrity=True).issues == ()


def test_a_fault_in_waiting_at_the_end_of_an_async_block_stays_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*args: object) -> bool:
        raise RuntimeError

    monkeypatch.setattr(Recorder, "has_others_at_work", fault)

    async def main() -> None:
        async with record("agent", output=tmp_path / "a.sftrace"):
            pass

    asyncio.run(main())
    assert validate_bundle(tmp_path / "a.sftrace", verify_integrity=True).issues == ()
