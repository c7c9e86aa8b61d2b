# SPDX-License-Identifier: Apache-2.0
"""What the HTTP boundaries share: whose exchange a request is, the recorded answer to one, work off the event loop.

Decision: functions over `Head`, `Exchange` and `Answer`, without a client in them; each boundary turns an `Answer` into
its client's own types. Rejected: a base class of boundaries, which would have to know sync and async, transports and
pools.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from sftrace_otel.core.plan import Outcome
from sftrace_otel.errors import ReplayError
from sftrace_otel.instrumentation import bare, guard, replaying
from sftrace_otel.instrumentation.exceptions import rebuilt_exception
from sftrace_otel.instrumentation.exchange import Exchange, Head, call_name, current_llm, request_payload
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.llm import LlmCall, ServedLlmCall
from sftrace_otel.instrumentation.outcomes import Answer, GoesOut, answers_of
from sftrace_otel.recorder import Recorder, current_scope

if TYPE_CHECKING:
    from sftrace_otel.formats.sidecars import Recorded

__all__ = [
    "Body", "come_out", "exchange_of", "go_inside", "in_thread", "recorded_error",
    "sends_unseen", "served_answer",
]  # fmt: skip


# --- recording --------------------------------------------------------------------------------------------------------


def sends_unseen(host: str, port: int | None) -> bool:
    """Whether a request that is OpenTelemetry's own goes out unrecorded.

    Under replay only one to an allowed address: anything may set the suppression key.
    """
    return replaying.active() is None or guard.is_allowed(host, port)


def exchange_of(recorder: Recorder, head: Head) -> Exchange:
    """The exchange of a request: an attempt of the SDK's LLM call that is under way here, or a call of its own."""
    llm = current_llm.get()
    if isinstance(llm, ServedLlmCall):
        llm = llm.recording
    return Exchange(recorder, head, llm if isinstance(llm, LlmCall) and llm.owns(head) else None, bare.begun)


@fails_open("entering an exchange", None)
def go_inside() -> contextvars.Token[bool]:
    """What connects from now on is part of an exchange; give the result to `come_out`."""
    return guard.enter()


@fails_open("leaving an exchange", None, replay_too=True)
def come_out(token: contextvars.Token[bool] | None) -> None:
    """Undo `go_inside`."""
    if token is not None:
        guard.leave(token)


async def in_thread(exchange: Exchange, work: Callable[[], None]) -> None:
    """Do `work` in a thread and wait. A cancellation meanwhile ends the exchange afterwards.

    In a thread of its own: the workers of the loop's executor are the program's, and may be waiting for this very loop.
    """
    try:
        done = _begun(asyncio.get_running_loop(), work)
    except RuntimeError:  # another event loop, such as trio's, or no thread begins any more
        work()
        return
    try:
        await asyncio.shield(done)
    except asyncio.CancelledError as error:
        done.add_done_callback(functools.partial(_cancelled, exchange, error))
        raise


def _begun(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> asyncio.Future[None]:
    """Begin `work` in a thread; the future is done when that is. Raises RuntimeError where none can be started."""
    done: asyncio.Future[None] = loop.create_future()
    context = contextvars.copy_context()

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    def run() -> None:
        try:
            context.run(work)
        finally:
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError:  # the loop is closed: nobody waits
                pass

    threading.Thread(target=run, name="sftrace-body").start()
    return done


def _cancelled(exchange: Exchange, error: BaseException, _: object) -> None:
    exchange.finish("cancelled", error)


# --- replaying --------------------------------------------------------------------------------------------------------


class Body:
    """A request's body, as far as it could be read, and the error of the generator that gave it."""

    __slots__ = ("data", "error")

    def __init__(self, data: bytes, error: BaseException | None = None) -> None:
        self.data = data
        self.error = error


def served_answer(replay: replaying.Active, head: Head, body: Body) -> Answer | GoesOut:
    """The recorded answer to a request, or that the replay lets it out.

    Raises a ReplayError where there is none, and the error of the program's own request body, which was recorded as a
    failed call.
    """
    llm = current_llm.get()
    answer: Answer | GoesOut
    if isinstance(llm, ServedLlmCall) and llm.owns(head):
        answer = llm.serve(head, body.data)
    elif current_scope().live and replay.session.mode != "resume":  # which may hold the beginning of the call around
        answer = GoesOut(current_scope().place())
    else:
        try:
            answer = bare.answer(replay, head, body.data) or _http_answer(replay, head, body.data)
        except ReplayError as error:
            if llm is not None or replaying.in_sdk.get():
                raise replaying.ReplayStop(error) from None
            raise
    if body.error is not None:
        raise body.error
    return answer


def _http_answer(replay: replaying.Active, head: Head, body: bytes) -> Answer | GoesOut:
    lineage = current_scope().place()
    prepared = replay.prepare(request_payload(head, body, replay.policy))
    decision = replay.decide("http", call_name(head, replay.policy), prepared, lineage=lineage)
    if decision.action == "live":
        return GoesOut(lineage)
    assert decision.call is not None
    return answers_of(decision.call, framing="", blob=replay.blob)[0]


def recorded_error(recorded: Mapping[str, Any], message: str, url: str) -> BaseException:
    """An exception that was recorded for a call of `url` and is not of the client: a program's own, or the system's."""
    outcome = Outcome(
        status="error",
        error_type=str(recorded.get("qualname")),
        error_message=message,
        exception=cast("Recorded", recorded),
    )
    return rebuilt_exception("http", url, outcome)
