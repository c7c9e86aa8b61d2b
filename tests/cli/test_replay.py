# SPDX-License-Identifier: Apache-2.0
"""`replay` and `ReplaySession`: bundles of the field, entrypoints and commands, exit codes, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sftrace_otel import set_output, trace_tool
from sftrace_otel.errors import (
    ReplayError,
    ReplayExhaustedError,
    ReplayMismatchError,
    ReplayPolicyError,
    TraceStorageError,
)
from sftrace_otel.fork import ForkEngine, ForkPoint, OverrideSpec, fork_trace
from sftrace_otel.replay import ReplaySession
from sftrace_otel.trace import Trace

from .conftest import VECTORS, Cli, Done

AGENT = textwrap.dedent(
    """
    import asyncio
    from sftrace_otel import llm_request, trace_tool

    @trace_tool
    def get_value(x, scale=1.0):
        raise AssertionError("the body of a tool ran under frozen replay")

    @trace_tool
    def inner(q):
        raise AssertionError("the body of a tool ran under frozen replay")

    @trace_tool
    def outer(q):
        return {"inner": inner(q)}

    @trace_tool
    def boom(code):
        raise AssertionError("the body of a tool ran under frozen replay")

    def ask(text):
        request = {"model": "gpt-4o-mini", "temperature": 1.0, "messages": [{"role": "user", "content": text}]}
        return llm_request(
            model="gpt-4o-mini",
            provider="openai",
            input={"method": "chat.completions.create", "request": request},
            call=lambda: 1 / 0,
        )

    def main(question):
        print("asked", question)
        value = get_value(42)
        answer = ask(f"value is {value['value']:.0f}")
        outer("née café ☕")
        return {"answer": value["value"], "text": answer["choices"][0]["message"]["content"]}

    async def amain(question):
        return main(question)

    def changed(question):
        get_value(42)
        return ask("value is 43")

    def elsewhere(question):
        value = get_value(42)
        answer = ask("another text every time")
        outer("née café ☕")
        return {"answer": value["value"], "text": answer["choices"][0]["message"]["content"]}

    def swallows(question):
        try:
            get_value(43)
        except Exception:
            pass
        return {"answer": 42.0, "text": "echo: value is 42"}

    def other_output(question):
        main(question)
        return {"answer": 42, "text": "other"}

    def forgets(question):
        return {"answer": get_value(42)["value"], "text": "echo: value is 42"}

    def without_argument():
        return main(None)

    def fails():
        get_value(1)
        boom(7)

    def fails_otherwise():
        get_value(1)
        try:
            boom(7)
        except ValueError as error:
            raise KeyError("other") from error

    def two(a, b):
        pass

    NUMBER = 1

    class Agent:
        @staticmethod
        def run(question):
            return main(question)

    if __name__ == "__main__":
        import sys
        from sftrace_otel import set_output
        set_output(globals()[sys.argv[1]](*sys.argv[2:]))
    """
)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `agent` in the current folder."""
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    for name in [name for name in sys.modules if name == "agent" or name.startswith("bad_")]:
        del sys.modules[name]


# --- entrypoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entrypoint", ["agent:main", "agent:amain", "agent:without_argument", "agent:Agent.run"])
def test_an_entrypoint_that_does_the_same(
    cli: Cli, bundle: Callable[[str], Path], agent: Path, entrypoint: str
) -> None:
    done = cli("replay", bundle("completed"), "--entrypoint", entrypoint)
    assert done.code == 0, done.err
    assert "replay: same; 4 of 4 recorded calls used" in done.err
    assert done.out.startswith("asked ")


def test_the_recorded_input_reaches_the_entrypoint(cli: Cli, bundle: Callable[[str], Path], agent: Path) -> None:
    assert cli("replay", bundle("completed"), "--entrypoint", "agent:main").out == "asked {'question': 'price?'}\n"


