# SPDX-License-Identifier: Apache-2.0
"""Lineage, parents and runs of what is spawned: tasks, threads, jobs of pools, callbacks, processes.

The programs make equal calls whose answers differ, in an order that is given; replayed in another order each place must
get its own answer.
"""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import functools
import itertools
import json
import random
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from opentelemetry import trace

from sftrace_otel import recorder, trace_tool
from sftrace_otel.bundle.read import open_bundle
from sftrace_otel.instrumentation import guard, spawns
from sftrace_otel.recorder import UNPLACED, Scope, current_scope, entered, lineage, spawn

Program = Callable[[list[int]], Any]
numbers = itertools.count()
WIDTH = 4


@trace_tool
def draw() -> int:
    """Equal calls, different answers."""
    return next(numbers)


@trace_tool
def outer(work: Any) -> Any:
    return work()


class Turns:
    """Lets what runs at once go on one by one, in the order of `order`."""

    def __init__(self, order: list[int]) -> None:
        self._order = order
        self._gates = {number: threading.Event() for number in order}
        self._gates[order[0]].set()

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        assert self._gates[number].wait(60)
        try:
            yield
        finally:
            self.passed(number)

    def passed(self, number: int) -> None:
        place = self._order.index(number) + 1
        if place < len(self._order):
            self._gates[self._order[place]].set()

    def draw(self, number: int) -> int:
        with self.turn(number):
            return draw()

    async def adraw(self, number: int) -> int:
        while not self._gates[number].is_set():
            await asyncio.sleep(0)
        with self.turn(number):
            return draw()


def threads(order: list[int]) -> list[int]:
    turns, found = Turns(order), dict[int, int]()
    started = [
        threading.Thread(target=lambda number=number: found.update({number: turns.draw(number)}))
        for number in sorted(order)
    ]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return [found[number] for number in sorted(order)]


class Drawing(threading.Thread):
    """A thread with its own `run`."""

    def __init__(self, turns: Turns, number: int) -> None:
        super().__init__()
        self.turns, self.number, self.found = turns, number, -1

    def run(self) -> None:
        self.found = self.turns.draw(self.number)


def subclassed_threads(order: list[int]) -> list[int]:
    turns = Turns(order)
    started = [Drawing(turns, number) for number in sorted(order)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return [thread.found for thread in started]


def timers(order: list[int]) -> list[int]:
    turns, found = Turns(order), dict[int, int]()
    started = [
        threading.Timer(0, lambda number=number: found.update({number: turns.draw(number)})) for number in sorted(order)
    ]
    for timer in started:
        timer.start()
    for timer in started:
        timer.join()
    return [found[number] for number in sorted(order)]


def pool_submit(order: list[int]) -> list[int]:
    turns = Turns(order)
    with ThreadPoolExecutor(len(order)) as pool:
        return [future.result() for future in [pool.submit(turns.draw, number) for number in sorted(order)]]


def pool_map(order: list[int]) -> list[int]:
    with ThreadPoolExecutor(len(order)) as pool:
        return list(pool.map(Turns(order).draw, sorted(order)))


def pool_with_contexts(order: list[int]) -> list[int]:
    """As frameworks do that take the caller's context along."""
    turns = Turns(order)
    with ThreadPoolExecutor(len(order)) as pool:
        copies = [(number, contextvars.copy_context()) for number in sorted(order)]
        waiting = [pool.submit(copied.run, turns.draw, number) for number, copied in copies]
        return [future.result() for future in waiting]


def nested_pools(order: list[int]) -> list[int]:
    turns = Turns(order)

    def job(pool: ThreadPoolExecutor, number: int) -> int:
        context = contextvars.copy_context()
        return pool.submit(context.run, turns.draw, number).result()

    with ThreadPoolExecutor(len(order)) as below, ThreadPoolExecutor(len(order)) as above:
        return list(above.map(functools.partial(job, below), sorted(order)))


def warm_pool(order: list[int]) -> list[int]:
    """How many workers there are already depends on how fast they were, and is no part of the program."""
    turns, all_at_once = Turns(order), order[0] % 2 == 0
    barrier = threading.Barrier(len(order) if all_at_once else 1)
    with ThreadPoolExecutor(len(order)) as pool:
        waiting = [pool.submit(barrier.wait, 60)]
        for _ in order[1:]:
            if not all_at_once:
                waiting[-1].result()
            waiting.append(pool.submit(barrier.wait, 60))
        drawn = [pool.submit(turns.draw, number) for number in sorted(order)]
        return [future.result() for future in drawn]


def done_callbacks(order: list[int]) -> list[int]:
    """Called where the future is done, in whatever order the futures are."""
    found = dict[int, int]()

    def done(number: int, future: Any) -> None:
        found[number] = draw()

    futures = [Future[None]() for _ in order]
    for number in sorted(order):
        futures[number].add_done_callback(functools.partial(done, number))
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda number: futures[number].set_result(None), order))
    return [found[number] for number in sorted(order)]


