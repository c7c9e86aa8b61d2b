# SPDX-License-Identifier: Apache-2.0
"""`@trace_tool`: every kind of callable keeps its kind, arguments bind alike, results and errors pass through."""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import gc
import inspect
import pickle
import signal
import sys
import textwrap
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel import instrumentation, recorder, trace_tool
from sftrace_otel.bundle.read import open_bundle
from sftrace_otel.errors import ReplayExhaustedError, ReplayMismatchError, ReplayPolicyError
from sftrace_otel.instrumentation import replaying, tools
from sftrace_otel.instrumentation.tools import Tool
from sftrace_otel.settings import Settings

Run = Callable[..., Any]


@trace_tool
def add(a: int, b: int = 2, *, scale: int = 1) -> int:
    """Adds."""
    return (a + b) * scale


class Shop:
    @trace_tool
    def price(self, item: str) -> float:
        return len(item) * 1.5

    @trace_tool(name="shop.open")
    @classmethod
    def opened(cls, day: str) -> bool:
        return day != "sunday"

    @classmethod
    @trace_tool
    def closed(cls, day: str) -> bool:
        return day == "sunday"

    @staticmethod
    @trace_tool
    def tax(amount: float) -> float:
        return amount * 0.25


class Increment:
    def __call__(self, x: int) -> int:
        return x + 1


@trace_tool
def count(n: int) -> Iterator[int]:
    yield from range(n)


@trace_tool
async def acount(n: int) -> AsyncIterator[int]:
    for number in range(n):
        yield number


@trace_tool
async def slow(x: int) -> int:
    await asyncio.sleep(0)
    return x * 2


def tool_events(bundle: Any, kind: str = "tool_call") -> list[Any]:
    return [event for event in bundle.events if event.type == kind]


def test_a_traced_tool_looks_as_before() -> None:
    assert add.__name__ == "add" and add.__doc__ == "Adds." and add.__module__ == __name__
    assert list(inspect.signature(add).parameters) == ["a", "b", "scale"]
    assert inspect.iscoroutinefunction(slow)
    assert inspect.isgeneratorfunction(count)
    assert inspect.isasyncgenfunction(acount)


def test_a_traced_function_can_be_pickled_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or inspect.getmodule(add))
    assert pickle.loads(pickle.dumps(add)) is add


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1,), {}), ((1, 2), {}), ((1,), {"b": 2}), ((), {"a": 1}), ((), {"b": 2, "a": 1}), ((1,), {"scale": 1})],
)
def test_equal_calls_have_equal_inputs(args: Any, kwargs: Any, recorded: Run, read: Run) -> None:
    recorded(lambda: add(*args, **kwargs))
    assert tool_events(read())[0].input == {"a": 1, "b": 2, "scale": 1}


def test_arguments_are_those_that_inspect_binds() -> None:
    def plain(a: int, b: int = 5) -> None: ...

    tool = Tool(plain, "plain", None, "frozen")
    for args, kwargs in [((1,), {}), ((1, 2), {}), ((), {"a": 3}), ((1,), {"b": 4})]:
        bound = inspect.signature(plain).bind(*args, **kwargs)
        bound.apply_defaults()
        assert tool.arguments(args, kwargs) == dict(bound.arguments)


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"a": 2}), ((1,), {"z": 2})])
def test_a_call_that_does_not_bind_raises_its_own_error_and_is_recorded_as_given(
    args: Any, kwargs: Any, recorded: Run, read: Run
) -> None:
    def program() -> str:
        with pytest.raises(TypeError) as raised:
            Shop.tax(*args, **kwargs)
        return str(raised.value)

    assert "tax" in recorded(program)
    assert tool_events(read())[0].input == {"args": list(args), "kwargs": kwargs}


