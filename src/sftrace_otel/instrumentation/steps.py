# SPDX-License-Identifier: Apache-2.0
"""Generators at a boundary, step by step: recorded with all that a program may do to one, and served again.

Decision: what the program sends, throws in and closes goes to the tool's own generator, and its return value comes
back, as with `yield from`. The call's scope and span are current during a step only, never across a yield, so that what
the tool does hangs on the call and what its consumer does between two items does not. Each item is copied in its
recorded form when it is given out, since the program may change it afterwards; no more than a payload may hold is kept.
Rejected: `yield from` inside the call's scope, which leaks it into the consumer.

Source: PEP 380 and PEP 525; `design.md`, "Outcome".
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from typing import Any, Protocol

import msgspec

from sftrace_otel.core.prepare import Prepared, restore
from sftrace_otel.core.redact import Finding
from sftrace_otel.formats import Json
from sftrace_otel.instrumentation.failopen import fails_open

__all__ = ["UNRECORDED", "Items", "Steps", "async_steps", "steps"]


class Items:
    """The items that a generator has given, in their recorded form, up to `limit` bytes; `cut` once more came."""

    __slots__ = ("_limit", "_prepare", "_size", "cut", "findings", "tags", "values")

    def __init__(self, prepare: Callable[[object], Prepared], limit: int) -> None:
        self._prepare = prepare
        self._limit = limit
        self._size = 0
        self.values: list[Json] = []
        self.tags: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.cut = False

    def add(self, item: object) -> None:
        """Keep an item, if there is room for it."""
        if self.cut:
            return
        prepared = self._prepare(item)
        self._size += len(prepared.data) + 1
        self.cut = prepared.truncated or self._size > self._limit
        if self.cut:
            return
        place = f"/{len(self.values)}"
        self.values.append(restore(prepared.value, {}))  # type: ignore[arg-type]
        self.tags.update({place + pointer: tag for pointer, tag in prepared.tags.items()})
        self.findings += [Finding(place + found.pointer, found.reason) for found in prepared.findings]

    def output(self, error: dict[str, Any] | None = None) -> Prepared:
        """The items as the output of a call; as the member `items` of the `error` that it ended with."""
        below = "" if error is None else "/items"
        value: object = self.values
        if error is not None:
            value = {"error_type": error["type"], "message": error["message"]}
            if self.values:
                value["items"] = self.values
        prepared = self._prepare(value)
        return msgspec.structs.replace(
            prepared,
            tags={**prepared.tags, **{below + pointer: tag for pointer, tag in self.tags.items()}},
            findings=(*prepared.findings, *(Finding(below + one.pointer, one.reason) for one in self.findings)),
            truncated=prepared.truncated or self.cut,
        )


class Steps(Protocol):
    """A call that is being recorded, as far as its steps need it. Nothing here raises."""

    def enter(self) -> tuple[Any, Any] | None:
        """Make its span and scope current."""

    def leave(self, tokens: tuple[Any, Any] | None, /) -> None:
        """Put back what `enter` replaced."""

    def gave(self, item: object) -> None:
        """An item came out."""

    def exhausted(self, value: object = None, end: str = "finished") -> None:
        """The generator returned `value`, or was closed."""

    def raised(self, error: BaseException) -> None:
        """It raised."""


class _Unrecorded:
    """Steps of which nothing is recorded."""

    def enter(self) -> tuple[Any, Any]:
        return (None, None)

    def leave(self, tokens: tuple[Any, Any] | None, /) -> None:
        pass

    def gave(self, item: object) -> None:
        pass

    def exhausted(self, value: object = None, end: str = "finished") -> None:
        pass

    def raised(self, error: BaseException) -> None:
        pass


UNRECORDED: Steps = _Unrecorded()


def steps(record: Steps, inner: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run a generator for its consumer, recording."""
    step: Callable[[Any], Any] = inner.send
    given: Any = None
    while True:
        tokens = record.enter()
        try:
            item = step(given)
        except StopIteration as stop:
            record.exhausted(stop.value)
            return stop.value
        except BaseException as error:
            record.raised(error)
            raise
        finally:
            given = None
            record.leave(tokens)
        record.gave(item)
        step = inner.send
        try:
            given = yield item
        except GeneratorExit:
            _close(record, inner)
            raise
        except BaseException as error:
            step, given = inner.throw, error


def _close(record: Steps, inner: Generator[Any, Any, Any]) -> None:
    tokens = record.enter()
    try:
        inner.close()
    except BaseException as error:
        record.raised(error)
        raise
    finally:
        record.leave(tokens)
    record.exhausted(end="closed")


def async_steps(
    begin: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Steps, AsyncGenerator[Any, Any]]],
) -> Callable[..., AsyncIterator[Any]]:
    """An async generator function that asks `begin` for a call and its generator, and runs this for the consumer.

    Closing it closes the inner one first. It is one layer: there is no `yield from` between async generators.
    """

    async def call(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        record, inner = begin(args, kwargs)
        pending: Any = _first(inner) or inner.asend(None)
        while True:
            tokens = record.enter()
            try:
                item = await pending
            except StopAsyncIteration:
                record.exhausted()
                return
            except BaseException as error:
                record.raised(error)
                raise
            finally:
                pending = None
                record.leave(tokens)
            record.gave(item)
            try:
                pending = inner.asend((yield item))
            except GeneratorExit:
                await _aclose(record, inner)
                raise
            except BaseException as error:
                pending = inner.athrow(error)

    return call


async def _aclose(record: Steps, inner: AsyncGenerator[Any, Any]) -> None:
    tokens = record.enter()
    try:
        await inner.aclose()
    except BaseException as error:
        record.raised(error)
        raise
    finally:
        record.leave(tokens)
    record.exhausted(end="closed")


@fails_open("following a generator", None)
def _first(inner: AsyncGenerator[Any, Any]) -> Any:
    """The first step of `inner`, to be awaited. The event loop does not hear of it: what it closes at its end is the
    generator around, and two that close one generator at once fail."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return inner.asend(None)
    finally:
        sys.set_asyncgen_hooks(*hooks)
