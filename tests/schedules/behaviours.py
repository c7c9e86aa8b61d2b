# SPDX-License-Identifier: Apache-2.0
"""The behaviours on which recorders were compared, as programs whose schedule is drawn at random.

Each takes the server's origin and gives a result as JSON, the same under any schedule. What the program asks for is
fixed; which task or thread goes on next is not: `Shuffled` runs the ready callbacks of an event loop in random order,
and `pause` holds a thread for a moment before each thing it does. `deal(seed)` draws a schedule, `deal(None)` none.

As a script it is one replay in a process of its own: `behaviours.py NAME BUNDLE ORIGIN SEED` prints the result.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai

from sftrace_otel import ReplaySession, record, trace_tool

_dealt: list[random.Random | None] = [None]
ran: list[str] = []
"""The bodies of tools that ran: none under frozen replay."""


tried: list[str] = []
"""Connections, datagrams and look-ups of names that a replay tried, whoever did and whatever stopped them."""
_watching = [False]
_OUT = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"})


def _watch(event: str, args: tuple[object, ...]) -> None:
    if _watching[0] and event in _OUT:
        tried.append(f"{event} {args[1:]!r}")


sys.addaudithook(_watch)


def deal(seed: int | None) -> None:
    """The schedule of the next program."""
    _dealt[0] = None if seed is None else random.Random(seed)
    ran.clear()


def pause() -> None:
    """Let other threads go first, for a moment that the schedule draws."""
    rng = _dealt[0]
    if rng is not None and rng.random() < 0.7:
        time.sleep(rng.random() * 0.0008)


async def apause() -> None:
    """Let other tasks go first, a number of turns that the schedule draws."""
    rng = _dealt[0]
    for _ in range(0 if rng is None else rng.randrange(4)):
        await asyncio.sleep(0)


class Shuffled(asyncio.SelectorEventLoop):
    """An event loop in which what is ready runs in an order of the schedule."""

    def _run_once(self) -> None:
        rng = _dealt[0]
        ready = getattr(self, "_ready")  # noqa: B009
        if rng is not None and len(ready) > 1:
            handles = list(ready)
            rng.shuffle(handles)
            ready.clear()
            ready.extend(handles)
        super()._run_once()  # type: ignore[misc]


def looped(main: Callable[[], Awaitable[Any]]) -> Any:
    with asyncio.Runner(loop_factory=Shuffled) as runner:

        async def run() -> Any:
            return await main()

        return runner.run(run())


# --- what the programs are made of ------------------------------------------------------------------------------------


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def ask(url: str, text: str) -> str | None:
    pause()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="test-key", max_retries=0) as model:
        return model.chat.completions.create(model="m", messages=user(text)).choices[0].message.content  # type: ignore[arg-type]


async def aask(model: openai.AsyncOpenAI, text: str) -> str | None:
    await apause()
    done = await model.chat.completions.create(model="m", messages=user(text))  # type: ignore[arg-type]
    await apause()
    return done.choices[0].message.content


def amodel(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="test-key", max_retries=0)


def read(url: str, text: str) -> list[str]:
    pause()
    found = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="test-key", max_retries=0) as model:
        for chunk in model.chat.completions.create(model="m", messages=user(text), stream=True):  # type: ignore[call-overload]
            pause()
            found += [choice.delta.content or "" for choice in chunk.choices]
    return found


async def aread(model: openai.AsyncOpenAI, text: str) -> list[str]:
    await apause()
    found = []
    async for chunk in await model.chat.completions.create(model="m", messages=user(text), stream=True):  # type: ignore[call-overload]
        await apause()
        found += [choice.delta.content or "" for choice in chunk.choices]
    return found


@trace_tool
def lookup(city: str) -> dict[str, Any]:
    ran.append(city)
    return {"city": city, "nr": len(ran)}


@trace_tool
async def alookup(city: str) -> dict[str, Any]:
    ran.append(city)
    await asyncio.sleep(0)
    return {"city": city, "nr": len(ran)}


@trace_tool
async def nested(city: str) -> dict[str, Any]:
    return {"first": await alookup(city), "then": await alookup(city)}


@trace_tool
def refuse(code: int) -> None:
    ran.append("refuse")
    raise ValueError(f"bad code {code}")


# --- the behaviours ---------------------------------------------------------------------------------------------------


def loop_sync(url: str) -> Any:
    messages: list[Any] = user("start")
    seen = []
    for city in ("Oslo", "Rome", "Oslo"):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as model:
            answer = model.chat.completions.create(model="m", messages=messages).choices[0].message.content
        pause()
        messages += [{"role": "assistant", "content": answer}, *user(json.dumps(lookup(city)))]
        seen.append(answer)
    return seen


def loop_async(url: str) -> Any:
    async def main() -> Any:
        messages: list[Any] = user("start")
        async with amodel(url) as model:
            for city in ("Oslo", "Rome", "Oslo"):
                answer = await model.chat.completions.create(model="m", messages=messages)
                both = await asyncio.gather(alookup(city), alookup(city))
                messages += [{"role": "assistant", "content": str(answer.choices[0].message.content)}]
                messages += user(json.dumps(both))
        return messages

    return looped(main)


def stream_sync(url: str) -> Any:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda text: read(url, text), ("one two", "one two three", "one two")))


def stream_async(url: str) -> Any:
    async def main() -> Any:
        async with amodel(url) as model:
            return await asyncio.gather(*(aread(model, text) for text in ("one two", "one two three", "one two")))

    return looped(main)


def gather_different(url: str) -> Any:
    async def main() -> Any:
        async with amodel(url) as model:
            return await asyncio.gather(*(aask(model, text) for text in "abcd"))

    return looped(main)


def gather_equal(url: str) -> Any:
    async def main() -> Any:
        async with amodel(url) as model:
            return await asyncio.gather(*(aask(model, "the same") for _ in range(4)))

    return looped(main)


def threads_equal(url: str) -> Any:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda _: ask(url, "the same"), range(4)))


def async_tools(_: str) -> Any:
    async def one(city: str) -> Any:
        await apause()
        return await alookup(city)

    async def main() -> Any:
        return await asyncio.gather(*(one(city) for city in ("Oslo", "Rome", "Oslo", "Bern", "Oslo")))

    return looped(main)


def nested_tools(_: str) -> Any:
    async def one(city: str) -> Any:
        await apause()
        return [await nested(city), await alookup(city)]

    async def main() -> Any:
        return await asyncio.gather(*(one(city) for city in ("Oslo", "Oslo", "Rome")))

    return looped(main)


def thread_pool(_: str) -> Any:
    def one(city: str) -> Any:
        pause()
        return lookup(city)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, [f"city {number % 5}" for number in range(12)]))


def bare_threads(_: str) -> Any:
    found: dict[int, Any] = {}

    def one(number: int) -> None:
        pause()
        found[number] = [lookup("Oslo"), lookup(f"city {number}")]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in sorted(found)]


def tasks_and_threads(url: str) -> Any:
    def work(number: int) -> Any:
        pause()
        return [ask(url, "the same"), lookup("Oslo")]

    async def branch(number: int) -> Any:
        await apause()
        first = await alookup("Oslo")
        return [first, await asyncio.to_thread(work, number), await alookup("Oslo")]

    async def main() -> Any:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(branch(number)) for number in range(3)]
        return [task.result() for task in tasks]

    return looped(main)


def model_error(url: str) -> Any:
    def one(text: str) -> Any:
        try:
            return ask(url, text)
        except openai.APIStatusError as error:
            return [type(error).__name__, error.status_code, str(error), error.body]

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, ("refuse", "fine", "refuse")))


def model_error_async(url: str) -> Any:
    async def main() -> Any:
        async with amodel(url) as model:

            async def one(text: str) -> Any:
                try:
                    return await aask(model, text)
                except openai.APIStatusError as error:
                    return [type(error).__name__, error.status_code, str(error), error.body]

            return await asyncio.gather(one("refuse"), one("fine"), one("refuse"))

    return looped(main)


def tool_error(_: str) -> Any:
    def one(code: int) -> Any:
        pause()
        try:
            refuse(code)
        except ValueError as error:
            return [str(error), list(error.args), type(error).__name__]
        raise AssertionError("no error")

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, (7, 8, 7)))


def raw_http(url: str) -> Any:
    def one(number: int) -> Any:
        pause()
        answer = httpx.get(f"{url}/json?item={number % 2}")
        return [answer.status_code, answer.json(), answer.headers["content-type"]]

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(4)))


def raw_http_async(url: str) -> Any:
    async def main() -> Any:
        async with httpx.AsyncClient() as client:

            async def one(number: int) -> Any:
                await apause()
                async with client.stream("GET", f"{url}/json?item={number % 2}") as answer:
                    return [answer.status_code, (await answer.aread()).decode()]

            return await asyncio.gather(*map(one, range(4)))

    return looped(main)


def secrets(url: str) -> Any:
    key = "sk-" + "proj-" + "Zm9vYmFyYmF6cXV4" * 3

    def one(number: int) -> Any:
        pause()
        answer = httpx.get(f"{url}/json?api_key={key}&item={number}", headers={"x-api-key": key})
        return [answer.status_code, lookup(f"Bearer {key} {number}")["nr"] > 0]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(3)))


def raises(url: str) -> Any:
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda text: ask(url, text), "ab"))
    raise KeyError(f"price of {answers}")


BEHAVIOURS: dict[str, Callable[[str], Any]] = {
    program.__name__: program
    for program in (
        loop_sync, loop_async, stream_sync, stream_async, gather_different, gather_equal, threads_equal, async_tools,
        nested_tools, thread_pool, bare_threads, tasks_and_threads, model_error, model_error_async, tool_error,
        raw_http, raw_http_async, secrets, raises,
    )
}  # fmt: skip


def outcome(program: Callable[[], Any]) -> Any:
    """The result of a program as JSON, or what it raised."""
    try:
        return json.loads(json.dumps(program()))
    except KeyError as error:
        return [type(error).__name__, str(error)]


def recording(name: str, url: str, bundle: Any) -> Any:
    """Record a behaviour into `bundle`."""

    def run() -> Any:
        with record("agent", output=bundle) as session:
            result = BEHAVIOURS[name](url)
            session.set_output(result)
        return result

    return outcome(run)


def replaying(name: str, url: str, bundle: Any, seed: int | None) -> Any:
    """Replay it under the schedule of `seed`; every recorded call has to be used, and no body of a tool to run."""
    deal(seed)
    tried.clear()
    with ReplaySession.from_trace(bundle) as replay:
        _watching[0] = True

        def run() -> Any:
            with record("agent") as session:
                result = BEHAVIOURS[name](url)
                session.set_output(result)
            return result

        try:
            result = outcome(run)
        finally:
            _watching[0] = False
        replay.verify_complete()
    report = replay.report()
    assert report.exit_code == 0, report.text()
    assert ran == []
    assert tried == []
    return result


if __name__ == "__main__":
    print(json.dumps(replaying(sys.argv[1], sys.argv[3], sys.argv[2], int(sys.argv[4]))))
