# SPDX-License-Identifier: Apache-2.0
"""Tools that the SDKs' own loops run: each call once, as the function got it, and not run again under replay."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pydantic
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_async_tool, beta_tool
from anthropic.lib.tools import BetaAsyncBuiltinFunctionTool, BetaBuiltinFunctionTool
from openai.lib.beta.agents import function_tool
from openai.lib.decisions_tool_runner import AsyncDecisionsToolRunner, DecisionsToolRunner
from openai.lib.responses_tool_runner import (
    AsyncRegisteredFunction,
    AsyncResponsesToolRunner,
    RegisteredFunction,
    ResponsesToolRunner,
)
from openai.lib.streaming.agents._tools import ToolInvocation
from openai.types.beta.agent_function_call_item import AgentFunctionCallItem

from sftrace_otel import ReplayMismatchError, instrumentation, trace_tool
from sftrace_otel.bundle.read import validate_bundle
from sftrace_otel.instrumentation import tool_runners

Run = Callable[..., Any]
server = sys.modules["llm_server"]

pytestmark = [  # agents leave clients open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class OutOfRange(ValueError):
    """An error of the program's own, with a member."""

    def __init__(self, text: str, degree: int) -> None:
        super().__init__(text)
        self.degree = degree


# --- anthropic --------------------------------------------------------------------------------------------------------


def uses(*calls: tuple[str, str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "tool_use", "id": id_, "name": name, "input": given} for id_, name, given in calls]


def message(content: list[dict[str, Any]], stop: str) -> dict[str, Any]:
    return {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-9", "content": content,
        "stop_reason": stop, "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 7},
    }  # fmt: skip


TWO = uses(("t1", "add", {"a": 1}), ("t2", "measure", {"place": "Oslo", "degree": 95}))
DONE = [{"type": "text", "text": "Done."}]


def reply(content: list[dict[str, Any]], stop: str, *, stream: bool) -> Any:
    whole = message(content, stop)
    if not stream:
        return server.whole(whole)
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}}]
    for index, block in enumerate(content):
        if block["type"] == "text":
            first, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            first = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        events.append({"type": "content_block_start", "index": index, "content_block": first})
        events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    end = {"stop_reason": stop, "stop_sequence": None}
    events.append({"type": "message_delta", "delta": end, "usage": {"output_tokens": 7}})
    events.append({"type": "message_stop"})
    return server.named_events(*events)


def plan(llm_server: Any, *turns: list[dict[str, Any]], stream: bool = False) -> None:
    """What the model will say: each turn of tools, then that it is done."""
    for turn in turns:
        llm_server.replies.append(reply(turn, "tool_use", stream=stream))
    llm_server.replies.append(reply(DONE, "end_turn", stream=stream))


class Calls:
    """Tools that count their calls."""

    def __init__(self, *, second: int = 2) -> None:
        self.ran: list[str] = []

        def add(a: int, b: int = second) -> str:
            """Add two numbers."""
            self.ran.append("add")
            return str(a + b)

        def measure(place: str, degree: float) -> str:
            """Measure a place."""
            self.ran.append("measure")
            raise OutOfRange(f"{place} is out of range", 7)

        self.add, self.measure = add, measure

    def tools(self) -> list[Any]:
        return [beta_tool(self.add), beta_tool(self.measure)]

    def async_tools(self) -> list[Any]:
        async def add(a: int, b: int = 2) -> str:
            """Add two numbers."""
            await asyncio.sleep(0)
            return self.add(a, b)

        async def measure(place: str, degree: float) -> str:
            """Measure a place."""
            return self.measure(place, degree)

        return [beta_async_tool(add), beta_async_tool(measure)]


ASK: dict[str, Any] = {"model": "claude-9", "max_tokens": 64, "messages": [{"role": "user", "content": "go"}]}


def run_sync(url: str, tools: list[Any], **options: Any) -> Any:
    with Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        last = client.beta.messages.tool_runner(**ASK, tools=tools, **options).until_done()
        return last.to_dict()["content"][0]["text"]


def run_async(url: str, tools: list[Any], **options: Any) -> Any:
    async def main() -> Any:
        async with AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
            last = await client.beta.messages.tool_runner(**ASK, tools=tools, **options).until_done()
            return last.to_dict()["content"][0]["text"]

    return asyncio.run(main())


