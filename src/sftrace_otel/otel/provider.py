# SPDX-License-Identifier: Apache-2.0
"""Putting our processor on the tracer provider of the program, whoever made it and whenever.

Decision: attach to what is there, once, and where nothing is there yet, when the program sets a provider. The API has
no event for that, so `opentelemetry.trace._set_tracer_provider`, through which every way of setting one goes, is
wrapped, only from `watch()` on and only if it exists; without it, the next `attach()` finds the provider. Rejected:
setting a provider of our own from `instrument()`, since the API lets a program set one only once, and its own would be
refused.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import wrapt
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from sftrace_otel.instrumentation import guard
from sftrace_otel.otel.processor import SftraceSpanProcessor
from sftrace_otel.otel.sampler import record_all

__all__ = ["attach", "detach", "watch"]

_log = logging.getLogger("sftrace_otel")
_SETTER = "_set_tracer_provider"

_lock = threading.RLock()
_attached: list[tuple[Any, SftraceSpanProcessor]] = []
"""Providers and the processors added to them; a list, since a provider need not be hashable (logfire's is not)."""
_handle: Any = None


def attach(provider: Any = None) -> bool:
    """Put a processor with the environment's settings on `provider`, by default on the program's, and see all spans.

    True if it is there afterwards; False if there is no SDK provider yet (`watch` waits for one) or nothing is to be
    recorded. Any number of calls has the effect of one. Never raises.
    """
    try:
        with _lock:
            return _attach(provider if provider is not None else trace.get_tracer_provider())
    except Exception as error:
        _log.error("sftrace: no processor could be added to the tracer provider (%s)", type(error).__name__)
        return False


def watch() -> None:
    """From now on attach to the provider that the program sets. Twice is once."""
    global _handle
    with _lock:
        if _handle is None and callable(getattr(trace, _SETTER, None)):
            _handle = wrapt.wrap_function_wrapper(trace, _SETTER, _provider_set)


def detach() -> None:
    """Stop watching, and let the processors that `attach` added rest: the SDK cannot take one off."""
    global _handle
    with _lock:
        if _handle is not None:
            wrapt.unwrap_object(trace, _SETTER, _handle, missing_ok=True)
            _handle = None
        for _, processor in _attached:
            processor.shutdown()
        _attached.clear()


def _provider_set(wrapped: Any, instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    attach()
    # One that the API refuses, since there is one already, may still be used by the program itself.
    refused = args[0] if args else kwargs.get("tracer_provider")
    if refused is not None:
        attach(refused)
    return result


def _attach(provider: Any) -> bool:
    if not hasattr(provider, "add_span_processor"):
        return False
    if not any(known is provider for known, _ in _attached) and not _has_processor(provider):
        processor = SftraceSpanProcessor()
        if not processor.holder.open or processor.holder.intake is None:
            return False
        _add(provider, processor)
        _attached.append((provider, processor))
        recorder = processor.holder.intake.recorder
        recorder.connections, recorder.commands = guard.connections, guard.commands
        guard.notice_connections()
    _see_all_spans(provider)
    return True


def _add(provider: Any, processor: SftraceSpanProcessor) -> None:
    """Subclasses may do more than add: Phoenix's takes its own exporter off when another processor comes."""
    if isinstance(provider, TracerProvider):
        TracerProvider.add_span_processor(provider, processor)
    else:
        provider.add_span_processor(processor)


def _has_processor(provider: Any) -> bool:
    """Whether the program put a processor of ours there itself."""
    waiting = [getattr(provider, "_active_span_processor", None)]
    while waiting:
        found = waiting.pop()
        if isinstance(found, SftraceSpanProcessor):
            return True
        waiting += getattr(found, "_span_processors", ())
    return False


def _see_all_spans(provider: Any) -> None:
    """Wrap the sampler of an SDK provider and of the tracers that it has handed out."""
    if not isinstance(provider, TracerProvider):
        provider = getattr(provider, "provider", None)  # logfire keeps the SDK's provider inside its own
    if not isinstance(provider, TracerProvider):
        return
    provider.sampler = record_all(provider.sampler)
    for tracer in list(getattr(provider, "_tracers", {}).values()):
        tracer.sampler = record_all(tracer.sampler)