def done_callbacks_in_tasks(order: list[int]) -> list[int]:
    found = dict[int, int]()
    futures = [Future[None]() for _ in order]
    for number in sorted(order):
        futures[number].add_done_callback(lambda _, number=number: found.update({number: draw()}))

    async def main() -> None:
        async def end(number: int) -> None:
            futures[number].set_result(None)

        for number in order:
            await end(number)

    asyncio.run(main())
    return [found[number] for number in sorted(order)]


def in_loop(make: Callable[[Turns, list[int]], Any]) -> Program:
    return functools.wraps(make)(lambda order: asyncio.run(make(Turns(order), order)))


@in_loop
async def gathered(turns: Turns, order: list[int]) -> list[int]:
    return list(await asyncio.gather(*map(turns.adraw, sorted(order))))


@in_loop
async def task_group(turns: Turns, order: list[int]) -> list[int]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(turns.adraw(number), name=f"n{number}") for number in sorted(order)]
    return [task.result() for task in tasks]


@in_loop
async def task_factory(turns: Turns, order: list[int]) -> list[int]:
    loop = asyncio.get_running_loop()
    loop.set_task_factory(lambda loop, coro, **kwargs: asyncio.Task(coro, loop=loop, **kwargs))
    return list(await asyncio.gather(*map(turns.adraw, sorted(order))))


@in_loop
async def eager_tasks(turns: Turns, order: list[int]) -> list[int]:
    """The first step is made inside `create_task`."""
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]

    async def one(number: int) -> list[int]:
        return [draw(), await turns.adraw(number)]

    return list(itertools.chain.from_iterable(await asyncio.gather(*map(one, sorted(order)))))


@in_loop
async def tasks_in_contexts(turns: Turns, order: list[int]) -> list[int]:
    loop = asyncio.get_running_loop()
    made = [loop.create_task(turns.adraw(number), context=contextvars.copy_context()) for number in sorted(order)]
    return list(await asyncio.gather(*made))


@in_loop
async def to_thread(turns: Turns, order: list[int]) -> list[int]:
    return list(await asyncio.gather(*(asyncio.to_thread(turns.draw, number) for number in sorted(order))))


@in_loop
async def run_in_executor(turns: Turns, order: list[int]) -> list[int]:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(len(order)) as pool:
        made = [loop.run_in_executor(pool, turns.draw, number) for number in sorted(order)]
        return list(await asyncio.gather(*made))


@in_loop
async def anyio_threads(turns: Turns, order: list[int]) -> list[int]:
    return list(await asyncio.gather(*(anyio.to_thread.run_sync(turns.draw, number) for number in sorted(order))))


@in_loop
async def call_later(turns: Turns, order: list[int]) -> list[int]:
    loop = asyncio.get_running_loop()
    found = {number: loop.create_future() for number in order}
    now = loop.time()
    for number in sorted(order):
        if number % 2:
            loop.call_at(now + order.index(number) / 1e4, lambda number=number: found[number].set_result(draw()))
        else:
            wait = now + order.index(number) / 1e4 - loop.time()
            loop.call_later(wait, functools.partial(lambda number: found[number].set_result(draw()), number))
    return [await found[number] for number in sorted(order)]


@in_loop
async def call_soon(turns: Turns, order: list[int]) -> list[int]:
    loop = asyncio.get_running_loop()

    async def one(number: int) -> int:
        while not turns._gates[number].is_set():
            await asyncio.sleep(0)
        found: asyncio.Future[int] = loop.create_future()
        loop.call_soon(lambda: (found.set_result(draw()), turns.passed(number)))
        return await found

    return list(await asyncio.gather(*map(one, sorted(order))))


@in_loop
async def call_soon_threadsafe(turns: Turns, order: list[int]) -> list[int]:
    loop = asyncio.get_running_loop()
    found = {number: loop.create_future() for number in order}

    def tell(number: int) -> None:
        with turns.turn(number):
            loop.call_soon_threadsafe(lambda: found[number].set_result(draw()))

    started = [threading.Thread(target=tell, args=(number,)) for number in sorted(order)]
    for thread in started:
        thread.start()
    return [await found[number] for number in sorted(order)]


