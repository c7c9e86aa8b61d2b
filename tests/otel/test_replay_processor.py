# SPDX-License-Identifier: Apache-2.0
"""`ReplaySpanProcessor`: on a provider in staging, over real clients and servers, and off again."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sftrace_otel import (
    ReplayMismatchError,
    ReplayPolicyError,
    ReplaySpanProcessor,
    SftraceSpanProcessor,
    instrumentation,
    record,
    recorder,
    trace_tool,
)
from sftrace_otel.bundle.read import open_bundle, validate_bundle
from sftrace_otel.errors import ReplayError, SettingsError, TraceStorageError
from sftrace_otel.fork import ForkPoint, fork_trace
from sftrace_otel.instrumentation import replaying

RAN: list[str] = []


@trace_tool
def lookup(city: str) -> str:
    RAN.append(city)
    return f"{city} {len(RAN)}"


class Server:
    """Answers every GET, and counts."""

    def __init__(self) -> None:
        self.hits: list[str] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.hits.append(self.path)
                self.send_response(200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    RAN.clear()
    recorder.restart_lineage()
    yield
    replaying.deactivate()
    instrumentation.uninstall()


@pytest.fixture
def bundle(tmp_path: Path, server: Server) -> Path:
    """A run: a tool, an exchange, an output."""
    path = tmp_path / "run.sftrace"
    instrumentation.install()
    with record("agent", output=path) as session:
        program(server)
        session.set_output("done")
    recorder.release()
    RAN.clear()
    server.hits.clear()
    recorder.restart_lineage()
    return path


def program(server: Server) -> str:
    with record("agent"):
        return lookup("Oslo") + httpx.get(server.url + "/x").text


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[TracerProvider, InMemorySpanExporter]]]:
    """`staging(processor)` makes a provider with it the global one, and gives what another exporter gets."""
    made: list[TracerProvider] = []

    def provide(*processors: Any, **resource: str) -> tuple[TracerProvider, InMemorySpanExporter]:
        exporter = InMemorySpanExporter()
        provider = TracerProvider(resource=Resource(dict(resource)), shutdown_on_exit=False)
        for processor in processors:
            provider.add_span_processor(processor)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
        made.append(provider)
        return provider, exporter

    yield provide
    for provider in made:
        provider.shutdown()


def test_a_provider_replays_until_it_shuts_down(bundle: Path, server: Server, staging: Any) -> None:
    processor = ReplaySpanProcessor(bundle)
    provider, exporter = staging(processor)
    with provider.get_tracer("app").start_as_current_span("root"):
        assert program(server) == "Oslo 1ok"
    assert RAN == [] and server.hits == []
    report = processor.report()
    assert (report.exit_code, report.served, report.unused, report.spans) == (0, 2, (), 2)
    provider.shutdown()
    assert processor.report().to_dict() == report.to_dict()
    spans = {span.name: span.attributes for span in exporter.get_finished_spans()}
    assert spans["root"] == {"sftrace.replay.active": True}
    tool = spans["execute_tool lookup"]
    assert tool["sftrace.replay.served"] is True and tool["sftrace.replay.rung"] == "lineage"
    assert tool["sftrace.replay.event.id"]
    assert program(server).endswith("ok")  # the program goes on, for real
    assert RAN == ["Oslo"] and server.hits == ["/x"]
    provider.shutdown()
    processor.shutdown()


def test_nothing_is_recorded_beside_a_replay(bundle: Path, server: Server, staging: Any, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    provider, _ = staging(SftraceSpanProcessor(dir=str(tmp_path / "traces")), ReplaySpanProcessor(bundle))
    with provider.get_tracer("app").start_as_current_span("root"):
        program(server)
    provider.shutdown()
    assert sorted(path for path in tmp_path.rglob("*") if "traces" not in path.parts) == before
    assert not list((tmp_path / "traces").glob("*.sftrace"))


def test_a_divergence_stops_its_call_and_is_reported(
    bundle: Path, server: Server, staging: Any, tmp_path: Path
) -> None:
    target = tmp_path / "report.json"
    processor = ReplaySpanProcessor(bundle, report=target)
    provider, _ = staging(processor)
    with pytest.raises(ReplayMismatchError), provider.get_tracer("app").start_as_current_span("root"):
        lookup("Bergen")
    provider.shutdown()
    document = json.loads(target.read_bytes())
    assert document["exit_code"] == 1 and document["diverged"]["reason"] == "input_differs"
    assert document["unused"][0]["title"] == "tool 'lookup'"
    assert "lookup" in document["text"]
    assert RAN == [] and server.hits == []


def test_a_root_that_fails_is_the_outcome(bundle: Path, server: Server, staging: Any) -> None:
    processor = ReplaySpanProcessor(bundle)
    provider, _ = staging(processor)
    with pytest.raises(KeyError), provider.get_tracer("app").start_as_current_span("root"):
        program(server)
        raise KeyError("x")
    report = processor.report()
    assert (report.outcome.status, report.outcome.error_type) == ("failed", "KeyError")
    assert (report.exit_code, report.same_outcome) == (1, False)


def test_spans_of_others_around_a_served_call_are_marked_and_the_others_named(
    bundle: Path, server: Server, staging: Any
) -> None:
    processor = ReplaySpanProcessor(bundle)
    provider, exporter = staging(processor)
    framework = provider.get_tracer("framework")
    operation = {"gen_ai.operation.name": "execute_tool"}
    with framework.start_as_current_span("invoke_agent", attributes={"gen_ai.operation.name": "invoke_agent"}):
        with framework.start_as_current_span("tool Oslo", attributes=operation):
            lookup("Oslo")
        with framework.start_as_current_span("tool other", attributes=operation):
            pass  # no boundary of ours saw it: it ran
    spans = {span.name: span.attributes for span in exporter.get_finished_spans()}
    assert spans["tool Oslo"]["sftrace.replay.served"] is True
    assert "sftrace.replay.served" not in spans["tool other"]
    assert "sftrace.replay.served" not in spans["invoke_agent"]
    assert processor.report().outside == {"framework": 1}
    assert "framework (1)" in processor.report().text()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_bad_bundle_is_refused_by_the_constructor(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceStorageError):
        ReplaySpanProcessor(tmp_path / "none.sftrace")
    events = bundle / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b"Oslo", b"Osla"))
    with pytest.raises(TraceStorageError):
        ReplaySpanProcessor(bundle)
    assert replaying.active() is None


def test_arguments_and_a_second_replay_are_refused(bundle: Path) -> None:
    with pytest.raises(SettingsError):
        ReplaySpanProcessor(bundle, mode="hybrid")
    with pytest.raises(SettingsError):
        ReplaySpanProcessor(bundle, order="odd")
    first = ReplaySpanProcessor(bundle)
    with pytest.raises(ReplayError, match="active"):
        ReplaySpanProcessor(bundle)
    first.shutdown()
    ReplaySpanProcessor(bundle).shutdown()


@pytest.mark.parametrize("name", ["deployment.environment.name", "deployment.environment"])
def test_production_is_refused_unless_forced(name: str, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"service.name=shop,{name}=production")
    with pytest.raises(ReplayPolicyError, match="production") as caught:
        ReplaySpanProcessor(bundle)
    assert caught.value.code == "production"
    assert replaying.active() is None
    ReplaySpanProcessor(bundle, force=True).shutdown()
    monkeypatch.setenv("OTEL_SFTRACE_REPLAY_FORCE", "true")
    ReplaySpanProcessor(bundle).shutdown()
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"{name}=staging")
    monkeypatch.delenv("OTEL_SFTRACE_REPLAY_FORCE")
    ReplaySpanProcessor(bundle).shutdown()


def test_a_provider_of_production_ends_the_replay_and_the_program_goes_on(
    bundle: Path, server: Server, staging: Any, caplog: pytest.LogCaptureFixture
) -> None:
    processor = ReplaySpanProcessor(bundle)
    provider, exporter = staging(processor, **{"deployment.environment.name": "production"})
    with provider.get_tracer("app").start_as_current_span("root"):
        program(server)
    assert RAN == ["Oslo"] and server.hits == ["/x"]
    assert processor.refused is not None and "production" in caplog.text
    assert all("sftrace.replay.active" not in span.attributes for span in exporter.get_finished_spans())


# --- the guard --------------------------------------------------------------------------------------------------------


def connect(port: int) -> None:
    with socket.socket() as connection:
        connection.connect(("127.0.0.1", port))


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """The port of a server in another process."""
    import subprocess

    source = (
        "import socket,sys\ns=socket.create_server(('127.0.0.1',0))\nprint(s.getsockname()[1],flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        yield int(child.stdout.readline())
        child.stdin.close()
        child.wait()


def test_the_guard_stops_connections_inside_runs_only(
    bundle: Path, staging: Any, elsewhere: int, server: Server
) -> None:
    processor = ReplaySpanProcessor(bundle)
    provider, _ = staging(processor)
    tracer = provider.get_tracer("app")
    connect(elsewhere)  # a pool, a probe
    begun, stopped = threading.Event(), []

    def probe() -> None:
        begun.wait(30)
        connect(elsewhere)

    def in_run() -> None:
        try:
            connect(elsewhere)
        except ReplayPolicyError as error:
            stopped.append(error)

    beside = threading.Thread(target=probe)
    beside.start()
    with tracer.start_as_current_span("root"):
        connect(server.port)  # this process listens there
        begun.set()
        beside.join()
        assert processor.report().diverged is None
        within = threading.Thread(target=in_run)
        within.start()
        within.join()
        assert len(stopped) == 1
        with pytest.raises(ReplayPolicyError, match="tried to connect"):
            connect(elsewhere)
    assert processor.report().exit_code == 1
    connect(elsewhere)
    processor.shutdown()
    with tracer.start_as_current_span("root"):
        connect(elsewhere)


def test_the_guard_stops_connections_in_a_record_block(bundle: Path, elsewhere: int) -> None:
    processor = ReplaySpanProcessor(bundle)
    with record("agent"), pytest.raises(ReplayPolicyError):
        connect(elsewhere)
    connect(elsewhere)
    processor.shutdown()


@pytest.mark.parametrize("how", ["argument", "variable", "otlp"])
def test_what_is_allowed_is_let_through(
    how: str, bundle: Path, staging: Any, elsewhere: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"127.0.0.1:{elsewhere}"
    if how == "variable":
        monkeypatch.setenv("OTEL_SFTRACE_REPLAY_ALLOW", place)
    if how == "otlp":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{place}")
    processor = ReplaySpanProcessor(bundle, allow=[place] if how == "argument" else None)
    provider, _ = staging(processor)
    with provider.get_tracer("app").start_as_current_span("root"):
        connect(elsewhere)
    assert processor.session.latched is None


# --- it does no harm --------------------------------------------------------------------------------------------------


def test_nothing_is_raised_into_the_program(bundle: Path, staging: Any, server: Server, caplog: Any) -> None:
    processor = ReplaySpanProcessor(bundle)
    provider, _ = staging(processor)

    def broken(*args: Any) -> None:
        raise RuntimeError("broken")

    processor._check = broken  # type: ignore[method-assign]
    processor._outside = None  # type: ignore[assignment]
    with provider.get_tracer("app").start_as_current_span("chat", attributes={"gen_ai.operation.name": "chat"}):
        assert program(server) == "Oslo 1ok"
    assert "RuntimeError" in caplog.text
    processor.session.stop = broken
    provider.shutdown()


def test_a_call_that_the_end_overtakes_goes_on_for_real(bundle: Path, server: Server) -> None:
    processor = ReplaySpanProcessor(bundle)
    active = replaying.active()
    assert active is not None
    processor.shutdown()
    assert active.decide("tool", "lookup", active.prepare({"city": "Oslo"}), lineage="0").action == "live"


def test_reports_and_notices_in_a_process_of_its_own(bundle: Path, server: Server, child: Any) -> None:
    done = child.run(
        "import sys\n"
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "from sftrace_otel import ReplaySpanProcessor, trace_tool\n"
        "provider = TracerProvider()\n"
        f"provider.add_span_processor(ReplaySpanProcessor({str(bundle)!r}))\n"
        "trace.set_tracer_provider(provider)\n"
        "assert 'httpx' not in sys.modules and 'openai' not in sys.modules\n"
        "import httpx\n"
        "@trace_tool\n"
        "def lookup(city):\n"
        "    raise SystemExit('ran')\n"
        "with trace.get_tracer('app').start_as_current_span('root'):\n"
        f"    print(lookup('Oslo'), httpx.get('{server.url}/x').text)\n",
        **{name: value for name, value in os.environ.items() if name.startswith("PYTHON")},
    )
    assert done.stdout == "Oslo 1 ok\n"
    assert server.hits == []
    assert "replaying" in done.stderr and "2 of 2 recorded calls used" in done.stderr


def test_it_resumes_and_records(
    bundle: Path, server: Server, staging: Any, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_SFTRACE_QUIET", raising=False)
    options: Any = {"policies": ["tool:lookup=live", "http:127.0.0.1=live"]}
    processor = ReplaySpanProcessor(bundle, mode="resume", **options)
    said = capfd.readouterr().err
    assert "2 recorded calls are served, then calls are made" in said and "recorded into" in said
    provider, _ = staging(processor)
    with provider.get_tracer("app").start_as_current_span("root"):
        assert program(server) == "Oslo 1ok"
        assert (RAN, server.hits) == ([], [])
        assert lookup("Bergen") == "Bergen 1"
        httpx.get(server.url + "/y")
    provider.shutdown()
    assert (RAN, server.hits) == (["Bergen"], ["/y"])
    report = processor.report()
    assert (report.exit_code, report.served, report.live) == (0, 2, 2)
    made = tmp_path / "run-resumed.sftrace"
    assert validate_bundle(made, verify_integrity=True).exit_code == 0
    assert open_bundle(made).provenance["origin"] == "resumed"


def test_reuse_and_policies_come_from_the_variables(
    bundle: Path, server: Server, staging: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_trace(bundle, ForkPoint(step=2), output_path=tmp_path / "fork.sftrace")
    monkeypatch.setenv("OTEL_SFTRACE_REPLAY_MODE", "resume")
    monkeypatch.setenv("OTEL_SFTRACE_REPLAY_REUSE", "true")
    monkeypatch.setenv("OTEL_SFTRACE_REPLAY_POLICIES", "tool:look*=live,http:*=block")
    processor = ReplaySpanProcessor(tmp_path / "fork.sftrace")
    provider, _ = staging(processor)
    with provider.get_tracer("app").start_as_current_span("root"):
        assert program(server) == "Oslo 1ok"
        assert lookup("Bergen") == "Bergen 1"
        with pytest.raises(ReplayPolicyError):
            httpx.get(server.url + "/z")
    provider.shutdown()
    assert (RAN, server.hits) == (["Bergen"], [])
    report = processor.report()
    assert (report.served, report.reused, report.live, report.exit_code) == (1, 1, 1, 4)
