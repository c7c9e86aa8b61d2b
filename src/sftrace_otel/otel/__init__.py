# SPDX-License-Identifier: Apache-2.0
"""The OpenTelemetry side: exporter, processor, distro, sampler, id generator. The only room that imports the SDK.

`instrument()` is what a program calls that is not started by `opentelemetry-instrument`. Nothing here is imported
before it is used, so that reading bundles needs no SDK.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        LangchainInstrumentor,
        McpInstrumentor,
        OpenAIAgentsInstrumentor,
        OpenAIInstrumentor,
        PydanticAIInstrumentor,
        ServersInstrumentor,
        ToolRunnersInstrumentor,
        ToolsInstrumentor,
    )
    from sftrace_otel.otel.provider import attach, watch

    _each(
        lambda: HttpInstrumentor().instrument(),
        lambda: OpenAIInstrumentor().instrument(),
        lambda: AnthropicInstrumentor().instrument(),
        lambda: McpInstrumentor().instrument(),
        lambda: ServersInstrumentor().instrument(),
        lambda: ToolRunnersInstrumentor().instrument(),
        lambda: OpenAIAgentsInstrumentor().instrument(),
        lambda: LangchainInstrumentor().instrument(),
        lambda: PydanticAIInstrumentor().instrument(),
        lambda: ToolsInstrumentor().instrument(tools=tools),
        watch,
        attach,
    )


def uninstrument() -> None:
    """Take the boundaries off and let our processors rest; the SDK keeps them, so they pass everything by."""
    from sftrace_otel.otel.instrumentors import (
        AnthropicInstrumentor,
        HttpInstrumentor,
        LangchainInstrumentor,
        McpInstrumentor,
        OpenAIAgentsInstrumentor,
        OpenAIInstrumentor,
        PydanticAIInstrumentor,
        ServersInstrumentor,
        ToolRunnersInstrumentor,
        ToolsInstrumentor,
    )
    from sftrace_otel.otel.provider import detach

    _each(
        lambda: ToolsInstrumentor().uninstrument(),
        lambda: PydanticAIInstrumentor().uninstrument(),
        lambda: LangchainInstrumentor().uninstrument(),
        lambda: ServersInstrumentor().uninstrument(),
        lambda: OpenAIAgentsInstrumentor().uninstrument(),
        lambda: ToolRunnersInstrumentor().uninstrument(),
        lambda: McpInstrumentor().uninstrument(),
        lambda: AnthropicInstrumentor().uninstrument(),
        lambda: OpenAIInstrumentor().uninstrument(),
        lambda: HttpInstrumentor().uninstrument(),
        detach,
    )


def _each(*steps: Callable[[], object]) -> None:
    """One that fails is logged and leaves the others to their work; wrong arguments are the program's to see."""
    from sftrace_otel import recorder
    from sftrace_otel.errors import SettingsError

    for step in steps:
        try:
            step()
        except SettingsError:
            raise
        except Exception as error:
            recorder.fault("instrumenting", error)
