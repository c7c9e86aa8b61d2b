# SPDX-License-Identifier: Apache-2.0
"""`SftraceSpanProcessor`: every span once, in the program's own thread, whoever else listens."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context

from sftrace_otel import SftraceExporter, SftraceSpanProcessor, instrument, uninstrument
from sftrace_otel.otel.provider import attach
from sftrace_otel.recorder import active

from .conftest import CHAT, TOOL, Bundles

Provider = Callable[..., TracerProvider]


def attributes_of(span: trace.Span) -> dict[str, Any]:
    assert isinstance(span, ReadableSpan)
    return dict(span.attributes or {})


# --- the matrix of the issue ------------------------------------------------------------------------------------------

PROCESSORS: dict[str, Callable[[], SpanProcessor]] = {
    "ours": SftraceSpanProcessor,
    "simple": lambda: SimpleSpanProcessor(SftraceExporter()),
    "batch": lambda: BatchSpanProcessor(SftraceExporter()),
    "batch with a queue of 1": lambda: BatchSpanProcessor(
        SftraceExporter(), max_queue_size=1, max_export_batch_size=1, schedule_delay_millis=60_000
    ),
}
SAMPLERS = {"sampled": ALWAYS_ON, "10 %": TraceIdRatioBased(0.1), "not sampled": ALWAYS_OFF}


@pytest.mark.parametrize("instrumented", [False, True], ids=["", "instrument()"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_what_arrives(
    bundles: Bundles, make_provider: Provider, openai_server: Any, processor: str, sampler: str, instrumented: bool
) -> None:
    """A call of a boundary is recorded whatever happens to its span; a foreign span if the SDK hands it over."""
    import httpx2

    provider = make_provider(PROCESSORS[processor](), sampler=SAMPLERS[sampler])
    if instrumented:
        instrument()
    try:
        tracer = provider.get_tracer("foreign")
        sampled = 0
        for _ in range(8):
            with tracer.start_as_current_span("chat", attributes=CHAT) as span:
                sampled += span.get_span_context().trace_flags.sampled
            httpx2.get(f"{openai_server.url}/weather?city=Oslo")
        provider.shutdown()
    finally:
        uninstrument()
    llm, http = len(bundles.events("llm_request")), len(bundles.events("tool_call"))
    assert http == (8 if instrumented else 0)
    if processor == "batch with a queue of 1":
        assert llm <= sampled
        assert llm > 0 or not sampled
    else:
        assert llm == sampled
    assert len(bundles.events("llm_response")) == llm
    assert all(event["status"] == "ok" for event in bundles.events())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_attached_provider_hands_over_every_span_and_others_see_the_sampled(
    bundles: Bundles, make_provider: Provider, sampler: str
) -> None:
    theirs = InMemorySpanExporter()
    provider = make_provider(SimpleSpanProcessor(theirs), sampler=SAMPLERS[sampler])
    before = provider.get_tracer("made before")
    assert attach(provider)
    sampled = 0
    for tracer in (before, provider.get_tracer("made after")):
        for _ in range(20):
            with tracer.start_as_current_span("root") as root:
                with tracer.start_as_current_span("chat", attributes=CHAT):
                    pass
                sampled += root.get_span_context().trace_flags.sampled
    provider.shutdown()
    assert len(bundles.events("llm_request")) == 40
    assert len(theirs.get_finished_spans()) == 2 * sampled


def test_a_burst_of_20000_spans_loses_none(tmp_path: Any, make_provider: Provider) -> None:
    provider = make_provider(SftraceSpanProcessor(dir=str(tmp_path)))
    tracer = provider.get_tracer("burst")

    def burst(thread: int) -> None:
        for n in range(5_000):
            attributes = CHAT if n % 50 == 0 else {"n": n}
            with tracer.start_as_current_span(f"{thread}/{n}", attributes=attributes):
                pass

    threads = [threading.Thread(target=burst, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    provider.shutdown()
    bundles = Bundles(tmp_path)
    names = bundles.spans()
    assert len(names) + len(bundles.events("llm_request")) == 20_000
    assert len(set(names)) == len(names)
    assert len(bundles.events("llm_response")) == 400


# --- local roots ------------------------------------------------------------------------------------------------------


def test_local_roots_name_the_bundle(bundles: Bundles, make_provider: Provider) -> None:
    tracer = make_provider(SftraceSpanProcessor()).get_tracer("t")
    remote = SpanContext(7, 8, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    context = set_span_in_context(NonRecordingSpan(remote))
    handler = tracer.start_as_current_span("handler", context=context, kind=SpanKind.SERVER)
    with handler as root, tracer.start_as_current_span("chat", attributes=CHAT) as inner:
        pass
    assert attributes_of(root)["sftrace.bundle"] == bundles.one().name
    assert "sftrace.bundle" not in attributes_of(inner)
    assert f"-{7:032x}"[:9] in bundles.one().name


def test_each_request_is_a_run_and_the_rest_is_the_process(bundles: Bundles, make_provider: Provider) -> None:
    provider = make_provider(SftraceSpanProcessor())
    tracer = provider.get_tracer("t")
    for kind, name in ((SpanKind.SERVER, "GET /"), (SpanKind.CONSUMER, "take"), (SpanKind.INTERNAL, "invoke_agent a")):
        with tracer.start_as_current_span(name, kind=kind), tracer.start_as_current_span("chat", attributes=CHAT):
            pass
    assert len(bundles.paths()) == 3
    with tracer.start_as_current_span("chat", attributes=CHAT):
        pass
    assert len(bundles.paths()) == 3
    provider.shutdown()
    assert len(bundles.paths()) == 4


def test_a_failed_request_fails_its_run_with_a_redacted_message(bundles: Bundles, make_provider: Provider) -> None:
    tracer = make_provider(SftraceSpanProcessor()).get_tracer("t")
    secret = "sk-" + "proj-" + "a1B2c3D4" * 5
    with pytest.raises(ValueError), tracer.start_as_current_span("GET /", kind=SpanKind.SERVER):
        with tracer.start_as_current_span("chat", attributes=CHAT):
            pass
        raise ValueError(f"key {secret} was refused")
    assert json.loads((bundles.one() / "manifest.json").read_bytes())["failure"]["type"] == "ValueError"
    everything = b"".join(path.read_bytes() for path in bundles.one().iterdir())
    assert b"was refused" in everything
    assert secret.encode() not in everything


# --- each span once ---------------------------------------------------------------------------------------------------


def test_ours_and_a_batch_exporter_together_record_once(bundles: Bundles, make_provider: Provider) -> None:
    provider = make_provider(SftraceSpanProcessor(), BatchSpanProcessor(SftraceExporter()), SftraceSpanProcessor())
    tracer = provider.get_tracer("t")
    with tracer.start_as_current_span("agent"), tracer.start_as_current_span("chat", attributes=CHAT):
        pass
    provider.shutdown()
    assert len(bundles.events("llm_request")) == 1
    assert bundles.spans() == ["agent"]
    assert "losses" in bundles.run()


def test_a_copy_of_a_span_is_recognised(bundles: Bundles, make_provider: Provider) -> None:
    """Some set-ups hand a copy of each span to further processors."""
    memory = InMemorySpanExporter()
    provider = make_provider(SftraceSpanProcessor(), SimpleSpanProcessor(memory))
    with provider.get_tracer("t").start_as_current_span("chat", attributes=CHAT):
        pass
    [span] = memory.get_finished_spans()
    copy = ReadableSpan(name="chat", context=span.get_span_context(), attributes=dict(span.attributes or {}),
                        start_time=span.start_time, end_time=span.end_time)  # fmt: skip
    exporter = SftraceExporter()
    exporter.export([copy])
    exporter.shutdown()
    provider.shutdown()
    assert len(bundles.events("llm_request")) == 1


def test_a_processor_shares_the_destination_of_its_exporter(tmp_path: Any, make_provider: Provider) -> None:
    exporter = SftraceExporter(str(tmp_path))
    provider = make_provider(SftraceSpanProcessor(exporter), BatchSpanProcessor(exporter))
    with provider.get_tracer("t").start_as_current_span("chat", attributes=CHAT):
        pass
    provider.shutdown()
    assert len(Bundles(tmp_path).events("llm_request")) == 1
    with pytest.raises(TypeError, match="InMemorySpanExporter"):
        SftraceSpanProcessor(InMemorySpanExporter())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="settings"):
        SftraceSpanProcessor(exporter, agent="x")


# --- several layers ---------------------------------------------------------------------------------------------------


def test_a_framework_span_around_an_sdk_span_is_one_call(bundles: Bundles, make_provider: Provider) -> None:
    provider = make_provider(SftraceSpanProcessor())
    tracer = provider.get_tracer("t")
    bare = {key: value for key, value in CHAT.items() if not key.endswith("messages")}
    post = {"http.method": "POST", "http.url": "https://api.test/v1", "http.status_code": 200}
    with (
        tracer.start_as_current_span("agent"),
        tracer.start_as_current_span("framework", attributes=CHAT),
        tracer.start_as_current_span("step"),
        tracer.start_as_current_span("sdk", attributes=bare),
        tracer.start_as_current_span("POST", kind=SpanKind.CLIENT, attributes=post),
    ):
        pass
    provider.shutdown()
    [request] = bundles.events("llm_request")
    assert request["input"]["request"]["messages"] == [{"role": "user", "content": "hi"}]
    assert bundles.events("tool_call") == []
    rows = {row["name"]: row for row in bundles.lines("spans.jsonl")}
    assert rows["sdk"]["same_as"] == rows["POST"]["same_as"] == request["id"]
    assert "same_as" not in rows["step"]


@pytest.mark.parametrize("inner_attributes", [CHAT, {**CHAT, "sftrace.event.id": "evt_1"}])
def test_a_span_that_says_only_at_its_end_what_it_is(
    bundles: Bundles, make_provider: Provider, inner_attributes: dict[str, Any]
) -> None:
    provider = make_provider(SftraceSpanProcessor())
    tracer = provider.get_tracer("t")
    with tracer.start_as_current_span("framework") as span, tracer.start_as_current_span("step"):
        with tracer.start_as_current_span("sdk", attributes=inner_attributes):
            pass
        for key, value in CHAT.items():
            span.set_attribute(key, value)
    with tracer.start_as_current_span("other", attributes=TOOL):
        pass
    provider.shutdown()
    assert len(bundles.events("llm_request")) == (0 if "sftrace.event.id" in inner_attributes else 1)


def test_a_span_that_outlives_the_spans_around_it_is_still_the_same_call(
    bundles: Bundles, make_provider: Provider
) -> None:
    """The inner span of a stream ends when the stream is read, the outer one perhaps before."""
    provider = make_provider(SftraceSpanProcessor())
    tracer = provider.get_tracer("t")
    for framework_ends_first in (False, True):
        with tracer.start_as_current_span("framework", attributes=CHAT) as framework:
            with tracer.start_as_current_span("sdk", attributes=CHAT):
                late = tracer.start_span("late", attributes=CHAT)
            if framework_ends_first:
                framework.end()
            late.end()
    provider.shutdown()
    assert len(bundles.events("llm_request")) == 2


def test_calls_inside_a_tool_hang_on_it(bundles: Bundles, make_provider: Provider) -> None:
    provider = make_provider(SftraceSpanProcessor())
    tracer = provider.get_tracer("t")
    with (
        tracer.start_as_current_span("execute_tool weather", attributes=TOOL),
        tracer.start_as_current_span("inside"),
        tracer.start_as_current_span("chat", attributes=CHAT),
    ):
        pass
    provider.shutdown()
    [tool], [llm] = bundles.events("tool_call"), bundles.events("llm_request")
    assert llm["parent_id"] == tool["id"]
    assert tool["parent_id"] == bundles.events("run_start")[0]["id"]
    assert [event["type"] for event in bundles.events()][1:5] == [
        "tool_call", "llm_request", "llm_response", "tool_result",
    ]  # fmt: skip


def test_spans_are_written_as_they_end(tmp_path: Any, make_provider: Provider) -> None:
    """So that they survive the death of the process, also below an agent's span that is still open."""
    provider = make_provider(SftraceSpanProcessor(dir=str(tmp_path)))
    tracer = provider.get_tracer("t")
    with tracer.start_as_current_span("agent"):
        with tracer.start_as_current_span("chat", attributes=CHAT):
            pass
        with tracer.start_as_current_span("step"):
            pass
        [journal] = [path for path in tmp_path.iterdir() if path.name.endswith(".journal")]
        assert b"chat.completions.create" in (journal / "journal.jsonl").read_bytes()
        assert b'"step"' in (journal / "spans.jsonl").read_bytes()


