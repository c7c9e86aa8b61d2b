# SPDX-License-Identifier: Apache-2.0
"""The Responses API through the openai SDK: recorded, and replayed as the same objects and events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pydantic
import pytest

from sftrace_otel import trace_tool

Run = Callable[..., Any]

pytestmark = [  # agents leave clients open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(not hasattr(openai.OpenAI, "responses"), reason="this openai has no Responses API"),
]

PATH = "POST /v1/responses"
REASONING = {
    "id": "rs_0f3a",
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "Think of Norway."}],
    "encrypted_content": "gAAAAABo" + "Zm9vYmFyYmF6cXV4" * 20,
}
CALL = {
    "id": "fc_0f3a",
    "type": "function_call",
    "status": "completed",
    "call_id": "call_9AbCdEf",
    "name": "weather",
    "arguments": '{"city":"Oslo","n":1.0}',
}
CUSTOM = {
    "id": "ctc_1", "type": "custom_tool_call", "status": "completed", "call_id": "c2", "name": "sh", "input": "ls -l",
}  # fmt: skip
REFUSAL = {
    "id": "msg_2",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "refusal", "refusal": "I will not."}],
}


def events_of(bundle: Any, kind: str) -> list[Any]:
    return [event for event in bundle.events if event.type == kind]


def sync_client(server: Any) -> Any:
    return openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)


def async_client(server: Any) -> Any:
    return openai.AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0)


def streamed(server: Any) -> list[Any]:
    with sync_client(server).responses.create(model="gpt-5", input="Oslo?", stream=True) as stream:
        return [event.to_dict() for event in stream]


async def astreamed(server: Any) -> list[Any]:
    async with async_client(server) as client:
        stream = await client.responses.create(model="gpt-5", input="Oslo?", stream=True)
        return [event.to_dict() async for event in stream]


@pytest.fixture
def whole(server_module: Any) -> Any:
    """A response with an item of each kind."""
    return server_module.response(
        {"model": "gpt-5"}, REASONING, CALL, CUSTOM, server_module.output_message("Fjords."), REFUSAL
    )


def test_a_response_comes_back_with_every_item(
    exact: Run, openai_server: Any, server_module: Any, whole: Any, read: Run
) -> None:
    openai_server.replies[PATH] = server_module.json_reply(whole)

    def program() -> Any:
        client = sync_client(openai_server)
        first = client.responses.create(model="gpt-5", input="Oslo?", reasoning={"effort": "low"}, store=True)
        again = client.responses.create(model="gpt-5", input=[*first.output], previous_response_id=first.id)
        return [first, again.output_text]

    first, text = exact(program)
    assert first.to_dict() == whole
    assert text == "Fjords."
    requests, responses = events_of(read(), "llm_request"), events_of(read(), "llm_response")
    assert requests[1].input["request"]["previous_response_id"] == whole["id"]
    assert responses[0].output == whole
    assert (responses[0].prompt_tokens, responses[0].completion_tokens) == (30, 12)


def test_an_async_response_comes_back_with_every_item(
    exact: Run, openai_server: Any, server_module: Any, whole: Any
) -> None:
    openai_server.replies[PATH] = server_module.json_reply(whole)

    async def program() -> Any:
        async with async_client(openai_server) as client:
            return await client.responses.create(model="gpt-5", input="Oslo?")

    assert exact(lambda: asyncio.run(program())).to_dict() == whole


def test_a_stream_comes_back_event_by_event(
    exact: Run, openai_server: Any, server_module: Any, whole: Any, read: Run
) -> None:
    events = list(server_module.response_events(whole))
    openai_server.replies[PATH] = server_module.sse_reply(events, named=True)
    assert exact(streamed, openai_server) == events
    [response] = events_of(read(), "llm_response")
    assert response.output == whole


def test_an_async_stream_comes_back_event_by_event(
    exact: Run, openai_server: Any, server_module: Any, whole: Any, read: Run
) -> None:
    events = list(server_module.response_events(whole))
    openai_server.replies[PATH] = server_module.sse_reply(events, named=True)
    assert exact(lambda: asyncio.run(astreamed(openai_server))) == events
    [response] = events_of(read(), "llm_response")
    assert response.output == whole


def test_a_large_response_whose_stream_is_closed_at_its_last_event_is_finished(
    exact: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    whole = server_module.response({"model": "gpt-5"}, server_module.output_message("Fjord " * 5000))
    events = list(server_module.response_events(whole))
    openai_server.replies[PATH] = server_module.sse_reply(events, named=True, hold=True)

    def program() -> list[str]:
        seen = []
        for event in sync_client(openai_server).responses.create(model="gpt-5", input="Oslo?", stream=True):
            seen.append(event.type)
            if event.type == "response.completed":
                break
        return seen

    assert exact(program)[-1] == "response.completed"
    [row] = read().calls
    assert row["end"] == "finished"


@pytest.mark.parametrize("kept", range(1, 30, 4))
def test_a_stream_that_breaks_off_is_stored_as_far_as_it_came(
    exact: Run, openai_server: Any, server_module: Any, whole: Any, read: Run, kept: int
) -> None:
    events = list(server_module.response_events(whole))[:kept]
    openai_server.replies[PATH] = server_module.sse_reply(events, named=True, cut=True)

    def program() -> list[str]:
        seen = []
        try:
            for event in sync_client(openai_server).responses.create(model="gpt-5", input="Oslo?", stream=True):
                seen.append(event.type)
        except Exception as error:
            seen.append(type(error).__name__)
        return seen

    seen = exact(program)
    assert seen[:-1] == [event["type"] for event in events]
    [response] = events_of(read(), "llm_response")
    assert response.output["status"] == "in_progress"
    for got, want in zip(response.output["output"], whole["output"], strict=False):
        assert all(want[member].startswith(got[member]) for member in ("arguments", "input") if member in got)
        for place in {"content", "summary"} & got.keys():
            for part, all_of_it in zip(got[place], want[place], strict=False):
                assert all(all_of_it[name].startswith(part[name]) for name in ("text", "refusal") if name in part)
    assert len(response.output["output"]) == sum(event["type"] == "response.output_item.added" for event in events)
    [error] = events_of(read(), "error")
    assert error.error_type == "RemoteProtocolError"


FAILED = {"status": "failed", "error": {"code": "server_error", "message": "The model broke."}, "usage": None}
INCOMPLETE = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}


@pytest.mark.parametrize(
    ("members", "error_type", "reason"),
    [(FAILED, "server_error", "error"), (INCOMPLETE, None, "length")],
    ids=["failed", "incomplete"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_failed_and_an_incomplete_response(
    exact: Run, openai_server: Any, server_module: Any, read: Run, spans: Run,
    members: Any, error_type: str | None, reason: str, stream: bool,
) -> None:  # fmt: skip
    whole = server_module.response({"model": "gpt-5"}, server_module.output_message("Fj"), **members)
    events = list(server_module.response_events(whole))
    reply = server_module.sse_reply(events, named=True) if stream else server_module.json_reply(whole)
    openai_server.replies[PATH] = reply

    def program() -> Any:
        if stream:
            return streamed(openai_server)[-1]["response"]
        return sync_client(openai_server).responses.create(model="gpt-5", input="Oslo?").to_dict()

    assert exact(program) == whole
    [response] = events_of(read(), "llm_response")
    assert response.output == whole
    errors = [event.error_type for event in events_of(read(), "error")]
    assert errors == ([] if error_type is None else [error_type])
    span = spans()[0]
    assert span.attributes["gen_ai.response.finish_reasons"] == (reason,)
    assert span.attributes.get("error.type") == error_type


def test_an_error_event_in_a_stream_is_the_calls_error(
    exact: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    whole = server_module.response({"model": "gpt-5"}, server_module.output_message("Fjords."))
    failure = {"type": "error", "code": "rate_limit_exceeded", "message": "Too fast.", "param": None}
    events = [*list(server_module.response_events(whole))[:5], {**failure, "sequence_number": 5}]
    openai_server.replies[PATH] = server_module.sse_reply(events, named=True)

    def program() -> list[str]:
        seen = []
        try:
            for event in sync_client(openai_server).responses.create(model="gpt-5", input="Oslo?", stream=True):
                seen.append(event.type)
        except openai.APIError as error:
            seen.append(error.message)
        return seen

    exact(program)
    [error] = events_of(read(), "error")
    assert (error.error_type, error.message) == ("rate_limit_exceeded", "Too fast.")
    [response] = events_of(read(), "llm_response")
    assert response.output["output"][0]["content"][0]["text"] == "Fjo"


class Place(pydantic.BaseModel):
    name: str


def test_parse_gives_the_programs_own_class(exact: Run, openai_server: Any, server_module: Any) -> None:
    whole = server_module.response({"model": "gpt-5"}, server_module.output_message('{"name": "Oslo"}'))
    openai_server.replies[PATH] = server_module.json_reply(whole)

    def program() -> Any:
        return sync_client(openai_server).responses.parse(model="gpt-5", input="?", text_format=Place).output_parsed

    assert exact(program) == Place(name="Oslo")


def test_async_parse_gives_the_programs_own_class(exact: Run, openai_server: Any, server_module: Any) -> None:
    whole = server_module.response({"model": "gpt-5"}, server_module.output_message('{"name": "Oslo"}'))
    openai_server.replies[PATH] = server_module.json_reply(whole)

    async def program() -> Any:
        async with async_client(openai_server) as client:
            return (await client.responses.parse(model="gpt-5", input="?", text_format=Place)).output_parsed

    assert exact(lambda: asyncio.run(program())) == Place(name="Oslo")


def test_the_stream_helper_gives_the_same_events(exact: Run, openai_server: Any, server_module: Any) -> None:
    whole = server_module.response({"model": "gpt-5"}, CALL, server_module.output_message('{"name": "Oslo"}'))
    openai_server.replies[PATH] = server_module.sse_reply(list(server_module.response_events(whole)), named=True)

    def program() -> Any:
        with sync_client(openai_server).responses.stream(model="gpt-5", input="?", text_format=Place) as stream:
            return [[event.type for event in stream], stream.get_final_response().output_parsed]

    kinds, parsed = exact(program)
    assert "response.function_call_arguments.delta" in kinds
    assert parsed == Place(name="Oslo")


def test_the_async_stream_helper_gives_the_same_events(exact: Run, openai_server: Any, server_module: Any) -> None:
    whole = server_module.response({"model": "gpt-5"}, server_module.output_message("Fjords."))
    openai_server.replies[PATH] = server_module.sse_reply(list(server_module.response_events(whole)), named=True)

    async def program() -> Any:
        async with async_client(openai_server) as client, client.responses.stream(model="gpt-5", input="?") as stream:
            return [[event.type async for event in stream], (await stream.get_final_response()).output_text]

    assert exact(lambda: asyncio.run(program()))[1] == "Fjords."


def test_retrieve_cancel_and_delete_are_calls_of_their_own(
    exact: Run, openai_server: Any, server_module: Any, whole: Any, read: Run
) -> None:
    openai_server.replies["GET /v1/responses/resp_test"] = server_module.json_reply(whole)
    openai_server.replies["POST /v1/responses/resp_test/cancel"] = server_module.json_reply(
        {**whole, "status": "cancelled"}
    )
    items = {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False}
    openai_server.replies["GET /v1/responses/resp_test/input_items"] = server_module.json_reply(items)

    def program() -> Any:
        client = sync_client(openai_server)
        fetched = client.responses.retrieve("resp_test", include=["reasoning.encrypted_content"])
        cancelled = client.responses.cancel("resp_test")
        listed = list(client.responses.input_items.list("resp_test"))
        return [fetched, cancelled, listed, client.responses.delete("resp_test")]

    fetched, cancelled, _, _ = exact(program)
    assert fetched.to_dict() == whole
    assert cancelled.status == "cancelled"
    assert {row["kind"] for row in read().calls} == {"http"}


def test_a_retrieved_stream_comes_back_event_by_event(
    exact: Run, openai_server: Any, server_module: Any, whole: Any
) -> None:
    events = list(server_module.response_events(whole))
    openai_server.replies["GET /v1/responses/resp_test"] = server_module.sse_reply(events, named=True)

    def program() -> Any:
        return [event.to_dict() for event in sync_client(openai_server).responses.retrieve("resp_test", stream=True)]

    assert exact(program) == events


@trace_tool
def weather(city: str) -> str:
    return f"7 degrees in {city}"


def test_a_tool_loop_by_previous_response_replays(
    exact: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    def answer(received: Any) -> Any:
        body = received.json
        if body.get("previous_response_id"):
            message = server_module.output_message(body["input"][0]["output"])
            return server_module.json_reply(server_module.response(body, message))
        return server_module.json_reply(server_module.response(body, CALL, id="resp_first"))

    openai_server.replies[PATH] = answer

    def program() -> Any:
        client = sync_client(openai_server)
        first = client.responses.create(model="gpt-5", input="Oslo?")
        call = first.output[0]
        result = weather(json.loads(call.arguments)["city"])
        done = [{"type": "function_call_output", "call_id": call.call_id, "output": result}]
        return client.responses.create(model="gpt-5", input=done, previous_response_id=first.id).output_text

    assert exact(program) == "7 degrees in Oslo"
    assert [row["kind"] for row in read().calls] == ["llm", "tool", "llm"]
