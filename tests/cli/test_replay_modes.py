# SPDX-License-Identifier: Apache-2.0
"""`replay --mode`, what goes with it, ASGI applications, replays that are recorded, production; and the variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel import record, recorder
from sftrace_otel.bundle.read import validate_bundle

from .conftest import Cli, Done

AGENT = textwrap.dedent(
    """
    import datetime
    import os
    import sys
    import uuid
    from sftrace_otel import llm_request, set_output, trace_tool

    RAN = []

    @trace_tool
    def lookup(city):
        print("lookup ran", file=sys.stderr)
        return {"city": city}

    @trace_tool
    def at(now, run, path):
        return "noted"

    def ask(text):
        def call():
            print("model ran", file=sys.stderr)
            return {"answer": os.environ.get("ANSWER", "Oslo")}
        return llm_request(model="m", provider="house", input={"q": text}, call=call)["answer"]

    def main():
        return lookup(ask("where"))

    def reworded():
        return lookup(ask("where to"))

    def clock():
        return at(datetime.datetime.now().isoformat(), str(uuid.uuid4()), f"/tmp/{uuid.uuid4().hex}/x")

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            assert (await receive())["type"] == "lifespan.startup"
            scope["state"]["ready"] = True
            await send({"type": "lifespan.startup.complete"})
            assert (await receive())["type"] == "lifespan.shutdown"
            await send({"type": "lifespan.shutdown.complete"})
            return
        assert scope["state"]["ready"]
        body = (await receive())["body"]
        found = lookup(ask("where"))
        text = f'{{"path": "{scope["path"]}", "query": "{scope["query_string"].decode()}", ' \\
               f'"got": {body.decode()}, "city": "{found["city"]}"}}'
        await send({"type": "http.response.start", "status": int(os.environ.get("STATUS", "201")),
                    "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": text[:5].encode(), "more_body": True})
        await send({"type": "http.response.body", "body": text[5:].encode()})

    async def plain(scope, receive, send):
        assert scope["type"] == "http", "no lifespan here"
        await app({**scope, "state": {"ready": True}}, receive, send)

    async def silent(scope, receive, send):
        pass

    if __name__ == "__main__":
        set_output(globals()[sys.argv[1]]())
    """
)

REQUEST = {
    "method": "POST",
    "url": "http://shop.test/ask?x=1",
    "headers": [["content-type", "application/json"], ["content-length", "999"]],
    "body": {"q": 1},
}
ANSWER = {
    "status_code": 201,
    "headers": [["date", "then"]],
    "body": {"path": "/ask", "query": "x=1", "got": {"q": 1}, "city": "Oslo"},
}


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `agent`, imported from the current folder."""
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("OTEL_SFTRACE_QUIET", "true")
    sys.modules.pop("agent", None)
    import agent  # type: ignore[import-not-found]

    recorder.restart_lineage()
    yield agent
    sys.modules.pop("agent", None)
    recorder.release()


@pytest.fixture
def bundle(agent: Any, tmp_path: Path) -> Callable[..., Path]:
    """`bundle(function, run_input=…, output=…)` records a run of the agent's `function`."""

    def make(function: str = "main", **given: Any) -> Path:
        path = tmp_path / f"{function}.sftrace"
        with record("agent", output=path, run_input=given.get("run_input")) as session:
            session.set_output(given["output"] if "output" in given else getattr(agent, function)())
            if "output" in given:
                agent.main()
        recorder.release()
        return path

    return make


@pytest.fixture
def instrumented(bytecode: dict[str, str], agent: Any) -> Callable[..., Done]:
    """Run the agent under `opentelemetry-instrument` with variables."""

    def run(function: str, **variables: str) -> Done:
        program = "from opentelemetry.instrumentation.auto_instrumentation import run; run()"
        command = [sys.executable, "-c", program, sys.executable, "agent.py", function]
        environment = {**os.environ, **bytecode, "OTEL_PYTHON_DISTRO": "sftrace", **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return Done(code=done.returncode, out=done.stdout, err=done.stderr)

    return run


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["entrypoint", "command"])
def test_hybrid_mode_asks_the_named_llm_and_serves_the_tools(
    way: str, cli: Cli, shell: Cli, bundle: Callable[..., Path]
) -> None:
    path = bundle()
    options = ["replay", path, "--mode", "hybrid", "--live-llm", "house/m", "--json"]
    if way == "entrypoint":
        done = cli(*options, "--entrypoint", "agent:reworded")
    else:
        done = shell(*options, "--", sys.executable, "agent.py", "reworded")
    assert done.code == 0, done.err
    assert (done.json["live"], done.json["served"], done.json["mode"]) == (1, 1, "hybrid")
    assert done.json["live_calls"] == {"LLM house/m": 1}
    assert "model ran" in done.err and "lookup ran" not in done.err