def tool_events(bundle: Any) -> list[tuple[str, Any, str, Any]]:
    """(name, input, status, output) of each tool event."""
    results = {event.parent_id: event for event in bundle.events if event.type == "tool_result"}
    return [
        (call.name, call.input, results[call.id].status, results[call.id].output)
        for call in bundle.events
        if call.type == "tool_call"
    ]


EVENTS = [
    ("add", {"a": 1, "b": 2}, "ok", "3"),
    (
        "measure",
        {"place": "Oslo", "degree": 95.0},
        "error",
        {"error_type": "OutOfRange", "message": "Oslo is out of range"},
    ),
]
SHAPES = [(run_sync, False), (run_sync, True), (run_async, False), (run_async, True)]


@pytest.mark.parametrize(("run", "stream"), SHAPES, ids=["sync", "sync-stream", "async", "async-stream"])
def test_an_anthropic_runner(
    recorded: Run, frozen: Run, read: Run, bundle_path: Path, llm_server: Any, spans: Run, run: Run, stream: bool
) -> None:
    """Two tools in one turn, one of which raises."""
    calls = Calls()
    plan(llm_server, TWO, stream=stream)
    options = {"stream": True} if stream else {}

    def program() -> Any:
        return run(llm_server.url, calls.tools() if run is run_sync else calls.async_tools(), **options)

    assert recorded(program) == "Done."
    assert calls.ran == ["add", "measure"]
    assert "OutOfRange" in llm_server.requests[1][2].decode()
    bundle = read()
    assert tool_events(bundle) == EVENTS
    assert [event.type for event in bundle.events].count("llm_request") == 2
    start = bundle.events[0].id
    assert {event.parent_id for event in bundle.events if event.type == "tool_call"} == {start}
    assert bundle.run["verdict"]["offline"] is True
    result = validate_bundle(bundle_path, strict=True, verify_integrity=True)
    assert result.exit_code == 0, result.issues
    ours = [span for span in spans() if span.instrumentation_scope.name == "sftrace_otel.tools"]
    assert [(span.name, span.attributes["gen_ai.tool.call.id"]) for span in ours] == [
        ("execute_tool add", "t1"), ("execute_tool measure", "t2"),
    ]  # fmt: skip

    llm_server.stop()
    assert frozen(program) == "Done."
    assert calls.ran == ["add", "measure"], "a tool ran under replay"
    assert len(llm_server.requests) == 2


def test_tools_that_run_while_the_answer_still_comes(recorded: Run, frozen: Run, read: Run, llm_server: Any) -> None:
    calls = Calls()
    plan(llm_server, TWO, stream=True)

    def program() -> Any:
        return run_sync(llm_server.url, calls.tools(), stream=True, run_tools_eagerly=True)

    recorded(program)
    assert tool_events(read()) == EVENTS
    llm_server.stop()
    frozen(program)
    assert calls.ran == ["add", "measure"]


@pytest.mark.parametrize("run", [run_sync, run_async], ids=["sync", "async"])
def test_another_argument_diverges(recorded: Run, frozen: Run, llm_server: Any, run: Run) -> None:
    """The default of `b`, which the model is not told, is 3 now; the runner turns the error into a text, caught so."""
    plan(llm_server, uses(("t1", "add", {"a": 1})))
    ran: list[int] = []

    def program(second: int) -> Any:
        def add(a: int, b: int = second) -> str:
            ran.append(b)
            return str(a + b)

        async def aadd(a: int, b: int = second) -> str:
            return add(a, b)

        told: dict[str, Any] = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
        tool: Any = beta_tool(add, **told) if run is run_sync else beta_async_tool(aadd, **told)
        return run(llm_server.url, [tool])

    recorded(program, 2)
    with pytest.raises(ReplayMismatchError, match="input of tool 'add' differs"):
        frozen(program, 3)
    assert ran == [2]


def test_a_traced_function_is_recorded_once(recorded: Run, frozen: Run, read: Run, llm_server: Any, spans: Run) -> None:
    """By its own decorator, whose name counts; its span has the model's id too."""
    ran = []

    @beta_tool(name="add")
    @trace_tool(name="sum")
    def add(a: int, b: int = 2) -> str:
        """Add."""
        ran.append(a)
        return str(inner(a))

    @trace_tool
    def inner(n: int) -> int:
        return n

    plan(llm_server, uses(("t1", "add", {"a": 1})))
    recorded(run_sync, llm_server.url, [add])
    assert tool_events(read()) == [("sum", {"a": 1, "b": 2}, "ok", "1"), ("inner", {"n": 1}, "ok", 1)]
    ids = {span.name: span.attributes.get("gen_ai.tool.call.id") for span in spans()}
    assert ids["execute_tool sum"] == "t1" and ids["execute_tool inner"] is None
    frozen(run_sync, llm_server.url, [add])
    assert ran == [1]


