# SPDX-License-Identifier: Apache-2.0
"""`@trace_tool`: every kind of callable keeps its kind, arguments bind alike, results and errors pass through."""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import inspect
import pickle
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel import instrumentation, trace_tool
from sftrace_otel.instrumentation import tools
from sftrace_otel.instrumentation.tools import Tool

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


def test_a_wrong_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="replay_policy"):
        trace_tool(replay_policy="sometimes")(add)
    with pytest.raises(TypeError):
        trace_tool(3)  # type: ignore[call-overload]


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
