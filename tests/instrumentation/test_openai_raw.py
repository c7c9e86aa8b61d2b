# SPDX-License-Identifier: Apache-2.0
"""Raw and streaming responses of the openai SDK: read whole, in lines, in pieces, in part, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from sftrace_otel import ReplayExhaustedError

Run = Callable[..., Any]

pytestmark = [  # agents leave clients open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ASK: Any = {"model": "m", "messages": [{"role": "user", "content": "one two three four five"}]}


def sync_client(server: Any) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key="k", max_retries=0)


def async_client(server: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0)


def head(response: Any) -> list[Any]:
    """What a program sees of a raw response beside its body."""
    return [response.status_code, response.headers["content-type"], response.http_version, response.retries_taken]


def test_a_raw_response(exact: Run, openai_server: Any) -> None:
    def program() -> list[Any]:
        raw = sync_client(openai_server).chat.completions.with_raw_response.create(**ASK)
        return [*head(raw), raw.parse(), raw.content, type(raw).__name__]

    assert exact(program)[0] == 200


def test_an_async_raw_response(exact: Run, openai_server: Any) -> None:
    async def program() -> list[Any]:
        async with async_client(openai_server) as client:
            raw = await client.chat.completions.with_raw_response.create(**ASK)
            return [*head(raw), raw.parse(), raw.content, type(raw).__name__]

    assert exact(lambda: asyncio.run(program()))[0] == 200


def test_a_stream_in_a_raw_response(exact: Run, openai_server: Any) -> None:
    def program() -> list[Any]:
        raw = sync_client(openai_server).chat.completions.with_raw_response.create(**ASK, stream=True)
        return [*head(raw), [chunk.to_dict() for chunk in raw.parse()]]

    assert len(exact(program)[-1]) == 8


def test_a_stream_in_an_async_raw_response(exact: Run, openai_server: Any) -> None:
    async def program() -> list[Any]:
        async with async_client(openai_server) as client:
            raw = await client.chat.completions.with_raw_response.create(**ASK, stream=True)
            return [*head(raw), [chunk.to_dict() async for chunk in raw.parse()]]

    assert len(exact(lambda: asyncio.run(program()))[-1]) == 8


READERS: dict[str, Callable[[Any], Any]] = {
    "read": lambda response: response.read(),
    "text": lambda response: response.text(),
    "json": lambda response: response.json(),
    "parse": lambda response: response.parse().to_dict(),
    "lines": lambda response: list(response.iter_lines()),
    "bytes": lambda response: list(response.iter_bytes()),
    "bytes of a size": lambda response: list(response.iter_bytes(7)),
    "text in pieces": lambda response: list(response.iter_text()),
    "raw": lambda response: list(response.http_response.iter_raw()),
}


@pytest.mark.parametrize("how", READERS)
def test_a_streaming_response_of_a_plain_answer(exact: Run, openai_server: Any, read: Run, how: str) -> None:
    def program() -> list[Any]:
        with sync_client(openai_server).chat.completions.with_streaming_response.create(**ASK) as response:
            return [*head(response), READERS[how](response)]

    exact(program)
    [row] = read().calls
    assert row["end"] == "finished"
    assert [event.type for event in read().events].count("llm_response") == 1


@pytest.mark.parametrize("how", ["read", "lines", "bytes", "raw"])
def test_a_streaming_response_of_a_stream(exact: Run, openai_server: Any, read: Run, how: str) -> None:
    def program() -> list[Any]:
        create = sync_client(openai_server).chat.completions.with_streaming_response.create
        with create(**ASK, stream=True) as response:
            return [*head(response), READERS[how](response)]

    exact(program)
    response = next(event for event in read().events if event.type == "llm_response")
    assert response.output["choices"][0]["message"]["content"] == "1: one two three four five"


async def collected(items: Any) -> list[Any]:
    return [item async for item in items]


ASYNC_READERS: dict[str, Callable[[Any], Any]] = {
    "read": lambda response: response.read(),
    "json": lambda response: response.json(),
    "lines": lambda response: collected(response.iter_lines()),
    "bytes": lambda response: collected(response.iter_bytes(7)),
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("how", ["read", "lines", "bytes"])
def test_an_async_streaming_response(exact: Run, openai_server: Any, read: Run, how: str, stream: bool) -> None:
    async def program() -> list[Any]:
        async with async_client(openai_server) as client:
            create = client.chat.completions.with_streaming_response.create
            async with create(**ASK, stream=stream) as response:
                return [*head(response), await ASYNC_READERS[how](response)]

    exact(lambda: asyncio.run(program()))
    [row] = read().calls
    assert row["end"] == "finished"


@pytest.mark.parametrize("lines", [0, 1, 5])
def test_a_streaming_response_left_early_replays_to_there_and_no_further(
    exact: Run, frozen: Run, openai_server: Any, server_module: Any, read: Run, lines: int
) -> None:
    chunks = [{"id": "c", "object": "chat.completion.chunk", "choices": []}] * 3
    openai_server.replies["POST /v1/chat/completions"] = server_module.sse_reply(chunks, hold=True)

    def program(count: int = lines) -> list[str]:
        create = sync_client(openai_server).chat.completions.with_streaming_response.create
        seen: list[str] = []
        with create(**ASK, stream=True) as response:
            if count:
                for line in response.iter_lines():
                    seen.append(line)
                    if len(seen) == count:
                        break
        return seen

    assert len(exact(program)) == lines
    [row] = read().calls
    assert row["end"] == "closed"
    with pytest.raises(ReplayExhaustedError, match="asks for more"):
        frozen(program, 100)


@pytest.mark.parametrize("lines", [0, 3])
def test_an_async_streaming_response_left_early_replays_to_there(
    exact: Run, openai_server: Any, server_module: Any, read: Run, lines: int
) -> None:
    chunks = [{"id": "c", "object": "chat.completion.chunk", "choices": []}] * 3
    openai_server.replies["POST /v1/chat/completions"] = server_module.sse_reply(chunks, hold=True)

    async def program() -> list[str]:
        seen: list[str] = []
        create = async_client(openai_server).chat.completions.with_streaming_response.create
        async with create(**ASK, stream=True) as response:
            if lines:
                async for line in response.iter_lines():
                    seen.append(line)
                    if len(seen) == lines:
                        break
        return seen

    assert len(exact(lambda: asyncio.run(program()))) == lines
    [row] = read().calls
    assert row["end"] == "closed"
