# SPDX-License-Identifier: Apache-2.0
"""MCP requests answered from the recording: by the SDK's own models and exceptions.

Decision: a recorded result is read by the model that the SDK asked for, as one from a server is; a refusal is the SDK's
own exception with its code, message and data. Progress is told before the result, in its recorded order.

Source: ADR 14; `design.md`, "Outcome".
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sftrace_otel.errors import ReplayError, ReplayPolicyError
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.exceptions import rebuilt_exception
from sftrace_otel.instrumentation.mcp_messages import LIST, SCOPE, Asked
from sftrace_otel.instrumentation.served import Served
from sftrace_otel.recorder import current_scope

if TYPE_CHECKING:
    from sftrace_otel.core.plan import Outcome, RecordedCall

__all__ = ["ServedRequest", "listed", "result_of"]

_log = logging.getLogger("sftrace_otel")


class ServedRequest(Served):
    """The recorded answer to a request. Making it raises a ReplayError where the recording has none."""

    __slots__ = ("method", "model")

    def __init__(self, replay: replaying.Active, asked: Asked, model: Any) -> None:
        self.replay = replay
        self.method = asked.method
        self.model = model
        self.thrown = []
        lineage = current_scope().place()
        decision = replay.decide("tool", asked.name, replay.prepare(asked.input), lineage=lineage)
        if decision.action != "serve" or decision.call is None:
            error = ReplayPolicyError(
                f"replay: {asked.name} was to go out, and the session that would send it is connected to nothing; MCP "
                "requests are answered from the recording in every mode"
            )
            replay.session.latch(error)
            raise error
        self.call = decision.call
        attributes = {**asked.attributes, **replaying.marks(decision)}
        self.span = tracing.start_span(SCOPE, asked.span_name, tracing.CLIENT, attributes)

    async def told(self, callback: Callable[..., Awaitable[None]] | None) -> None:
        """Tell of the progress that was recorded."""
        if callback is None:
            return
        for told in self.call.outcome.progress:
            try:
                await callback(*told)
            except Exception as error:  # as the SDK does, which goes on without the program's callback
                _log.warning("sftrace: a progress callback raised %s", type(error).__name__)

    def result(self) -> object:
        """As `Served.result`, made by the SDK's own model."""
        try:
            result = result_of(self.replay, self.call, self.model)
        except BaseException as error:
            tracing.end_span(self.span, error)
            raise
        tracing.end_span(self.span, self.call.outcome.error_type)
        return result


def result_of(replay: replaying.Active, call: RecordedCall, model: Any) -> object:
    """The recorded result as the SDK's `model` makes it, or its exception raised."""
    outcome = call.outcome
    output: Any = outcome.output
    if outcome.status == "error" and not (isinstance(output, dict) and output.get("isError") is True):
        raise _rebuilt(call.kind, call.name, outcome)
    if model is None:
        return output
    try:
        validate = getattr(model, "validate_python", None) or model.model_validate
        return validate(output)
    except Exception as error:
        name = getattr(model, "__name__", "result that the SDK expects")
        fault = ReplayError(
            f"replay: the answer to {call.name!r} is no {name} ({type(error).__name__}); the output of an MCP tool has "
            'the form {"content": [{"type": "text", "text": …}]}'
        )
        replay.session.latch(fault)
        raise fault from error


def _rebuilt(kind: str, name: str, outcome: Outcome) -> BaseException:
    """The recorded exception; a protocol error with its code, message and data."""
    error: Any = rebuilt_exception(kind, name, outcome)
    refusal = outcome.output.get("error") if isinstance(outcome.output, dict) else None
    if isinstance(refusal, dict) and type(error).__module__.startswith("mcp."):
        error.error = sys.modules["mcp.shared.exceptions"].ErrorData.model_validate(refusal)
    return error  # type: ignore[no-any-return]


def listed(replay: replaying.Active, served: ServedRequest) -> RecordedCall | None:
    """The list of tools that the recorded call asked for to check its result, else another one with its tool.

    None where there is none: then nobody checked when it was recorded.
    """
    lists = [call for call in replay.session.calls if call.name == f"mcp {LIST}" and call.input == {}]
    own = [call for call in lists if call.parent == served.call.index]
    return next(iter(own or [call for call in lists if served.call.name in _tools_of(call.outcome.output)]), None)


def _tools_of(output: Any) -> set[object]:
    tools = output.get("tools") if isinstance(output, dict) else None
    return {tool.get("name") for tool in tools or () if isinstance(tool, dict)}