def test_json_is_one_document_and_the_program_s_output_goes_elsewhere(
    cli: Cli, bundle: Callable[[str], Path], agent: Path
) -> None:
    done = cli("replay", bundle("completed"), "--entrypoint", "agent:main", "--json")
    assert done.code == 0
    assert done.json["exit_code"] == 0
    assert done.json["served"] + done.json["skipped"] == 4
    assert done.json["outcome"]["same"] is True
    assert "asked" in done.err


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [
        ("agent:changed", ("/request/messages/0/content", '"value is 42"', '"value is 43"')),
        ("agent:swallows", ("/x", "42", "43")),
        ("agent:other_output", ("/text", '"echo: value is 42"', '"other"')),
        ("agent:forgets", ("never reached", "outer")),
    ],
)
def test_an_entrypoint_that_does_something_else(
    cli: Cli, bundle: Callable[[str], Path], agent: Path, entrypoint: str, said: tuple[str, ...]
) -> None:
    done = cli("replay", bundle("completed"), "--entrypoint", entrypoint)
    assert done.code == 1
    assert "Traceback" not in done.err
    for text in said:
        assert text in done.err
    assert cli("replay", bundle("completed"), "--entrypoint", entrypoint, "--json").json["exit_code"] == 1


def test_what_is_ignored_is_not_compared(cli: Cli, shell: Cli, bundle: Callable[[str], Path], agent: Path) -> None:
    entrypoint, ignore = ("--entrypoint", "agent:elsewhere"), ("--ignore", "/request/messages/0/content")
    refused = cli("replay", bundle("completed"), *entrypoint)
    assert refused.code == 1
    assert " ".join(ignore) in refused.err
    assert cli("replay", bundle("completed"), *entrypoint, *ignore).code == 0
    done = shell("replay", bundle("completed"), *ignore, "--", sys.executable, "agent.py", "elsewhere", "x")
    assert done.code == 0, done.err


def test_the_recorded_failure_happens_again(cli: Cli, bundle: Callable[[str], Path], agent: Path) -> None:
    done = cli("replay", bundle("failed_tool"), "--entrypoint", "agent:fails")
    assert done.code == 0, done.err
    assert "failed with ValueError, as recorded" in done.err
    other = cli("replay", bundle("failed_tool"), "--entrypoint", "agent:fails_otherwise")
    assert other.code == 1
    assert "failed with KeyError" in other.err
    assert "agent.py:" in other.err


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [
        ("agent", "module:function"),
        ("agent:", "module:function"),
        ("agent.py:main", "cannot import agent.py"),
        ("a/gent:main", "module:function"),
        ("nowhere:main", "cannot import nowhere"),
        ("agent:nothing", "has no nothing"),
        ("agent:NUMBER", "not a function"),
        ("agent:two", "needs 2 arguments (a, b)"),
        ("bad_syntax:main", "SyntaxError"),
        ("bad_import:main", "ZeroDivisionError"),
    ],
)
def test_an_entrypoint_that_cannot_be_used(
    cli: Cli, bundle: Callable[[str], Path], agent: Path, entrypoint: str, said: str
) -> None:
    agent.with_name("bad_syntax.py").write_text("def main(:\n")
    agent.with_name("bad_import.py").write_text("1 / 0\n")
    done = cli("replay", bundle("completed"), "--entrypoint", entrypoint)
    assert (done.code, done.out) == (2, "")
    assert said in done.line
    with ReplaySession.from_trace(VECTORS / "parallel.sftrace"):
        pass


def test_an_entrypoint_that_needs_an_input_that_was_not_recorded(
    cli: Cli, bundle: Callable[[str], Path], agent: Path
) -> None:
    done = cli("replay", bundle("failed_tool"), "--entrypoint", "agent:main")
    assert done.code == 2
    assert "needs question and the recording holds no run input" in done.line


# --- commands ---------------------------------------------------------------------------------------------------------


def test_a_command_that_does_the_same(shell: Cli, bundle: Callable[[str], Path], agent: Path) -> None:
    done = shell("replay", bundle("completed"), "--", sys.executable, "agent.py", "main", "price?")
    assert done.code == 0, done.err
    assert done.out == "asked price?\n"
    assert "replay: same; 4 of 4 recorded calls used" in done.err
    done = shell("replay", bundle("completed"), "--json", "--", sys.executable, "agent.py", "main", "x")
    assert done.json["exit_code"] == 0
    assert done.json["program_exit_code"] == 0
    assert "asked x" in done.err


