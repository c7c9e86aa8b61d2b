# SPDX-License-Identifier: Apache-2.0
"""One turn of the rows about LLM calls: `call|chunk|first|block|many|memory|runs CONTENDER`.

Real openai client over a mock transport, the same provider and standard HTTP instrumentation for every contender:
`plain` records nothing; `ours`, `stepfork`, `agent-rewind`, `agenttape` and `vcrpy` record. Prints JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
from opentelemetry import trace
from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor
from opentelemetry.sdk.trace import TracerProvider

PROSE = "It was raining when the order arrived, and nobody had asked for a lamp. " * 60
QUESTION, ANSWER = PROSE[:4000], PROSE[:2000]
WARM_UP = 20
CHUNKS = 400
IMAGE = "data:image/png;base64," + "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ" * 48_000


def completion() -> dict[str, object]:
    """An answer of 2 KB."""
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 900, "completion_tokens": 450, "total_tokens": 1350},
    }  # fmt: skip


def chunk(number: int) -> bytes:
    """One event of a stream."""
    delta = {"content": f"word{number} "} if number < CHUNKS else {}
    done = None if number < CHUNKS else "stop"
    event = {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": done}],
    }  # fmt: skip
    return f"data: {json.dumps(event)}\n\n".encode()


BODY = json.dumps(completion()).encode()
STREAM = [*map(chunk, range(CHUNKS + 1)), b"data: [DONE]\n\n"]


class Parts(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """A body that comes in parts."""

    def __iter__(self) -> Iterator[bytes]:
        yield from STREAM

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in STREAM:
            yield part


def answer(request: httpx2.Request) -> httpx2.Response:
    """The model: a stream where one is asked for."""
    if b'"stream":true' in request.content:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=Parts())
    return httpx2.Response(200, headers={"content-type": "application/json"}, content=BODY)


def client() -> openai.OpenAI:
    """The SDK's client, without a network."""
    http = httpx2.Client(transport=httpx2.MockTransport(answer))
    return openai.OpenAI(api_key="none", base_url="http://model.test/v1", http_client=http)


def async_client() -> openai.AsyncOpenAI:
    """The same, async."""
    http = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    return openai.AsyncOpenAI(api_key="none", base_url="http://model.test/v1", http_client=http)


def question(number: int) -> list[dict[str, str]]:
    """Messages of 4 KB; no two are the same."""
    return [{"role": "user", "content": f"{number} {QUESTION}"}]


@contextlib.contextmanager
def recording(contender: str, folder: Path) -> Iterator[None]:
    """The contender's recording, around what is measured."""
    provider = TracerProvider()
    if contender == "ours":
        from sftrace_otel import SftraceSpanProcessor, instrument, record

        provider.add_span_processor(SftraceSpanProcessor(dir=str(folder), quiet=True))
        trace.set_tracer_provider(provider)
        HTTPXClientInstrumentor().instrument()
        instrument()
        with record("bench", output=folder / "bench.sftrace"):
            yield
        return
    trace.set_tracer_provider(provider)
    HTTPXClientInstrumentor().instrument()
    if contender == "plain":
        yield
    elif contender == "stepfork":
        from stepfork import record as stepfork_record

        with stepfork_record("bench", output=folder / "bench.sftrace"):
            yield
    elif contender == "agent-rewind":
        import rewind

        rewind.auto_patch("openai")
        with rewind.record(folder / "bench.rewind"):
            yield
    elif contender == "agenttape":
        import agenttape

        with agenttape.use_cassette("bench", mode="record", cassette_dir=str(folder)):
            yield
    elif contender == "vcrpy":
        import vcr

        with vcr.use_cassette(str(folder / "bench.yaml"), record_mode="all"):
            yield
    else:
        raise SystemExit(f"no such contender: {contender}")


def ask(contender: str, model: openai.OpenAI, number: int) -> None:
    """One call, as the contender wants it made."""
    if contender == "stepfork":
        from stepfork.integrations.openai import chat_completions_create

        chat_completions_create(model, model="m", messages=question(number))
    else:
        model.chat.completions.create(model="m", messages=question(number))  # type: ignore[arg-type]