def test_a_pattern_for_a_tool_object(recorded: Run, read: Run, llm_server: Any) -> None:
    """OTEL_SFTRACE_TOOLS may name what `@beta_tool` made: it stays a tool, recorded once; plain functions too."""
    module = ModuleType("tools_of_a_runner")
    made = Calls()
    module.add = beta_tool(made.add)  # type: ignore[attr-defined]
    made.measure.__module__ = module.__name__
    module.measure = made.measure  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        instrumentation.install([f"{module.__name__}:add", f"{module.__name__}:m*"])
        plan(llm_server, TWO)
        recorded(lambda: run_sync(llm_server.url, [module.add, beta_tool(module.measure)]))
    finally:
        del sys.modules[module.__name__]
    assert tool_events(read()) == EVENTS


class Memory(BetaBuiltinFunctionTool):
    """A tool class of the program's own."""

    ran = 0

    def to_dict(self) -> Any:
        return {"type": "memory_20250818", "name": "memory"}

    def call(self, input: object) -> Any:  # noqa: A002
        Memory.ran += 1
        return [{"type": "text", "text": f"kept {input}"}]


class AsyncMemory(BetaAsyncBuiltinFunctionTool):
    def to_dict(self) -> Any:
        return {"type": "memory_20250818", "name": "memory"}

    async def call(self, input: object) -> Any:  # noqa: A002
        return Memory().call(input)


@pytest.mark.parametrize(("run", "tool"), [(run_sync, Memory), (run_async, AsyncMemory)], ids=["sync", "async"])
def test_a_tool_class_of_the_programs_own(
    recorded: Run, frozen: Run, read: Run, llm_server: Any, run: Run, tool: Run
) -> None:
    Memory.ran = 0
    plan(llm_server, uses(("t1", "memory", {"command": "view", "path": "/"})))
    recorded(run, llm_server.url, [tool()])
    kept = [{"type": "text", "text": "kept {'command': 'view', 'path': '/'}"}]
    assert tool_events(read()) == [("memory", {"command": "view", "path": "/"}, "ok", kept)]
    llm_server.stop()
    frozen(run, llm_server.url, [tool()])
    assert Memory.ran == 1


def test_arguments_that_do_not_fit_are_the_runners_affair(
    recorded: Run, frozen: Run, read: Run, llm_server: Any
) -> None:
    """The function is not called, so there is no tool event."""
    calls = Calls()
    plan(llm_server, uses(("t1", "add", {"a": "no number"})))
    recorded(run_sync, llm_server.url, calls.tools())
    assert calls.ran == [] and tool_events(read()) == []
    assert "Invalid arguments for function add" in llm_server.requests[1][2].decode()


def test_the_programs_tool_is_left_as_it_is(recorded: Run, llm_server: Any) -> None:
    tool = beta_tool(Calls().add)
    before = dict(vars(tool))
    plan(llm_server, uses(("t1", "add", {"a": 1})))
    recorded(run_sync, llm_server.url, [tool])
    assert vars(tool) == before
    assert tool(2) == "4"


# --- openai -----------------------------------------------------------------------------------------------------------

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function", "name": "weather", "description": "Weather.", "parameters": PARAMETERS, "strict": False,
}  # fmt: skip


class Place(pydantic.BaseModel):
    """Where."""

    city: str
    days: int = 2


def function_call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"fc_{call_id}", "type": "function_call", "status": "completed", "call_id": call_id, "name": name,
        "arguments": json.dumps(arguments),
    }  # fmt: skip


@pytest.fixture
def responses(openai_server: Any, server_module: Any) -> Run:
    """`responses(*items)`: what the model asks for in its first answer; then it is done."""

    def answers(*items: dict[str, Any]) -> None:
        def answer(received: Any) -> Any:
            body = received.json
            done = any(item.get("type") == "function_call_output" for item in body["input"] if isinstance(item, dict))
            output = [server_module.output_message("Done.")] if done else items
            whole = server_module.response(body, *output, id="resp_2" if done else "resp_1")
            if body.get("stream"):
                return server_module.sse_reply(list(server_module.response_events(whole)), named=True)
            return server_module.json_reply(whole)

        openai_server.replies["POST /v1/responses"] = answer

    return answers


