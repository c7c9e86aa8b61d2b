# SPDX-License-Identifier: Apache-2.0
"""Causal order: what has to wait, against a second, slow reading of the rule.

Property (issue 6): any recorded tree of calls with overlaps replays under any schedule that respects happens-before and
diverges under any that does not, with a reason that names the first violation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sftrace_otel.core.causal import CausalOrder
from sftrace_otel.core.plan import RecordedCall
from sftrace_otel.core.session import RunOutcome, Session
from sftrace_otel.errors import ReplayError, ReplayMismatchError


@dataclass
class Scope:
    """A scope of a made-up program: what it does in order; spawned scopes run beside it."""

    path: str
    rng: random.Random
    depth: int
    steps: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for slot in range(self.rng.randint(0 if self.depth else 1, 4)):
            spawn = self.depth < 3 and self.rng.random() < 0.4
            if spawn:
                child = Scope(f"{self.path}t{slot}/", self.rng, self.depth + 1)
                self.steps.append(("spawn", child))
            else:
                nested = self.depth < 3 and self.rng.random() < 0.2
                inside = Scope(f"{self.path}{slot}/", self.rng, self.depth + 1) if nested else None
                self.steps.append(("call", (f"{self.path}{slot}", inside)))


def record(seed: int, *, alike: bool = False) -> list[RecordedCall]:
    """A recording of a made-up program: scopes interleaved at random, some calls left open over the next ones.

    `alike`: its calls are two that are made again and again, each time with another answer, and each has its place.
    """
    rng = random.Random(seed)
    clock = 0
    started: dict[str, int] = {}
    ended: dict[str, int | None] = {}
    running: list[list[Any]] = [[Scope("", rng, 0), 0, []]]
    while running:
        thread = rng.choice(running)
        scope, at, still_open = thread
        clock += 1
        if still_open and (at == len(scope.steps) or rng.random() < 0.6):
            ended[still_open.pop(rng.randrange(len(still_open)))] = clock
            continue
        if at == len(scope.steps):
            running.remove(thread)
            continue
        thread[1] += 1
        kind, what = scope.steps[at]
        if kind == "spawn":
            running.append([what, 0, []])
            continue
        lineage, inside = what
        started[lineage] = clock
        ended[lineage] = None
        if rng.random() < 0.9:
            still_open.append(lineage)
        if inside is not None:
            running.append([inside, 0, []])
    return _calls(started, ended, rng, alike)


def _calls(
    started: dict[str, int], ended: dict[str, int | None], rng: random.Random, alike: bool
) -> list[RecordedCall]:
    from sftrace_otel.core.plan import Outcome

    order = sorted(started, key=started.__getitem__)
    calls = []
    for index, lineage in enumerate(order):
        above = [order.index(path) for path in _above(lineage) if path in started and order.index(path) < index]
        end = ended[lineage]
        unknown = rng.random() < 0.1 and not alike
        calls.append(
            RecordedCall(
                index=index,
                kind="tool",
                name="again" if alike else f"t{index}",
                held={"question": rng.randrange(2)} if alike else {"place": lineage},
                lineage=None if unknown else lineage,
                started=(started[lineage], 0),
                ended=None if end is None else (end, 0),
                parent=above[0] if above else None,
                outcome=Outcome(status="ok", held=index),
            )
        )
    return calls


def _above(lineage: str) -> list[str]:
    parts = lineage.split("/")
    return ["/".join(parts[:size]) for size in range(len(parts) - 1, 0, -1)]


def must_wait(first: RecordedCall, second: RecordedCall) -> bool:
    """The rule in its own words: `first` had finished before `second` started, in the scope of `second` or in one above
    it before the spawn that led to `second`."""
    if first.lineage is None or second.lineage is None or first.ended is None or first.ended >= second.started:
        return False
    *scope, slot = first.lineage.split("/")
    path = second.lineage.split("/")
    if path[: len(scope)] != scope or len(path) <= len(scope):
        return False
    return int(slot) < int(path[len(scope)].removeprefix("t"))


def respecting(calls: list[RecordedCall], top: list[int], rng: random.Random) -> list[int]:
    """A random order of the calls in `top` in which nothing comes before what it must wait for."""
    left, order = list(top), []
    while left:
        ready = [b for b in left if not any(must_wait(calls[a], calls[b]) for a in left if a != b)]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return order


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_any_schedule_that_respects_happens_before_replays(build: Any, seed: int, schedule: int) -> None:
    calls = record(seed)
    top = [call.index for call in calls if call.parent is None]
    session = Session(calls)
    order = respecting(calls, top, random.Random(schedule))
    assert build.serve_all(session, [build.live(calls[index]) for index in order]) == order
    session.verify_complete()
    report = session.report(outcome=RunOutcome(status="completed"), expected=RunOutcome(status="completed"))
    assert (report.exit_code, report.served, report.skipped) == (0, len(top), len(calls) - len(top))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_any_other_schedule_diverges_and_names_the_first_violation(build: Any, seed: int, schedule: int) -> None:
    calls = record(seed)
    order = [call.index for call in calls if call.parent is None]
    random.Random(schedule).shuffle(order)
    done: set[int] = set()
    session = Session(calls)
    for index in order:
        waits_for = [a for a in order if a not in done and a != index and must_wait(calls[a], calls[index])]
        if waits_for:
            with pytest.raises(ReplayMismatchError) as caught:
                session.decide(build.live(calls[index]))
            assert caught.value.code == "out_of_order"
            assert f"tool 't{index}' was asked for before tool 't{min(waits_for)}'" in str(caught.value)
            return
        session.decide(build.live(calls[index]))
        done.add(index)
    session.verify_complete()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_equal_calls_get_their_own_answers_under_any_schedule_that_respects_happens_before(
    build: Any, seed: int, schedule: int
) -> None:
    calls = record(seed, alike=True)
    top = [call.index for call in calls if call.parent is None]
    session = Session(calls)
    order = respecting(calls, top, random.Random(schedule))
    assert [build.serve(session, build.live(calls[index])) for index in order] == [(at, "lineage") for at in order]
    session.verify_complete()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 1))
def test_nothing_is_served_twice_nor_before_what_it_waits_for(
    build: Any, seed: int, schedule: int, lost: float
) -> None:
    """Whatever the schedule, and where places are lost: a call gets an equal one whose turn has come, or none does."""
    calls = record(seed, alike=True)
    assume(calls)
    rng = random.Random(schedule)
    asked = [rng.choice(calls) for _ in range(2 * len(calls))]
    session = Session(calls)
    used: set[int] = set()
    for call in asked:
        try:
            found, _ = build.serve(session, build.live(call, None if rng.random() < lost else call.lineage))
        except ReplayError:
            break
        assert calls[found].input == call.input and found not in used
        assert not any(must_wait(calls[a], calls[found]) for a in range(len(calls)) if a not in used and a != found)
        used |= {found, *_inside(calls, found)}
    else:
        raise AssertionError("more was served than was recorded")
    error = session.latched
    assert error is not None
    with pytest.raises(type(error)):
        session.decide(build.live(calls[0]))


def _inside(calls: list[RecordedCall], above: int) -> set[int]:
    """The calls inside a call, at any depth: a replay skips them with it."""
    found = {call.index for call in calls if call.parent == above}
    return found.union(*(_inside(calls, index) for index in found))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_the_index_agrees_with_the_rule(seed: int, removals: int) -> None:
    calls = record(seed)
    order = CausalOrder(calls)
    left = list(range(len(calls)))
    rng = random.Random(removals)
    while left:
        for index in left:
            waits_for = [a for a in left if a != index and must_wait(calls[a], calls[index])]
            assert order.blocker(index) == (min(waits_for) if waits_for else None)
        gone = rng.choice(left)
        left.remove(gone)
        order.remove(gone)


def test_some_recordings_overlap_and_some_wait() -> None:
    """The generator is worth something: across seeds there are waits, overlaps, nested and unplaced calls."""
    recordings = [record(seed) for seed in range(200)]
    pairs = [(a, b) for calls in recordings for a in calls for b in calls if a.index < b.index]
    assert sum(must_wait(a, b) for a, b in pairs) > 100
    assert sum(not must_wait(a, b) for a, b in pairs) > 100
    assert sum(call.parent is not None for calls in recordings for call in calls) > 50
    assert sum(call.lineage is None for calls in recordings for call in calls) > 50
    assert sum(call.ended is None for calls in recordings for call in calls) > 20


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_siblings_do_not_wait_and_neither_does_the_parent_for_a_child(build: Any) -> None:
    calls = [
        build.tool(0, "a", lineage="t0/0", span=(0, 1)),
        build.tool(1, "b", lineage="t1/0", span=(2, 3)),
        build.tool(2, "c", lineage="2", span=(4, 5)),
    ]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        assert build.serve_all(Session(calls), [build.live(calls[i]) for i in order]) == list(order)


def test_a_spawned_call_waits_for_what_came_before_its_spawn_only(build: Any) -> None:
    calls = [
        build.tool(0, "before", lineage="0", span=(0, 1)),
        build.tool(1, "after", lineage="2", span=(2, 3)),
        build.tool(2, "spawned", lineage="t1/0", span=(4, 5)),
    ]
    assert build.serve_all(Session(calls), [build.live(calls[i]) for i in (0, 2, 1)]) == [0, 2, 1]
    with pytest.raises(ReplayMismatchError, match="'spawned' was asked for before tool 'before'"):
        Session(calls).decide(build.live(calls[2]))


def test_calls_in_flight_together_may_come_in_any_order(build: Any) -> None:
    calls = [
        build.tool(0, "a", lineage="0", span=(0, 9)),
        build.tool(1, "b", lineage="1", span=(1, 2)),
        build.tool(2, "c", lineage="2", span=(3, None)),
        build.tool(3, "d", lineage="3", span=(10, 11)),
    ]
    assert build.serve_all(Session(calls), [build.live(calls[i]) for i in (1, 2, 0, 3)]) == [1, 2, 0, 3]
    session = Session(calls)
    session.decide(build.live(calls[1]))
    with pytest.raises(ReplayMismatchError, match="'d' was asked for before tool 'a'"):
        session.decide(build.live(calls[3]))


def test_calls_without_lineage_wait_for_nothing(build: Any) -> None:
    calls = [build.tool(i, name) for i, name in enumerate("abc")]
    assert build.serve_all(Session(calls), [build.live(calls[i]) for i in (2, 0, 1)]) == [2, 0, 1]


def test_a_long_stream_left_open_costs_nothing_later(build: Any) -> None:
    calls = [build.tool(0, "stream", lineage="0", span=(0, None))]
    calls += [build.tool(i, payload=i, lineage=str(i)) for i in range(1, 20_000)]
    session = Session(calls)
    served = build.serve_all(session, [build.live(call) for call in calls[1:]])
    assert served == list(range(1, 20_000))
