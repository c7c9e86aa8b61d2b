# SPDX-License-Identifier: Apache-2.0
"""What an agent did, step by step, and assertions about it that say what was done instead.

Decision: a step is a call that the program itself made: what a recorded tool did inside is no step, since a replay
skips it, and so the trajectory of a recording and that of its replay are the same. Assertions are methods that raise
AssertionError, each with a name of its own, since a bare `assert` in this file would not be rewritten by pytest in the
user's project. Rejected: a query language over events, which a Python test does not need.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, overload

from sftrace_otel.core.miss import excerpt, printable
from sftrace_otel.formats import Json

__all__ = ["Step", "Trajectory"]

_SHOWN = 40


class Step(NamedTuple):
    """A call that the program made.

    Attributes:
        kind: "tool", "llm" or "http".
        name: The tool's name, the model, or `http METHOD scheme://host/path`.
        provider: LLM calls: who serves the model, None where that is not known.
        input: Its redacted input: a tool's arguments by name, an LLM call's `{"method", "request"}`, an HTTP request.
    """

    kind: str
    name: str
    provider: str | None = None
    input: Json = None

    def is_named(self, name: str) -> bool:
        """Whether `name` means this step: its name, `provider/model`, or "llm" for any LLM call; `*` and `?` are
        wildcards."""
        names = [self.name]
        if self.kind == "llm":
            names += ["llm", f"{self.provider}/{self.name}"]
        return any(fnmatch.fnmatchcase(own, name) for own in names)


class Trajectory(Sequence[Step]):
    """The steps of a run, in the order in which they started. Every `assert_…` gives the trajectory back."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = tuple(steps)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Trajectory: ...
    def __getitem__(self, index: int | slice) -> Step | Trajectory:
        return Trajectory(self._steps[index]) if isinstance(index, slice) else self._steps[index]

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return f"Trajectory({[step.name for step in self._steps]})"

    def of(self, name: str) -> Trajectory:
        """The steps that `name` means (see `Step.is_named`)."""
        return Trajectory(step for step in self._steps if step.is_named(name))

    def assert_called(self, name: str) -> Self:
        """`name` was called at least once. Raises AssertionError."""
        if not self.of(name):
            self._fail(f"{name} was not called")
        return self

    def assert_not_called(self, name: str) -> Self:
        """`name` was never called. Raises AssertionError."""
        found = self.of(name)
        if found:
            self._fail(f"{name} was called{_times(len(found))}, and must not be")
        return self

    def assert_count(
        self, name: str, times: int | None = None, *, at_least: int | None = None, at_most: int | None = None
    ) -> Self:
        """`name` was called exactly `times`, or within bounds. Raises AssertionError, ValueError without a number."""
        if times is None and at_least is None and at_most is None:
            raise ValueError("assert_count needs a number: times, at_least or at_most")
        count = len(self.of(name))
        wanted = [(times, "", count == times), (at_least, "at least ", count >= (at_least or 0))]
        wanted.append((at_most, "at most ", count <= (at_most or 0)))
        for number, bound, holds in wanted:
            if number is not None and not holds:
                self._fail(f"{name} was called{_times(count)}, not {bound}{number}")
        return self

    def assert_arguments(self, name: str, arguments: Mapping[str, Any]) -> Self:
        """Some call of `name` was given at least these `arguments`.

        A value is compared with `==`, but true is not 1; a list by its items; a mapping again by at least its members;
        a function is asked with the value. Of an LLM call the arguments are its request, of an HTTP call its
        `method`, `url`, `headers` and `body`. Raises AssertionError.
        """
        found = self.of(name)
        if not found:
            self._fail(f"{name} was not called")
        if not any(_holds(arguments, _arguments_of(step)) for step in found):
            given = "; ".join(excerpt(_arguments_of(step)) for step in found[:5])
            self._fail(f"no call of {name} was given {arguments!r}, but: {given}")
        return self

    def assert_order(self, *names: str) -> Self:
        """`names` were called in this order, with anything between them. Raises AssertionError."""
        steps = iter(self._steps)
        for number, name in enumerate(names):
            if not any(step.is_named(name) for step in steps):
                before = f" after {', '.join(names[:number])}" if number else ""
                self._fail(f"{name} was not called{before}")
        return self

    def assert_sequence(self, *names: str, kinds: Iterable[str] = ("tool",)) -> Self:
        """The steps of `kinds` were exactly `names`, in this order. Raises AssertionError."""
        wanted = frozenset(kinds)
        steps = [step for step in self._steps if step.kind in wanted]
        for number, name in enumerate(names):
            if number >= len(steps):
                self._fail(f"{name} was to be call {number + 1}, and there were only {len(steps)}")
            if not steps[number].is_named(name):
                self._fail(f"call {number + 1} was {steps[number].name}, not {name}")
        if len(steps) > len(names):
            self._fail(f"after {len(names)} calls came {steps[len(names)].name}")
        return self

    def assert_max_steps(self, limit: int, *, kinds: Iterable[str] = ("tool", "llm", "http")) -> Self:
        """There were at most `limit` steps of `kinds`. Raises AssertionError."""
        wanted = frozenset(kinds)
        count = sum(step.kind in wanted for step in self._steps)
        if count > limit:
            self._fail(f"there were {count} steps, and at most {limit} are wanted")
        return self

    def _fail(self, why: str) -> None:
        __tracebackhide__ = True
        raise AssertionError("\n".join([printable(why), *self._lines()]))

    def _lines(self) -> Iterator[str]:
        yield "the steps were:" if self._steps else "there were no steps"
        for number, step in enumerate(self._steps[:_SHOWN]):
            yield f"  {number + 1}. {step.kind} {printable(step.name)} {excerpt(_arguments_of(step))}"
        if len(self._steps) > _SHOWN:
            yield f"  … and {len(self._steps) - _SHOWN} more"


def _times(count: int) -> str:
    return {0: " never", 1: " once", 2: " twice"}.get(count, f" {count} times")


def _arguments_of(step: Step) -> Json:
    if step.kind == "llm" and isinstance(step.input, dict):
        return step.input.get("request", step.input)
    return step.input


def _holds(wanted: Any, given: Any) -> bool:
    """Whether `given` has at least what `wanted` names."""
    if isinstance(wanted, Mapping):
        return isinstance(given, Mapping) and all(
            key in given and _holds(value, given[key]) for key, value in wanted.items()
        )
    if isinstance(wanted, (list, tuple)):
        return (
            isinstance(given, list)
            and len(given) == len(wanted)
            and all(_holds(one, other) for one, other in zip(wanted, given, strict=True))
        )
    if callable(wanted):
        return bool(wanted(given))
    return isinstance(wanted, bool) == isinstance(given, bool) and bool(wanted == given)
