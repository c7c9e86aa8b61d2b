# SPDX-License-Identifier: Apache-2.0
"""`@trace_tool` on every kind of callable, its own redaction, and its replay policies."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import pickle
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel import record, trace_tool
from sftrace_otel.bundle.read import validate_bundle
from sftrace_otel.errors import ReplayPolicyError
from sftrace_otel.replay import ReplaySession

Run = Callable[..., Any]
SSN = "123-45-6789"


def events(bundle: Any, kind: str = "tool_call") -> list[Any]:
    return [event for event in bundle.events if event.type == kind]


def everything(path: Path) -> str:
    assert validate_bundle(path, verify_integrity=True).exit_code == 0
    return "".join(file.read_text("utf-8") for file in path.rglob("*") if file.is_file())


# --- kinds ------------------------------------------------------------------------------------------------------------


class Adder:
    """Adds."""

    unit = "each"

    def __call__(self, a: int, b: int = 1) -> int:
        return a + b


class AsyncAdder:
    async def __call__(self, a: int) -> int:
        await asyncio.sleep(0)
        return a + 1


class Counter:
    def __call__(self, n: int) -> Iterator[int]:
        yield from range(n)


class AsyncCounter:
    async def __call__(self, n: int) -> AsyncIterator[int]:
        for number in range(n):
            yield number


def minus(a: int, b: int) -> int:
    return a - b


async def aminus(a: int, b: int) -> int:
    return a - b


def later(a: int) -> Awaitable[int]:
    async def inner() -> int:
        return a + 100

    return inner()


def test_objects_with_a_call_of_every_kind(recorded: Run, read: Run, frozen: Run) -> None:
    plain, awaited, items, aitems = map(trace_tool, (Adder(), AsyncAdder(), Counter(), AsyncCounter()))
    assert inspect.iscoroutinefunction(awaited.__call__) and not inspect.iscoroutinefunction(plain.__call__)
    assert inspect.isgeneratorfunction(items.__call__) and inspect.isasyncgenfunction(aitems.__call__)
    assert plain.unit == "each" and plain.__doc__ == "Adds."
    with pytest.raises(AttributeError):
        _ = plain.nothing_like_it

    async def main() -> list[Any]:
        return [plain(1), plain(a=1), await awaited(1), list(items(2)), [one async for one in aitems(2)]]

    want = recorded(lambda: asyncio.run(main()))
    assert want == [2, 2, 2, [0, 1], [0, 1]]
    calls = events(read())
    assert [call.name for call in calls] == ["Adder", "Adder", "AsyncAdder", "Counter", "AsyncCounter"]
    assert [call.input for call in calls] == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 1}, {"n": 2}, {"n": 2}]
    assert frozen(lambda: asyncio.run(main())) == want


def test_partials_and_what_gives_something_to_await(recorded: Run, read: Run, frozen: Run) -> None:
    ten, aten = trace_tool(functools.partial(minus, 10)), trace_tool(functools.partial(aminus, b=1))
    assert isinstance(ten, functools.partial) and inspect.iscoroutinefunction(aten)
    waiting = trace_tool(later)

    class Box:
        @trace_tool
        def put(self, a: int, b: int) -> int:
            return a + b

        put_one = trace_tool(functools.partialmethod(put, b=1))  # type: ignore[call-overload]

    async def main() -> list[Any]:
        return [ten(3), ten(b=3), await aten(5), await waiting(1), Box().put_one(4)]

    want = recorded(lambda: asyncio.run(main()))
    assert want == [7, 7, 4, 101, 5]
    inputs = [call.input for call in events(read())]
    assert inputs[:4] == [{"b": 3}, {"b": 3}, {"a": 5, "b": 1}, {"a": 1}] and inputs[4]["a"] == 4
    assert frozen(lambda: asyncio.run(main())) == want


def test_nameless_tools_are_copied_and_pickled(monkeypatch: pytest.MonkeyPatch, recorded: Run, read: Run) -> None:
    monkeypatch.setitem(sys.modules, __name__, inspect.getmodule(minus) or sys.modules[minus.__module__])
    ten = trace_tool(functools.partial(minus, 10), name="from ten")
    made = [copy.copy(ten), copy.deepcopy(ten), copy.copy(trace_tool(Adder()))]
    with contextlib.suppress(pickle.PicklingError, ModuleNotFoundError):
        made.append(pickle.loads(pickle.dumps(ten)))
    recorded(lambda: [one(3) for one in made])
    assert [call.name for call in events(read())][:3] == ["from ten", "from ten", "Adder"]


def test_context_managers_of_contextlib_still_work(recorded: Run, frozen: Run) -> None:
    @trace_tool
    @contextlib.contextmanager
    def opened(x: int) -> Iterator[int]:
        yield x

    @trace_tool
    @contextlib.asynccontextmanager
    async def aopened(x: int) -> AsyncIterator[int]:
        yield x

    @contextlib.asynccontextmanager
    @trace_tool
    async def over(x: int) -> AsyncIterator[int]:
        yield x

    async def main() -> list[int]:
        with opened(1) as one:
            async with aopened(2) as two, over(3) as three:
                return [one, two, three]

    assert asyncio.run(main()) == [1, 2, 3]  # nothing active
    assert recorded(lambda: asyncio.run(main())) == [1, 2, 3]

    async def generator_only() -> int:
        async with over(3) as three:
            return three

    recorded(lambda: asyncio.run(generator_only()))
    assert frozen(lambda: asyncio.run(generator_only())) == 3


def test_builtins_and_what_has_no_signature(recorded: Run, read: Run, frozen: Run) -> None:
    size, upper, largest = trace_tool(len), trace_tool("pear".upper), trace_tool(max)

    def program() -> list[Any]:
        return [size([1, 2]), upper(), largest(3, 4), largest([1], default=0)]

    assert recorded(program) == [2, "PEAR", 4, 1] == frozen(program)
    assert [call.input for call in events(read())] == [
        {"obj": [1, 2]},
        {},
        {"args": [3, 4], "kwargs": {}},
        {"args": [[1]], "kwargs": {"default": 0}},
    ]


def test_caches_keep_their_methods(recorded: Run, read: Run) -> None:
    @trace_tool
    @functools.lru_cache
    def cached(x: int) -> int:
        return x

    recorded(lambda: [cached(1), cached(1)])
    assert cached.cache_info().hits == 1 and len(events(read())) == 2  # type: ignore[attr-defined]
    cached.cache_clear()  # type: ignore[attr-defined]
    assert cached.cache_info().hits == 0  # type: ignore[attr-defined]


@trace_tool
def every(a: int, /, b: int = 2, *rest: int, c: int = 3, **more: int) -> int:
    return a + b + c


@pytest.mark.parametrize(
    ("args", "kwargs"), [((1,), {}), ((1, 2), {}), ((1,), {"b": 2, "c": 3})], ids=["defaults", "position", "keyword"]
)
def test_arguments_of_every_kind_bind_alike(args: Any, kwargs: Any, recorded: Run, read: Run) -> None:
    recorded(lambda: every(*args, **kwargs))
    assert events(read())[0].input == {"a": 1, "b": 2, "c": 3, "more": {}, "rest": []}


def test_a_mutable_default_is_recorded_as_it_was_at_the_call(recorded: Run, read: Run) -> None:
    @trace_tool
    def collect(x: int, into: list[int] = []) -> list[int]:  # noqa: B006 (what is tested)
        into.append(x)
        return into

    recorded(lambda: [len(collect(1)), len(collect(2))])
    assert [call.input["into"] for call in events(read())] == [[], [1]]
    assert [result.output for result in events(read(), "tool_result")] == [[1], [1, 2]]


# --- own redaction ----------------------------------------------------------------------------------------------------


def test_named_arguments_and_places_are_hidden_at_both_times(recorded: Run, read: Run, bundle_path: Path) -> None:
    @trace_tool(redact=["ssn", "/input/who/name", "/output/rows/*/owner"])
    def look_up(ssn: str, who: dict[str, Any], limit: int = 2) -> dict[str, Any]:
        return {"rows": [{"owner": who["name"], "sum": n} for n in range(limit)]}

    who = {"name": "Ada Lovelace", "age": 36}
    assert recorded(lambda: look_up(SSN, who)["rows"][0] == {"owner": "Ada Lovelace", "sum": 0})
    assert who == {"name": "Ada Lovelace", "age": 36}
    call, result = events(read())[0], events(read(), "tool_result")[0]
    assert call.input == {"limit": 2, "ssn": "[REDACTED]", "who": {"age": 36, "name": "[REDACTED]"}}
    assert call.redactions == ("/input/ssn", "/input/who/name")
    assert result.redactions == ("/output/rows/0/owner", "/output/rows/1/owner")
    assert '"tool_redaction"' in everything(bundle_path)
    with ReplaySession.from_trace(bundle_path) as replay:
        with record("agent"):
            assert look_up(ssn=SSN, who=who)["rows"][1] == {"owner": "[REDACTED]", "sum": 1}
        replay.verify_complete()
    assert "Lovelace" not in everything(bundle_path) and SSN not in everything(bundle_path)


def test_a_function_hides_what_only_it_knows(recorded: Run, read: Run, frozen: Run, bundle_path: Path) -> None:
    def without_names(value: Any) -> Any:
        return {**value, "name": "someone"} if isinstance(value, dict) and "name" in value else value

    @trace_tool(redact=without_names)
    def greet(name: str) -> dict[str, str]:
        return {"name": name, "said": "hello"}

    assert recorded(lambda: greet("Ada")["name"] == "Ada")
    assert events(read())[0].input == {"name": "someone"}
    assert frozen(lambda: greet("Ada")) == {"name": "someone", "said": "hello"}
    assert "Ada" not in everything(bundle_path)


def test_a_rule_that_fails_hides_everything(recorded: Run, read: Run, frozen: Run) -> None:
    @trace_tool(redact=lambda value: value["no such member"])
    def fragile(x: int) -> str:
        return "out"

    assert recorded(lambda: fragile(1)) == "out"
    assert events(read())[0].input == "[REDACTED]" == events(read(), "tool_result")[0].output
    assert frozen(lambda: fragile(1)) == "[REDACTED]"


def test_errors_items_and_unbound_calls_hold_nothing_of_it(
    recorded: Run, read: Run, frozen: Run, bundle_path: Path
) -> None:
    class Refused(Exception):
        def __init__(self, ssn: str) -> None:
            super().__init__(f"no person {ssn}")
            self.ssn = ssn

    @trace_tool(redact="ssn")
    def fail(ssn: str) -> None:
        raise Refused(ssn)

    @trace_tool(redact=["/output/*/ssn"])
    def people(n: int) -> Iterator[dict[str, Any]]:
        for number in range(n):
            yield {"n": number, "ssn": SSN}

    @trace_tool(redact=["ssn"])
    def options(**given: str) -> int:
        return len(given)

    def program() -> list[Any]:
        found: list[Any] = [[one["n"] for one in people(2)], options(ssn=SSN, other="x")]
        try:
            fail(SSN)
        except Exception as error:
            found.append(type(error).__name__)
        try:
            fail(SSN, SSN)  # type: ignore[call-arg]
        except TypeError:
            found.append("did not bind")
        return found

    want = recorded(program)
    assert want == [[0, 1], 1 + 1, "Refused", "did not bind"]
    assert SSN not in everything(bundle_path)
    assert events(read(), "error")[0].message == "no person [REDACTED]"
    assert events(read())[1].input == {"given": {"other": "x", "ssn": "[REDACTED]"}}
    assert events(read())[3].input == {"args": "[REDACTED]", "kwargs": "[REDACTED]"}
    assert frozen(program) == want


def test_rules_that_fit_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no argument 'snn'; it has ssn"):

        @trace_tool(redact=["snn"])
        def misspelt(ssn: str) -> None: ...

    with pytest.raises(ValueError, match="neither /input nor /output"):
        trace_tool(redact=["/ssn"])(lambda ssn: None)
    with pytest.raises(TypeError, match="int is neither"):
        trace_tool(redact=[3])(lambda ssn: None)  # type: ignore[list-item]


# --- policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["frozen", "live", "manual", "forbidden", "derived"])
def test_each_policy_is_recorded_and_only_what_is_derived_runs_again(policy: str, recorded: Run, read: Run) -> None:
    ran: list[int] = []

    @trace_tool(replay_policy=policy)
    def effect(x: int) -> int:
        ran.append(x)
        return x

    recorded(lambda: effect(1))
    (call,) = events(read())
    assert call.replay_policy == policy
    with contextlib.ExitStack() as stack:
        if policy in ("manual", "forbidden"):
            stack.enter_context(
                pytest.raises(ReplayPolicyError, match="forbids" if policy == "forbidden" else "approval")
            )
        stack.enter_context(ReplaySession.from_trace(read().path))
        assert effect(1) == 1
    assert ran == ([1, 1] if policy == "derived" else [1])  # what is derived is made again, and compared


@pytest.mark.parametrize("answer", ["yes", "no", "fails"])
def test_a_manual_call_is_served_once_a_callback_approves(answer: str, recorded: Run, read: Run) -> None:
    asked: list[Any] = []

    def approve(call: Any) -> bool:
        asked.append((call.name, call.input, call.outcome.output))
        if answer == "fails":
            raise RuntimeError("the person left")
        return answer == "yes"

    @trace_tool(replay_policy="manual", approve=approve)
    def pay(amount: int) -> str:
        return f"paid {amount}"

    assert recorded(lambda: pay(5)) == "paid 5" and asked == []

    def again() -> str:
        with ReplaySession.from_trace(read().path):
            return pay(5)

    if answer == "yes":
        assert again() == "paid 5"
    else:
        with pytest.raises(ReplayPolicyError, match="refused"):
            again()
    assert asked == [("pay", {"amount": 5}, "paid 5")]


def test_approval_is_for_manual_tools() -> None:
    with pytest.raises(ValueError, match="manual"):
        trace_tool(approve=lambda call: True)(minus)
