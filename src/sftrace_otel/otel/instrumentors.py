# SPDX-License-Identifier: Apache-2.0
"""Our boundaries as OpenTelemetry instrumentors, so that `opentelemetry-instrument` finds them.

Decision: entry points with names of our own (entry-point names are not namespaced, and four packages register
`openai`), each of which turns a boundary on or off. None depends on the library that it instruments: the boundaries
patch on import, so nothing is imported that the program does not import, and a dependency check would switch off all
of them when one library is absent.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]

from sftrace_otel.instrumentation import (
    HTTP,
    anthropic,
    boundaries,
    langchain,
    mcp,
    openai,
    openai_agents,
    pydantic_ai,
    servers,
    tool_runners,
    tools,
)
from sftrace_otel.otel.opening import read_settings

__all__ = [
    "AnthropicInstrumentor", "HttpInstrumentor", "LangchainInstrumentor", "McpInstrumentor",
    "OpenAIAgentsInstrumentor", "OpenAIInstrumentor", "PydanticAIInstrumentor", "ServersInstrumentor",
    "ToolRunnersInstrumentor", "ToolsInstrumentor",
]  # fmt: skip


class _Boundary(BaseInstrumentor):  # type: ignore[misc]
    """Instrumenting twice is once, and quiet: the distro puts HTTP first, whatever order entry points have."""

    def instrument(self, **kwargs: Any) -> Any:
        """Turn the boundary on. The spans go to the global tracer provider; `tracer_provider` is not used."""
        return None if self.is_instrumented_by_opentelemetry else super().instrument(**kwargs)

    def uninstrument(self, **kwargs: Any) -> Any:
        """Turn the boundary off."""
        return super().uninstrument(**kwargs) if self.is_instrumented_by_opentelemetry else None

    def instrumentation_dependencies(self) -> Collection[str]:
        """None: the boundary waits for the import."""
        return ()


class HttpInstrumentor(_Boundary):
    """httpx, httpx2, aiohttp and urllib3 (requests), and the tasks they are called from; websockets are noted."""

    def _instrument(self, **kwargs: Any) -> None:
        for boundary in boundaries(HTTP):
            boundary.install()

    def _uninstrument(self, **kwargs: Any) -> None:
        for boundary in reversed(boundaries(HTTP)):
            boundary.uninstall()


class OpenAIInstrumentor(_Boundary):
    """The openai SDK."""

    def _instrument(self, **kwargs: Any) -> None:
        openai.install()

    def _uninstrument(self, **kwargs: Any) -> None:
        openai.uninstall()


class AnthropicInstrumentor(_Boundary):
    """The anthropic SDK."""

    def _instrument(self, **kwargs: Any) -> None:
        anthropic.install()

    def _uninstrument(self, **kwargs: Any) -> None:
        anthropic.uninstall()


class McpInstrumentor(_Boundary):
    """Client sessions of the mcp SDK, and the transports below them."""

    def _instrument(self, **kwargs: Any) -> None:
        mcp.install()

    def _uninstrument(self, **kwargs: Any) -> None:
        mcp.uninstall()


class ServersInstrumentor(_Boundary):
    """Requests of uvicorn and gunicorn, and celery's tasks, as runs."""

    def _instrument(self, **kwargs: Any) -> None:
        servers.install()

    def _uninstrument(self, **kwargs: Any) -> None:
        servers.uninstall()


class ToolRunnersInstrumentor(_Boundary):
    """The tools that the tool runners of the anthropic and openai SDKs call."""

    def _instrument(self, **kwargs: Any) -> None:
        tool_runners.install()

    def _uninstrument(self, **kwargs: Any) -> None:
        tool_runners.uninstall()


class OpenAIAgentsInstrumentor(_Boundary):
    """Tools and handoffs of openai-agents."""

    def _instrument(self, **kwargs: Any) -> None:
        openai_agents.install()

    def _uninstrument(self, **kwargs: Any) -> None:
        openai_agents.uninstall()


class LangchainInstrumentor(_Boundary):
    """The tools of langchain-core, which langgraph calls too."""

    def _instrument(self, **kwargs: Any) -> None:
        langchain.install()

    def _uninstrument(self, **kwargs: Any) -> None:
        langchain.uninstall()


class PydanticAIInstrumentor(_Boundary):
    """The toolsets of pydantic-ai."""

    def _instrument(self, **kwargs: Any) -> None:
        pydantic_ai.install()

    def _uninstrument(self, **kwargs: Any) -> None:
        pydantic_ai.uninstall()


class ToolsInstrumentor(_Boundary):
    """Functions named by `OTEL_SFTRACE_TOOLS`, or by `tools` (`module:callable` patterns) given here."""

    def instrument(self, **kwargs: Any) -> Any:
        """Turn the boundary on; later calls add their `tools`. Raises SettingsError where those are no patterns."""
        if kwargs.get("tools") and self.is_instrumented_by_opentelemetry:
            self._instrument(**kwargs)
        return super().instrument(**kwargs)

    def _instrument(self, **kwargs: Any) -> None:
        settings = read_settings({"tools": kwargs.get("tools")})
        tools.install(() if settings is None else settings.tools)

    def _uninstrument(self, **kwargs: Any) -> None:
        tools.uninstall()
