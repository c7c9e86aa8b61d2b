# SPDX-License-Identifier: Apache-2.0
"""A miss under an SDK that tries again: one typed error reaches the program, at once, and stays.

Sync, async and streaming apart, raw answers too; `tests/matrix` runs this with openai 1, 2 and 3.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from sftrace_otel import ReplayMismatchError, ReplaySession
from sftrace_otel.instrumentation import replaying

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def body(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=5)


def aclient(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=5)


def by_create(url: str, text: str) -> Any:
    return client(url).chat.completions.create(**body(text)).choices[0].message.content


def by_stream(url: str, text: str) -> Any:
    chunks = list(client(url).chat.completions.create(**body(text), stream=True))
    return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]


def by_raw_response(url: str, text: str) -> Any:
    return client(url).chat.completions.with_raw_response.create(**body(text)).parse().choices[0].message.content


def by_streaming_response(url: str, text: str) -> Any:
    with client(url).chat.completions.with_streaming_response.create(**body(text)) as answer:
        return answer.parse().choices[0].message.content


def by_post(url: str, text: str) -> Any:
    return client(url).post("/chat/completions", body=body(text), cast_to=object)


def by_async_create(url: str, text: str) -> Any:
    async def ask() -> Any:
        async with aclient(url) as model:
            return (await model.chat.completions.create(**body(text))).choices[0].message.content

    return asyncio.run(ask())


def by_async_stream(url: str, text: str) -> Any:
    async def ask() -> Any:
        async with aclient(url) as model:
            stream = await model.chat.completions.create(**body(text), stream=True)
            return [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]

    return asyncio.run(ask())


WAYS: tuple[Callable[[str, str], Any], ...] = (
    by_create, by_stream, by_raw_response, by_streaming_response, by_post, by_async_create, by_async_stream,
)  # fmt: skip


@pytest.mark.parametrize("ask", WAYS)
def test_one_typed_error_at_once_and_again(
    ask: Callable[[str, str], Any],
    recorded: Callable[..., Any],
    frozen: Callable[..., Any],
    openai_server: Any,
    bundle_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want = recorded(ask, openai_server.url, "one two")
    received = len(openai_server.requests)
    assert frozen(ask, openai_server.url, "one two") == want

    def no_waiting(seconds: float) -> None:
        raise AssertionError("the SDK waited to try again")

    asked: list[str] = []
    decide = replaying.Active.decide

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(args[0])
        return decide(self, *args, **kwargs)

    monkeypatch.setattr(replaying.Active, "decide", counted)
    monkeypatch.setattr(time, "sleep", no_waiting)
    errors: list[ReplayMismatchError] = []
    with pytest.raises(ReplayMismatchError), ReplaySession.from_trace(bundle_path) as replay:
        for text in ("other", "one two"):  # the second one is in the recording, and comes too late
            try:
                ask(openai_server.url, text)
            except ReplayMismatchError as error:
                errors.append(error)
            assert len(asked) == len(errors)
    assert [error.code for error in errors] == ["input_differs"] * 2
    assert all(error.__cause__ is None and error.miss is not None for error in errors)
    assert errors[0] is not errors[1]
    assert replay.report().exit_code == 1
    assert len(openai_server.requests) == received


@pytest.mark.parametrize("ask", WAYS)
def test_a_program_that_catches_everything_cannot_hide_it(
    ask: Callable[[str, str], Any], recorded: Callable[..., Any], openai_server: Any, bundle_path: Path
) -> None:
    recorded(ask, openai_server.url, "one two")
    received = len(openai_server.requests)
    with pytest.raises(ReplayMismatchError) as raised, ReplaySession.from_trace(bundle_path) as replay:
        for text in ("other", "one two"):
            try:
                ask(openai_server.url, text)
            except Exception:
                pass
    assert raised.value.code == "input_differs" and "/messages/0/content" in str(raised.value)
    found = replay.report().to_dict()
    assert found["verdict"] == "diverged" and found["diverged"]["reason"] == "input_differs"  # type: ignore[index,call-overload]
    assert [call["step"] for call in found["unused"]] == [1]  # type: ignore[union-attr,index,call-overload]
    assert len(openai_server.requests) == received
