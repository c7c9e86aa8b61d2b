# SPDX-License-Identifier: Apache-2.0
"""The twelve behaviours on which recorders were compared: recorded against a real server, replayed with it stopped.

In each the replayed program must give what the recorded one gave, although calls start in another order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from sftrace_otel import ReplayError, ReplayMismatchError, ReplaySession, record, trace_tool

Run = Callable[..., Any]

pytestmark = [  # agents leave clients open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="test-key", max_retries=0)


def aclient(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="test-key", max_retries=0)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


bodies_run: list[str] = []


@trace_tool
def lookup(city: str, unit: str = "C") -> dict[str, Any]:
    bodies_run.append(city)
    return {"city": city, "unit": unit, "degrees": len(city)}


@trace_tool
async def alookup(city: str, wait: float = 0.0) -> dict[str, Any]:
    bodies_run.append(city)
    await asyncio.sleep(wait)
    return {"city": city, "nr": len(bodies_run)}


@trace_tool
def refuse(code: int) -> None:
    raise ValueError(f"bad code {code}")


@pytest.fixture
def same(recorded: Run, frozen: Run, openai_server: Any) -> Callable[[Callable[..., Any], Callable[..., Any]], Any]:
    """Record `first`, stop the server, replay `second` (the same program on another schedule): equal, no tool ran."""

    def check(first: Callable[[str], Any], second: Callable[[str], Any] | None = None) -> Any:
        want = recorded(first, openai_server.url)
        openai_server.stop()
        bodies_run.clear()
        got = frozen(second or first, openai_server.url)
        assert got == want
        assert bodies_run == []
        return got

    return check


def test_loop_of_calls_and_tools(same: Run) -> None:
    def program(url: str) -> list[Any]:
        messages: list[Any] = user("start")
        seen = []
        for city in ("Oslo", "Rome", "Oslo"):
            answer = client(url).chat.completions.create(model="m", messages=messages).choices[0].message.content
            messages += [{"role": "assistant", "content": answer}, *user(json.dumps(lookup(city)))]
            seen.append(answer)
        return seen

    assert len(same(program)) == 3


def test_stream_sync(same: Run) -> None:
    def program(url: str) -> list[str]:
        stream = client(url).chat.completions.create(model="m", messages=user("one two three"), stream=True)
        return [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]

    assert len(same(program)) > 2


def test_stream_async(same: Run) -> None:
    async def run(url: str) -> list[str]:
        async with aclient(url) as model:
            stream = await model.chat.completions.create(model="m", messages=user("one two three"), stream=True)
            return [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]

    assert len(same(lambda url: asyncio.run(run(url)))) > 2


def test_gather_of_different_calls_in_flipped_order(same: Run) -> None:
    async def ask(url: str, text: str, wait: float) -> str | None:
        await asyncio.sleep(wait)
        async with aclient(url) as model:
            done = await model.chat.completions.create(model="m", messages=user(text))
        return done.choices[0].message.content

    def program(first: float, second: float) -> Callable[[str], Any]:
        async def run(url: str) -> list[Any]:
            return await asyncio.gather(ask(url, "a", first), ask(url, "b", second))

        return lambda url: asyncio.run(run(url))

    same(program(0, 0.02), program(0.02, 0))


def test_two_equal_calls_in_flight_get_their_own_answers(
    recorded: Run, frozen: Run, openai_server: Any, server_module: Any
) -> None:
    numbers = iter(range(10))
    openai_server.answer = lambda body: server_module.text(f"answer {next(numbers)}")

    async def ask(url: str, wait: float) -> str | None:
        await asyncio.sleep(wait)
        async with aclient(url) as model:
            done = await model.chat.completions.create(model="m", messages=user("the same"))
        return done.choices[0].message.content

    async def run(url: str, first: float, second: float) -> list[Any]:
        return await asyncio.gather(ask(url, first), ask(url, second))

    want = recorded(lambda url: asyncio.run(run(url, 0, 0.05)), openai_server.url)
    openai_server.stop()
    assert want[0] != want[1]
    assert frozen(lambda url: asyncio.run(run(url, 0.05, 0)), openai_server.url) == want


def test_async_tools_in_flipped_order(same: Run) -> None:
    async def pair(first: float, second: float) -> list[Any]:
        async def tool(wait: float) -> Any:
            await asyncio.sleep(wait)
            return await alookup("Oslo")

        return await asyncio.gather(tool(first), tool(second))

    same(lambda _: asyncio.run(pair(0, 0.02)), lambda _: asyncio.run(pair(0.02, 0)))


def test_tools_in_a_thread_pool(same: Run) -> None:
    def program(_: str) -> list[Any]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lookup, [f"city {number}" for number in range(12)]))

    assert len(same(program)) == 12


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
def test_caught_error_of_the_model(
    status: int, recorded: Run, frozen: Run, openai_server: Any, server_module: Any
) -> None:
    def program(url: str) -> list[Any]:
        try:
            client(url).chat.completions.create(model="m", messages=user("x"))
        except openai.APIStatusError as error:
            return [type(error).__name__, error.status_code, str(error), error.body]
        raise AssertionError("no error")

    openai_server.faults.append(server_module.Fault(status=status))
    want = recorded(program, openai_server.url)
    openai_server.stop()
    assert frozen(program, openai_server.url) == want
    assert want[1] == status


def test_caught_error_of_a_tool(same: Run) -> None:
    def program(_: str) -> list[Any]:
        try:
            refuse(7)
        except ValueError as error:
            return [str(error), list(error.args), type(error).__name__]
        raise AssertionError("no error")

    assert same(program) == ["bad code 7", ["bad code 7"], "ValueError"]


def test_raw_httpx(same: Run) -> None:
    def program(url: str) -> list[Any]:
        answer = httpx.get(f"{url}/json?item=1")
        return [answer.status_code, answer.json(), answer.content.decode(), answer.headers["content-type"]]

    same(program)


def test_an_agent_that_raises_leaves_a_failed_run_and_raises_again(
    recorded: Run, frozen: Run, openai_server: Any, read: Run
) -> None:
    def program(url: str) -> None:
        client(url).chat.completions.create(model="m", messages=user("x"))
        raise KeyError("price")

    with pytest.raises(KeyError):
        recorded(program, openai_server.url)
    openai_server.stop()
    bundle = read()
    assert bundle.manifest.status == "failed"
    assert bundle.manifest.failure.type == "KeyError"
    with pytest.raises(KeyError):
        frozen(program, openai_server.url)


def test_a_failure_caught_outside_the_block_is_the_same_failure_under_replay(
    recorded: Run, bundle_path: Any, openai_server: Any
) -> None:
    def program() -> None:
        lookup("Oslo")
        raise LookupError("price")

    with pytest.raises(LookupError):
        recorded(program)
    with ReplaySession.from_trace(bundle_path) as replay, contextlib.suppress(LookupError), record("agent"):
        program()
    report = replay.report()
    assert report.exit_code == 0, report.text()


def test_secrets_do_not_reach_the_bundle(
    recorded: Run, frozen: Run, openai_server: Any, bundle_path: Any, server_module: Any
) -> None:
    key = "sk-" + "proj-" + "Zm9vYmFyYmF6cXV4" * 3
    token = "ghp_" + "a1B2c3D4e5F6" * 3
    openai_server.answer = lambda body: server_module.text(f"your token is {token}")

    def program(url: str) -> list[Any]:
        model = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        first = model.chat.completions.create(model="m", messages=user(f"use {key}")).choices[0].message.content
        answer = httpx.get(f"{url}/json?api_key={key}&item=1", headers={"x-api-key": key, "cookie": f"sid={token}"})
        lookup(city=f"Bearer {token}")
        return [first, answer.status_code]

    want = recorded(program, openai_server.url)
    assert token in want[0]
    stored = b"".join(path.read_bytes() for path in bundle_path.rglob("*") if path.is_file())
    for secret in (key, token):
        assert secret.encode() not in stored
    openai_server.stop()
    assert frozen(program, openai_server.url)[1] == 200


def test_a_changed_prompt_diverges_with_pointer_and_both_values(recorded: Run, frozen: Run, openai_server: Any) -> None:
    def program(url: str, text: str) -> Any:
        return client(url).chat.completions.create(model="m", messages=user(text)).choices[0].message.content

    recorded(program, openai_server.url, "first text")
    openai_server.stop()
    with pytest.raises(ReplayMismatchError) as raised:
        frozen(program, openai_server.url, "other text")
    text = str(raised.value)
    assert "/messages/0/content" in text and "first text" in text and "other text" in text


def test_a_miss_stays_although_the_program_catches_everything(recorded: Run, frozen: Run, openai_server: Any) -> None:
    def program(url: str, text: str) -> str:
        try:
            return str(client(url).chat.completions.create(model="m", messages=user(text)))
        except Exception:
            return "caught"

    recorded(program, openai_server.url, "first")
    with pytest.raises(ReplayError):
        frozen(program, openai_server.url, "other")
    assert len(openai_server.requests) == 1


def test_the_sdk_does_not_retry_a_miss(
    recorded: Run, frozen: Run, openai_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(url: str, text: str) -> Any:
        model = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=5)
        return model.chat.completions.create(model="m", messages=user(text)).choices[0].message.content

    def no_sleep(seconds: float) -> None:
        raise AssertionError("the SDK waited to try again")

    recorded(program, openai_server.url, "first")
    monkeypatch.setattr("time.sleep", no_sleep)
    with pytest.raises(ReplayMismatchError):
        frozen(program, openai_server.url, "other")