def responses_sync(url: str, functions: list[Any], **options: Any) -> Any:
    runner = ResponsesToolRunner(functions=functions)
    client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
    question: Any = [{"role": "user", "content": "go"}]
    return runner.run(client, {"model": "gpt-5", "input": question}, max_steps=4, **options).output_text


def responses_async(url: str, functions: list[Any], **options: Any) -> Any:
    async def main() -> Any:
        runner = AsyncResponsesToolRunner(functions=functions)
        question: Any = [{"role": "user", "content": "go"}]
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            answer = await runner.run(client, {"model": "gpt-5", "input": question}, max_steps=4, **options)
            return answer.output_text

    return asyncio.run(main())


def registered(ran: list[Any], *, fails: bool = False, is_async: bool) -> list[Any]:
    """A function that gets a dict, and one that gets a model."""

    def weather(given: dict[str, Any], *, cancelled: Any = None) -> str:
        ran.append(given)
        if fails:
            raise OutOfRange("too far", 3)
        return f"rain in {given['city']}"

    def forecast(place: Place) -> str:
        ran.append(place)
        return f"{place.days} days of rain"

    async def aweather(given: dict[str, Any]) -> str:
        await asyncio.sleep(0)
        return weather(given)

    async def aforecast(place: Place) -> str:
        return forecast(place)

    typed: Any = openai.pydantic_responses_function_tool(Place, name="forecast")
    if is_async:
        return [
            AsyncRegisteredFunction(WEATHER, aweather, independent=True),  # type: ignore[arg-type]
            AsyncRegisteredFunction.from_tool(typed, execute=aforecast, independent=True),
        ]
    return [
        RegisteredFunction(WEATHER, weather, independent=True),  # type: ignore[arg-type]
        RegisteredFunction.from_tool(typed, execute=forecast, independent=True),
    ]


BOTH = [function_call("c1", "weather", {"city": "Oslo"}), function_call("c2", "forecast", {"city": "Rome"})]
WEATHERS = [
    ("forecast", {"city": "Rome", "days": 2}, "ok", "2 days of rain"),
    ("weather", {"city": "Oslo"}, "ok", "rain in Oslo"),
]
HOW: list[dict[str, Any]] = [{}, {"stream": True}, {"stream": True, "eager": True}]


@pytest.mark.parametrize("options", HOW, ids=["plain", "stream", "eager"])
@pytest.mark.parametrize("run", [responses_sync, responses_async], ids=["sync", "async"])
def test_a_responses_runner(
    recorded: Run, frozen: Run, read: Run, bundle_path: Path, openai_server: Any, responses: Run, spans: Run,
    run: Run, options: dict[str, Any],
) -> None:  # fmt: skip
    """Two functions in one turn; with `eager` both at once, in threads or tasks."""
    ran: list[Any] = []
    responses(*BOTH)

    def program() -> Any:
        return run(openai_server.base_url, registered(ran, is_async=run is responses_async), **options)

    assert recorded(program) == "Done."
    bundle = read()
    assert sorted(tool_events(bundle)) == WEATHERS
    assert bundle.run["verdict"]["offline"] is True
    assert validate_bundle(bundle_path, strict=True, verify_integrity=True).exit_code == 0
    ours = [span for span in spans() if span.instrumentation_scope.name == "sftrace_otel.tools"]
    assert {span.name: span.attributes["gen_ai.tool.call.id"] for span in ours} == {
        "execute_tool weather": "c1", "execute_tool forecast": "c2",
    }  # fmt: skip
    openai_server.stop()
    assert frozen(program) == "Done."
    assert len(ran) == 2, "a function ran under replay"


@pytest.mark.parametrize("run", [responses_sync, responses_async], ids=["sync", "async"])
def test_a_function_that_raises_ends_a_responses_run(
    recorded: Run, frozen: Run, read: Run, openai_server: Any, responses: Run, run: Run
) -> None:
    ran: list[Any] = []
    responses(BOTH[0])

    def program() -> Any:
        try:
            run(openai_server.base_url, registered(ran, fails=True, is_async=run is responses_async))
        except Exception as error:
            cause = error.__cause__ or error
            return [type(error).__name__, str(error), type(cause).__name__]
        return None

    want = recorded(program)
    [(name, given, status, output)] = tool_events(read())
    assert (name, given, status) == ("weather", {"city": "Oslo"}, "error")
    assert output == {"error_type": "OutOfRange", "message": "too far"}
    assert frozen(program) == want
    assert len(ran) == 1


