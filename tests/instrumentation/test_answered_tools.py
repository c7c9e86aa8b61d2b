# SPDX-License-Identifier: Apache-2.0
"""Tools whose result went back to the model and that left no event are named, in every dialect; others are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sftrace_otel import trace_tool
from sftrace_otel.bundle.read import open_bundle
from sftrace_otel.core.plan import extract_calls
from sftrace_otel.recorder import Answered
from sftrace_otel.replay import untraced_tools

RESULT = {"celsius": 7, "city": "Oslo"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GEMINI, OLLAMA = "/v1beta/models/g-2:generateContent", "/api/chat"


def chat(name: str, content: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": "{}"}}
    return {"model": "m", "messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": content}]}  # fmt: skip


def function(name: str, content: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "function", "name": name, "content": content}]}


def responses(name: str, content: Any, kind: str = "function_call") -> dict[str, Any]:
    return {"model": "m", "input": [
        {"type": kind, "call_id": "c1", "name": name, "arguments": "{}"},
        {"type": f"{kind}_output", "call_id": "c1", "output": content}]}  # fmt: skip


def messages(name: str, content: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 5, "messages": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": name, "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": content}]}]}  # fmt: skip


def gemini(name: str, content: Any) -> dict[str, Any]:
    response = content if isinstance(content, dict) else {"result": content}
    return {"contents": [{"role": "user", "parts": [{"functionResponse": {"name": name, "response": response}}]}]}


def ollama(name: str, content: Any) -> dict[str, Any]:
    return {"model": "m", "stream": False, "messages": [
        {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {}}}]},
        {"role": "tool", "tool_name": name, "content": content}]}  # fmt: skip


DIALECTS: dict[str, tuple[str, Callable[[str, Any], dict[str, Any]]]] = {
    "chat": (CHAT, chat),
    "chat function": (CHAT, function),
    "responses": (RESPONSES, responses),
    "responses custom": (RESPONSES, lambda name, content: responses(name, content, "custom_tool_call")),
    "anthropic": (MESSAGES, messages),
    "gemini": (GEMINI, gemini),
    "ollama": (OLLAMA, ollama),
}


@pytest.fixture
def named(recorded: Callable[..., Any], read: Callable[[], Any]) -> Callable[..., list[str]]:
    """`named(program)` records it with a model that answers nothing much; the tools that the verdict names, which are
    those that a replay would refuse to start for."""

    def run(program: Callable[[Callable[..., Any]], Any]) -> list[str]:
        answers: list[Any] = []
        transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answers.pop() if answers else {}))
        with httpx.Client(transport=transport, base_url="http://127.0.0.1:1") as client:

            def ask(path: str, body: Any, answer: Any = None) -> None:
                answers.extend([] if answer is None else [answer])
                client.post(path, json=body, headers={"anthropic-version": "2023-06-01"}).raise_for_status()

            recorded(lambda: program(ask) and None)
        bundle = open_bundle(read().path)
        obstacles = bundle.run["verdict"]["obstacles"]
        told = [str(one["name"]) for one in obstacles if one["kind"] == "untraced_tool"]  # type: ignore[typeddict-item]
        assert untraced_tools(extract_calls(bundle.events, bundle.calls)) == told
        return told

    return run


def weather(name: str = "get_weather", result: Any = RESULT) -> Callable[[], Any]:
    return trace_tool(name=name)(lambda: result)


@pytest.mark.parametrize("content", [json.dumps(RESULT), "7 degrees"], ids=["json", "text"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_untraced_tool_is_named_and_a_traced_one_not(dialect: str, content: str, named: Any) -> None:
    path, body = DIALECTS[dialect]
    assert named(lambda ask: ask(path, body("get_weather", content))) == ["get_weather"]
    assert named(lambda ask: (weather()(), ask(path, body("get_weather", content)))) == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_tool_under_another_name_is_known_by_its_result(dialect: str, named: Any) -> None:
    path, body = DIALECTS[dialect]
    other = weather("weather_api_v2")
    assert named(lambda ask: (other(), ask(path, body("get_weather", json.dumps(RESULT))))) == []
    assert named(lambda ask: (other(), ask(path, body("get_weather", "something else")))) == ["get_weather"]


def test_two_tools_of_one_name_are_told_apart_by_their_results(named: Any) -> None:
    first = [{"id": f"c{n}", "function": {"name": "search"}} for n in (1, 2)]
    body = {"model": "m", "messages": [
        {"role": "assistant", "tool_calls": first},
        {"role": "tool", "tool_call_id": "c1", "content": "from the untraced one"},
        {"role": "tool", "tool_call_id": "c2", "content": json.dumps(RESULT)}]}  # fmt: skip
    assert named(lambda ask: (weather("search")(), ask(CHAT, body))) == ["search"]
    both = lambda ask: (weather("search")(), weather("search", "x")(), ask(CHAT, body))  # noqa: E731
    assert named(both) == []


def test_an_answer_that_later_requests_repeat_counts_once(named: Any) -> None:
    body = chat("get_weather", "7")
    assert named(lambda ask: (weather(result=7)(), ask(CHAT, body), ask(CHAT, body))) == []


def test_a_call_is_named_by_the_answer_that_asked_for_it(named: Any) -> None:
    asked = {"id": "r1", "output": [{"type": "function_call", "call_id": "c9", "name": "pay", "arguments": "{}"}]}
    answer = {"model": "m", "previous_response_id": "r1", "input": [
        {"type": "function_call_output", "call_id": "c9", "output": "paid"}]}  # fmt: skip

    def program(ask: Any) -> None:
        ask(RESPONSES, {"model": "m", "input": "pay"}, asked)
        ask(RESPONSES, answer)

    assert named(program) == ["pay"]


def test_tools_that_ran_at_the_service_are_none(named: Any) -> None:
    hosted = {"model": "m", "input": [
        {"type": "web_search_call", "id": "ws1", "status": "completed"},
        {"type": "code_interpreter_call", "id": "ci1", "outputs": []},
        {"type": "mcp_call", "id": "m1", "name": "read", "output": "text"}]}  # fmt: skip
    server = {"model": "m", "max_tokens": 5, "messages": [{"role": "assistant", "content": [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "mcp_tool_use", "id": "m1", "name": "read"},
        {"type": "mcp_tool_result", "tool_use_id": "m1", "content": []}]}]}  # fmt: skip
    coded = {"contents": [{"role": "model", "parts": [
        {"executableCode": {"code": "1"}}, {"codeExecutionResult": {"output": "1"}}]}]}  # fmt: skip
    assert named(lambda ask: (ask(RESPONSES, hosted), ask(MESSAGES, server), ask(GEMINI, coded))) == []


def test_what_the_program_runs_for_the_service_is_one(named: Any) -> None:
    body = {"model": "m", "input": [
        {"type": "local_shell_call", "call_id": "c1", "action": {}},
        {"type": "local_shell_call_output", "call_id": "c1", "output": "done"}]}  # fmt: skip
    assert named(lambda ask: ask(RESPONSES, body)) == ["local_shell"]


def test_a_tool_of_an_mcp_server_is_known_by_name_and_by_content(named: Any) -> None:
    mcp = trace_tool(name="read_file")(lambda: {"content": [{"type": "text", "text": "hello"}], "isError": False})
    prefixed, renamed = chat("mcp__files__read_file", "as the host put it"), chat("look", "hello")
    assert named(lambda ask: (mcp(), ask(CHAT, prefixed))) == []
    assert named(lambda ask: (mcp(), ask(CHAT, renamed))) == []
    assert named(lambda ask: (mcp(), ask(MESSAGES, messages("look", [{"type": "text", "text": "hello"}])))) == []


def test_an_event_with_the_calls_id_accounts_for_it_alone() -> None:
    answered = Answered()
    answered.answer("c1", "pay", ["a"])
    answered.answer("c2", "pay", ["b"])
    answered.tool("charge", ["x"], ["c1"])
    assert answered.untraced() == ["pay"]
    answered.tool("charge", ["y"], ["c2"])
    assert answered.untraced() == []
