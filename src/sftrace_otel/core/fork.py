# SPDX-License-Identifier: Apache-2.0
"""Forking: the beginning of a trace as a trace of its own, with some recorded outputs replaced.

Pure: the new run's id, the time, and the way outputs are cleaned are handed in; files are `bundle`'s and `fork`'s.

Decision: a fork keeps every event up to the step of its fork point, events of one step together, ids unchanged. Its
status says what it holds, not what its parent came to: `failed` only with the failure's step and an error event inside,
`completed` only with the run_end, else `running`. An override changes the output of an event, its hash and its
redactions, and leaves tokens, cost, duration and policy alone; a failed call that is given an ordinary output counts as
ok, since replay would otherwise raise what was just replaced. Rejected: numbering the steps anew (fork points and
failures name steps), and keeping the parent's status (a failed run cut before its error is not valid).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from sftrace_otel.errors import ForkError
from sftrace_otel.formats import canonical
from sftrace_otel.formats.sftrace import (
    MANIFEST_ENTRY,
    EventBase,
    LLMResponse,
    Manifest,
    RedactionEntry,
    ToolResult,
    Totals,
    TraceData,
    totals,
)

__all__ = ["Clean", "ForkError", "ForkInfo", "ForkPoint", "Forked", "Overridden", "OverrideSpec", "fork"]

Clean = Callable[[object], tuple[bytes, Sequence[tuple[str, str]]]]
"""Makes a payload of a value: its JSON text after redaction, and the findings as (JSON Pointer, reason)."""

_OVERRIDABLE = (ToolResult, LLMResponse)
_ONLY = "only tool_result and llm_response can be overridden"


@dataclass(frozen=True)
class ForkPoint:
    """The last event of a fork: its id, or its step (0 is the first).

    Raises:
        ValueError: Neither or both are given.
    """

    event_id: str | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if self.event_id is None and self.step is None:
            raise ValueError("fork point requires either event_id or step")
        if self.event_id is not None and self.step is not None:
            raise ValueError("fork point cannot specify both event_id and step")


@dataclass(frozen=True, kw_only=True)
class OverrideSpec:
    """A new output for the event with this id, or for the result at this step. An id wins over a step.

    Raises:
        ValueError: Neither or both targets are given.
    """

    step: int | None = None
    event_id: str | None = None
    output: object

    def __post_init__(self) -> None:
        if self.step is None and self.event_id is None:
            raise ValueError("override requires either step or event_id")
        if self.step is not None and self.event_id is not None:
            raise ValueError("override cannot specify both step and event_id")


@dataclass(frozen=True, kw_only=True)
class ForkInfo:
    """Where a fork came from."""

    parent_run_id: str
    fork_point_event_id: str
    fork_point_step: int
    fork_timestamp: datetime
    overrides_applied: int = 0
    parent_trace_path: str | None = None


@dataclass(frozen=True, slots=True)
class Overridden:
    """One applied override, by digests of the output before and after."""

    event_id: str
    step: int
    was: str | None
    now: str


@dataclass(frozen=True, slots=True)
class Forked:
    """A fork.

    Attributes:
        data: The new trace.
        event_id, step: The fork point, both ways.
        overridden: The overrides that were applied, in the order of the events.
        stale: Ids of events whose sidecar rows no longer hold: left out, overridden, or asking for one of these.
    """

    data: TraceData
    event_id: str
    step: int
    overridden: tuple[Overridden, ...]
    stale: frozenset[str]


def fork(
    trace: TraceData, point: ForkPoint, overrides: Sequence[OverrideSpec] = (), *, run_id: str, clean: Clean
) -> Forked:
    """Cut `trace` after `point` and replace outputs.

    Args:
        trace: The parent; it is not changed.
        point: The last step to keep.
        overrides: Outputs to replace, at most one for each target.
        run_id: Id of the new run.
        clean: Makes a payload of an output, by the redaction policy.

    Raises:
        ForkError: The point or a target does not exist, an override fits no result, a target is named twice, or an
            event that stays has a parent that does not.
    """
    by_target = _index(overrides)
    last = _find(trace.events, point)
    kept = [event for event in trace.events if event.step <= last.step]
    _require_parents(kept, last.step)
    chosen = _choose(trace.events, kept, by_target, last.step)
    events: list[EventBase] = []
    applied: list[Overridden] = []
    entries = _entries_of(trace, kept)
    for event in kept:
        changed: EventBase = event
        if event.id in chosen:
            changed, record, found = _override(event, chosen[event.id], clean)
            applied.append(record)
            entries = _replaced(entries, event, found)
        events.append(changed.replace(run_id=run_id))
    manifest = _manifest(trace, events, last.step, run_id)
    if manifest.failure is None:
        entries = [e for e in entries if not (e.event_id == MANIFEST_ENTRY and e.path.startswith("/failure"))]
    data = TraceData(manifest=manifest, events=tuple(events), redactions=tuple(entries))
    return Forked(data, last.id, last.step, tuple(applied), _stale(trace.events, last.step, chosen))


def _index(overrides: Iterable[OverrideSpec]) -> dict[int | str, OverrideSpec]:
    """Overrides by step (int) or event id (str)."""
    by_target: dict[int | str, OverrideSpec] = {}
    for spec in overrides:
        target = spec.step if spec.event_id is None else spec.event_id
        assert target is not None
        if target in by_target:
            noun = "step" if isinstance(target, int) else "event"
            raise ForkError(f"duplicate override for {noun} {target}", code="duplicate_override")
        by_target[target] = spec
    return by_target


def _find(events: Sequence[EventBase], point: ForkPoint) -> EventBase:
    for event in events:
        if event.id == point.event_id if point.event_id is not None else event.step == point.step:
            return event
    if point.event_id is not None:
        raise ForkError(f"event ID {point.event_id!r} not found in trace", code="fork_point_not_found")
    raise ForkError(f"step {point.step} not found in trace", code="fork_point_not_found")


def _require_parents(kept: Sequence[EventBase], step: int) -> None:
    ids = {event.id for event in kept}
    for event in kept:
        if event.parent_id is not None and event.parent_id not in ids:
            raise ForkError(
                f"fork at step {step} would break parent dependency: event {event.id} references parent "
                f"{event.parent_id} which occurs after fork point",
                code="broken_parent",
            )


def _choose(
    events: Sequence[EventBase], kept: Sequence[EventBase], by_target: Mapping[int | str, OverrideSpec], last: int
) -> dict[str, OverrideSpec]:
    """Event id to the override it gets. An override that fits nothing is an error, all of them in one."""
    chosen: dict[str, OverrideSpec] = {}
    errors: list[str] = []
    for target, spec in by_target.items():
        found = [event for event in kept if target in (event.step, event.id)]
        results = [event for event in found if isinstance(event, _OVERRIDABLE)]
        if len(results) == 1:
            if results[0].id not in chosen or isinstance(target, str):
                chosen[results[0].id] = spec
        elif results:
            errors.append(f"override targets step {target}, which has several results; name one by its event ID")
        else:
            errors.append(_misfit(events, found, target, last))
    if errors:
        raise ForkError(f"invalid overrides: {'; '.join(errors)}", code="invalid_override")
    return chosen


def _misfit(events: Sequence[EventBase], found: Sequence[EventBase], target: int | str, last: int) -> str:
    """Why an override fits nothing."""
    if found:
        kind = found[0].type
        what = f"step {target} ({kind})" if isinstance(target, int) else f"{kind} event {target}"
        return f"override targets {what}; {_ONLY}"
    if any(target in (event.step, event.id) for event in events):
        what = f"step {target}" if isinstance(target, int) else f"event {target}"
        return f"override targets {what}, which comes after the fork point (step {last})"
    if isinstance(target, str):
        return f"override targets non-existent event {target}"
    steps = max((event.step for event in events), default=-1) + 1
    if 0 <= target < steps:
        return f"override targets step {target}, which no event has"
    return f"override targets step {target} but trace only has {steps} steps"


def _override(
    event: EventBase, spec: OverrideSpec, clean: Clean
) -> tuple[EventBase, Overridden, list[tuple[str, str]]]:
    data, findings = clean(spec.output)
    digest = hashlib.sha256(canonical.reread(data)[1]).hexdigest()
    found = [(f"/output{pointer}", reason) for pointer, reason in findings]
    elsewhere = tuple(pointer for pointer in event.redactions if not _is_output(pointer))
    pointers = dict.fromkeys(pointer for pointer, _ in found)
    changed = event.replace(
        output=msgspec.Raw(data),
        output_hash=digest,
        redactions=(*elsewhere, *pointers),
        status="ok" if event.status == "error" and not _is_error_form(data) else event.status,
    )
    return changed, Overridden(event.id, event.step, event.output_hash, digest), found


def _is_error_form(data: bytes) -> bool:
    """Whether an output says that its call failed (format page, "Pairing")."""
    try:
        value = msgspec.json.decode(data, type=dict[str, object])
    except msgspec.ValidationError:
        return False
    return value.keys() == {"error_type", "message"}


def _is_output(pointer: str) -> bool:
    return pointer == "/output" or pointer.startswith("/output/")


def _entries_of(trace: TraceData, kept: Sequence[EventBase]) -> list[RedactionEntry]:
    ids = {event.id for event in kept} | {MANIFEST_ENTRY}
    return [entry for entry in trace.redactions if entry.event_id in ids]


def _replaced(
    entries: Sequence[RedactionEntry], event: EventBase, found: Iterable[tuple[str, str]]
) -> list[RedactionEntry]:
    """`entries` with those of the event's new output instead of those of its old one."""
    rest = [entry for entry in entries if entry.event_id != event.id or not _is_output(entry.path)]
    return [*rest, *(RedactionEntry(event_id=event.id, path=path, reason=reason) for path, reason in found)]


