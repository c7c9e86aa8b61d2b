# SPDX-License-Identifier: Apache-2.0
"""`SftraceExporter`: behind any processor, for any order of spans, before and after shutdown."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode

from sftrace_otel import SftraceExporter
from sftrace_otel.errors import SettingsError
from sftrace_otel.recorder import active

from .conftest import CHAT, TOOL, Bundles, Child

Provider = Callable[..., TracerProvider]


def spans_of(make_provider: Provider, *, root: str = "agent", kind: SpanKind = SpanKind.INTERNAL) -> list[ReadableSpan]:
    """A root with a chat and a tool below, in the order in which they ended."""
    memory = InMemorySpanExporter()
    tracer = make_provider(SimpleSpanProcessor(memory)).get_tracer("t")
    with tracer.start_as_current_span(root, kind=kind):
        with tracer.start_as_current_span("chat gpt-5", attributes=CHAT):
            pass
        with tracer.start_as_current_span("execute_tool weather", attributes=TOOL):
            pass
    return list(memory.get_finished_spans())


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


def test_it_is_a_span_exporter_without_arguments(bundles: Bundles, make_provider: Provider) -> None:
    exporter = SftraceExporter()
    assert isinstance(exporter, SpanExporter)
    assert exporter.export(spans_of(make_provider)) is SpanExportResult.SUCCESS
    assert exporter.force_flush() is True
    exporter.shutdown()
    assert [event["type"] for event in bundles.events()] == [
        "run_start", "llm_request", "llm_response", "tool_call", "tool_result", "run_end",
    ]  # fmt: skip
    [request] = bundles.events("llm_request")
    assert request["input"] == {
        "method": "chat.completions.create",
        "request": {"model": "gpt-5", "messages": [{"role": "user", "content": "hi"}]},
    }
    assert bundles.spans() == ["agent"]


def test_children_may_come_in_other_batches_and_in_any_order(bundles: Bundles, make_provider: Provider) -> None:
    chat, tool, root = spans_of(make_provider)
    exporter = SftraceExporter()
    for batch in ([tool], [], [root, chat]):
        assert exporter.export(batch) is SpanExportResult.SUCCESS
    exporter.shutdown()
    assert len(bundles.events("llm_request", "tool_call")) == 2
    assert bundles.events("run_start")[0]["timestamp"] <= bundles.events("llm_request")[0]["timestamp"]


def test_spans_whose_root_never_comes_are_recorded_at_shutdown(bundles: Bundles, make_provider: Provider) -> None:
    exporter = SftraceExporter()
    exporter.export(spans_of(make_provider)[:2])
    assert not bundles.paths()
    exporter.shutdown()
    assert len(bundles.events("llm_request", "tool_call")) == 2


def test_a_server_span_is_a_run_of_its_own(bundles: Bundles, make_provider: Provider) -> None:
    exporter = SftraceExporter()
    for name in ("GET /a", "GET /b"):
        exporter.export(spans_of(make_provider, root=name, kind=SpanKind.SERVER))
    assert len(bundles.paths()) == 2
    exporter.shutdown()
    assert len(bundles.paths()) == 2


def test_a_failed_root_fails_its_run(bundles: Bundles, make_provider: Provider) -> None:
    memory = InMemorySpanExporter()
    tracer = make_provider(SimpleSpanProcessor(memory)).get_tracer("t")
    with pytest.raises(KeyError), tracer.start_as_current_span("GET /a", kind=SpanKind.SERVER):
        with tracer.start_as_current_span("chat", attributes=CHAT):
            pass
        raise KeyError("missing")
    SftraceExporter().export(memory.get_finished_spans())
    [error] = bundles.events("error")
    assert (error["error_type"], error["message"]) == ("KeyError", "'missing'")
    assert bundles.events("run_end")[0]["run_status"] == "failed"


def test_failed_calls_have_error_events_with_short_class_names(bundles: Bundles, make_provider: Provider) -> None:
    memory = InMemorySpanExporter()
    tracer = make_provider(SimpleSpanProcessor(memory)).get_tracer("t")
    for attributes in (CHAT, TOOL):
        with tracer.start_as_current_span(
            "call", attributes={**attributes, "error.type": "shop.errors.NotFound"}
        ) as span:
            span.set_status(Status(StatusCode.ERROR, "gone"))
    exporter = SftraceExporter()
    exporter.export(memory.get_finished_spans())
    exporter.shutdown()
    assert [(error["error_type"], error["message"]) for error in bundles.events("error")] == [("NotFound", "gone")] * 2
    [result] = bundles.events("tool_result")
    assert result["status"] == "error"


# --- after shutdown ---------------------------------------------------------------------------------------------------


def test_after_shutdown_it_refuses_quietly_and_the_bundle_stays(
    bundles: Bundles, make_provider: Provider, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    exporter = SftraceExporter()
    exporter.export(spans_of(make_provider))
    exporter.shutdown()
    exporter.shutdown()
    before = digest(bundles.folder)
    assert exporter.export(spans_of(make_provider)) is SpanExportResult.FAILURE
    assert exporter.force_flush() is True
    assert exporter.refused == 3
    assert digest(bundles.folder) == before
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_two_exporters_with_one_destination_share_its_recorder(bundles: Bundles, make_provider: Provider) -> None:
    spans = spans_of(make_provider)
    first, second = SftraceExporter(), SftraceExporter()
    first.export(spans)
    second.export(spans)
    first.shutdown()
    assert not bundles.paths()
    second.shutdown()
    assert len(bundles.paths()) == 1
    assert len(bundles.events("llm_request")) == 1


def test_two_destinations_are_two_recordings(tmp_path: Path, make_provider: Provider) -> None:
    spans = spans_of(make_provider)
    exporters = [SftraceExporter(tmp_path / name) for name in ("a", "b")]
    for exporter in exporters:
        exporter.export(spans)
        exporter.shutdown()
    assert [len(Bundles(tmp_path / name).events("llm_request")) for name in ("a", "b")] == [1, 1]


# --- settings ---------------------------------------------------------------------------------------------------------


def test_yaml_friendly_keywords(tmp_path: Path, make_provider: Provider) -> None:
    exporter = SftraceExporter(dir=str(tmp_path), agent="shop", formats=["sftrace"], quiet=True, max_payload_bytes=1000)
    exporter.export(spans_of(make_provider))
    exporter.shutdown()
    assert Bundles(tmp_path).one().name.startswith("shop-")


@pytest.mark.parametrize("keywords", [{"colour": "red"}, {"capture": "some"}, {"max_payload_bytes": -1}])
def test_a_wrong_keyword_raises(keywords: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(keywords))):
        SftraceExporter(**keywords)


def test_a_wrong_variable_is_one_line_and_nothing_is_recorded(
    bundles: Bundles, make_provider: Provider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_SCOPE", "everything-of-today")
    exporters = [SftraceExporter(), SftraceExporter()]
    assert [exporter.export(spans_of(make_provider)) for exporter in exporters] == [SpanExportResult.SUCCESS] * 2
    [line] = caplog.messages
    assert "OTEL_SFTRACE_SCOPE" in line
    assert active() is None
    assert not bundles.folder.exists()


@pytest.mark.parametrize(("name", "value"), [("OTEL_SFTRACE_CAPTURE", "off"), ("OTEL_SDK_DISABLED", "true")])
def test_off_is_off(
    bundles: Bundles, make_provider: Provider, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    spans = spans_of(make_provider)
    monkeypatch.setenv(name, value)
    exporter = SftraceExporter()
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    exporter.shutdown()
    assert active() is None
    assert not bundles.folder.exists()


def test_metadata_keeps_no_content(bundles: Bundles, make_provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_CAPTURE", "metadata")
    memory = InMemorySpanExporter()
    tracer = make_provider(SimpleSpanProcessor(memory)).get_tracer("t")
    with tracer.start_as_current_span("agent", attributes={"prompt": "private words", "n": 3}) as span:
        span.add_event("said", {"what": "private words"})
        span.set_status(Status(StatusCode.ERROR, "private words"))
        with tracer.start_as_current_span("chat", attributes={**CHAT, "gen_ai.output.messages": '["private words"]'}):
            pass
    exporter = SftraceExporter()
    exporter.export(memory.get_finished_spans())
    exporter.shutdown()
    everything = b"".join(path.read_bytes() for path in bundles.one().iterdir())
    assert b"private words" not in everything
    assert bundles.lines("spans.jsonl")[0]["attributes"] == {"n": 3}


def test_under_the_default_folder_a_run_without_a_call_leaves_nothing(
    make_provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exporter = SftraceExporter()
    exporter.export(spans_of(make_provider)[2:])
    exporter.shutdown()
    assert list(tmp_path.iterdir()) == []
    named = SftraceExporter("here")
    named.export(spans_of(make_provider)[2:])
    named.shutdown()
    assert Bundles(tmp_path / "here").spans() == ["agent"]


# --- odd values -------------------------------------------------------------------------------------------------------


def test_everything_that_the_sdk_lets_through_is_recorded(tmp_path: Path, make_provider: Provider) -> None:
    memory = InMemorySpanExporter()
    tracer = make_provider(SimpleSpanProcessor(memory)).get_tracer("t")
    odd = {"b": b"\xff\x00", "mixed": ("a", None, "b"), "n": float("nan"), "big": 2**63 - 1, "huge": 2**70,
           "seq": (1.0, 2.5), "deep": {"a": [{"b": None}]}, "half": "x\udcff"}  # fmt: skip
    for name in ("odd \ud83e", "fine \U0001f9ea"):
        with tracer.start_as_current_span(name, attributes=odd) as span:
            span.add_event("e\udcff", odd)
            span.set_status(Status(StatusCode.ERROR, "half \udcff"))
        with tracer.start_as_current_span("execute_tool x", attributes={**TOOL, **odd, "gen_ai.tool.name": "x\udcff"}):
            pass
    exporter = SftraceExporter(tmp_path)
    assert exporter.export(memory.get_finished_spans()) is SpanExportResult.SUCCESS
    exporter.shutdown()
    assert len(Bundles(tmp_path).spans()) == 2
    assert "fine \U0001f9ea" in Bundles(tmp_path).spans()
    assert len(Bundles(tmp_path).events("tool_result")) == 2


def test_content_cut_by_a_length_limit_is_kept_as_text_and_marked(bundles: Bundles) -> None:
    from opentelemetry.sdk.trace import SpanLimits

    provider = TracerProvider(span_limits=SpanLimits(max_attribute_length=40), shutdown_on_exit=False)
    exporter = SftraceExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    logging.getLogger("opentelemetry.attributes").setLevel(logging.ERROR)
    with provider.get_tracer("t").start_as_current_span("chat", attributes=CHAT):
        pass
    provider.shutdown()
    [request] = bundles.events("llm_request")
    assert request["input"]["request"]["messages"][0]["content"] == CHAT["gen_ai.input.messages"][:40]
    assert bundles.run()["verdict"]["offline"] is False


def test_evicted_attributes_are_counted(bundles: Bundles, make_provider: Provider) -> None:
    memory = InMemorySpanExporter()
    tracer = make_provider(SimpleSpanProcessor(memory)).get_tracer("t")
    with tracer.start_as_current_span("chat") as span:
        for n in range(140):
            span.set_attribute(f"noise.{n}", n)
        for key, value in CHAT.items():
            span.set_attribute(key, value)
    exporter = SftraceExporter()
    exporter.export(memory.get_finished_spans())
    exporter.shutdown()
    assert bundles.run()["losses"]["span attributes dropped by a limit"] == 17


def test_resources_are_written_once(tmp_path: Path, make_provider: Provider) -> None:
    exporter = SftraceExporter(tmp_path)
    tracer = make_provider(SimpleSpanProcessor(exporter)).get_tracer("t")
    for name in ("a", "b"):
        with tracer.start_as_current_span(name):
            pass
    exporter.shutdown()
    first, second = (row["resource"] for row in Bundles(tmp_path).lines("spans.jsonl"))
    assert first["attributes"]["telemetry.sdk.language"] == "python"
    assert second == {"id": 0}


# --- what fails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [ValueError, asyncio.CancelledError, KeyboardInterrupt, SystemExit, RecursionError])
def test_no_failure_of_ours_reaches_the_program(
    bundles: Bundles, make_provider: Provider, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fail(*args: object, **kwargs: object) -> None:
        raise fault("broken")

    exporter = SftraceExporter()
    recorder = active()
    assert recorder is not None
    monkeypatch.setattr(recorder, "span_reference", fail)
    tracer = make_provider(SimpleSpanProcessor(exporter)).get_tracer("t")
    for _ in range(3):
        with tracer.start_as_current_span("chat", attributes=CHAT):
            pass
    assert exporter.export(spans_of(make_provider)) is SpanExportResult.FAILURE
    assert [record.message for record in caplog.records if "broken" in record.message] == []
    assert len([record for record in caplog.records if fault.__name__ in record.message]) == 1


LOGGING_AGENT = """
import logging
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from sftrace_otel import SftraceExporter
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(SftraceExporter("/proc/nowhere/at/all")))
tracer = provider.get_tracer("t")
lines = []
class Sink(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
        with tracer.start_as_current_span("log", attributes={tool!r}):
            pass
logging.getLogger().addHandler(Sink())
for _ in range(3):
    with tracer.start_as_current_span("chat", attributes={chat!r}):
        pass
assert len(lines) <= 2, lines
"""


def test_a_log_handler_that_traces_neither_recurses_nor_hangs(child: Child) -> None:
    child.run(LOGGING_AGENT.format(tool=TOOL, chat=CHAT), timeout=20)


# --- the end of the process -------------------------------------------------------------------------------------------

AGENT = """
import os, signal, sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
{early}
provider = TracerProvider()
{late}
provider.add_span_processor(BatchSpanProcessor(SftraceExporter("sftraces")))
CHAT = {chat!r}
with provider.get_tracer("t").start_as_current_span("chat", attributes=CHAT):
    pass
{end}
"""
IMPORT = "from sftrace_otel import SftraceExporter"


@pytest.mark.parametrize("early", [True, False], ids=["imported before the provider", "after"])
@pytest.mark.parametrize(
    ("end", "code", "status"),
    [("", 0, "completed"), ("sys.exit(3)", 3, "completed"), ("raise KeyError('x')", 1, "failed")],
)
def test_batches_are_in_the_bundle_at_exit(child: Child, early: bool, end: str, code: int, status: str) -> None:
    program = AGENT.format(early=IMPORT if early else "", late="" if early else IMPORT, chat=CHAT, end=end)
    child.run(program, code=code)
    assert len(child.bundles.events("llm_request", "llm_response")) == 2
    assert child.bundles.events("run_end")[0]["run_status"] == status


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_writes_its_own_bundle(child: Child) -> None:
    program = AGENT.format(
        early=IMPORT,
        late="",
        chat=CHAT,
        end="""
provider.force_flush()
pid = os.fork()
with provider.get_tracer("t").start_as_current_span("execute_tool " + ("child" if pid == 0 else "parent")) as span:
    span.set_attribute("gen_ai.operation.name", "execute_tool")
if pid:
    assert os.waitpid(pid, 0)[1] == 0
sys.exit(0)
""",
    )
    child.run(program)
    assert len(child.bundles.paths()) == 2
    tools = {path: [e["name"] for e in Bundles(path.parent).events("tool_call")] for path in child.bundles.paths()}
    assert sorted(next(iter(tools.values()))) == ["child", "parent"]
    assert len(child.bundles.events("llm_request")) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_process_leaves_no_bundle_that_claims_to_be_whole(child: Child) -> None:
    program = AGENT.format(
        early=IMPORT, late="", chat=CHAT, end="provider.force_flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    child.run(program, code=-9)
    assert child.bundles.paths() == []
    assert [path.name for path in child.bundles.folder.iterdir() if path.name.endswith(".journal")]