def test_methods_leave_self_and_cls_out(recorded: Run, read: Run, frozen: Run) -> None:
    def program() -> list[Any]:
        return [Shop().price("pear"), Shop.opened("monday"), Shop().closed(day="sunday"), Shop.tax(4.0)]

    want = recorded(program)
    calls = tool_events(read())
    assert [call.name for call in calls] == ["price", "shop.open", "closed", "tax"]
    assert [call.input for call in calls] == [{"item": "pear"}, {"day": "monday"}, {"day": "sunday"}, {"amount": 4.0}]
    assert frozen(program) == want


def test_partials_and_callable_objects(recorded: Run, read: Run, frozen: Run) -> None:
    partial = trace_tool(functools.partial(lambda a, b: a - b, 10), name="minus")
    instance = trace_tool(Increment())

    def program() -> list[int]:
        return [partial(b=3), instance(1)]

    assert recorded(program) == [7, 2] == frozen(program)
    assert [call.name for call in tool_events(read())] == ["minus", "Increment"]


def test_generators_are_recorded_item_by_item_and_replayed(recorded: Run, read: Run, frozen: Run) -> None:
    async def collect() -> list[int]:
        return [number async for number in acount(3)]

    def program() -> list[Any]:
        return [list(count(3)), asyncio.run(collect())]

    assert recorded(program) == [[0, 1, 2], [0, 1, 2]] == frozen(program)
    assert [event.output for event in tool_events(read(), "tool_result")] == [[0, 1, 2], [0, 1, 2]]


def test_a_generator_left_early_ends_as_closed(recorded: Run, read: Run) -> None:
    def program() -> int:
        numbers = count(10)
        first = next(numbers)
        numbers.close()
        return first

    recorded(program)
    assert tool_events(read(), "tool_result")[0].output == [0]
    assert [row["end"] for row in map(dict_of, read().calls)] == ["closed"]


def dict_of(row: Any) -> dict[str, Any]:
    return row if isinstance(row, dict) else {"end": row.end}


def test_types_come_back_under_replay(recorded: Run, frozen: Run) -> None:
    @trace_tool
    def typed() -> Any:
        return {
            "when": dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
            "pair": (1, 2),
            "set": {3},
            "raw": b"\x00\xff",
            "p": Path("/x"),
        }

    want = recorded(typed)
    assert frozen(typed) == want


def test_errors_of_own_classes(recorded: Run, frozen: Run) -> None:
    @trace_tool
    def fail() -> None:
        raise Declined("card", 51)

    def program() -> list[Any]:
        try:
            fail()
        except Declined as error:
            return [str(error), list(error.args)]
        return []

    assert recorded(program) == frozen(program) == [str(Declined("card", 51)), ["card", 51]]


class Declined(Exception):
    """An error of the program's own."""


def test_nested_tools_hang_on_the_outer_one(recorded: Run, read: Run, frozen: Run) -> None:
    @trace_tool
    def outer(x: int) -> int:
        return add(x) + add(x + 1)

    want = recorded(lambda: outer(1))
    calls = tool_events(read())
    assert [call.name for call in calls] == ["outer", "add", "add"]
    assert {call.parent_id for call in calls[1:]} == {calls[0].id}
    assert frozen(lambda: outer(1)) == want


def test_nothing_active_calls_straight_through() -> None:
    assert add(1) == 3 and list(count(2)) == [0, 1]
    assert asyncio.run(slow(4)) == 8

    async def collect() -> list[int]:
        return [number async for number in acount(2)]

    assert asyncio.run(collect()) == [0, 1]


def test_a_wrong_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="replay_policy"):
        trace_tool(replay_policy="sometimes")(add)
    with pytest.raises(TypeError):
        trace_tool(3)  # type: ignore[call-overload]


# --- generators -------------------------------------------------------------------------------------------------------


@trace_tool
def talk(sent: list[Any]) -> Generator[int, str, str]:
    try:
        sent.append((yield 1))
        try:
            yield 2
        except KeyError as error:
            sent.append(str(error))
            yield 3
        return "done"
    finally:
        sent.append("closed")


