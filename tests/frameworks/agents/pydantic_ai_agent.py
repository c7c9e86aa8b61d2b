# SPDX-License-Identifier: Apache-2.0
"""A pydantic-ai agent without a line of ours: `python pydantic_ai_agent.py BASE_URL MODE WHAT`.

WHAT names the tools that the model asks for (the test's server goes by it); MODE is sync, async or stream.
Side effects of tools go to the file that `EFFECTS` names, so that a replay can be seen to have none.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, RunContext
from pydantic_ai.exceptions import CallDeferred, ToolFailed
from pydantic_ai.messages import ToolReturn
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import DeferredToolRequests, ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, FunctionToolset, ToolsetTool
from pydantic_ai.toolsets.external import TOOL_SCHEMA_VALIDATOR

url, mode, what = sys.argv[1:4]


def effect(line: str) -> None:
    with Path(os.environ["EFFECTS"]).open("a") as file:
        file.write(line + "\n")


class Report(BaseModel):
    city: str
    day: dt.date


class Own(AbstractToolset[Any]):
    """A toolset that calls its tools itself."""

    @property
    def id(self) -> str:
        return "own"

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        schema = {"type": "object", "properties": {"word": {"type": "string"}}}
        definition = ToolDefinition(name="shout", parameters_json_schema=schema)
        return {
            "shout": ToolsetTool(toolset=self, tool_def=definition, max_retries=1, args_validator=TOOL_SCHEMA_VALIDATOR)
        }

    async def call_tool(self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: Any) -> Any:
        effect(name)
        return tool_args["word"].upper()


more = FunctionToolset[Any]()


@more.tool
def get(ctx: RunContext[str], city: str = "Oslo", *, days: int = 1) -> str:
    """A tool with a context and defaults, behind a prefix."""
    effect("get")
    return f"{city} {days} for {ctx.deps}"


agent = Agent(
    OpenAIChatModel("m", provider=OpenAIProvider(base_url=url, api_key="k")),
    deps_type=str,
    toolsets=[more.prefixed("weather"), Own()],
    output_type=[str, DeferredToolRequests],
)


@agent.tool(retries=3)
async def lookup(ctx: RunContext[str], key: str, limit: int = 3) -> dict[str, Any]:
    """An async tool."""
    effect(f"lookup {key}")
    return {"key": key, "limit": limit, "who": ctx.deps, "when": dt.date(2026, 1, 2)}


@agent.tool_plain
def report(city: str) -> Report:
    """A sync tool that returns a model."""
    effect("report")
    return Report(city=city, day=dt.date(2026, 1, 2))


@agent.tool_plain
def returned(city: str) -> ToolReturn:
    """A tool that returns the framework's own object."""
    effect("returned")
    return ToolReturn(f"in {city}", content=["see also", city], metadata={"private": 1})


@agent.tool_plain(retries=2)
def again(n: int) -> int:
    """A tool that asks for another try."""
    effect(f"again {n}")
    if n < 2:
        raise ModelRetry(f"{n} is too small")
    return n


@agent.tool_plain
def failed(n: int) -> int:
    """A tool that failed for good."""
    effect("failed")
    raise ToolFailed("no such thing")


@agent.tool_plain
def broken(n: int) -> int:
    """A tool with a fault."""
    effect("broken")
    raise OSError(5, "disk on fire")


@agent.tool_plain
def later(n: int) -> int:
    """A tool whose result comes later."""
    effect("later")
    raise CallDeferred(metadata={"job": {"id": n}})


def shown(result: Any) -> str:
    if isinstance(result, DeferredToolRequests):
        return str([(call.tool_name, result.metadata) for call in result.calls])
    return str(result)


async def streamed() -> str:
    async with agent.run_stream(what, deps="me") as result:
        return "|".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)])


if os.environ.get("INSTRUMENT"):
    Agent.instrument_all()
try:
    if mode == "sync":
        print(shown(agent.run_sync(what, deps="me").output))
    elif mode == "async":
        print(shown(asyncio.run(agent.run(what, deps="me")).output))
    else:
        print(asyncio.run(streamed()))
except OSError as error:
    print(type(error).__name__, error.errno)