def _manifest(trace: TraceData, events: Sequence[EventBase], step: int, run_id: str) -> Manifest:
    parent = trace.manifest
    whole = len(events) == len(trace.events)
    failed = (
        parent.failure is not None and parent.failure.step <= step and any(event.type == "error" for event in events)
    )
    ended = any(event.type == "run_end" for event in events) and parent.status == "completed"
    return parent.replace(
        run_id=run_id,
        status="failed" if failed else "completed" if ended else "running",
        failure=parent.failure if failed else None,
        totals=totals(events, known=parent.totals if whole else Totals(cost_usd=_cost(events))),
    )


def _cost(events: Iterable[EventBase]) -> float | None:
    """What the kept calls cost in US dollars, if any says so."""
    costs = [event.cost_usd for event in events if isinstance(event, LLMResponse) and event.cost_usd is not None]
    return sum(costs) if costs else None


def _stale(events: Iterable[EventBase], step: int, chosen: Mapping[str, OverrideSpec]) -> frozenset[str]:
    """Ids that no row of a sidecar may speak of any more: a row would bring back what was cut off or replaced."""
    stale: set[str] = set()
    for event in events:
        if event.step > step or event.id in chosen:
            stale.add(event.id)
            if event.parent_id is not None and event.type in ("tool_result", "llm_response", "error"):
                stale.add(event.parent_id)
    return frozenset(stale)
