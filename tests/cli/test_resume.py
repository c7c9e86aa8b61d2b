# SPDX-License-Identifier: Apache-2.0
"""`replay --mode resume` and `fork --run`: what is said, exit codes, the terminal's question, variables, a kill."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel import record, recorder
from sftrace_otel.bundle.read import open_bundle, validate_bundle

from .conftest import Cli, Done

AGENT = textwrap.dedent(
    """
    import os
    import sys
    from sftrace_otel import llm_request, set_output, trace_tool

    @trace_tool
    def lookup(city):
        print("lookup ran", file=sys.stderr)
        return {"city": city, "weather": "rain", "token": "hunter2-hunter2"}

    @trace_tool
    def book(city, weather):
        print("book ran", file=sys.stderr)
        if os.environ.get("HANG"):
            os.write(int(os.environ["HANG"]), b"%d\\n" % os.getpid())
            sys.stdin.read()
        return f"booked {city} for {weather}"

    def ask(text):
        def call():
            print("model ran", file=sys.stderr)
            return {"answer": f"on {text}"}
        return llm_request(model="m", provider="house", input={"q": text}, call=call)["answer"]

    def main():
        found = lookup("Oslo")
        said = ask(found["weather"])
        return [said, book(found["city"], said)]

    def other():
        return lookup("Bergen")

    def fails():
        lookup("Oslo")
        raise LookupError("after the fork")

    if __name__ == "__main__":
        result = globals()[sys.argv[1]]()
        set_output(result)
        print(result)
        sys.exit(int(os.environ.get("EXIT", "0")))
    """
)


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A recorded run of the module `agent` of the current folder: run.sftrace."""
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("agent", None)
    import agent  # type: ignore[import-not-found]

    recorder.restart_lineage()
    with record("agent", output="run.sftrace") as session:
        session.set_output(agent.main())
    recorder.release()
    yield tmp_path / "run.sftrace"
    sys.modules.pop("agent", None)
    recorder.release()


FORK = ("fork", "run.sftrace", "--at-step", "2")
SNOW = ("--set", '2:/weather="snow"')
COMMAND = ("--", sys.executable, "agent.py", "main")
HERE = ("--entrypoint", "agent:main")


@pytest.fixture
def fork(bundle: Path, cli: Cli) -> Path:
    """fork.sftrace: after the tool's result, which is another."""
    assert cli(*FORK, *SNOW, "-o", "fork.sftrace").code == 0
    return bundle.with_name("fork.sftrace")


@pytest.fixture
def resume(cli: Cli, shell: Cli, fork: Path) -> Callable[..., Done]:
    """`resume(way, *options)` resumes the fork here or as a command."""

    def run(way: str, *options: str, **variables: str) -> Done:
        arguments = ("replay", fork, "--mode", "resume", *options)
        return shell(*arguments, *COMMAND, **variables) if way == "command" else cli(*arguments, *HERE)

    return run


WAYS = ["entrypoint", pytest.param("command", marks=pytest.mark.full)]


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_and_says_what_was_served_live_and_stubbed(
    way: str, resume: Callable[..., Done], fork: Path
) -> None:
    done = resume(way, "--policy", 'tool:book=stub:"a stub"', "--json")
    assert done.code == 0, done.err
    told = done.json
    assert (told["verdict"], told["served"], told["live"], told["stubbed"]) == ("resumed", 1, 1, 1)
    assert told["live_calls"] == {"LLM house/m": 1} and told["stubbed_calls"] == {"tool 'book'": 1}
    assert (told["blocked"], told["redacted_served"], told["redacted_sent"]) == (None, 1, 0)
    assert "model ran" in done.err and "lookup ran" not in done.err and "book ran" not in done.err
    made = Path(told["recorded_to"])
    assert made == fork.with_name("fork-resumed.sftrace")
    assert validate_bundle(made, strict=True, verify_integrity=True).exit_code == 0
    bundle = open_bundle(made)
    assert [event.output for event in bundle.events if event.type == "tool_result"][1:] == ["a stub"]
    said = {event.output["answer"] for event in bundle.events if event.type == "llm_response"}
    assert said == {"on snow"}


@pytest.mark.parametrize("way", WAYS)
def test_how_many_values_are_redacted_is_said_before_anything_runs(way: str, resume: Callable[..., Done]) -> None:
    done = resume(way, "--policy", "tool:book=live")
    assert done.code == 0, done.err
    lines = done.err.splitlines()
    ran = lines.index("model ran")
    assert any("1 value is [REDACTED] in what is served" in line for line in lines[:ran])
    assert any("1 recorded calls are served" in line and "tool:book=live" in line for line in lines[:ran])
    assert done.err.count("[REDACTED] in what is served") == 1
    assert "replay: resumed; 1 of 1 recorded calls used" in done.err
    assert "went out 2: LLM house/m (1), tool 'book' (1)" in done.err


