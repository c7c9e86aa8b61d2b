# SPDX-License-Identifier: Apache-2.0
"""The server's side of MCP: what came in and what was answered, for the run that a request's span began.

Decision: mcp from 2.x on makes a SERVER span for each request, which has a run of its own (`design.md`, "Runs"); only
that run's input and output are missing, and they are taken inside the SDK's own middleware, where the span is current.
A request in which nothing is called leaves no bundle, as ever. Servers of mcp 1.x make no span: what they call belongs
to the process's run. Rejected: events of our own for requests that came in; the call is the client's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sftrace_otel import recorder as recording
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.mcp_messages import params_of, raw
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.recorder import Recorder, Run

__all__ = ["add"]


def add(patches: Patches) -> None:
    """Want the SDK's middleware wrapped."""
    patches.add("mcp.server._otel", "OpenTelemetryMiddleware.__call__", _request)


async def _request(
    wrapped: Callable[..., Awaitable[Any]], middleware: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    recorder = recording._active
    if recorder is None or replaying._active is not None or len(args) != 2:
        return await wrapped(*args, **kwargs)
    context, call_next = args

    async def answered(inner: Any) -> Any:
        run = _asked(recorder, context)
        result = await call_next(inner)
        if run is not None:
            _gave(run, result)
        return result

    return await wrapped(context, answered, **kwargs)


@fails_open("recording an MCP request that came in", None)
def _asked(recorder: Recorder, context: Any) -> Run | None:
    """The run that the request's span began, told what it was given; None where it is a part of another run."""
    run = recorder.span_run(tracing.current_ids()[1])
    if run is None or run.kind != "trace" or run.journal is not None or run.input is not None:
        return None
    run.input = recorder.prepare({"method": context.method, "params": params_of(context.params)})
    return run


@fails_open("recording an MCP answer", None)
def _gave(run: Run, result: Any) -> None:
    run.output = run.recorder.prepare(raw(result))
