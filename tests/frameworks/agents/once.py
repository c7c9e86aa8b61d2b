# SPDX-License-Identifier: Apache-2.0
"""Tools that are decorated with `@trace_tool` and given to a framework, and boundaries put on twice and taken off."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from langchain_core.tools import BaseTool, tool
from pydantic_ai import RunContext
from pydantic_ai.models.test import TestModel
from pydantic_ai.tool_manager import ToolManager
from pydantic_ai.toolsets import FunctionToolset
from pydantic_ai.usage import RunUsage

from sftrace_otel import instrument, record, trace_tool, uninstrument


@tool
@trace_tool
def one(n: int) -> int:
    """A tool of langchain."""
    return n + 1


@tool
def two(n: int) -> int:
    """A tool of langchain."""
    return n + 2


class Three(BaseTool):
    name: str = "three"
    description: str = "A class of the program's own."

    def _run(self, n: int) -> int:
        return n + 3


@trace_tool
def four(n: int) -> int:
    """A tool of pydantic-ai."""
    return n + 4


methods = [
    (BaseTool, "run"), (BaseTool, "arun"), (BaseTool, "_parse_input"), (BaseTool, "_arun"), (type(two), "_run"),
    (type(two), "_arun"), (Three, "_run"), (FunctionToolset, "call_tool"), (ToolManager, "for_run_step"),
    (ToolManager, "validate_tool_call"),
]  # fmt: skip
before = [vars(kind)[name] for kind, name in methods]
toolset: FunctionToolset[Any] = FunctionToolset([four])


async def call() -> Any:
    ctx: RunContext[Any] = RunContext(deps=None, model=TestModel(), usage=RunUsage(), run_id="r", tool_call_id="c")
    tools = await toolset.get_tools(ctx)
    return await toolset.call_tool("four", {"n": 1}, ctx, tools["four"])


def use() -> list[Any]:
    return [one.invoke({"n": 1}), two.invoke({"n": 1}), Three().invoke({"n": 1}), asyncio.run(call())]


instrument()
instrument()
with record("agent", output=sys.argv[1]):
    recorded = use()
uninstrument()
after = [vars(kind)[name] for kind, name in methods]
left = [name for (_, name), old, new in zip(methods, before, after, strict=True) if old is not new]
print(json.dumps({"recorded": recorded, "again": use(), "left": left}))