@pytest.mark.parametrize("way", WAYS)
def test_what_is_blocked_exits_with_4(way: str, resume: Callable[..., Done]) -> None:
    done = resume(way, "--json")
    assert done.code == 4, done.err
    assert (done.json["verdict"], done.json["blocked"]) == ("blocked", "tool 'book'")
    assert done.json["diverged"]["reason"] == "blocked"
    assert "book ran" not in done.err
    done = resume(way, "--policy", "llm:house/*=block")
    assert done.code == 4 and "model ran" not in done.err
    assert "--policy 'llm:house/m=live'" in done.err


def test_the_other_exit_codes(cli: Cli, fork: Path) -> None:
    resume = ("replay", fork, "--mode", "resume", "--policy", "tool:*=live")
    done = cli(*resume, "--entrypoint", "agent:other")
    assert done.code == 1 and "lookup ran" not in done.err and "replay: diverged" in done.err
    done = cli(*resume, "--entrypoint", "agent:fails")
    assert done.code == 1 and "outcome: failed with LookupError: after the fork" in done.err
    for options in (
        ("--policy", "book=live"),
        ("--policy", "tool:book=perhaps"),
        ("--policy", "tool:book=stub:@nothing.json"),
        ("--reuse", "nothing.sftrace"),
        ("--record", "run.sftrace"),
    ):
        done = cli(*resume[:4], *options, *HERE)
        assert done.code == 2 and done.line and "ran" not in done.err.replace("ran'", "")
    for other in ("frozen", "live"):
        assert cli("replay", fork, "--mode", other, "--policy", "tool:book=live", *HERE).code == 2
    (fork / "events.jsonl").write_bytes((fork / "events.jsonl").read_bytes().replace(b"snow", b"hail"))
    done = cli(*resume, *HERE)
    assert done.code == 2 and done.line


def test_an_answer_from_a_file_and_a_place_for_the_bundle(cli: Cli, fork: Path, tmp_path: Path) -> None:
    (tmp_path / "answer.json").write_text('"from a file"')
    done = cli("replay", fork, "--mode", "resume", "--policy", "tool:book=stub:@answer.json", "--record",
               "out.sftrace", "--json", *HERE)  # fmt: skip
    assert (done.code, Path(done.json["recorded_to"]).name) == (0, "out.sftrace")
    assert open_bundle("out.sftrace").events[-2].output == "from a file"  # type: ignore[attr-defined]


# --- fork --run and --reuse -------------------------------------------------------------------------------------------


def test_fork_and_resume_in_one_go(cli: Cli, bundle: Path) -> None:
    done = cli(*FORK, *SNOW, "-o", "x.sftrace", "--run", "--policy", "tool:*=live", *HERE)
    assert done.code == 0, done.err
    assert "✓ Forked trace saved to: x.sftrace" in done.err and "replay: resumed" in done.err
    done = cli(*FORK, "--overwrite", "-o", "x.sftrace", "--run", "--json", *HERE)
    assert (done.code, done.json["forked"], done.json["fork_point_step"]) == (4, "x.sftrace", 2)
    assert done.json["verdict"] == "blocked" and done.json["recorded_to"].endswith("x-resumed-2.sftrace")


@pytest.mark.parametrize(
    "options", [("--run",), ("--run", *HERE, "--asgi", "agent:app"), HERE, ("--policy", "tool:x=live"), ("--reuse",)]
)
def test_fork_with_half_of_it_exits_with_2(options: tuple[str, ...], cli: Cli, bundle: Path) -> None:
    done = cli(*FORK, "-o", "x.sftrace", *options)
    assert (done.code, Path("x.sftrace").exists()) == (2, False)
    assert "--run" in done.line


def test_what_the_override_did_not_change_is_reused(cli: Cli, bundle: Path, tmp_path: Path) -> None:
    done = cli(*FORK, "-o", "same.sftrace", "--run", "--reuse", "--json", *HERE)
    assert done.code == 0, done.err
    assert (done.json["reused"], done.json["live"], done.json["blocked"]) == (2, 0, None)
    assert "model ran" not in done.err and "book ran" not in done.err
    assert "calls that run.sftrace holds" not in done.err and f"calls that {tmp_path}" in done.err
    done = cli(*FORK, *SNOW, "-o", "snow.sftrace", "--run", "--reuse", "--json", *HERE)
    assert (done.code, done.json["reused"], done.json["live"]) == (4, 0, 1)
    bundle.rename(tmp_path / "moved.bundle")
    done = cli("replay", "same.sftrace", "--mode", "resume", "--reuse", *HERE)
    assert done.code == 2 and "its parent (run.sftrace) is not beside it; name it: --reuse PARENT" in done.line


@pytest.mark.full
def test_a_command_reuses_too(shell: Cli, bundle: Path) -> None:
    done = shell(*FORK, "-o", "same.sftrace", "--run", "--reuse", "--json", *COMMAND)
    assert (done.code, done.json["reused"]) == (0, 2), done.err