@in_loop
async def tasks_of_callbacks(turns: Turns, order: list[int]) -> list[int]:
    loop = asyncio.get_running_loop()
    found = {number: loop.create_future() for number in order}

    async def one(number: int) -> None:
        found[number].set_result(await turns.adraw(number))

    kept = []
    for number in sorted(order):
        loop.call_soon(lambda number=number: kept.append(asyncio.ensure_future(one(number))))
    return [await found[number] for number in sorted(order)]


def loops_in_threads(order: list[int]) -> list[int]:
    turns = Turns(order)
    with ThreadPoolExecutor(len(order)) as pool:
        return list(pool.map(lambda number: asyncio.run(turns.adraw(number)), sorted(order)))


PROGRAMS = [
    threads, subclassed_threads, timers, pool_submit, pool_map, pool_with_contexts, nested_pools, warm_pool,
    done_callbacks, done_callbacks_in_tasks, gathered, task_group, task_factory, tasks_in_contexts, to_thread,
    run_in_executor, anyio_threads, call_later, call_soon, call_soon_threadsafe, tasks_of_callbacks, loops_in_threads,
    *([eager_tasks] if sys.version_info >= (3, 12) else []),
]  # fmt: skip


def schedules(count: int) -> list[list[int]]:
    drawn = random.Random(5)
    return [drawn.sample(range(WIDTH), WIDTH) for _ in range(count)]


@pytest.fixture(params=PROGRAMS, ids=lambda program: program.__name__)
def program(request: Any) -> Program:
    found: Program = request.param
    return found


def check(program: Program, count: int, recorded: Any, frozen: Any, read: Any) -> None:
    want = recorded(program, [2, 0, 3, 1])
    assert None not in {row["lineage"] for row in read().calls}
    for order in schedules(count):
        assert frozen(program, order) == want, order
    assert len(set(want)) == len(want)


def test_equal_calls_get_their_own_answers_in_any_order(
    program: Program, recorded: Any, frozen: Any, read: Any
) -> None:
    check(program, 6, recorded, frozen, read)


@pytest.mark.full
def test_equal_calls_get_their_own_answers_in_a_hundred_orders(
    program: Program, recorded: Any, frozen: Any, read: Any
) -> None:
    check(program, 100, recorded, frozen, read)


# --- parents and runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [threads, timers, pool_map, to_thread, call_later, call_soon, done_callbacks])
def test_what_a_tool_spawns_hangs_on_it(program: Program, recorded: Any, read: Any) -> None:
    recorded(lambda: outer(lambda: program([1, 0, 2])))
    above, *drawn = [event for event in read().events if event.type == "tool_call"]
    assert [event.parent_id for event in drawn] == [above.id] * 3


@pytest.mark.parametrize("program", [threads, pool_map, done_callbacks, to_thread, loops_in_threads])
def test_spans_of_threads_are_children_of_the_span_around(program: Program, recorded: Any, spans: Any) -> None:
    with trace.get_tracer("t").start_as_current_span("turn") as turn:
        recorded(program, [1, 0])
    drawn = [span for span in spans() if span.name == "execute_tool draw"]
    assert [span.parent.span_id for span in drawn] == [turn.get_span_context().span_id] * 2


def test_a_span_of_the_threads_own_stays(recorded: Any, spans: Any) -> None:
    def program() -> None:
        with trace.get_tracer("t").start_as_current_span("around"), ThreadPoolExecutor(1, initializer=begin) as pool:
            pool.submit(draw).result()

    def begin() -> None:
        from opentelemetry import context

        context.attach(trace.set_span_in_context(trace.get_tracer("t").start_span("workers")))

    recorded(program)
    (drawn,) = [span for span in spans() if span.name == "execute_tool draw"]
    around = next(span for span in spans() if span.name == "around")
    assert drawn.parent.span_id != around.context.span_id


def test_a_pool_keeps_nothing_of_a_job(recorded: Any, spans: Any) -> None:
    def seen() -> tuple[bool, bool]:
        return current_scope() is UNPLACED, trace.get_current_span().get_span_context().is_valid

    with ThreadPoolExecutor(1) as pool:
        with trace.get_tracer("t").start_as_current_span("turn"):
            assert recorded(lambda: pool.submit(seen).result()) == (False, True)
        recorder.release()
        assert pool.submit(seen).result() == (True, False)


mine: contextvars.ContextVar[str] = contextvars.ContextVar("mine", default="unset")


def test_the_programs_own_context_variables_stay_where_they_are(recorded: Any) -> None:
    def program() -> list[str]:
        mine.set("set")
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(mine.get()))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            return [
                *found,
                pool.submit(mine.get).result(),
                pool.submit(contextvars.copy_context().run, mine.get).result(),
            ]

    assert recorded(program) == ["unset", "unset", "set"]