def decided(received: Any) -> dict[str, Any]:
    """The first choice of those offered that was not made yet: `press`, then `done`."""
    choices = [one["value"] for one in received["questions"][0]["choices"]]
    chosen = "done" if "pressed" in json.dumps(received["input"]) else "press"
    details = {"input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0}}
    return {
        "id": "dec_1", "object": "decision", "created_at": 1, "model": "gpt-5",
        "answers": [{
            "type": "choice", "name": "next_action", "choice": chosen, "confidence": 0.9,
            "probabilities": [{"value": one, "probability": 0.5} for one in choices],
        }],
        "usage": {
            **details, "input_tokens": 1, "output_tokens": 1, "total_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_decisions_runner(
    recorded: Run, frozen: Run, read: Run, openai_server: Any, server_module: Any, is_async: bool
) -> None:
    """The action that was chosen is a tool by its id."""
    openai_server.replies["POST /v1/decisions"] = lambda received: server_module.json_reply(decided(received.json))
    ran: list[str] = []
    params: Any = {"model": "gpt-5", "input": "press it"}

    def program() -> Any:
        steps = iter(["open", "pressed"])
        if not is_async:
            candidates: Any = [
                {"id": "press", "description": "Press.", "execute": lambda: ran.append("press")},
                {"id": "done", "description": "Done.", "done": True},
            ]
            runner = DecisionsToolRunner(observe=lambda: next(steps), candidates=lambda seen: candidates)
            client = openai.OpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0)
            return runner.run(client, params)["completed_candidate_ids"]

        async def observe() -> str:
            return next(steps)

        async def press() -> None:
            ran.append("press")

        async def offered(seen: Any) -> Any:
            press_it: Any = {"id": "press", "description": "Press.", "execute": press}
            return [press_it, {"id": "done", "description": "Done.", "done": True}]

        async def main() -> Any:
            async with openai.AsyncOpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0) as client:
                runner = AsyncDecisionsToolRunner(observe=observe, candidates=offered)
                return (await runner.run(client, params))["completed_candidate_ids"]

        return asyncio.run(main())

    assert recorded(program) == ["press"]
    tools = [event for event in tool_events(read()) if not event[0].startswith("http ")]
    assert tools == [("press", {}, "ok", None)]
    openai_server.stop()
    assert frozen(program) == ["press"]
    assert ran == ["press"]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_handler_of_an_agent_session(recorded: Run, frozen: Run, read: Run, spans: Run, is_async: bool) -> None:
    """What the session's stream calls for each function call of the agent: a tool of the SDK, or a plain handler."""
    ran: list[Any] = []

    def weather(city: str, days: int = 2) -> str:
        """Weather."""
        ran.append(city)
        return f"{days} days of rain in {city}"

    async def aweather(city: str, days: int = 2) -> str:
        """Weather."""
        return weather(city, days)

    def plain(given: Any) -> Any:
        return weather(given["city"])

    tool = function_tool(aweather if is_async else weather, name="weather")

    def call(call_id: str) -> Any:
        given = {"id": "i", "arguments": {"city": "Oslo"}, "call_id": call_id, "name": "weather", "turn_id": "u"}
        return AgentFunctionCallItem.construct(**given, type="function_call", status="completed")

    def program() -> Any:
        async def awaited(value: Any) -> Any:
            return await value

        first = ToolInvocation("s", call("c1")).invoke(tool)
        second: Any = ToolInvocation("s", call("c2")).invoke(plain)
        return [asyncio.run(awaited(first)) if is_async else first, second]

    want = ["2 days of rain in Oslo"] * 2
    assert recorded(program) == want
    assert sorted(tool_events(read()), key=str) == [
        ("weather", {"city": "Oslo", "days": 2}, "ok", want[0]), ("weather", {"city": "Oslo"}, "ok", want[0]),
    ]  # fmt: skip
    assert sorted(span.attributes["gen_ai.tool.call.id"] for span in spans()) == ["c1", "c2"]
    assert frozen(program) == want
    assert len(ran) == 2


def test_everything_is_put_back(recorded: Run) -> None:
    recorded(lambda: None)
    assert len(tool_runners.patched()) == 8
    tool_runners.install()
    assert len(tool_runners.patched()) == 8
    from anthropic.lib.tools._beta_functions import BetaFunctionTool

    assert hasattr(BetaFunctionTool.call, "__wrapped__")
    instrumentation.uninstall()
    assert tool_runners.patched() == []
    assert not hasattr(BetaFunctionTool.call, "__wrapped__")
