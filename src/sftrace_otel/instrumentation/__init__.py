# SPDX-License-Identifier: Apache-2.0
"""The boundaries: the only room that patches.

Each boundary is a file: what it wraps, and two thin drivers (sync, async) over one flow. All of them ask the same two
questions first: is a replay active (`replaying`), is a recorder (`recorder.active`)? With neither they pass through.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["install", "uninstall"]


def install(tools: Sequence[str] = ()) -> None:
    """Put every boundary on; libraries not imported yet are patched when they are. Twice is once."""
    from sftrace_otel.instrumentation import aiohttp, anthropic, httpx, openai, spawns, urllib3, websockets
    from sftrace_otel.instrumentation import tools as tool_boundary

    httpx.install()
    aiohttp.install()
    urllib3.install()
    websockets.install()
    openai.install()
    anthropic.install()
    spawns.install()
    tool_boundary.install(tools)


def uninstall() -> None:
    """Take every boundary off again."""
    from sftrace_otel.instrumentation import aiohttp, anthropic, httpx, openai, spawns, urllib3, websockets
    from sftrace_otel.instrumentation import tools as tool_boundary

    for boundary in (tool_boundary, spawns, anthropic, openai, websockets, urllib3, aiohttp, httpx):
        boundary.uninstall()
