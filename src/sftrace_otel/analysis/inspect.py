# SPDX-License-Identifier: Apache-2.0
"""What happened in a recorded run: summary, verdict, the tree of calls, the events, what was lost or redacted.

Decision: one pass over the events and the pairing of replay (`core.plan`), so that inspect shows the calls that replay
would serve. Rejected: a tree built from spans, which a bundle of another recorder lacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

from sftrace_otel.bundle.read import Bundle
from sftrace_otel.core.miss import title_of
from sftrace_otel.core.plan import RecordedCall, extract_calls
from sftrace_otel.formats import Json
from sftrace_otel.formats.sftrace import ErrorEvent, EventBase, LLMRequest, LLMResponse, RunEnd, StateChange, to_json
from sftrace_otel.formats.sidecars import Provenance, RunInfo

__all__ = ["CallLine", "EventLine", "Inspection", "Overview", "event_at", "inspect_bundle"]

_FAULTY_ENDS = {
    "abandoned": "its stream was dropped before its end",
    "cancelled": "it was cancelled",
    "cut": "the run was cut while it was open",
    "open": "it was still open when the run ended",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLine:
    """One call of the tree.

    `depth`: calls that enclose it. `started_ms`: since the run began; `took_ms` None where it has no result. `tokens`:
    prompt and completion, where recorded. `remark`: what is wrong with it as a recording, None where nothing is.
    """

    step: int
    event_id: str
    depth: int
    kind: str
    title: str
    status: str
    error: str | None
    started_ms: float | None
    took_ms: float | None
    tokens: tuple[int | None, int | None] | None
    remark: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EventLine:
    """One event of the timeline; `about` is the tool, model, key or error class."""

    step: int
    event_id: str
    parent_id: str | None
    type: str
    about: str
    status: str
    at_ms: float | None
    redactions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """The manifest and sums over the run; `failure` is `{type, message, step}`, counts that nobody stated are None."""

    run_id: str
    agent: str
    status: str
    failure: dict[str, Json] | None
    created_at: str
    duration_ms: int | None
    events: int
    llm_calls: int
    tool_calls: int
    cost_usd: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    trace_ids: tuple[str, ...]
    environment: dict[str, Json]
    command: tuple[str, ...]
    policy: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """A bundle at a glance.

    `integrity` is verified, mismatch or unverified_legacy. `verdict` says whether it replays offline: "offline",
    "obstacles", or "unknown" where the bundle does not say and nothing in it speaks against it. `lost` has one line for
    everything that is missing from the recording.
    """

    path: str
    integrity: str
    summary: Overview
    verdict: Literal["offline", "obstacles", "unknown"]
    obstacles: tuple[dict[str, str], ...]
    calls: tuple[CallLine, ...]
    events: tuple[EventLine, ...]
    lost: tuple[str, ...]
    redacted: dict[str, int]
    origin: Provenance

    def to_dict(self) -> dict[str, Any]:
        """JSON values of everything."""
        return asdict(self)


def inspect_bundle(bundle: Bundle, *, untraced: Sequence[str] = ()) -> Inspection:
    """Look at an open bundle; `untraced` are functions known to lack events (`replay.untraced_tools`)."""
    events = list(bundle.events)
    calls = extract_calls(events, bundle.calls)
    run = bundle.run
    obstacles = tuple(_obstacles(run, calls, untraced))
    offline = run.get("verdict", {}).get("offline") is True
    return Inspection(
        path=str(bundle.path),
        integrity=bundle.integrity().state,
        summary=_summary(bundle, events),
        verdict="obstacles" if obstacles else "offline" if offline else "unknown",
        obstacles=obstacles,
        calls=tuple(_call_lines(calls, events)),
        events=tuple(_event_lines(events)),
        lost=tuple(_lost(run, calls)),
        redacted=dict(Counter(entry.reason for entry in bundle.trace.redactions)),
        origin=bundle.provenance,
    )


def event_at(bundle: Bundle, step: int) -> list[dict[str, Json]]:
    """The events of one step as JSON, payloads included; empty where there is no such step."""
    return [to_json(event) for event in bundle.events if event.step == step]


def _summary(bundle: Bundle, events: Sequence[EventBase]) -> Overview:
    manifest, totals = bundle.manifest, bundle.manifest.totals
    responses = [event for event in events if isinstance(event, LLMResponse)]
    return Overview(
        run_id=manifest.run_id,
        agent=manifest.agent_name,
        status=manifest.status,
        failure=None if manifest.failure is None else to_json(manifest.failure),
        created_at=manifest.created_at,
        duration_ms=totals.duration_ms,
        events=totals.events,
        llm_calls=totals.llm_calls,
        tool_calls=totals.tool_calls,
        cost_usd=totals.cost_usd,
        prompt_tokens=_sum(event.prompt_tokens for event in responses),
        completion_tokens=_sum(event.completion_tokens for event in responses),
        trace_ids=tuple(bundle.run.get("trace_ids") or ()),
        environment=to_json(manifest.environment),
        command=tuple(bundle.run.get("command") or ()),
        policy=bundle.run.get("policy") or {},
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _obstacles(run: RunInfo, calls: Iterable[RecordedCall], untraced: Iterable[str]) -> Iterator[dict[str, str]]:
    if "verdict" in run:
        for one in run["verdict"].get("obstacles", ()):
            yield {"kind": one.get("kind", ""), "what": one.get("what", ""), "do": one.get("do", "")}
        return
    for name in untraced:
        what = f"the result of {name} went back to the model, and no tool event holds it"
        yield {"kind": "untraced_tool", "what": what, "do": f"record again with {name} traced as a tool"}
    for call in calls:
        if call.outcome.status == "missing":
            what = f"{title_of(call)} at step {call.step} has no result"
            yield {"kind": "no_result", "what": what, "do": "replay ends there"}


def _call_lines(calls: Sequence[RecordedCall], events: Sequence[EventBase]) -> Iterator[CallLine]:
    depths: list[int] = []
    begin, times = _times(events)
    durations = {event.parent_id: event.duration_ms for event in events if event.duration_ms is not None}
    tokens = {
        event.parent_id: (event.prompt_tokens, event.completion_tokens)
        for event in events
        if isinstance(event, LLMResponse) and (event.prompt_tokens, event.completion_tokens) != (None, None)
    }
    timed = any(call.started[0] for call in calls)
    for call in calls:
        depths.append(0 if call.parent is None else depths[call.parent] + 1)
        at = call.started[0] / 1e6 if timed else _since(begin, times.get(call.request_id))
        took = (call.ended[0] - call.started[0]) / 1e6 if timed and call.ended else durations.get(call.request_id)
        yield CallLine(
            step=call.step,
            event_id=call.request_id,
            depth=depths[-1],
            kind=call.kind,
            title=title_of(call),
            status=call.outcome.status,
            error=_error(call),
            started_ms=at,
            took_ms=None if took is None else float(took),
            tokens=tokens.get(call.request_id),
            remark=_remark(call),
        )


def _error(call: RecordedCall) -> str | None:
    if call.outcome.status != "error":
        return None
    return f"{call.outcome.error_type}: {call.outcome.error_message}"


def _remark(call: RecordedCall) -> str | None:
    if call.outcome.truncated:
        return "its payload was cut when it was recorded; it cannot be replayed"
    if call.outcome.end in _FAULTY_ENDS:
        return _FAULTY_ENDS[call.outcome.end]
    return "it has no result" if call.outcome.status == "missing" else None


def _event_lines(events: Sequence[EventBase]) -> Iterator[EventLine]:
    begin, times = _times(events)
    for event in events:
        yield EventLine(
            step=event.step,
            event_id=event.id,
            parent_id=event.parent_id,
            type=event.type,
            about=_about(event),
            status=event.status,
            at_ms=_since(begin, times.get(event.id)),
            redactions=len(event.redactions),
        )


def _about(event: EventBase) -> str:
    if isinstance(event, ErrorEvent):
        return f"{event.error_type}: {event.message}"
    if isinstance(event, LLMRequest):
        return f"{event.provider or 'unknown'}/{event.model}"
    if isinstance(event, RunEnd):
        return str(event.run_status)
    if isinstance(event, StateChange):
        return event.key or ""
    if isinstance(event, LLMResponse):
        return event.model or ""
    return str(getattr(event, "name", ""))


def _times(events: Sequence[EventBase]) -> tuple[datetime | None, dict[str, datetime]]:
    times = {event.id: event.timestamp for event in events}
    return (events[0].timestamp if events else None), times


def _since(begin: datetime | None, moment: datetime | None) -> float | None:
    if begin is None or moment is None:
        return None
    return round((moment - begin).total_seconds() * 1000, 3)


def _lost(run: RunInfo, calls: Iterable[RecordedCall]) -> Iterator[str]:
    yield from (f"{name.replace('_', ' ')}: {value}" for name, value in run.get("losses", {}).items() if value)
    for call in calls:
        remark = _remark(call)
        if remark is not None:
            yield f"{title_of(call)} at step {call.step}: {remark}"