@trace_tool
async def atalk(sent: list[Any]) -> AsyncGenerator[int, str]:
    try:
        sent.append((yield 1))
        try:
            yield 2
        except KeyError as error:
            sent.append(str(error))
            yield 3
    finally:
        await asyncio.sleep(0)
        sent.append("closed")


def test_what_is_sent_and_thrown_in_reaches_a_generator(recorded: Run, read: Run, frozen: Run) -> None:
    def program(sent: list[Any]) -> list[Any]:
        numbers = talk(sent)
        got: list[Any] = [next(numbers), numbers.send("hello"), numbers.throw(KeyError("k"))]
        with pytest.raises(StopIteration) as stop:
            next(numbers)
        assert sent in ([], ["hello", "'k'", "closed"])
        return [*got, stop.value.value, len(sent)]

    assert recorded(program, []) == [1, 2, 3, "done", 3]
    assert frozen(program, []) == [1, 2, 3, "done", 0]
    assert [event.output for event in tool_events(read(), "tool_result")] == [[1, 2, 3]]
    assert read().calls[0]["returned"] == {"value": "done", "tags": {}}


def test_what_is_sent_and_thrown_in_reaches_an_async_generator(recorded: Run, frozen: Run) -> None:
    async def talked(sent: list[Any]) -> list[Any]:
        numbers = atalk(sent)
        got = [await anext(numbers), await numbers.asend("hello"), await numbers.athrow(KeyError("k"))]
        await numbers.aclose()
        assert sent in ([], ["hello", "'k'", "closed"])
        return [*got, len(sent)]

    assert recorded(lambda: asyncio.run(talked([]))) == [1, 2, 3, 3]
    assert frozen(lambda: asyncio.run(talked([]))) == [1, 2, 3, 0]