def test_errors_come_with_the_tracebacks_that_they_have_without_us(recorded: Any) -> None:
    def fails() -> None:
        raise ValueError("of the program")

    def frames(error: BaseException) -> list[str]:
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)]

    def program() -> list[Any]:
        found: list[Any] = []
        kept, threading.excepthook = threading.excepthook, lambda args: found.append(frames(args.exc_value))  # type: ignore[arg-type]
        try:
            thread = threading.Thread(target=fails)
            thread.start()
            thread.join()
        finally:
            threading.excepthook = kept
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(fails).exception()
            assert error is not None
        return [*found, frames(error)]

    want = program()
    assert recorded(program) == want and want[0][-1] == "fails"


def test_a_thread_that_could_not_start_raises_as_before(recorded: Any) -> None:
    def program() -> None:
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="threads can only be started once"):
            thread.start()

    recorded(program)


# --- what cannot be followed ------------------------------------------------------------------------------------------


def lineages(read: Any) -> list[Any]:
    return [row["lineage"] for row in read().calls]


def test_a_thread_that_is_no_thread_object_has_no_lineage(recorded: Any, read: Any) -> None:
    def program() -> None:
        done = threading.Event()
        _thread.start_new_thread(lambda: (draw(), done.set()), ())
        assert done.wait(60)
        draw()

    recorded(program)
    assert lineages(read) == [None, "0"]
    assert len({event.run_id for event in read().events}) == 1


class OwnLoop(asyncio.SelectorEventLoop):
    """Makes its tasks itself, as a loop written in C does."""

    def create_task(self, coro: Any, **kwargs: Any) -> Any:
        return asyncio.Task(coro, loop=self, **kwargs)


def test_a_loop_that_makes_its_tasks_itself_gives_calls_without_lineage(recorded: Any, read: Any) -> None:
    async def both() -> list[int]:
        turns = Turns([1, 0])
        first = asyncio.gather(turns.adraw(0), turns.adraw(1))
        return [*await first, draw()]

    def program() -> list[int]:
        draw()
        with asyncio.Runner(loop_factory=OwnLoop) as runner:
            return runner.run(both())

    recorded(program)
    assert lineages(read) == ["0", None, None, None]


def test_callbacks_of_futures_of_asyncio_have_their_parent_and_no_lineage(recorded: Any, read: Any) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        future.add_done_callback(lambda _: draw())

        def later() -> None:  # a callback: what it wants called has no part in its own slots
            inner: asyncio.Future[None] = loop.create_future()
            inner.add_done_callback(lambda _: (draw(), future.set_result(None)))
            inner.set_result(None)

        loop.call_soon(later)
        await future
        await asyncio.sleep(0)

    recorded(lambda: outer(lambda: asyncio.run(run())))
    above, *drawn = [event for event in read().events if event.type == "tool_call"]
    assert [event.parent_id for event in drawn] == [above.id] * 2
    assert lineages(read) == [None, None, "0"]  # in the order of their ends


def test_what_a_connection_spawns_has_no_place_nor_what_that_spawns(recorded: Any, read: Any) -> None:
    async def main() -> None:
        async def below() -> None:
            await asyncio.gather(turns.adraw(0), turns.adraw(1))

        turns = Turns([1, 0])
        with guard.inside():
            connecting = asyncio.get_running_loop().create_task(below())
        await connecting
        draw()

    recorded(lambda: asyncio.run(main()))
    assert lineages(read) == [None, None, "t0/0"]


def test_a_context_used_by_nobody_it_was_made_for_gives_no_lineage(recorded: Any, read: Any) -> None:
    context: list[contextvars.Context] = []

    async def main() -> None:
        async def one() -> None:
            context.append(contextvars.copy_context())

        await asyncio.create_task(one())
        context[0].run(draw)

    recorded(lambda: asyncio.run(main()))
    assert lineages(read) == [None]


def test_a_timer_that_starts_itself_anew_has_a_place_of_bounded_length() -> None:
    with entered(Scope()) as scope:
        for _ in range(2000):
            with entered(spawn()) as scope:
                pass
            recorder.enter(scope)
        assert len(scope.path) < 1100 and scope.place() is None