def call(contender: str, calls: int = 400) -> dict[str, float]:
    """CPU of the process a call, µs: the median of blocks of 20."""
    blocks = []
    with tempfile.TemporaryDirectory() as scratch, recording(contender, Path(scratch)):
        model = client()
        for number in range(WARM_UP):
            ask(contender, model, number)
        for block in range(calls // 20):
            started = time.process_time()
            for number in range(20):
                ask(contender, model, 1000 + 20 * block + number)
            blocks.append((time.process_time() - started) / 20 * 1e6)
    return {"all": statistics.median(blocks), "least": min(blocks)}


def stream(contender: str, streams: int = 30) -> dict[str, float]:
    """CPU a chunk, µs: the best stream."""
    best = float("inf")
    with tempfile.TemporaryDirectory() as scratch, recording(contender, Path(scratch)):
        model = client()
        for number in range(streams):
            gc.collect()
            started = time.process_time()
            for _ in model.chat.completions.create(model="m", messages=question(number), stream=True):  # type: ignore[call-overload]
                pass
            best = min(best, (time.process_time() - started) / CHUNKS * 1e6)
    return {"all": best}


def first(contender: str, streams: int = 200) -> dict[str, float]:
    """Wall time to the first chunk, ms: the median."""
    times = []
    with tempfile.TemporaryDirectory() as scratch, recording(contender, Path(scratch)):
        model = client()
        for number in range(streams + WARM_UP):
            started = time.perf_counter()
            with model.chat.completions.create(model="m", messages=question(number), stream=True) as chunks:  # type: ignore[call-overload]
                next(iter(chunks))
                times.append((time.perf_counter() - started) * 1e3)
    return {"all": statistics.median(times[WARM_UP:])}


def block(contender: str) -> dict[str, float]:
    """Longest time that one call holds the event loop, ms, by the size of its request; the least of 15 calls."""

    async def longest(model: openai.AsyncOpenAI, content: Any) -> float:
        worst, last, done = 0.0, time.perf_counter(), False

        async def watch() -> None:
            nonlocal worst, last
            while not done:
                await asyncio.sleep(0)
                now = time.perf_counter()
                worst, last = max(worst, now - last), now

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await model.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
        done = True
        await watching
        return worst * 1e3

    async def run() -> dict[str, float]:
        found: dict[str, float] = {}
        model = async_client()
        picture = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": "what is it?"}]
        for name, content in (("64 KB", PROSE * 15), ("2 MB", picture)):
            await longest(model, "warm")
            turns = []
            for number in range(15):
                mark = str(number)
                plain = isinstance(content, str)
                asked = mark + content if plain else [{"type": "text", "text": mark}, *content]
                turns.append(await longest(model, asked))
            found[name] = min(turns)
        return found

    with tempfile.TemporaryDirectory() as scratch, recording(contender, Path(scratch)):
        return asyncio.run(run())


def many(contender: str, rounds: int = 8) -> dict[str, float]:
    """CPU a call, µs, of 1 and of 100 async calls in flight."""

    async def run() -> dict[str, float]:
        model = async_client()
        found = {}
        for width in (1, 100):
            best, number = float("inf"), 0
            for _ in range(rounds):
                started = time.process_time()
                for _ in range(200 // width):
                    asked = [
                        model.chat.completions.create(model="m", messages=question(number + one))  # type: ignore[arg-type]
                        for one in range(width)
                    ]
                    number += width
                    await asyncio.gather(*asked)
                best = min(best, (time.process_time() - started) / 200 * 1e6)
            found[str(width)] = best
        return found

    with tempfile.TemporaryDirectory() as scratch, recording(contender, Path(scratch)):
        return asyncio.run(run())


def memory(contender: str, calls: int = 20_000) -> dict[str, float]:
    """Peak memory, MB, after a tenth of the calls and after all."""
    with tempfile.TemporaryDirectory() as scratch, recording(contender, Path(scratch)):
        model = client()
        peaks = []
        for number in range(calls):
            ask(contender, model, number)
            if number + 1 in (calls // 10, calls):
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return {"tenth": peaks[0], "all": peaks[1]}


def runs(contender: str, count: int = 100) -> dict[str, float]:
    """Peak memory, MB, with `count` runs open at once, each with ten calls."""

    async def one(model: openai.AsyncOpenAI, folder: Path, number: int, all_open: asyncio.Barrier) -> None:
        around: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if contender == "ours":
            from sftrace_otel import record

            around = record(f"run {number}", output=folder / f"{number}.sftrace")
        with around:
            for call_number in range(10):
                await model.chat.completions.create(model="m", messages=question(10 * number + call_number))  # type: ignore[arg-type]
            await all_open.wait()

    async def all_of_them(folder: Path) -> None:
        model, all_open = async_client(), asyncio.Barrier(count)
        await asyncio.gather(*(one(model, folder, number, all_open) for number in range(count)))

    with tempfile.TemporaryDirectory() as scratch, recording(contender, Path(scratch)):
        asyncio.run(all_of_them(Path(scratch)))
        return {"all": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    kinds = {
        "call": call, "chunk": stream, "first": first, "block": block, "many": many, "memory": memory, "runs": runs,
    }  # fmt: skip
    print(json.dumps(kinds[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))))
