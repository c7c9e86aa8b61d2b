# SPDX-License-Identifier: Apache-2.0
"""A tool call answered from the recording: at once, when it is awaited, or item by item.

Decision: a call that was cancelled waits until it is cancelled again, so that the timeout around it is what ends it, as
it did. The span of a served call lasts until it is over; nothing of it is current while the program runs.

Source: `design.md`, "Outcome".
"""

from __future__ import annotations

import asyncio
import signal
import traceback
from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING, Any

from sftrace_otel.core.prepare import restore
from sftrace_otel.errors import ReplayError, ReplayExhaustedError
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.asked import identified
from sftrace_otel.instrumentation.exceptions import rebuilt_exception
from sftrace_otel.instrumentation.outcomes import give_back
from sftrace_otel.recorder import current_scope

if TYPE_CHECKING:
    from sftrace_otel.instrumentation.tools import Tool

__all__ = ["SCOPE", "Served", "unreadable"]

SCOPE = "sftrace_otel.tools"
"""Instrumentation scope of the spans of tools."""


class Served:
    """The recorded call that answers a live one. Making it raises a ReplayError where the recording has none.

    `runs`: it is not served, the tool runs.
    """

    __slots__ = ("call", "decision", "lineage", "replay", "runs", "span", "thrown")

    def __init__(self, replay: replaying.Active, tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.replay = replay
        lineage = current_scope().place()
        self.lineage = lineage
        decision = tool.same(replay, args, kwargs, lineage)
        if decision is None:
            prepared = tool.prepared(replay.prepare, args, kwargs)
            decision = replay.decide("tool", tool.name, prepared, lineage=lineage, approve=tool.approve, runs=True)
        self.decision = decision
        self.runs = decision.action != "serve"
        if self.runs:
            return
        assert decision.call is not None
        self.call = decision.call
        self.thrown: list[BaseException] = []
        attributes = identified(tool.attributes)
        if tracing.is_traced(SCOPE):
            attributes = {**attributes, **replaying.marks(decision)}
            self.span = tracing.start_span(SCOPE, tool.span_name, tracing.INTERNAL, attributes)
        else:
            self.span = tracing.NO_SPAN

    def answer(self) -> object:
        """What the tool returned: its result, or something to await where it gave that. Raises what it raised."""
        awaitable = self.call.outcome.awaitable
        if awaitable is None:
            return self.result()
        return self.awaited() if awaitable == "coroutine" else self.future()

    def result(self) -> object:
        """The recorded result, or its exception raised."""
        try:
            result = give_back(self.call)
        except BaseException as error:
            tracing.end_span(self.span, error)
            raise
        tracing.end_span(self.span)
        return result

    # -- awaited

    async def awaited(self) -> object:
        """The same, for a call that is awaited."""
        if self._was_cancelled():
            await self._until_cancelled()
        return self.result()

    def _was_cancelled(self) -> bool:
        """Whether its task was: an interrupt or exit also ends a call as cancelled, and is raised again at once."""
        outcome = self.call.outcome
        return outcome.end == "cancelled" and outcome.error_type in (None, "CancelledError", "GeneratorExit")

    async def _until_cancelled(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # another event loop: nothing to wait with
            return
        try:
            await loop.create_future()
        except BaseException as error:
            tracing.end_span(self.span, error)
            raise

    def future(self) -> object:
        """A future that is settled as the recorded one was, once the loop runs; without a loop a coroutine."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self.awaited()
        future = loop.create_future()
        if self._was_cancelled():
            future.add_done_callback(lambda _: tracing.end_span(self.span, "CancelledError"))
        else:
            loop.call_soon(self._settle, future)
        return future

    def _settle(self, future: asyncio.Future[object]) -> None:
        if future.done():
            tracing.end_span(self.span, "CancelledError")
            return
        try:
            future.set_result(self.result())
        except asyncio.CancelledError:
            future.cancel()
        except BaseException as error:
            future.set_exception(error)

    # -- item by item

    def items(self) -> Generator[Any, Any, Any]:
        """The recorded items, then what the generator returned or raised."""
        try:
            for item in self._recorded_items():
                try:
                    yield item
                except GeneratorExit:
                    raise
                except BaseException as error:  # the recording knows what followed
                    self.thrown.append(error)
            value = self._end()
        except BaseException as error:
            tracing.end_span(self.span, error)
            raise
        tracing.end_span(self.span)
        return value

    async def async_items(self) -> AsyncGenerator[Any, Any]:
        """The same, for an async generator."""
        try:
            for item in self._recorded_items():
                try:
                    yield item
                except GeneratorExit:
                    raise
                except BaseException as error:
                    self.thrown.append(error)
            cancelled = self._was_cancelled() and not self.thrown
        except BaseException as error:
            tracing.end_span(self.span, error)
            raise
        if cancelled:
            await self._until_cancelled()
        try:
            self._end()
        except BaseException as error:
            tracing.end_span(self.span, error)
            raise
        tracing.end_span(self.span)

    def _recorded_items(self) -> list[Any]:
        outcome = self.call.outcome
        output = outcome.output
        if outcome.status == "error":
            restored: Any = restore(output, outcome.output_tags)
            items = restored.get("items") if isinstance(restored, dict) else None
            return items if isinstance(items, list) else []
        if output is None and self.decision.rung == "stub":
            return []
        if not isinstance(output, list):
            raise ReplayError(
                f"tool {self.call.name!r} gives items one by one, and the recording holds no list of them"
            )
        back: Any = restore(output, outcome.output_tags)
        return list(back)

    def _end(self) -> object:
        """What came after the last item."""
        outcome = self.call.outcome
        if outcome.status == "error":
            if self.thrown and type(self.thrown[-1]).__name__ == outcome.error_type:
                raise self.thrown[-1]
            raise rebuilt_exception(self.call.kind, self.call.name, outcome)
        if outcome.end == "closed":
            error = ReplayExhaustedError(
                f"tool {self.call.name!r} was closed after its last recorded item, and the program asks for another; "
                f"what comes next was never recorded"
            )
            self.replay.session.latch(error)
            raise error
        if outcome.returned is None:
            return None
        tags = outcome.returned.get("tags")
        known = {place: str(tag) for place, tag in tags.items()} if isinstance(tags, dict) else {}
        return restore(outcome.returned.get("value"), known)


def unreadable(error: BaseException) -> str:
    """What stands for a value whose own code raised `error` when it was read; raises what was meant for the program.

    That is an interrupt, and an exit that a signal's handler asked for while we were reading.
    """
    if isinstance(error, KeyboardInterrupt) or _is_of_signal(error):
        raise error
    return f"<unreadable ({type(error).__name__})>"


def _is_of_signal(error: BaseException) -> bool:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