@pytest.mark.full
def test_a_program_that_exits_with_a_failure_is_one(resume: Callable[..., Done]) -> None:
    done = resume("command", "--policy", "tool:*=live", "--json", EXIT="3")
    assert (done.code, done.json["verdict"], done.json["program_exit_code"]) == (1, "resumed, and failed", 3)
    assert "ended with exit code 3" in done.json["text"]


def test_variables_ask_for_it_too(bundle: Path, fork: Path, bytecode: dict[str, str]) -> None:
    program = "from opentelemetry.instrumentation.auto_instrumentation import run; run()"
    command = [sys.executable, "-c", program, sys.executable, "agent.py", "main"]
    environment = {
        **os.environ, **bytecode, "OTEL_PYTHON_DISTRO": "sftrace", "OTEL_SFTRACE_REPLAY": str(fork),
        "OTEL_SFTRACE_REPLAY_MODE": "resume", "OTEL_SFTRACE_REPLAY_REPORT": "report.json",
        "OTEL_SFTRACE_REPLAY_POLICIES": '["tool:x=live", "tool:book=stub:[1, 2]"]',
    }  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "['on snow', [1, 2]]", done.stderr
    told = json.loads(Path("report.json").read_text())
    assert (told["exit_code"], told["stubbed"], told["live"]) == (0, 1, 1)
    assert "1 value is [REDACTED] in what is served" in done.stderr
    settings = open_bundle(told["recorded_to"]).run["settings"]
    assert settings["replay_policies"] == ["tool:x=live", "tool:book=stub"], "an answer is nobody's setting"


# --- asking -----------------------------------------------------------------------------------------------------------


def on_terminal(arguments: list[str], said: str, environment: dict[str, str]) -> tuple[int, str]:
    """(exit code, what the terminal showed) of our command on a terminal of its own, where `said` is typed."""
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "sftrace_otel", *arguments]
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment) as child:
        os.close(end)
        shown, typed = b"", False
        while True:
            try:
                data = os.read(terminal, 4096)
            except OSError:  # the terminal is gone with its last process
                break
            if not data:
                break
            shown += data
            if not typed and b"[N]o: " in shown:
                typed = True
                os.write(terminal, said.encode())
    os.close(terminal)
    return child.returncode, shown.decode()


@pytest.mark.parametrize(("said", "code"), [("y\n", 0), pytest.param("\n", 4, marks=pytest.mark.full)])
def test_ask_asks_on_the_terminal(said: str, code: int, fork: Path, bytecode: dict[str, str]) -> None:
    arguments = ["replay", str(fork), "--mode", "resume", "--policy", "tool:*=ask", *HERE]
    ended, shown = on_terminal(arguments, said, {**os.environ, **bytecode})
    assert ended == code, shown
    assert 'tool \'book\' comes after the recording; its input (redacted): {"city": "Oslo", "weather"' in shown
    assert ("book ran" in shown) == (code == 0)


def test_without_a_terminal_ask_is_block(resume: Callable[..., Done]) -> None:
    done = resume("entrypoint", "--policy", "tool:*=ask")
    assert done.code == 4 and "book ran" not in done.err
    assert "and nobody let it go" in done.err


# --- a kill -----------------------------------------------------------------------------------------------------------


def test_a_killed_resume_leaves_a_journal_that_is_recovered(
    cli: Cli, fork: Path, bytecode: dict[str, str], tmp_path: Path
) -> None:
    told, tell = os.pipe()
    command = [sys.executable, "-m", "sftrace_otel", "replay", str(fork), "--mode", "resume", "--policy", "tool:*=live",
               "--record", "out.sftrace", *HERE]  # fmt: skip
    environment = {**os.environ, **bytecode, "HANG": str(tell)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, pass_fds=[tell]
    ) as child:
        os.close(tell)
        with os.fdopen(told) as pipe:
            assert int(pipe.readline()) == child.pid
        child.send_signal(signal.SIGKILL)
    assert not Path("out.sftrace").exists()
    [journal] = tmp_path.glob(".out.sftrace.journal*")
    done = cli("recover", journal)
    assert done.code == 0, done.err
    [made] = [path for path in tmp_path.glob("*.sftrace") if path.name.startswith("out")]
    assert validate_bundle(made, verify_integrity=True).exit_code == 0
    events = open_bundle(made).events
    assert [event.type for event in events][:6] == [
        "run_start", "tool_call", "tool_result", "llm_request", "llm_response", "tool_call",
    ]  # fmt: skip
    drawn = cli("lineage", made).out
    assert "fork.sftrace" in drawn and "recovered, a resumed run of it" in drawn
    # It is a partial recording like a fork: the call under way when it was killed is made.
    done = cli("replay", made, "--mode", "resume", "--policy", "tool:book=stub:1", "--json", *HERE)
    assert (done.code, done.json["served"], done.json["stubbed"]) == (0, 2, 1), done.err