def test_rows_before_the_first_call_are_kept_for_it(bundles: Bundles, make_provider: Provider) -> None:
    provider = make_provider(SftraceSpanProcessor())
    tracer = provider.get_tracer("t")
    for name in ("early", "chat", "late"):
        with tracer.start_as_current_span(name, attributes=CHAT if name == "chat" else {}):
            pass
    provider.shutdown()
    assert bundles.spans() == ["early", "late"]


@pytest.mark.parametrize("recorded", [True, False])
def test_the_log_at_the_end_of_a_logfire_stream_is_no_second_call(
    bundles: Bundles, make_provider: Provider, recorded: bool
) -> None:
    provider = make_provider(SftraceSpanProcessor())
    tracer = provider.get_tracer("t")
    request = {"request_data": '{"model": "gpt-5"}', "gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-5"}
    reference = {**request, "sftrace.event.id": "evt_1"} if recorded else {"a": 1}
    for reference_ends_first in (True, False):
        with tracer.start_as_current_span("agent"):
            with tracer.start_as_current_span("not streamed", attributes=reference if recorded else CHAT):
                pass
            with tracer.start_as_current_span("begun", attributes={**request, "logfire.span_type": "span"}):
                ours = tracer.start_span("chat", attributes=reference)
            if reference_ends_first:
                ours.end()
            with tracer.start_as_current_span("streamed", attributes={**CHAT, **request, "logfire.span_type": "log"}):
                pass
            if not reference_ends_first:
                ours.end()
    provider.shutdown()
    assert len(bundles.events("llm_request")) == (0 if recorded else 4)