@pytest.mark.parametrize("warm", [False, True])
def test_threads_of_libraries_take_no_slot(warm: bool, recorded: Any, read: Any) -> None:
    async def main(pool: ThreadPoolExecutor) -> None:
        if not warm:
            await asyncio.get_running_loop().run_in_executor(pool, int)
        else:
            await asyncio.gather(*(asyncio.get_running_loop().run_in_executor(pool, int) for _ in range(1)))
        draw()

    with ThreadPoolExecutor(4) as pool:
        if warm:
            pool.submit(int).result()
        recorded(lambda: asyncio.run(main(pool)))
    assert lineages(read) == ["t0/1"]


def test_a_worker_with_a_queue_belongs_to_where_it_was_started(recorded: Any, read: Any) -> None:
    import queue

    def program() -> None:
        work: queue.Queue[Any] = queue.Queue()

        def serve() -> None:
            while (job := work.get()) is not None:
                job()

        worker = threading.Thread(target=serve, daemon=True)
        worker.start()
        outer(lambda: work.put(draw))
        work.put(None)
        worker.join()

    recorded(program)
    start, above, drawn = [event for event in read().events if event.type in ("run_start", "tool_call")]
    assert above.parent_id == start.id and drawn.parent_id == start.id  # not guessed to be the tool's


# --- with nothing active ----------------------------------------------------------------------------------------------


def test_with_nothing_active_nothing_is_kept_on_threads_and_jobs() -> None:
    spawns.install()
    thread = threading.Thread(target=int)
    thread.start()
    assert "_sftrace_spawned" not in vars(thread)
    thread.join()
    asyncio.run(asyncio.sleep(0))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
    assert lineage._thread.job is None


# --- processes --------------------------------------------------------------------------------------------------------

FAMILY = """
import multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from sftrace_otel import record, recorder, trace_tool
from sftrace_otel.settings import Settings

recorder.acquire(Settings(dir=Path("."), quiet=True))

@trace_tool
def work(who):
    return who

if __name__ == "__main__":
    method, way = sys.argv[1:]
    context = multiprocessing.get_context(method)
    with record("agent", output="parent.sftrace") as session:
        work("parent")
        if way == "executor":
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                assert pool.submit(work, "child").result() == "child"
        elif way == "pool":
            with context.Pool(1) as pool:
                assert pool.map(work, ["child"]) == ["child"]
                pool.close()
                pool.join()
        else:
            process = context.Process(target=work, args=("child",))
            process.start()
            process.join()
            assert process.exitcode == 0
        work("parent again")
"""


def run_python(folder: Path, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "way", ["process", *(pytest.param(way, marks=pytest.mark.full) for way in ("executor", "pool"))]
)
def test_processes_name_the_run_that_started_them(tmp_path: Path, method: str, way: str) -> None:
    family(tmp_path, method, way)


@pytest.mark.full
def test_processes_of_a_fork_server_name_the_run_that_started_them(tmp_path: Path) -> None:
    family(tmp_path, "forkserver", "executor")


def family(tmp_path: Path, method: str, way: str) -> None:
    program = tmp_path / "family.py"
    program.write_text(textwrap.dedent(FAMILY))
    run_python(tmp_path, str(program), method, way)
    found = {}
    for path in tmp_path.glob("*.sftrace"):
        bundle = open_bundle(path)
        names = [event.input["who"] for event in bundle.events if event.type == "tool_call"]
        found[names[0]] = (names, bundle)
    assert found["parent"][0] == ["parent", "parent again"] and found["child"][0] == ["child"]
    child, parent = found["child"][1], found["parent"][1]
    assert child.run["origin"] == {"parent_run": parent.manifest.run_id}
    assert [row["lineage"] for row in child.calls] == ["0"]


def test_a_fork_inside_a_block_names_its_run(tmp_path: Path) -> None:
    program = f"""
        import os, sys
        from pathlib import Path
        from sftrace_otel import record, recorder, trace_tool
        from sftrace_otel.settings import Settings
        recorder.acquire(Settings(dir=Path({str(tmp_path)!r}), quiet=True))
        @trace_tool
        def work(x): return x
        work("process")
        with record("agent", output={str(tmp_path / "block.sftrace")!r}):
            work("block")
            pid = os.fork()
            if pid == 0:
                work("child")
                sys.exit(0)
            os.waitpid(pid, 0)
        """
    run_python(tmp_path, "-c", textwrap.dedent(program))
    found = {}
    for path in tmp_path.glob("*.sftrace"):
        bundle = open_bundle(path)
        names = [event.input["x"] for event in bundle.events if event.type == "tool_call"]
        found[names[0]] = bundle
    origin = json.loads((found["child"].path / "run.json").read_bytes())["origin"]
    assert origin == {"parent_run": found["block"].manifest.run_id}
    assert "process" in found
