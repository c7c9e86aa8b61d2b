# SPDX-License-Identifier: Apache-2.0
"""One turn of the rows about spawns and concurrent runs: `task|job|thread|runs CONTENDER`. Prints JSON.

`task`, `job` and `thread`: CPU of the thread that spawns, µs a spawn (of `thread` without that of the system's thread),
`plain` without us and `ours` inside a record()
block; the best of many batches, each small enough to be spared by what else the machine does. `runs`: CPU of a tool
call, µs, the median of 10,000, in 1,000 tasks that take turns: `one` run around them all, or `many`, one for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BATCH, BATCHES = 100, 400
CLOCK = time.thread_time_ns


@contextlib.contextmanager
def recording(contender: str) -> Iterator[Path]:
    """A record() block around what is measured, for `ours`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if contender == "plain":
            yield folder
            return
        from sftrace_otel import record

        with record("bench", output=folder / "bench.sftrace"):
            yield folder


async def nothing() -> None:
    """What is spawned."""


def nought() -> None:
    """What is spawned in a thread."""


def task(contender: str) -> float:
    """asyncio tasks, by `loop.create_task`."""

    async def run() -> float:
        loop, best = asyncio.get_running_loop(), float("inf")
        for _ in range(BATCHES):
            coroutines = [nothing() for _ in range(BATCH)]
            started = CLOCK()
            tasks = [loop.create_task(coroutine) for coroutine in coroutines]
            best = min(best, (CLOCK() - started) / BATCH / 1e3)
            for one in tasks:
                await one
        return best

    with recording(contender):
        return asyncio.run(run())


def job(contender: str) -> float:
    """Jobs of a ThreadPoolExecutor, while its worker waits."""
    with recording(contender), ThreadPoolExecutor(1) as pool:

        def turn() -> float:
            gate = threading.Event()
            pool.submit(gate.wait)
            started = CLOCK()
            futures = [pool.submit(nought) for _ in range(BATCH)]
            took = CLOCK() - started
            gate.set()
            for future in futures:
                future.result()
            return took / BATCH / 1e3

        return min(turn() for _ in range(BATCHES))


def thread(contender: str) -> float:
    """Threads, by a `Thread.start` that starts none: what the system does for one varies by more than we add."""
    threading.Thread.start = lambda self: None  # type: ignore[method-assign]
    with recording(contender):

        def turn() -> float:
            made = [threading.Thread(target=nought) for _ in range(BATCH)]
            started = CLOCK()
            for one in made:
                one.start()
            return (CLOCK() - started) / BATCH / 1e3

        return min(turn() for _ in range(BATCHES))


def runs(contender: str, count: int = 1000, calls: int = 10) -> float:
    """A recorded tool call in one of `count` tasks that take turns."""
    from sftrace_otel import record, trace_tool

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    took: list[int] = []

    @trace_tool
    def tool(number: int) -> int:
        return number

    async def one(folder: Path, number: int, all_open: asyncio.Barrier) -> None:
        around: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if contender == "many":
            around = record(f"run {number}", output=folder / f"{number}.sftrace")
        with around:
            await all_open.wait()
            for call in range(calls):
                started = CLOCK()
                tool(call)
                took.append(CLOCK() - started)
                await asyncio.sleep(0)
            await all_open.wait()

    async def all_of_them(folder: Path) -> None:
        all_open = asyncio.Barrier(count)
        await asyncio.gather(*(one(folder, number, all_open) for number in range(count)))

    with recording("ours" if contender == "one" else "plain") as folder:
        asyncio.run(all_of_them(folder))
    return statistics.median(took) / 1e3


if __name__ == "__main__":
    kinds: dict[str, Callable[[str], float]] = {"task": task, "job": job, "thread": thread, "runs": runs}
    gc.freeze()
    print(json.dumps({"all": kinds[sys.argv[1]](sys.argv[2])}))
