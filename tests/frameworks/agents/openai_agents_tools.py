# SPDX-License-Identifier: Apache-2.0
"""Smallest agents of openai-agents. Usage: openai_agents_tools.py HOW [TRACES]

HOW is `sync`, `async`, `stream`, or what else there is in `PROGRAMS`. TRACES: where the SDK's own traces are sent; none
without. What ran for real is written to `ran`; without a line of sftrace in it.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

from agents import (
    Agent,
    FunctionTool,
    RunContextWrapper,
    Runner,
    ToolGuardrailFunctionOutput,
    function_tool,
    handoff,
    set_default_openai_api,
    set_default_openai_client,
    set_trace_processors,
    set_tracing_disabled,
    tool_input_guardrail,
)
from agents.tracing.processors import BackendSpanExporter, BatchTraceProcessor
from openai import AsyncOpenAI
from pydantic import AfterValidator

MODEL = "gpt-5"
City = Annotated[str, AfterValidator(lambda city: city + os.environ.get("SUFFIX", ""))]
"""An argument that the program changes in a way that the tool's schema does not show."""


class OutOfRange(ValueError):
    """An error of the program's own."""


def ran(name: str) -> None:
    with Path("ran").open("a") as file:
        file.write(f"{name}\n")


@function_tool
def weather(context: RunContextWrapper[dict[str, int]], city: City, days: int = 2) -> str:
    """Weather of a city."""
    ran("weather")
    return f"{days} days of rain in {city} of {context.context['country']}"


@function_tool(name_override="measure_place")
async def measure(place: str) -> float:
    """Measure a place."""
    ran("measure")
    await asyncio.sleep(0)
    raise OutOfRange(f"{place} is out of range")


@function_tool(failure_error_function=None)
async def strict(place: str) -> str:
    """Measure a place, or end the run."""
    ran("strict")
    raise OutOfRange(f"{place} is out of range")


async def search(context: object, text: str) -> list[str]:
    ran("search")
    return [text, "found"]


by_hand = FunctionTool(
    name="search",
    description="Search.",
    params_json_schema={"type": "object", "properties": {"q": {"type": "string"}}, "additionalProperties": False},
    on_invoke_tool=search,
    strict_json_schema=False,
)


@tool_input_guardrail
def never(data: object) -> ToolGuardrailFunctionOutput:
    """Refuse every call."""
    return ToolGuardrailFunctionOutput.reject_content("not allowed here")


@function_tool(tool_input_guardrails=[never])
def delete(path: str) -> str:
    """Delete a file."""
    ran("delete")
    return "deleted"


tools = Agent(name="tools", instructions="tools", model=MODEL, tools=[weather, measure])
failing = Agent(name="failing", instructions="failing", model=MODEL, tools=[strict])
hand = Agent(name="hand", instructions="hand", model=MODEL, tools=[by_hand])
guarded = Agent(name="guarded", instructions="guarded", model=MODEL, tools=[delete])
spanish = Agent(name="Spanish", instructions="spanish", model=MODEL, tools=[weather])
triage = Agent(
    name="triage",
    instructions="triage",
    model=MODEL,
    handoffs=[handoff(spanish, on_handoff=lambda context: ran("on_handoff"))],
)
boss = Agent(
    name="boss",
    instructions="boss",
    model=MODEL,
    tools=[spanish.as_tool(tool_name="ask_spanish", tool_description="Ask.")],
)
PROGRAMS = {"failing": failing, "hand": hand, "guarded": guarded, "handoff": triage, "as_tool": boss}
CONTEXT = {"country": "Norway"}


async def streamed() -> object:
    result = Runner.run_streamed(tools, "go", context=CONTEXT)
    kinds = [event.type async for event in result.stream_events()]
    return result.final_output, len(kinds), result.context_wrapper.usage.total_tokens


async def run(agent: Agent) -> object:
    result = await Runner.run(agent, "go", context=CONTEXT)
    return result.final_output, result.last_agent.name, result.context_wrapper.usage.total_tokens


how = sys.argv[1]
if os.environ.get("AGENTS_KEY") == "none":  # the client has a key, the exporter of traces has none
    set_default_openai_client(AsyncOpenAI(api_key=os.environ.pop("OPENAI_API_KEY")), use_for_tracing=False)
if os.environ.get("API"):
    set_default_openai_api(os.environ["API"])
if len(sys.argv) > 2:
    set_trace_processors([BatchTraceProcessor(BackendSpanExporter(endpoint=sys.argv[2]), schedule_delay=0.01)])
else:
    set_tracing_disabled(True)
if how == "sync":
    print(Runner.run_sync(tools, "go", context=CONTEXT).final_output)
elif how == "stream":
    print(asyncio.run(streamed()))
else:
    print(asyncio.run(run(PROGRAMS.get(how, tools))))
