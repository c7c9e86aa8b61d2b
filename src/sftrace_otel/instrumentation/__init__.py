# SPDX-License-Identifier: Apache-2.0
"""The boundaries: the only room that patches.

Each boundary is a file: what it wraps, and two thin drivers (sync, async) over one flow. All of them ask the same two
questions first: is a replay active (`replaying`), is a recorder (`recorder.active`)? With neither they pass through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["CLIENTS", "HTTP", "boundaries", "install", "uninstall"]

HTTP = ("nondeterminism", "spawns", "httpx", "aiohttp", "urllib3", "websockets")
"""The boundaries of HTTP clients, in the order in which they are put on; of the tasks that they are called from;
and of the clock and chance that the program asks for meanwhile."""

CLIENTS = (*HTTP, "openai", "anthropic", "mcp", "tool_runners", "openai_agents", "langchain", "pydantic_ai")
"""All boundaries but that of tools, and of servers: what a program calls, which `record()` needs to be replayed."""


def boundaries(names: Iterable[str] = CLIENTS) -> list[Any]:
    """The modules of boundaries, each with `install`, `uninstall` and `patched`."""
    import importlib

    return [importlib.import_module(f"{__name__}.{name}") for name in names]


def install(tools: Sequence[str] = ()) -> None:
    """Put every boundary on; libraries not imported yet are patched when they are. Twice is once."""
    for boundary in boundaries():
        boundary.install()
    boundaries(["servers"])[0].install()
    boundaries(["tools"])[0].install(tools)


def uninstall() -> None:
    """Take every boundary off again."""
    for boundary in reversed(boundaries([*CLIENTS, "servers", "tools"])):
        boundary.uninstall()