def test_a_loop_that_ends_closes_an_async_generator_once(recorded: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def left() -> None:
        for _ in range(3):
            kept.append(atalk(heard))
            await anext(kept[-1])

    kept: list[Any] = []
    heard: list[Any] = []
    recorded(lambda: asyncio.run(left()))
    assert heard == ["closed"] * 3 and not caplog.records


@trace_tool
def broken(n: int) -> Iterator[tuple[int, bytes]]:
    yield (n, b"a")
    yield (n + 1, b"b")
    raise Declined("card", n)


@trace_tool
async def abroken(n: int) -> AsyncIterator[tuple[int, bytes]]:
    for item in ((n, b"a"), (n + 1, b"b")):
        yield item
    raise Declined("card", n)


def test_items_before_an_error_are_replayed_with_it(recorded: Run, read: Run, frozen: Run) -> None:
    async def collect() -> list[Any]:
        got: list[Any] = []
        try:
            async for item in abroken(5):
                got.append(item)
        except Declined as error:
            got.append(error.args)
        return got

    def program() -> list[Any]:
        got: list[Any] = []
        try:
            for item in broken(5):
                got.append(item)
        except Declined as error:
            got.append(error.args)
        return [*got, *asyncio.run(collect())]

    want = [(5, b"a"), (6, b"b"), ("card", 5)]
    assert recorded(program) == frozen(program) == want * 2
    result = tool_events(read(), "tool_result")[0]
    assert result.status == "error" and result.output["items"] == [[5, "YQ=="], [6, "Yg=="]]
    assert (result.output["error_type"], result.output["message"]) == ("Declined", "('card', 5)")


def test_an_error_thrown_in_comes_out_as_itself(recorded: Run, frozen: Run) -> None:
    def program() -> bool:
        numbers = count(3)
        next(numbers)
        thrown = LookupError("x")
        try:
            numbers.throw(thrown)  # type: ignore[attr-defined]
        except LookupError as error:
            return error is thrown
        return False

    assert recorded(program) is frozen(program) is True


def test_calls_inside_a_generator_hang_on_it_and_those_between_items_do_not(
    recorded: Run, read: Run, frozen: Run
) -> None:
    ran: list[int] = []

    @trace_tool
    def source() -> Iterator[int]:
        for n in (1, 2):
            ran.append(n)
            yield add(n)

    @trace_tool
    async def asource() -> AsyncIterator[int]:
        for n in (3, 4):
            ran.append(n)
            yield await slow(n)

    async def consume() -> list[int]:
        return [add(item, 7) async for item in asource()]

    def program() -> list[int]:
        return [*(add(item, 7) for item in source()), *asyncio.run(consume())]

    want = recorded(program)
    calls = tool_events(read())
    ids = {call.name: call.id for call in calls}
    parents = [(call.name, call.input.get("b"), call.parent_id) for call in calls if call.name in ("add", "slow")]
    start = read().events[0].id
    assert sorted(parents, key=str) == sorted(
        [("add", 2, ids["source"])] * 2 + [("add", 7, start)] * 4 + [("slow", None, ids["asource"])] * 2, key=str
    )
    assert frozen(program) == want and ran == [1, 2, 3, 4]


def test_items_are_recorded_as_they_were_given(recorded: Run, frozen: Run) -> None:
    @trace_tool
    def growing() -> Iterator[list[int]]:
        row: list[int] = []
        for number in range(3):
            row.append(number)
            yield row

    def program() -> list[list[int]]:
        return [list(row) for row in growing()]

    assert recorded(program) == frozen(program) == [[0], [0, 1], [0, 1, 2]]


def test_no_more_items_are_kept_than_a_payload_holds(
    monkeypatch: pytest.MonkeyPatch, recorded: Run, read: Run, frozen: Run
) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_MAX_PAYLOAD_BYTES", "1000")

    def program() -> int:
        return sum(count(5000))

    assert recorded(program) == sum(range(5000))
    assert read().calls[0]["truncated"] is True
    assert len(tool_events(read(), "tool_result")[0].output) < 1000
    with pytest.raises(ReplayPolicyError):
        frozen(program)


def test_items_beyond_those_of_a_closed_generator_are_not_made_up(recorded: Run, frozen: Run) -> None:
    wanted = 2

    def program() -> list[int]:
        numbers = count(10)
        got = [next(numbers) for _ in range(wanted)]
        numbers.close()  # type: ignore[attr-defined]
        return got

    assert recorded(program) == frozen(program)
    wanted = 3
    with pytest.raises(ReplayExhaustedError, match="closed after its last recorded item"):
        frozen(program)


# --- what is awaited --------------------------------------------------------------------------------------------------


@trace_tool
async def forever() -> None:
    await asyncio.sleep(60)


@trace_tool
async def afterwards() -> AsyncIterator[int]:
    yield 1
    await asyncio.sleep(60)


@trace_tool
def task(x: int) -> asyncio.Task[int]:
    """Gives a task, which calls another tool."""

    async def work() -> int:
        await asyncio.sleep(0)
        if x < 0:
            raise Declined("negative", x)
        return add(x)

    return asyncio.ensure_future(work())


@trace_tool
def plainly(x: int) -> Any:
    return slow(x)


def test_a_timeout_around_a_tool_times_out_again(recorded: Run, frozen: Run) -> None:
    @trace_tool
    def forever_plainly() -> Any:
        return asyncio.sleep(60)

    @trace_tool
    def pending() -> Any:
        return asyncio.get_running_loop().create_future()

    async def program() -> list[Any]:
        got: list[Any] = []
        for waits in (forever, forever_plainly, pending):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waits(), 0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                async for item in afterwards():
                    got.append(item)
        return got

    assert recorded(lambda: asyncio.run(program())) == frozen(lambda: asyncio.run(program())) == [1]


def test_a_cancellation_of_the_tools_own_is_raised_at_once(recorded: Run, read: Run, frozen: Run) -> None:
    @trace_tool
    async def gives_up() -> None:
        inner = asyncio.ensure_future(asyncio.sleep(60))
        inner.cancel()
        await inner

    async def program() -> str:
        try:
            await gives_up()
        except asyncio.CancelledError:
            return "cancelled"
        return "not"

    assert recorded(lambda: asyncio.run(program())) == "cancelled"
    assert read().calls[0]["end"] == "failed"
    assert asyncio.run(asyncio.wait_for(as_coroutine(frozen, program), 5)) == "cancelled"


async def as_coroutine(frozen: Run, program: Run) -> Any:
    return await asyncio.to_thread(frozen, lambda: asyncio.run(program()))


def test_a_task_stays_the_programs_own(recorded: Run, read: Run, frozen: Run) -> None:
    done: list[Any] = []

    async def program() -> list[Any]:
        started = task(1)
        assert isinstance(started, asyncio.Future)
        if not replaying.active():
            assert isinstance(started, asyncio.Task)
        started.add_done_callback(lambda future: done.append(future.result()))
        got: list[Any] = [await started, await started]
        with pytest.raises(Declined) as raised:
            await task(-1)
        return [*got, str(raised.value), *(await asyncio.gather(task(2), plainly(3)))]

    want = recorded(lambda: asyncio.run(program()))
    assert want == [3, 3, "('negative', -1)", 4, 6] == frozen(lambda: asyncio.run(program())) and done == [3, 3]
    names = {event.id: event.name for event in tool_events(read())}
    rows = {names[row["request"]]: row for row in read().calls}
    assert (rows["task"]["awaitable"], rows["plainly"]["awaitable"]) == ("future", "coroutine")
    assert "awaitable" not in rows["slow"]
    assert {event.parent_id for event in tool_events(read()) if event.name == "add"} <= {
        event.id for event in tool_events(read()) if event.name == "task"
    }


def test_an_exception_of_a_task_that_nobody_awaits_is_still_reported(recorded: Run) -> None:
    reported: list[str] = []

    async def program() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context["message"]))
        task(-1)
        await asyncio.sleep(0.01)
        gc.collect()

    recorded(lambda: asyncio.run(program()))
    assert reported == ["Task exception was never retrieved"]


