# SPDX-License-Identifier: Apache-2.0
"""A langgraph agent without a line of ours: `python langgraph_agent.py BASE_URL MODE WHAT`.

WHAT names the tools that the model asks for (the test's server goes by it); MODE is sync, async or stream.
Side effects of tools go to the file that `EFFECTS` names, so that a replay can be seen to have none.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import sys
from pathlib import Path
from typing import Annotated, Any

from langchain_core.documents import Document
from langchain_core.messages import ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool, ToolException, tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, tools_condition
from langgraph.types import Command, interrupt
from pydantic import BaseModel

url, mode, what = sys.argv[1:4]


def effect(line: str) -> None:
    with Path(os.environ["EFFECTS"]).open("a") as file:
        file.write(line + "\n")


class Report(BaseModel):
    city: str
    day: dt.date


@tool
def get(city: str, state: Annotated[dict, InjectedState], config: RunnableConfig, days: int = 1) -> str:
    """A tool with a state, a config and defaults."""
    effect("get")
    return f"{city} {days} of {len(state['messages'])}"


@tool
async def lookup(key: str, limit: int = 3) -> dict[str, Any]:
    """An async tool."""
    effect(f"lookup {key}")
    return {"key": key, "limit": limit, "when": "2026"}


@tool
def find(key: str, limit: int = 3) -> dict[str, Any]:
    """A sync tool."""
    effect(f"find {key}")
    return {"key": key, "limit": limit}


@tool
def report(city: str) -> Report:
    """A tool that returns a model."""
    effect("report")
    return Report(city=city, day=dt.date(2026, 1, 2))


@tool
def update(note: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
    """A tool that returns the framework's own object."""
    effect("update")
    return Command(update={"note": note, "messages": [ToolMessage(f"noted {note}", tool_call_id=tool_call_id)]})


@tool(response_format="content_and_artifact")
def search(query: str) -> tuple[str, list[Document]]:
    """A tool with an artifact."""
    effect("search")
    return "one document", [Document(page_content=query, metadata={"page": 1})]


@tool
def broken(n: int) -> int:
    """A tool with a fault."""
    effect("broken")
    raise OSError(5, "disk on fire")


def _refuse(n: int) -> int:
    """A tool that says why not."""
    effect("refused")
    raise ToolException(f"not {n}")


@tool
def ask(question: str) -> str:
    """A tool that asks a person."""
    effect("ask")
    return f"they said {interrupt({'question': question})}"


class Shout(BaseTool):
    name: str = "shout"
    description: str = "A tool class of the program's own."
    calls: int = 0

    def _run(self, word: str, loud: bool = True, run_manager: Any = None) -> str:
        effect("shout")
        return word.upper() if loud else word


class Louder(Shout):
    name: str = "louder"

    def _run(self, word: str, loud: bool = True, run_manager: Any = None) -> str:
        return super()._run(word, loud) + "!"

    async def _arun(self, word: str, loud: bool = True, run_manager: Any = None) -> str:
        return self._run(word, loud)


class State(MessagesState):
    note: str


refused = StructuredTool.from_function(_refuse, name="refused", handle_tool_error=True)
TOOLS = [get, find, report, update, search, broken, refused, ask, Shout(), Louder()]
if mode != "sync":
    TOOLS.append(lookup)
model = ChatOpenAI(model="m", base_url=url, api_key="k", max_retries=0).bind_tools(TOOLS)


def chat(state: State) -> dict[str, Any]:
    return {"messages": [model.invoke(state["messages"])]}


async def achat(state: State) -> dict[str, Any]:
    return {"messages": [await model.ainvoke(state["messages"])]}


builder = StateGraph(State)
builder.add_node("chat", chat if mode == "sync" else achat)
builder.add_node("tools", ToolNode(TOOLS))
builder.add_edge(START, "chat")
builder.add_conditional_edges("chat", tools_condition)
builder.add_edge("tools", "chat")
graph = builder.compile(checkpointer=InMemorySaver())
given: Any = {"messages": [("user", what)]}
config: Any = {"configurable": {"thread_id": "1"}}


def shown(state: Any) -> str:
    artifacts = [
        type(one).__name__ for message in state["messages"] for one in getattr(message, "artifact", None) or ()
    ]
    return f"{state['messages'][-1].text} {state.get('note')} {artifacts}"


async def streamed() -> str:
    pieces = []
    async for message, _ in graph.astream(given, config, stream_mode="messages"):
        pieces.append(message.text)
    return "|".join(pieces)


try:
    if mode == "sync":
        state = graph.invoke(given, config)
        if "__interrupt__" in state:
            print(state["__interrupt__"][0].value)
            state = graph.invoke(Command(resume="yes"), config)
        print(shown(state))
    elif mode == "async":
        print(shown(asyncio.run(graph.ainvoke(given, config))))
    else:
        print(asyncio.run(streamed()))
except OSError as error:
    print(type(error).__name__, error.errno)