def test_a_command_that_fails_as_recorded(shell: Cli, bundle: Callable[[str], Path], agent: Path) -> None:
    done = shell("replay", bundle("failed_tool"), "--json", "--", sys.executable, "agent.py", "fails")
    assert done.code == 0, done.err
    assert done.json["program_exit_code"] == 1


@pytest.mark.parametrize("function", ["changed", "swallows", "forgets"])
def test_a_command_that_does_something_else(
    shell: Cli, bundle: Callable[[str], Path], agent: Path, function: str
) -> None:
    done = shell("replay", bundle("completed"), "--json", "--", sys.executable, "agent.py", function, "x")
    assert done.code == 1
    assert done.json["exit_code"] == 1


def test_helper_processes_do_not_count(shell: Cli, bundle: Callable[[str], Path], agent: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, 'agent.py', 'main', 'x'], check=True)\n"
        "subprocess.run([sys.executable, '-c', 'pass'], check=True)\n"
    )
    done = shell("replay", bundle("completed"), "--", sys.executable, "-c", program)
    assert done.code == 0, done.err


def test_a_command_that_is_killed_has_not_done_the_same(shell: Cli, bundle: Callable[[str], Path], agent: Path) -> None:
    program = "import os, agent; agent.main('x'); os._exit(0)"
    done = shell("replay", bundle("completed"), "--", sys.executable, "-c", program)
    assert done.code == 1
    assert "before its run could be compared" in done.err


@pytest.mark.parametrize(
    ("command", "said"),
    [(("no-such-command-of-ours",), "command not found"), (("true",), "not under replay")],
)
def test_a_command_that_cannot_be_replayed(
    shell: Cli, bundle: Callable[[str], Path], command: tuple[str, ...], said: str
) -> None:
    done = shell("replay", bundle("completed"), "--", *command)
    assert (done.code, done.out) == (2, "")
    assert said in done.line


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--",),
        ("--entrypoint", "agent:main", "--", "python", "agent.py"),
        ("--entrypoint", "a:b", "--map-host", "x"),
    ],
)
def test_what_to_run_has_to_be_clear(cli: Cli, bundle: Callable[[str], Path], arguments: tuple[str, ...]) -> None:
    done = cli("replay", bundle("completed"), *arguments)
    assert (done.code, done.out) == (2, "")
    assert "as in:" in done.line or "for instance" in done.line


# --- by variable ------------------------------------------------------------------------------------------------------


@pytest.fixture
def instrumented(tmp_path: Path, bytecode: dict[str, str]) -> Callable[..., Done]:
    """Run the agent under `opentelemetry-instrument` with variables."""

    def run(function: str, **variables: str) -> Done:
        program = "from opentelemetry.instrumentation.auto_instrumentation import run; run()"
        command = [sys.executable, "-c", program, sys.executable, "agent.py", function, "x"]
        environment = {**os.environ, **bytecode, "OTEL_PYTHON_DISTRO": "sftrace", **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return Done(code=done.returncode, out=done.stdout, err=done.stderr)

    return run


def test_a_replay_asked_for_by_variable_reports_to_a_file_or_to_standard_error(
    instrumented: Callable[..., Done], bundle: Callable[[str], Path], agent: Path, tmp_path: Path
) -> None:
    path = str(bundle("completed"))
    done = instrumented("main", OTEL_SFTRACE_REPLAY=path)
    assert done.code == 0, done.err
    assert "replay: same; 4 of 4 recorded calls used" in done.err
    report = tmp_path / "report.json"
    done = instrumented("forgets", OTEL_SFTRACE_REPLAY=path, OTEL_SFTRACE_REPLAY_REPORT=str(report))
    assert done.code == 0
    assert "replay:" not in done.err
    assert json.loads(report.read_text())["exit_code"] == 1


def test_an_agent_does_not_run_without_its_recording(
    instrumented: Callable[..., Done], bundle: Callable[[str], Path], agent: Path
) -> None:
    path = bundle("completed")
    events = path / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b"value is 42", b"value is 43"))
    done = instrumented("main", OTEL_SFTRACE_REPLAY=str(path))
    assert (done.code, done.out) == (2, "")
    assert "replay refused" in done.line


