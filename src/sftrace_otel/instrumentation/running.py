# SPDX-License-Identifier: Apache-2.0
"""A call that runs although a replay is active: let out by name, or derived (it runs again and is compared).

Decision: it goes the way of a recorded call, around the recording of it where the replay is recorded itself
(`--record`), so that drivers know one kind of call. Inside a call that was let out everything is really done, and the
guard lets its connections pass; inside a derived one calls are answered from the recording, and nothing goes out.

Source: `.sftrace` format page, `replay_policy`; ADR 20.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from sftrace_otel.errors import ReplayError
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.steps import Items, Steps
from sftrace_otel.recorder import current_scope, enter, inner, leave

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.trace import SpanKind

    from sftrace_otel.core.prepare import Prepared
    from sftrace_otel.core.session import Decision
    from sftrace_otel.instrumentation.opencall import OpenCall

__all__ = ["Running", "awaited"]

_LIMIT = 16 << 20
"""Bytes of a generator's items that are kept to be compared."""


class Running:
    """One such call. `record`: its recording, which has the span then."""

    __slots__ = ("_items", "_scope", "_span", "decision", "prepare", "record", "replay")

    def __init__(
        self,
        replay: replaying.Active,
        decision: Decision,
        lineage: str | None,
        record: Any,
        prepare: Callable[[object], Prepared],
        *,
        tracer: str,
        span_name: str,
        span_kind: SpanKind,
        attributes: Mapping[str, Any],
    ) -> None:
        self.replay = replay
        self.decision = decision
        self.record = record
        self.prepare = prepare
        self._items: Items | None = None
        if record is None:
            self._scope = inner(None, lineage, current_scope(), live=decision.action == "live")
            self._span = tracing.start_span(tracer, span_name, span_kind, {**attributes, **replaying.marks(decision)})

    @fails_open("entering a call", None, replay_too=True)
    def enter(self) -> tuple[Any, Any] | None:
        """As `OpenCall.enter`."""
        if self.record is not None:
            return self.record.enter()  # type: ignore[no-any-return]
        return enter(self._scope), tracing.attached(self._span)

    @fails_open("leaving a call", None, replay_too=True)
    def leave(self, tokens: tuple[Any, Any] | None, /) -> None:
        """Undo `enter`."""
        if tokens is not None:
            tracing.detach(tokens[1])
            leave(tokens[0])

    def returned(self, value: object, awaitable: str | None = None) -> None:
        """It gave `value`. Raises ReplayMismatchError where a derived call gave another value than it did."""
        if self.record is not None:
            self.record.returned(value, *(() if awaitable is None else (awaitable,)))
        self._end(None)
        if self.decision.action == "derived":
            self._compare(self.prepare(value))

    def raised(self, error: BaseException, awaitable: str | None = None) -> None:
        """It raised. Raises ReplayMismatchError where a derived call had not, or something else."""
        if self.record is not None:
            self.record.raised(error, *(() if awaitable is None else (awaitable,)))
        self._end(error)
        if self.decision.action == "derived" and isinstance(error, Exception):
            assert self.decision.call is not None
            self.replay.session.raised(self.decision.call, type(error).__name__)

    def _end(self, error: BaseException | None) -> None:
        if self.record is None:
            tracing.end_span(self._span, error)

    def _compare(self, output: Prepared) -> None:
        assert self.decision.call is not None
        self.replay.session.returned(self.decision.call, output.value)

    # -- awaited later

    def pending(self, result: Any) -> Any:
        """As the recording of a tool that gave something to await."""
        if inspect.iscoroutine(result):
            return awaited(self, result)
        if asyncio.isfuture(result):
            result.add_done_callback(self._settled)
        else:
            self.returned(result)
        return result

    def _settled(self, future: asyncio.Future[Any]) -> None:
        try:
            if future.cancelled():
                self.raised(asyncio.CancelledError(), "future")
            elif (error := future.exception()) is not None:
                self.raised(error, "future")
            else:
                self.returned(future.result(), "future")
        except ReplayError:
            pass  # latched: whoever has the future has its value already

    # -- item by item

    def generating(self) -> Steps:
        """As the recording of a generator."""
        if self.record is not None:
            self.record.generating()
        if self.decision.action == "derived":
            self._items = Items(self.prepare, _LIMIT)
        return self

    def gave(self, item: object) -> None:
        """It gave an item."""
        if self.record is not None:
            self.record.gave(item)
        if self._items is not None:
            self._items.add(item)

    def exhausted(self, value: object = None, end: str = "finished") -> None:
        """It returned `value`, or was closed. Raises ReplayMismatchError as `returned`."""
        if self.record is not None:
            self.record.exhausted(value, end)
        self._end(None)
        if self._items is not None and end == "finished":
            self._compare(self._items.output())


async def awaited(record: Running | OpenCall, result: Any) -> Any:
    """Await `result`, which a call gave, as part of that call."""
    tokens = record.enter()
    try:
        value = await result
    except BaseException as error:
        record.raised(error, "coroutine")  # type: ignore[union-attr]
        raise
    finally:
        record.leave(tokens)
    record.returned(value, "coroutine")  # type: ignore[union-attr]
    return value