def test_announcements_of_logfire_are_ignored(tmp_path: Any, make_provider: Provider) -> None:
    provider = make_provider(SftraceSpanProcessor(dir=str(tmp_path)))
    attributes = {**CHAT, "logfire.span_type": "pending_span"}
    with provider.get_tracer("t").start_as_current_span("chat (pending)", attributes=attributes):
        pass
    provider.shutdown()
    assert Bundles(tmp_path).paths() == []


# --- never in the way -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("where", ["span_started", "span_reference", "span_closed", "span_call", "span_row"])
def test_a_failure_inside_changes_nothing_for_the_program(
    tmp_path: Any, make_provider: Provider, monkeypatch: pytest.MonkeyPatch, where: str, fault: type[BaseException]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise fault("broken")

    theirs = InMemorySpanExporter()
    provider = make_provider(SftraceSpanProcessor(dir=str(tmp_path)), SimpleSpanProcessor(theirs))
    recorder = active()
    assert recorder is not None
    monkeypatch.setattr(recorder, where, fail)
    tracer = provider.get_tracer("t")
    with pytest.raises(LookupError, match="the program's own"), tracer.start_as_current_span("agent"):
        with tracer.start_as_current_span("chat", attributes=CHAT):
            pass
        raise LookupError("the program's own")
    assert len(theirs.get_finished_spans()) == 2
    provider.shutdown()


def test_after_shutdown_spans_pass_by(bundles: Bundles, make_provider: Provider) -> None:
    processor = SftraceSpanProcessor()
    tracer = make_provider(processor).get_tracer("t")
    processor.shutdown()
    processor.shutdown()
    with tracer.start_as_current_span("chat", attributes=CHAT) as span:
        pass
    assert "sftrace.bundle" not in attributes_of(span)
    assert processor.force_flush() is True
    assert not bundles.folder.exists()


def test_spans_that_never_end_do_not_fill_the_memory(
    bundles: Bundles, make_provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sftrace_otel.otel.intake._UNENDED", 10)
    processor = SftraceSpanProcessor()
    tracer = make_provider(processor).get_tracer("t")
    spans = [tracer.start_span("never ended") for _ in range(50)]
    assert processor.holder.intake is not None
    assert len(processor.holder.intake._open) == 10
    assert len(spans) == 50