# --- what is refused, and forks ---------------------------------------------------------------------------------------


def test_integrity_comes_first(cli: Cli, bundle: Callable[[str], Path], agent: Path) -> None:
    path = bundle("completed")
    events = path / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b"value is 42", b"value is 43"))
    done = cli("replay", path, "--entrypoint", "agent:main")
    assert (done.code, done.out) == (2, "")
    assert "events.jsonl" in done.line
    with pytest.raises(TraceStorageError):
        ReplaySession.from_trace(path)


@pytest.mark.parametrize("name", ["legacy", "hashless"])
def test_a_bundle_that_nothing_vouches_for_replays_and_says_so(
    cli: Cli, bundle: Callable[[str], Path], agent: Path, name: str
) -> None:
    done = cli("replay", bundle(name), "--entrypoint", "agent:main")
    assert done.code == 0, done.err
    assert "nothing vouches" in done.err


def test_a_fork_ends_where_its_recording_ends(
    cli: Cli, shell: Cli, bundle: Callable[[str], Path], agent: Path, tmp_path: Path
) -> None:
    out = tmp_path / "forked.sftrace"
    assert cli("fork", bundle("completed"), "--at-step", 4, "-o", out).code == 0
    done = cli("replay", out, "--entrypoint", "agent:main")
    assert done.code == 4, done.err
    assert "recording ended" in done.err
    assert cli("replay", out, "--entrypoint", "agent:changed").code == 1
    done = shell("replay", out, "--json", "--", sys.executable, "agent.py", "main", "x")
    assert (done.code, done.json["verdict"]) == (4, "recording ended")


def test_an_overridden_output_is_served(cli: Cli, bundle: Callable[[str], Path], agent: Path, tmp_path: Path) -> None:
    out = tmp_path / "forked.sftrace"
    assert cli("fork", bundle("completed"), "--at-step", 9, "--set", "2:/value=43", "-o", out).code == 0
    done = cli("replay", out, "--entrypoint", "agent:main")
    assert done.code == 1
    assert '"value is 43"' in done.err


def test_tools_without_events_stop_a_replay_before_it_starts(
    cli: Cli, bundle: Callable[[str], Path], agent: Path
) -> None:
    path = bundle("completed")
    lines = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    call = {"id": "call_1", "type": "function", "function": {"name": "pay", "arguments": "{}"}}
    lines[3] |= {"input_hash": None}
    lines[3]["input"]["request"]["messages"] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "paid"},
    ]
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "integrity.json").unlink()
    done = cli("replay", path, "--entrypoint", "agent:main")
    assert (done.code, done.out) == (2, "")
    assert "pay" in done.line
    assert "--run-untraced-tools" in done.line
    done = cli("replay", path, "--entrypoint", "agent:main", "--run-untraced-tools")
    assert done.code == 1
    assert done.out.startswith("asked")


# --- in Python --------------------------------------------------------------------------------------------------------

ran: list[object] = []


@trace_tool
def get_value(x: int, scale: float = 1.0) -> dict[str, float]:
    ran.append(x)
    return {"value": x * scale}


@trace_tool
def boom(code: int) -> None:
    ran.append(code)
    raise ValueError(f"live {code}")


@pytest.fixture(autouse=True)
def _no_body_runs() -> Iterator[None]:
    ran.clear()
    yield
    assert ran == []


def test_session_serves_and_reports() -> None:
    with ReplaySession.from_trace(VECTORS / "failed_tool.sftrace", mode="frozen") as replay:
        assert get_value(1) == {"value": 1.0}
        with pytest.raises(ValueError, match="bad code 7"):
            boom(7)
    replay.verify_complete()
    assert replay.report().served == 2


async def test_session_is_an_async_context_manager_too() -> None:
    async with ReplaySession.from_trace(str(VECTORS / "failed_tool.sftrace")):
        assert await asyncio.to_thread(get_value, 1) == {"value": 1.0}


