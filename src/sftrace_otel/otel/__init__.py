# SPDX-License-Identifier: Apache-2.0
"""The OpenTelemetry side: exporter, processor, distro, sampler, id generator. The only room that imports the SDK.

`instrument()` is what a program calls that is not started by `opentelemetry-instrument`. Nothing here is imported
before it is used, so that reading bundles needs no SDK.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["instrument", "uninstrument"]


def instrument(tools: str | Sequence[str] | None = None) -> None:
    """Record this process: boundaries on, our processor on its tracer provider, now or when the program sets one.

    `tools`: functions to record as tools, `module:callable` patterns; by default those of `OTEL_SFTRACE_TOOLS`.
    Settings come from the environment; with `OTEL_SFTRACE_CAPTURE=off` nothing is recorded. Twice is once.
    Raises SettingsError where `tools` is not a list of patterns.
    """
    from sftrace_otel.otel.instrumentors import (
        AnthropicInstrumentor,
        HttpInstrumentor,
        OpenAIInstrumentor,
        ToolsInstrumentor,
    )
    from sftrace_otel.otel.provider import attach, watch

    HttpInstrumentor().instrument()
    OpenAIInstrumentor().instrument()
    AnthropicInstrumentor().instrument()
    ToolsInstrumentor().instrument(tools=tools)
    watch()
    attach()


def uninstrument() -> None:
    """Take the boundaries off and let our processors rest; the SDK keeps them, so they pass everything by."""
    from sftrace_otel.otel.instrumentors import (
        AnthropicInstrumentor,
        HttpInstrumentor,
        OpenAIInstrumentor,
        ToolsInstrumentor,
    )
    from sftrace_otel.otel.provider import detach

    for boundary in (ToolsInstrumentor, AnthropicInstrumentor, OpenAIInstrumentor, HttpInstrumentor):
        boundary().uninstrument()
    detach()
