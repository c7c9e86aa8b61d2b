# SPDX-License-Identifier: Apache-2.0
"""Our boundaries as OpenTelemetry instrumentors, so that `opentelemetry-instrument` finds them.

Decision: three entry points with names of our own (entry-point names are not namespaced, and four packages register
`openai`), each of which turns a boundary on or off. None depends on the library that it instruments: the boundaries
patch on import, so nothing is imported that the program does not import, and a dependency check would switch off all
three when one library is absent.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]

from sftrace_otel.instrumentation import aiohttp, httpx, openai, spawns, tools, websockets
from sftrace_otel.otel.opening import read_settings

__all__ = ["HttpInstrumentor", "OpenAIInstrumentor", "ToolsInstrumentor"]


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
    """httpx, httpx2 and aiohttp, and the tasks from which they are called; websockets are noted."""

    def _instrument(self, **kwargs: Any) -> None:
        spawns.install()
        httpx.install()
        aiohttp.install()
        websockets.install()

    def _uninstrument(self, **kwargs: Any) -> None:
        websockets.uninstall()
        aiohttp.uninstall()
        httpx.uninstall()
        spawns.uninstall()


class OpenAIInstrumentor(_Boundary):
    """The openai SDK."""

    def _instrument(self, **kwargs: Any) -> None:
        openai.install()

    def _uninstrument(self, **kwargs: Any) -> None:
        openai.uninstall()


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