def test_what_a_live_answer_leads_to_and_was_not_recorded_diverges(shell: Cli, bundle: Callable[..., Path]) -> None:
    command = ["--mode", "hybrid", "--live-llm", "house/*", "--", sys.executable, "agent.py", "main"]
    done = shell("replay", bundle(), *command, ANSWER="Bergen")
    assert done.code == 1
    assert 'at /city: recorded "Oslo", live "Bergen"' in done.err
    assert "lookup ran" not in done.err


def test_live_mode_runs_named_tools(shell: Cli, bundle: Callable[..., Path]) -> None:
    path = bundle()
    command = ["--", sys.executable, "agent.py", "main"]
    done = shell("replay", path, "--mode", "live", "--allow-live-tool", "lookup", *command)
    assert done.code == 0, done.err
    assert "model ran" in done.err and "lookup ran" in done.err
    done = shell("replay", path, "--mode", "live", *command)
    assert done.code == 1
    assert "lookup ran" not in done.err and "--allow-live-tool" in done.err


@pytest.mark.parametrize(
    "options",
    [("--mode", "hybrid"), ("--mode", "hybrid", "--live-llm", "a/b"), ("--live-llm", "house/m"),
     ("--mode", "live", "--allow-live-tool", "looks")],
)  # fmt: skip
def test_options_that_cannot_be_meant_exit_with_2(
    options: tuple[str, ...], cli: Cli, bundle: Callable[..., Path]
) -> None:
    done = cli("replay", bundle(), *options, "--entrypoint", "agent:main")
    assert (done.code, done.out) == (2, "")
    assert done.line


@pytest.mark.parametrize("way", ["entrypoint", "command"])
def test_the_miss_names_the_normalisers_and_they_help(
    way: str, cli: Cli, shell: Cli, bundle: Callable[..., Path]
) -> None:
    path = bundle("clock")
    run = ["--entrypoint", "agent:clock"] if way == "entrypoint" else ["--", sys.executable, "agent.py", "clock"]
    call = cli if way == "entrypoint" else shell
    done = call("replay", path, *run)
    assert done.code == 1
    options = ["--normalize", "iso_time", "--normalize", "uuid", "--normalize", "path"]
    assert " ".join(options) in done.err
    done = call("replay", path, *options, *run)
    assert done.code == 0, done.err
    assert "normalised before matching: iso_time, uuid, path" in done.err


