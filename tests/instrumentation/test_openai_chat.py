# SPDX-License-Identifier: Apache-2.0
"""Chat completions, completions and embeddings through the openai SDK: recorded, and replayed as the same objects."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI

Run = Callable[..., Any]

pytestmark = [  # agents leave clients open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MESSAGES: Any = [{"role": "user", "content": "What about Oslo?"}]
CHUNK = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-5-2025-08-07"}


def deltas(*parts: dict[str, Any], index: int = 0, finish: str = "stop") -> list[dict[str, Any]]:
    """Chunks of one choice."""
    choices = [{"index": index, "delta": part, "finish_reason": None} for part in parts]
    choices.append({"index": index, "delta": {}, "finish_reason": finish})
    return [{**CHUNK, "choices": [choice]} for choice in choices]


def events_of(bundle: Any, kind: str) -> list[Any]:
    return [event for event in bundle.events if event.type == kind]


def sync_client(server: Any, **members: Any) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key="k", max_retries=0, **members)


def async_client(server: Any, **members: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0, **members)


# --- plain ------------------------------------------------------------------------------------------------------------


def function(name: str | None = None, arguments: str = "", **members: Any) -> dict[str, Any]:
    """A tool call, or a part of one."""
    named = {} if name is None else {"name": name}
    return {**members, "function": {**named, "arguments": arguments}}


def whole_answer() -> dict[str, Any]:
    """An answer with all that an answer may hold, and members that no SDK knows yet."""
    citation = {"url": "https://a.example/x", "title": "X", "start_index": 0, "end_index": 6}
    message = {
        "role": "assistant",
        "content": "Fjords. 🏔",
        "refusal": None,
        "annotations": [{"type": "url_citation", "url_citation": citation}],
        "audio": {
            "id": "audio_1",
            "data": base64.b64encode(bytes(range(256))).decode(),
            "expires_at": 2,
            "transcript": "fjords",
        },
        "tool_calls": [function("f", '{"a":  1.0, "b":1e2}', id="call_1", type="function")],
        "future_member": {"deep": [1, 2.50, None]},
    }
    logprob = {"token": "F", "logprob": -0.0001, "bytes": [70], "top_logprobs": []}
    refusal = {"role": "assistant", "content": None, "refusal": "No."}
    return {
        "id": "chatcmpl-CBxyzAbCdEfGhIjKlMnOpQrStUvWx",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "gpt-5-2025-08-07",
        "service_tier": "default",
        "system_fingerprint": "fp_44709d6fcb",
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls",
                "logprobs": {"content": [logprob], "refusal": None},
            },
            {"index": 1, "message": refusal, "finish_reason": "stop", "logprobs": None},
        ],
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "total_tokens": 120,
            "prompt_tokens_details": {"cached_tokens": 64, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 7, "audio_tokens": 0},
        },
    }


def test_a_chat_completion_comes_back_with_every_member(
    exact: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    answer = whole_answer()
    openai_server.replies["POST /v1/chat/completions"] = server_module.json_reply(answer)

    def program() -> Any:
        done = sync_client(openai_server).chat.completions.create(model="gpt-5", messages=MESSAGES, n=2)
        return [done, done.choices[0].message.model_extra, done._request_id]

    got = exact(program)
    assert got[0].to_dict() == answer
    [response] = events_of(read(), "llm_response")
    assert response.output == answer
    assert (response.model, response.prompt_tokens, response.completion_tokens, response.total_tokens) == (
        "gpt-5-2025-08-07", 100, 20, 120,
    )  # fmt: skip


def test_an_async_chat_completion_comes_back_with_every_member(
    exact: Run, openai_server: Any, server_module: Any
) -> None:
    answer = whole_answer()
    openai_server.replies["POST /v1/chat/completions"] = server_module.json_reply(answer)

    async def program() -> Any:
        async with async_client(openai_server) as client:
            return await client.chat.completions.create(model="gpt-5", messages=MESSAGES)

    assert exact(lambda: asyncio.run(program())).to_dict() == answer


# --- streamed ---------------------------------------------------------------------------------------------------------


def streamed(server: Any, **members: Any) -> list[Any]:
    client = sync_client(server)
    with client.chat.completions.create(model="gpt-5", messages=MESSAGES, stream=True, **members) as stream:
        return list(stream)


async def astreamed(server: Any, **members: Any) -> list[Any]:
    async with async_client(server) as client:
        stream = await client.chat.completions.create(model="gpt-5", messages=MESSAGES, stream=True, **members)
        return [chunk async for chunk in stream]


def rich_stream() -> list[dict[str, Any]]:
    logprob = {"token": "F", "logprob": -0.5, "bytes": [70], "top_logprobs": []}
    first = deltas({"role": "assistant", "content": ""}, {"content": "Fjo"}, {"content": "rds"})
    first[1]["choices"][0]["logprobs"] = {"content": [logprob], "refusal": None}
    first[2]["choices"][0]["logprobs"] = {"content": [{**logprob, "token": "r"}], "refusal": None}
    second = deltas({"role": "assistant", "refusal": "I can"}, {"refusal": "not."}, index=1)
    opening = function("f", index=0, id="call_a", type="function")
    another = function("g", "{", index=1, id="call_b", type="function")
    calls = deltas(
        {"role": "assistant", "content": None, "tool_calls": [opening]},
        {"tool_calls": [function(None, '{"x": ', index=0), another]},
        {"tool_calls": [function(None, '"y":1.0}', index=1), function(None, "1.0}", index=0)]},
        index=2,
        finish="tool_calls",
    )
    audio = deltas(
        {"role": "assistant", "audio": {"id": "audio_1", "transcript": "He"}},
        {"audio": {"id": "audio_1", "data": "AAEC", "transcript": "llo"}},
        {"audio": {"id": "audio_1", "data": "AwQF", "expires_at": 5}},
        {"annotations": [{"type": "url_citation", "url_citation": {"url": "https://a.example"}}]},
        {"reasoning_content": "think"},
        {"reasoning_content": "ing", "future_text": "new"},
        {"future_text": " word"},
        index=3,
    )
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    last = {**CHUNK, "choices": [], "usage": usage, "service_tier": "flex", "system_fingerprint": "fp_1"}
    return [*first, *second, *calls, *audio, last]


def assert_rich(output: Any) -> None:
    """The one completion that `rich_stream` amounts to."""
    assert output["object"] == "chat.completion"
    assert output["usage"]["total_tokens"] == 12
    assert (output["service_tier"], output["system_fingerprint"]) == ("flex", "fp_1")
    text, refusal, calls, audio = output["choices"]
    assert text["message"] == {"role": "assistant", "content": "Fjords"}
    assert [item["token"] for item in text["logprobs"]["content"]] == ["F", "r"]
    assert refusal["message"]["refusal"] == "I cannot."
    assert calls["finish_reason"] == "tool_calls"
    assert calls["message"]["tool_calls"] == [
        {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1.0}'}},
        {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": '{"y":1.0}'}},
    ]
    assert audio["message"] == {
        "role": "assistant",
        "content": None,
        "audio": {"id": "audio_1", "transcript": "Hello", "data": "AAECAwQF", "expires_at": 5},
        "annotations": [{"type": "url_citation", "url_citation": {"url": "https://a.example"}}],
        "reasoning_content": "thinking",
        "future_text": "new word",
    }


def test_a_stream_comes_back_chunk_by_chunk_and_is_stored_as_one_completion(
    exact: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    chunks = rich_stream()
    openai_server.replies["POST /v1/chat/completions"] = server_module.sse_reply(chunks, done=True)
    got = exact(streamed, openai_server)
    assert [chunk.to_dict() for chunk in got] == chunks
    [response] = events_of(read(), "llm_response")
    assert_rich(response.output)
    [row] = read().calls
    assert row["end"] == "finished"


def test_an_async_stream_comes_back_chunk_by_chunk_and_is_stored_as_one_completion(
    exact: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    chunks = rich_stream()
    openai_server.replies["POST /v1/chat/completions"] = server_module.sse_reply(chunks, done=True)
    got = exact(lambda: asyncio.run(astreamed(openai_server)))
    assert [chunk.to_dict() for chunk in got] == chunks
    [response] = events_of(read(), "llm_response")
    assert_rich(response.output)
    [row] = read().calls
    assert row["end"] == "finished"


@pytest.mark.skipif(
    importlib.util.find_spec("openai._streaming_cleanup") is None, reason="this openai waits for the end of the body"
)
def test_an_async_stream_whose_server_says_nothing_after_done_is_finished(
    exact: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    reply = server_module.sse_reply(deltas({"content": "x"}), done=True, hold=True)
    openai_server.replies["POST /v1/chat/completions"] = reply
    assert len(exact(lambda: asyncio.run(astreamed(openai_server)))) == 2
    [row] = read().calls
    assert row["end"] == "finished"
    assert not events_of(read(), "error")


@pytest.mark.parametrize(
    ("parts", "want"),
    [
        pytest.param(
            [function("f", "{}", id="a"), function("g", "[]", id="b")],
            [("a", "f", "{}"), ("b", "g", "[]")],
            id="no index",
        ),
        pytest.param(
            [
                function("f", "{}", id="a", index=0),
                function("g", "[", id="b", index=0),
                function(None, "]", index=0),
            ],
            [("a", "f", "{}"), ("b", "g", "[]")],
            id="one index for all",
        ),
        pytest.param(
            [
                function("f", "{", id="a", index=0),
                function("", "}", id="", index=0),
                function("f", " ", id="a", index=0),
            ],
            [("a", "f", "{} ")],
            id="id and name again",
        ),
    ],
)
def test_tool_calls_of_other_servers_are_told_apart(
    recorded: Run, openai_server: Any, server_module: Any, read: Run, parts: Sequence[Any], want: Any
) -> None:
    chunks = deltas(*({"tool_calls": [part]} for part in parts), finish="tool_calls")
    openai_server.replies["POST /v1/chat/completions"] = server_module.sse_reply(chunks, done=True)
    recorded(streamed, openai_server)
    [response] = events_of(read(), "llm_response")
    calls = response.output["choices"][0]["message"]["tool_calls"]
    assert [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls] == want


# --- helpers ----------------------------------------------------------------------------------------------------------


class Place(pydantic.BaseModel):
    name: str


def chat_of(client: Any) -> Any:
    """`chat.completions` with its helpers: they were under `beta` in 1.x."""
    return client.chat.completions if hasattr(client.chat.completions, "parse") else client.beta.chat.completions


def test_parse_gives_the_programs_own_class(exact: Run, openai_server: Any, server_module: Any, read: Run) -> None:
    openai_server.answer = lambda body: server_module.text('{"name": "Oslo"}')

    def program() -> Any:
        done = chat_of(sync_client(openai_server)).parse(model="m", messages=MESSAGES, response_format=Place)
        return done.choices[0].message.parsed

    assert exact(program) == Place(name="Oslo")
    [request] = events_of(read(), "llm_request")
    assert request.input["request"]["response_format"]["json_schema"]["name"] == "Place"


def test_async_parse_gives_the_programs_own_class(exact: Run, openai_server: Any, server_module: Any) -> None:
    openai_server.answer = lambda body: server_module.text('{"name": "Oslo"}')

    async def program() -> Any:
        async with async_client(openai_server) as client:
            done = await chat_of(client).parse(model="m", messages=MESSAGES, response_format=Place)
            return done.choices[0].message.parsed

    assert exact(lambda: asyncio.run(program())) == Place(name="Oslo")


def test_an_answer_that_parse_refuses_is_stored_and_refused_again(
    exact: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    answer = server_module.completion({"model": "m", "messages": MESSAGES}, server_module.text('{"na'))
    answer["choices"][0]["finish_reason"] = "length"
    openai_server.replies["POST /v1/chat/completions"] = server_module.json_reply(answer)

    def program() -> Any:
        try:
            chat_of(sync_client(openai_server)).parse(model="m", messages=MESSAGES, response_format=Place)
        except openai.LengthFinishReasonError as error:
            return str(error)

    assert "length limit" in exact(program)
    [response] = events_of(read(), "llm_response")
    assert response.output == answer
    [error] = events_of(read(), "error")
    assert error.error_type == "LengthFinishReasonError"


def test_the_stream_helper_gives_the_same_events(exact: Run, openai_server: Any, server_module: Any) -> None:
    calls = (("call_1", "f", {"a": 1}), ("call_2", "g", {"b": [2, 3]}))
    openai_server.answer = lambda body: {**server_module.tool_calls(*calls), "content": "one two"}

    def program() -> Any:
        with chat_of(sync_client(openai_server)).stream(model="m", messages=MESSAGES) as stream:
            seen = [(event.type, event.to_dict() if hasattr(event, "to_dict") else None) for event in stream]
            return [seen, stream.get_final_completion().to_dict()]

    seen, final = exact(program)
    assert {"chunk", "content.delta", "content.done", "tool_calls.function.arguments.done"} <= {
        kind for kind, _ in seen
    }
    assert json.loads(final["choices"][0]["message"]["tool_calls"][1]["function"]["arguments"]) == {"b": [2, 3]}


def test_the_async_stream_helper_gives_the_same_events(exact: Run, openai_server: Any, server_module: Any) -> None:
    openai_server.answer = lambda body: server_module.text('{"name": "Oslo"}')

    async def program() -> Any:
        async with async_client(openai_server) as client:
            manager = chat_of(client).stream(model="m", messages=MESSAGES, response_format=Place)
            async with manager as stream:
                seen = [event.type async for event in stream]
                return [seen, (await stream.get_final_completion()).choices[0].message.parsed]

    seen, parsed = exact(lambda: asyncio.run(program()))
    assert seen[-1] in ("content.done", "chunk")
    assert parsed == Place(name="Oslo")


# --- completions and embeddings ---------------------------------------------------------------------------------------


def test_legacy_completions_plain_and_streamed(exact: Run, openai_server: Any, server_module: Any, read: Run) -> None:
    base = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "gpt-3.5-turbo-instruct"}

    def answer(received: Any) -> Any:
        pieces = [("Fjo", 0, None), ("oth", 1, None), ("rds", 0, "stop"), ("er", 1, "length")]
        choices = [{"text": t, "index": i, "finish_reason": f, "logprobs": {"tokens": [t]}} for t, i, f in pieces]
        if received.json.get("stream"):
            return server_module.sse_reply([{**base, "choices": [choice]} for choice in choices], done=True)
        whole = {"text": "Fjords", "index": 0, "finish_reason": "stop", "logprobs": None}
        return server_module.json_reply({**base, "choices": [whole]})

    openai_server.replies["POST /v1/completions"] = answer

    def program() -> Any:
        client = sync_client(openai_server)
        plain = client.completions.create(model="gpt-3.5-turbo-instruct", prompt="Oslo has")
        chunks = client.completions.create(model="gpt-3.5-turbo-instruct", prompt="Oslo has", n=2, stream=True)
        return [plain, [chunk.choices[0].text for chunk in chunks]]

    plain, texts = exact(program)
    assert (plain.choices[0].text, texts) == ("Fjords", ["Fjo", "oth", "rds", "er"])
    requests, responses = events_of(read(), "llm_request"), events_of(read(), "llm_response")
    assert [request.input["method"] for request in requests] == ["completions.create"] * 2
    first, second = responses[1].output["choices"]
    assert (first["text"], first["logprobs"]["tokens"], first["finish_reason"]) == ("Fjords", ["Fjo", "rds"], "stop")
    assert (second["text"], second["finish_reason"]) == ("other", "length")


VECTORS = [[0.1, -2.5, 3e-05, 1.0], [float(number) / 7 for number in range(256)]]


def embeddings(server_module: Any) -> Any:
    """Answers embeddings in the encoding that is asked for."""

    def answer(received: Any) -> Any:
        def encoded(vector: list[float]) -> Any:
            if received.json.get("encoding_format") == "base64":
                return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
            return vector

        data = [{"object": "embedding", "index": at, "embedding": encoded(vector)} for at, vector in enumerate(VECTORS)]
        usage = {"prompt_tokens": 8, "total_tokens": 8}
        return server_module.json_reply(
            {"object": "list", "data": data, "model": "text-embedding-3-small", "usage": usage}
        )

    return answer


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_embeddings_come_back_bit_by_bit(
    exact: Run, openai_server: Any, server_module: Any, read: Run, encoding: str | None
) -> None:
    openai_server.replies["POST /v1/embeddings"] = embeddings(server_module)
    members: Any = {} if encoding is None else {"encoding_format": encoding}

    def program() -> Any:
        return sync_client(openai_server).embeddings.create(
            model="text-embedding-3-small", input=["a", "b"], dimensions=256, **members
        )

    got = exact(program)
    if encoding == "float":
        assert [item.embedding for item in got.data] == VECTORS
    [request] = events_of(read(), "llm_request")
    if encoding is None and "encoding_format" in request.input["request"]:  # the SDK asks for base64 and decodes it
        assert got.data[1].embedding == list(struct.unpack("<256f", struct.pack("<256f", *VECTORS[1])))
    assert (request.input["method"], request.input["request"]["dimensions"]) == ("embeddings.create", 256)
    [response] = events_of(read(), "llm_response")
    assert (response.prompt_tokens, response.completion_tokens, response.total_tokens) == (8, None, 8)


def test_async_embeddings_come_back_bit_by_bit(exact: Run, openai_server: Any, server_module: Any) -> None:
    openai_server.replies["POST /v1/embeddings"] = embeddings(server_module)

    async def program() -> Any:
        async with async_client(openai_server) as client:
            return await client.embeddings.create(model="text-embedding-3-small", input="a")

    assert len(exact(lambda: asyncio.run(program())).data[1].embedding) == 256
