# SPDX-License-Identifier: Apache-2.0
"""The openai boundary: what belongs to a call, attempts, every shape of the SDK's results, odd ends."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from typing import Any

import httpx
import httpx2
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI

from sftrace_otel import ReplayMismatchError

Run = Callable[..., Any]

pytestmark = [  # agents leave clients open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def ask(client: OpenAI, text: str) -> Any:
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def kinds(bundle: Any) -> list[str]:
    return [row["kind"] for row in bundle.calls]


def test_a_token_providers_own_request_is_no_attempt(recorded: Run, frozen: Run, openai_server: Any, read: Run) -> None:
    def token() -> str:
        return str(httpx.post(openai_server.url + "/json", data={"grant_type": "client_credentials"}).status_code)

    def program(text: str) -> Any:
        return ask(OpenAI(base_url=openai_server.base_url, api_key=token, max_retries=0), text).to_dict()

    want = recorded(program, "hi")
    assert sorted(kinds(read())) == ["http", "llm"]
    request = next(event for event in read().events if event.type == "llm_request")
    assert request.model == "m"
    assert frozen(program, "hi") == want
    with pytest.raises(ReplayMismatchError):
        frozen(program, "something else")


def test_a_log_handlers_request_during_the_call_is_no_attempt(
    recorded: Run, frozen: Run, openai_server: Any, read: Run
) -> None:
    class Shipper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "chat/completions" in record.getMessage():
                httpx.get(openai_server.url + "/json")

    log = logging.getLogger("httpx2")
    handler = Shipper()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        client = OpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0)
        want = recorded(lambda: ask(client, "hi").to_dict())
        assert frozen(lambda: ask(client, "hi").to_dict()) == want
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    attempts = [row for row in read().wire() if row["method"] == "POST"]
    assert [row["attempt"] for row in attempts] == [0]


def test_retries_are_attempts_of_one_call_served_in_order(
    recorded: Run, frozen: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    def program() -> Any:
        return ask(OpenAI(base_url=openai_server.base_url, api_key="k", max_retries=2), "hi").to_dict()

    openai_server.faults.append(server_module.Fault(status=429))
    openai_server.faults.append(server_module.Fault(status=500))
    want = recorded(program)
    rows = list(read().wire())
    assert [(row["attempt"], row["status"]) for row in rows] == [(0, 429), (1, 500), (2, 200)]
    assert kinds(read()) == ["llm"]
    openai_server.stop()
    assert frozen(program) == want


class Day(pydantic.BaseModel):
    name: str


def test_every_shape_of_the_sdks_results(recorded: Run, frozen: Run, openai_server: Any, server_module: Any) -> None:
    openai_server.answer = lambda body: server_module.text('{"name": "monday"}')

    def program() -> list[Any]:
        client = OpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0)
        messages: Any = [{"role": "user", "content": "hi"}]
        raw = client.chat.completions.with_raw_response.create(model="m", messages=messages)
        parsed = client.chat.completions.parse(model="m", messages=messages, response_format=Day)
        with client.chat.completions.with_streaming_response.create(model="m", messages=messages) as streaming:
            streamed = streaming.json()
        with client.chat.completions.stream(model="m", messages=messages) as events:
            final = events.get_final_completion().to_dict()
        return [raw.status_code, raw.parse().to_dict(), raw.headers["content-type"], parsed.choices[0].message.parsed,
                streamed, final]  # fmt: skip

    want = recorded(program)
    openai_server.stop()
    assert frozen(program) == want
    assert want[3] == Day(name="monday")


def test_a_stream_left_early_replays_to_the_same_place(
    recorded: Run, frozen: Run, openai_server: Any, read: Run
) -> None:
    def program() -> list[str]:
        client = OpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0)
        stream = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "one two three four"}], stream=True
        )
        seen = []
        for chunk in stream:
            seen.append(chunk.choices[0].delta.content or "")
            if len(seen) == 2:
                break
        stream.close()
        return seen

    want = recorded(program)
    openai_server.stop()
    assert frozen(program) == want
    assert len(want) == 2


def test_a_timed_out_call_times_out_again(recorded: Run, frozen: Run, openai_server: Any) -> None:
    openai_server.chunk_delay = 0.2

    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "a b c d e f g h"}], stream=True
            )
            seen: list[str] = []
            try:
                async with asyncio.timeout(0.3):
                    async for chunk in stream:
                        seen.append(chunk.choices[0].delta.content or "")
            except TimeoutError:
                seen.append("timed out")
            return seen

    want = recorded(lambda: asyncio.run(run()))
    openai_server.stop()
    assert want[-1] == "timed out"
    assert frozen(lambda: asyncio.run(run()))[-1] == "timed out"


def test_a_connection_made_takes_no_place_in_the_lineage(
    recorded: Run, frozen: Run, openai_server: Any, server_module: Any
) -> None:
    numbers = iter(range(10))
    openai_server.answer = lambda body: server_module.text(f"answer {next(numbers)}")

    async def one(client: Any, wait: float) -> Any:
        await asyncio.sleep(wait)
        done = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "same"}])
        return done.choices[0].message.content

    async def run(first: float, second: float) -> list[Any]:
        async with httpx2.AsyncClient() as plain:
            await plain.get(openai_server.url + "/json")
            async with AsyncOpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0) as client:
                return await asyncio.gather(one(client, first), one(client, second))

    want = recorded(lambda: asyncio.run(run(0, 0.1)))
    openai_server.stop()
    assert frozen(lambda: asyncio.run(run(0.1, 0))) == want


def test_a_task_that_a_finalizer_spawns_takes_no_place_in_the_lineage(
    recorded: Run, frozen: Run, openai_server: Any, server_module: Any
) -> None:
    numbers = iter(range(10))
    openai_server.answer = lambda body: server_module.text(f"answer {next(numbers)}")

    async def nothing() -> None:
        pass

    class Leaves:
        def __del__(self) -> None:
            asyncio.get_running_loop().create_task(nothing())

    async def one(client: Any, wait: float) -> Any:
        await asyncio.sleep(wait)
        done = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "same"}])
        return done.choices[0].message.content

    async def run(collected: bool, first: float, second: float) -> list[Any]:
        left = Leaves()
        if collected:
            del left
        async with AsyncOpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0) as client:
            return await asyncio.gather(one(client, first), one(client, second))

    want = recorded(lambda: asyncio.run(run(True, 0, 0.1)))
    openai_server.stop()
    assert frozen(lambda: asyncio.run(run(False, 0.1, 0))) == want


def test_a_task_factory_of_the_programs_own_works(recorded: Run, openai_server: Any) -> None:
    made: list[Any] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any) -> Any:
        made.append(coro)
        return asyncio.Task(coro, loop=loop)

    async def run() -> list[int]:
        asyncio.get_running_loop().set_task_factory(factory)

        async def one(number: int) -> int:
            return number

        return await asyncio.gather(one(1), one(2))

    assert recorded(lambda: asyncio.run(run())) == [1, 2]
    assert len(made) >= 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_closing_a_pending_call_from_another_context_is_quiet(
    recorded: Run, openai_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> str:
        async with AsyncOpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0) as client:
            pending = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
            contextvars.copy_context().run(pending.send, None)
            pending.close()
            return "closed"

    assert recorded(lambda: asyncio.run(run())) == "closed"
    assert "Failed to detach" not in caplog.text