def test_session_is_seen_in_threads() -> None:
    with ReplaySession.from_trace(VECTORS / "failed_tool.sftrace"):
        thread = threading.Thread(target=get_value, args=(1,))
        thread.start()
        thread.join()


def test_a_divergence_that_the_program_caught_is_raised_at_the_end_of_the_block() -> None:
    session = ReplaySession.from_trace(VECTORS / "failed_tool.sftrace")
    with pytest.raises(ReplayMismatchError), session:
        try:
            get_value(2)
        except ReplayError:
            pass
    assert session.report().exit_code == 1
    with pytest.raises(ReplayMismatchError):
        session.verify_complete()


def test_another_exception_does_not_hide_a_divergence() -> None:
    with pytest.raises(ReplayMismatchError), ReplaySession.from_trace(VECTORS / "failed_tool.sftrace"):
        try:
            get_value(2)
        except ReplayError:
            raise KeyError("of the program") from None


def test_an_exception_of_the_program_passes_through() -> None:
    with pytest.raises(KeyError), ReplaySession.from_trace(VECTORS / "failed_tool.sftrace"):
        raise KeyError("of the program")


def test_unused_calls_are_for_verify_complete() -> None:
    with ReplaySession.from_trace(VECTORS / "failed_tool.sftrace") as replay:
        get_value(1)
    with pytest.raises(ReplayMismatchError, match="boom"):
        replay.verify_complete()


def test_a_session_is_used_once_and_alone() -> None:
    session = ReplaySession.from_trace(VECTORS / "failed_tool.sftrace")
    with session, pytest.raises(ReplayError, match="active"):
        ReplaySession.from_trace(VECTORS / "failed_tool.sftrace").start()
    with pytest.raises(ReplayError, match="used before"):
        session.start()


def test_after_the_block_calls_go_out_again() -> None:
    with ReplaySession.from_trace(VECTORS / "failed_tool.sftrace"):
        get_value(1)
    assert get_value(5) == {"value": 5.0}
    ran.clear()


def test_output_is_compared_where_the_program_gave_one() -> None:
    with ReplaySession.from_trace(VECTORS / "completed.sftrace") as replay:
        pass
    assert replay.uncompared()
    assert replay.report().same_outcome is True
    with ReplaySession.from_trace(VECTORS / "completed.sftrace") as replay:
        set_output({"answer": 41})
    assert not replay.uncompared()
    assert replay.report().same_outcome is False


def test_traces_in_memory_and_forks_of_them() -> None:
    trace = Trace.load(VECTORS / "failed_tool.sftrace")
    forked, _ = ForkEngine(trace, ForkPoint(step=2), overrides=[OverrideSpec(step=2, output={"value": 9})]).fork()
    for source, value in ((trace, 1.0), (forked, 9)):
        with ReplaySession.from_trace(source) as replay:
            assert get_value(1) == {"value": value}
    with pytest.raises(ReplayExhaustedError), ReplaySession.from_trace(forked):
        get_value(1)
        boom(7)
    assert replay.report().exit_code in (0, 4)


def test_a_fork_saved_from_python(tmp_path: Path) -> None:
    out = tmp_path / "forked.sftrace"
    fork_trace(str(VECTORS / "failed_tool.sftrace"), ForkPoint(step=2), output_path=str(out))
    with ReplaySession.from_trace(str(out)) as replay:
        assert get_value(1) == {"value": 1.0}
    assert replay.report().exit_code == 0


def test_wrong_mode_and_order_are_named() -> None:
    for keywords in ({"mode": "sideways"}, {"order": "sideways"}):
        with pytest.raises(ValueError, match="sideways"):
            ReplaySession.from_trace(VECTORS / "completed.sftrace", **keywords)


def test_untraced_tools_are_named(bundle: Callable[[str], Path]) -> None:
    trace = Trace.load(VECTORS / "completed.sftrace")
    messages = [
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "pay"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "paid"},
    ]
    old = trace.events[3]
    trace.add(old.replace(id="evt_new", input={"method": "chat.completions.create", "request": {"messages": messages}}))
    with pytest.raises(ReplayPolicyError, match="pay"):
        ReplaySession.from_trace(trace)
    ReplaySession.from_trace(trace, run_untraced_tools=True)
