# SPDX-License-Identifier: Apache-2.0
"""`attach`, `watch` and `instrument()`: a provider that the program sets before us, after us, or never."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once

from sftrace_otel import SftraceSpanProcessor, instrument, uninstrument
from sftrace_otel.errors import SettingsError
from sftrace_otel.otel.provider import attach, detach, watch
from sftrace_otel.recorder import active

from .conftest import CHAT, Bundles

Provider = Callable[..., TracerProvider]


@pytest.fixture(autouse=True)
def _no_global_provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts in a process where nobody has set a provider."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    setter = trace._set_tracer_provider
    yield
    uninstrument()
    assert trace._set_tracer_provider is setter


def ours(provider: TracerProvider) -> int:
    processors = provider._active_span_processor._span_processors
    return sum(isinstance(processor, SftraceSpanProcessor) for processor in processors)


def chat(tracer: trace.Tracer) -> None:
    with tracer.start_as_current_span("chat", attributes=CHAT):
        pass


def test_a_provider_set_before(bundles: Bundles, make_provider: Provider) -> None:
    provider = make_provider()
    trace.set_tracer_provider(provider)
    instrument()
    instrument()
    assert ours(provider) == 1
    chat(trace.get_tracer("t"))
    provider.shutdown()
    assert len(bundles.events("llm_request")) == 1


def test_a_provider_set_after(bundles: Bundles, make_provider: Provider) -> None:
    instrument()
    early = trace.get_tracer("made while there was none")
    chat(early)
    assert active() is None
    provider = make_provider()
    trace.set_tracer_provider(provider)
    assert ours(provider) == 1
    chat(early)
    provider.shutdown()
    assert len(bundles.events("llm_request")) == 1


def test_a_provider_that_the_api_refuses_is_attached_too(
    bundles: Bundles, make_provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make_provider(), make_provider()
    instrument()
    with caplog.at_level(logging.CRITICAL):
        trace.set_tracer_provider(first)
        trace.set_tracer_provider(second)
    chat(second.get_tracer("the program's own"))
    assert (ours(first), ours(second)) == (1, 1)
    first.shutdown()
    assert not bundles.paths()
    second.shutdown()
    assert len(bundles.events("llm_request")) == 1


def test_never_a_provider(bundles: Bundles) -> None:
    instrument()
    assert attach() is False
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    assert active() is None


def test_a_processor_of_the_program_is_enough(bundles: Bundles, make_provider: Provider) -> None:
    inner = SynchronousMultiSpanProcessor()
    inner.add_span_processor(SftraceSpanProcessor())
    provider = make_provider(inner)
    assert attach(provider) is True
    assert ours(provider) == 0


def test_a_provider_that_replaces_processors_keeps_its_own(bundles: Bundles) -> None:
    class Replacing(TracerProvider):
        def add_span_processor(self, span_processor: object, replace: bool = True) -> None:
            raise AssertionError("would take the other processors off")

    provider = Replacing(shutdown_on_exit=False)
    assert attach(provider) is True
    assert ours(provider) == 1
    provider.shutdown()


def test_nothing_is_attached_when_recording_is_off(
    bundles: Bundles, make_provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_CAPTURE", "off")
    provider = make_provider()
    sampler = provider.sampler
    assert attach(provider) is False
    assert ours(provider) == 0
    assert provider.sampler is sampler


def test_objects_that_are_no_provider_are_left_alone() -> None:
    assert attach(object()) is False
    assert attach(trace.NoOpTracerProvider()) is False


def test_a_provider_that_refuses_costs_one_line(caplog: pytest.LogCaptureFixture, bundles: Bundles) -> None:
    class Odd:
        def add_span_processor(self, processor: object) -> None:
            raise RuntimeError("secret detail")

    assert attach(Odd()) is False
    [line] = caplog.messages
    assert "RuntimeError" in line and "secret" not in line


def test_uninstrument_lets_everything_rest(bundles: Bundles, make_provider: Provider) -> None:
    setter = trace._set_tracer_provider
    theirs = InMemorySpanExporter()
    provider = make_provider(SimpleSpanProcessor(theirs))
    for _ in range(3):
        instrument()
        uninstrument()
    assert trace._set_tracer_provider is setter
    trace.set_tracer_provider(provider)
    instrument()
    chat(provider.get_tracer("t"))
    uninstrument()
    chat(provider.get_tracer("t"))
    assert len(bundles.events("llm_request")) == 1
    assert len(theirs.get_finished_spans()) == 2


def test_another_wrapper_around_the_setter_survives_ours(make_provider: Provider) -> None:
    import wrapt

    seen: list[object] = []

    def other(
        wrapped: Callable[..., None], instance: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        seen.append(args[0])
        wrapped(*args, **kwargs)

    watch()
    handle = wrapt.wrap_function_wrapper(trace, "_set_tracer_provider", other)
    detach()
    provider = make_provider()
    trace.set_tracer_provider(provider)
    wrapt.unwrap_object(trace, "_set_tracer_provider", handle)
    assert seen == [provider]
    assert ours(provider) == 0


def test_wrong_tools_raise_for_the_programmer() -> None:
    with pytest.raises(SettingsError, match="tools"):
        instrument(tools=7)  # type: ignore[arg-type]