# --- odd arguments ----------------------------------------------------------------------------------------------------


class Array:
    """Compares like arrays do: not to a bool."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __eq__(self, other: object) -> Any:
        return Array([value == other for value in self.values])

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ValueError("the truth of an array is ambiguous")

    def __repr__(self) -> str:
        return f"array({self.values})"


class Exits:
    def __repr__(self) -> str:
        raise SystemExit("from repr")


class ExitsAsText(Exception):
    def __str__(self) -> str:
        raise SystemExit("from str")


def test_arguments_are_not_compared(recorded: Run, read: Run, frozen: Run) -> None:
    @trace_tool
    def mean(values: Array, weight: int = 2) -> float:
        return sum(values.values) / len(values.values)

    def program() -> float:
        return mean(Array([1, 2]))

    assert recorded(program) == frozen(program) == 1.5
    assert tool_events(read())[0].input == {"values": "array([1, 2])", "weight": 2}


def test_an_exit_from_the_repr_of_a_value_does_not_reach_the_program(recorded: Run, frozen: Run) -> None:
    @trace_tool
    def echo(value: Any) -> Any:
        return value if value is None else Exits()

    @trace_tool
    def fail() -> None:
        raise ExitsAsText

    def program() -> list[str]:
        with pytest.raises(ExitsAsText):
            fail()
        return [type(echo(Exits())).__name__, str(echo(None))]

    assert recorded(program) == ["Exits", "None"]


def test_an_exit_that_a_signal_asks_for_does(recorded: Run) -> None:
    class Slow:
        def __repr__(self) -> str:
            signal.raise_signal(signal.SIGUSR1)
            return "slow"

    def stop(*_: object) -> None:
        raise SystemExit(7)

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(SystemExit, match="7"):
            recorded(lambda: trace_tool(lambda x: x, name="t")(Slow()))  # type: ignore[call-overload]
    finally:
        signal.signal(signal.SIGUSR1, before)


@trace_tool
def pet(cls: str, x: int = 1) -> list[Any]:
    return [cls, x]


@trace_tool
def bark(self: Any, loud: bool = False) -> str:
    return "wuff"


class Dog:
    bark = bark


def test_a_first_parameter_named_cls_counts_outside_a_class(recorded: Run, read: Run, frozen: Run) -> None:
    recorded(lambda: pet("cat"))
    assert tool_events(read())[0].input == {"cls": "cat", "x": 1}
    with pytest.raises(ReplayMismatchError):
        frozen(lambda: pet("dog"))


def test_a_function_put_into_a_class_is_a_method(recorded: Run, read: Run) -> None:
    recorded(lambda: [Dog().bark(), Dog().bark(loud=True)])
    assert [call.input for call in tool_events(read())] == [{"loud": False}, {"loud": True}]


def test_a_class_is_refused_in_one_line() -> None:
    with pytest.raises(TypeError) as refused:
        trace_tool(Dog)
    assert str(refused.value) == "trace_tool needs a function or method, not the class Dog; trace its methods"


def test_a_call_that_cannot_be_recorded_is_counted(monkeypatch: pytest.MonkeyPatch, recorded: Run, read: Run) -> None:
    def program() -> int:
        with monkeypatch.context() as patch:
            patch.setattr(Tool, "arguments", lambda *_: 1 / 0)
            patch.setattr(recorder.Run, "new_id", lambda *_: 1 / 0)
            return add(1)

    assert recorded(program) == 3
    assert read().run["losses"]["recording a tool call"] == 1


def test_losses_of_no_run_are_told_by_the_next_run_of_the_process(tmp_path: Path) -> None:
    made = recorder.acquire(Settings(dir=tmp_path / "out", quiet=True))
    made.fault("somewhere", ValueError())
    made.fault("somewhere", ValueError())
    add(1)
    made.fault("elsewhere", ValueError())
    made.close()
    (path,) = (tmp_path / "out").glob("*.sftrace")
    losses = open_bundle(path).run["losses"]
    assert (losses["somewhere"], losses["elsewhere"]) == (2, 1)


@pytest.fixture
def toolbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "toolbox_of_test.py").write_text(
        textwrap.dedent(
            """
            from json import dumps
            def get_weather(city): return {"city": city}
            def get_time(): return 12
            def _private(): return 0
            class Box:
                def open(self, key): return key
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toolbox_of_test", raising=False)
    return "toolbox_of_test"


def test_patterns_are_patched_on_import_and_put_back(toolbox: str, recorded: Run, read: Run) -> None:
    tools.install([f"{toolbox}:get_*", f"{toolbox}:Box.open"])
    import importlib

    module = importlib.import_module(toolbox)
    assert sorted(tools.patched()) == ["Box.open", f"{toolbox}.get_time", f"{toolbox}.get_weather"]
    recorded(lambda: [module.get_weather("Oslo"), module.Box().open("k"), module._private(), module.dumps(1)])
    assert [(call.name, call.input) for call in tool_events(read())] == [
        ("get_weather", {"city": "Oslo"}),
        ("open", {"key": "k"}),
    ]
    instrumentation.uninstall()
    assert not hasattr(module.get_weather, "__sftrace_tool__") and not hasattr(module.Box.open, "__sftrace_tool__")


def test_a_pattern_that_names_nothing_is_said(toolbox: str, caplog: pytest.LogCaptureFixture) -> None:
    import importlib

    tools.install([f"{toolbox}:nothing_here", "no-colon"])
    importlib.import_module(toolbox)
    text = caplog.text
    assert "no callable nothing_here" in text and "no-colon" in text