# --- recorded ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["entrypoint", "command"])
def test_a_replay_is_recorded_where_it_is_asked_to(
    way: str, cli: Cli, shell: Cli, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    path, out = bundle(), tmp_path / "again.sftrace"
    run = ["--entrypoint", "agent:main"] if way == "entrypoint" else ["--", sys.executable, "agent.py", "main"]
    call = cli if way == "entrypoint" else shell
    assert call("replay", path, *run).code == 0
    assert not (tmp_path / "sftraces").exists()
    done = call("replay", path, "--record", out, "--json", *run)
    assert done.code == 0, done.err
    assert done.json["recorded_to"] == str(out)
    result = validate_bundle(out, strict=True, verify_integrity=True)
    assert result.exit_code == 0 and not result.issues
    assert not list(tmp_path.glob(".*journal"))
    done = call("replay", out, *run)
    assert done.code == 0, done.err
    done = call("replay", path, "--record", out, *run)
    assert done.code == 2 and "exists" in done.line


# --- ASGI -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("app", ["app", "plain"])
@pytest.mark.parametrize("place", ["url", "path"])
def test_the_recorded_request_is_sent_to_an_asgi_application(
    app: str, place: str, cli: Cli, bundle: Callable[..., Path]
) -> None:
    request: dict[str, Any] = dict(REQUEST)
    if place == "path":
        del request["url"]
        request |= {"path": "/ask", "query": "x=1"}
    path = bundle("main", run_input=request, output=ANSWER)
    done = cli("replay", path, "--asgi", f"agent:{app}", "--json")
    assert done.code == 0, (done.err, done.out)
    assert done.json["outcome"]["same"] is True
    assert "ran" not in done.err


@pytest.mark.parametrize(
    ("status", "says"), [("404", "at /status_code: recorded 201, now 404"), ("500", "now failed with 500")]
)
def test_another_answer_of_the_application_is_told(
    status: str, says: str, cli: Cli, bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle("main", run_input=REQUEST, output=ANSWER)
    monkeypatch.setenv("STATUS", status)
    done = cli("replay", path, "--asgi", "agent:app")
    assert done.code == 1
    assert says in done.err


def test_an_output_that_is_no_answer_is_not_compared_with_one(cli: Cli, bundle: Callable[..., Path]) -> None:
    done = cli("replay", bundle("main", run_input=REQUEST, output="kept"), "--asgi", "agent:app")
    assert done.code == 0, done.err
    assert "was not compared" in done.err


def test_an_application_that_cannot_be_asked(cli: Cli, bundle: Callable[..., Path]) -> None:
    path = bundle("main")
    done = cli("replay", path, "--asgi", "agent:app")
    assert done.code == 2 and "no inbound request" in done.line
    assert cli("replay", path, "--asgi", "agent:none").code == 2
    assert cli("replay", path, "--asgi", "agent:app", "--entrypoint", "agent:main").code == 2
    path.rename(path.with_name("other.sftrace"))
    cut = {**REQUEST, "body": {"beginning": "{", "size": 99}}
    path = bundle("main", run_input=cut, output=ANSWER)
    done = cli("replay", path, "--asgi", "agent:app")
    assert done.code == 2 and "was cut" in done.line
    path.rename(path.with_name("cut.sftrace"))
    path = bundle("main", run_input=REQUEST, output=ANSWER)
    done = cli("replay", path, "--asgi", "agent:silent")
    assert done.code == 1 and "RuntimeError" in done.err


# --- production -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["entrypoint", "command", "variable"])
def test_production_is_refused_unless_forced(
    way: str, cli: Cli, shell: Cli, instrumented: Callable[..., Done], bundle: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = bundle()
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=production")
    if way == "variable":
        done = instrumented("main", OTEL_SFTRACE_REPLAY=str(path))
        assert done.code == 2 and "production" in done.line and "ran" not in done.err
        done = instrumented("main", OTEL_SFTRACE_REPLAY=str(path), OTEL_SFTRACE_REPLAY_FORCE="true")
    else:
        run = ["--entrypoint", "agent:main"] if way == "entrypoint" else ["--", sys.executable, "agent.py", "main"]
        call = cli if way == "entrypoint" else shell
        done = call("replay", path, *run)
        assert done.code == 2 and "production" in done.line and "ran" not in done.err
        done = call("replay", path, "--force", *run)
    assert done.code == 0, done.err


def test_production_that_only_the_provider_knows_of_is_refused(
    instrumented: Callable[..., Done], bundle: Callable[..., Path], tmp_path: Path
) -> None:
    path = bundle()
    configuration = tmp_path / "otel.yaml"
    configuration.write_text(
        "file_format: '1.0'\nresource:\n  attributes:\n    - name: deployment.environment.name\n"
        "      value: production\ntracer_provider:\n  processors:\n"
        "    - simple:\n        exporter:\n          console: {}\n"
    )
    done = instrumented("main", OTEL_SFTRACE_REPLAY=str(path), OTEL_CONFIG_FILE=str(configuration))
    assert done.code == 2 and "production" in done.err, done.err
    assert "ran" not in done.err


# --- variables --------------------------------------------------------------------------------------------------------


def test_each_variable_works_under_auto_instrumentation(
    instrumented: Callable[..., Done], bundle: Callable[..., Path], tmp_path: Path
) -> None:
    path, report, out = str(bundle()), tmp_path / "report.json", tmp_path / "out.sftrace"
    done = instrumented(
        "reworded",
        OTEL_SFTRACE_REPLAY=path,
        OTEL_SFTRACE_REPLAY_MODE="hybrid",
        OTEL_SFTRACE_REPLAY_LIVE_LLMS="house/m",
        OTEL_SFTRACE_REPLAY_ORDER="strict",
        OTEL_SFTRACE_REPLAY_REPORT=str(report),
        OTEL_SFTRACE_REPLAY_RECORD=str(out),
    )
    assert done.code == 0, done.err
    document = json.loads(report.read_bytes())
    assert (document["exit_code"], document["mode"], document["order"], document["live"]) == (0, "hybrid", "strict", 1)
    assert validate_bundle(out, strict=True, verify_integrity=True).exit_code == 0
    done = instrumented(
        "main",
        OTEL_SFTRACE_REPLAY=path,
        OTEL_SFTRACE_REPLAY_MODE="live",
        OTEL_SFTRACE_REPLAY_LIVE_TOOLS="lookup",
        OTEL_SFTRACE_REPLAY_REPORT=str(report),
    )
    assert (done.code, json.loads(report.read_bytes())["live"]) == (0, 2)
    clock = str(bundle("clock"))
    done = instrumented(
        "clock",
        OTEL_SFTRACE_REPLAY=clock,
        OTEL_SFTRACE_REPLAY_NORMALIZE="iso_time,uuid",
        OTEL_SFTRACE_REPLAY_IGNORE="/path",
        OTEL_SFTRACE_REPLAY_REPORT=str(report),
    )
    assert (done.code, json.loads(report.read_bytes())["exit_code"]) == (0, 0)
    done = instrumented("main", OTEL_SFTRACE_REPLAY=path, OTEL_SFTRACE_REPLAY_MODE="sideways")
    assert done.code == 2 and "OTEL_SFTRACE_REPLAY_MODE" in done.err and "ran" not in done.err
