# SPDX-License-Identifier: Apache-2.0
"""Forking: the beginning of a trace as a trace of its own, with some recorded outputs replaced.

Pure: the new run's id, the time, and the way outputs are cleaned are handed in; files are `bundle`'s and `fork`'s.

Events are gone through twice, one at a time: an `Outline` takes of each what deciding needs (some bytes), and
`Plan.take` then lets the kept ones through, changed where asked. So a bundle is forked in the memory of its ids.

Decision: a fork keeps every event up to the step of its fork point, events of one step together, ids unchanged. Its
status says what it holds, not what its parent came to: `failed` only with the failure's step and an error event inside,
`completed` only with the run_end, else `running`. An override changes the output of an event, its hash and its
redactions, its tokens and cost where the new output says others, and leaves the rest alone; what is redacted in the new
output as it was in the old one stays marked. A failed call that is given an ordinary output counts as
ok, since replay would otherwise raise what was just replaced. Rejected: numbering the steps anew (fork points and
failures name steps), and keeping the parent's status (a failed run cut before its error is not valid).
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from sftrace_otel.core.mapping.wire import tokens_of
from sftrace_otel.core.prices import Prices
from sftrace_otel.errors import ForkError
from sftrace_otel.formats import Json, canonical, sftrace
from sftrace_otel.formats.sftrace import (
    EVENT_CLASSES,
    MANIFEST_ENTRY,
    REPLACEMENT,
    EventBase,
    LLMResponse,
    Manifest,
    RedactionEntry,
    Totals,
    TraceData,
)

__all__ = [
    "Clean",
    "ForkError",
    "ForkInfo",
    "ForkPoint",
    "Forked",
    "Outline",
    "Overridden",
    "OverrideSpec",
    "Plan",
    "fork",
    "outline",
    "plan",
]

Clean = Callable[[object], tuple[bytes, Sequence[tuple[str, str]]]]
"""Makes a payload of a value: its JSON text after redaction, and the findings as (JSON Pointer, reason)."""

_OVERRIDABLE = ("tool_result", "llm_response")
_ONLY = "only tool_result and llm_response can be overridden"


def _require_target(what: str, step: object, event_id: object) -> None:
    """Refuse a step that is no int (a bool is none) and an id that is no text: taken for the other, it would be
    looked up as that."""
    if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
        raise ValueError(f"{what} step is a whole number, not {type(step).__name__}")
    if event_id is not None and not isinstance(event_id, str):
        raise ValueError(f"{what} event_id is text, not {type(event_id).__name__}")


@dataclass(frozen=True)
class ForkPoint:
    """The last event of a fork: its id, or its step (0 is the first).

    Raises:
        ValueError: Neither or both are given, or of another type.
    """

    event_id: str | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if self.event_id is None and self.step is None:
            raise ValueError("fork point requires either event_id or step")
        if self.event_id is not None and self.step is not None:
            raise ValueError("fork point cannot specify both event_id and step")
        _require_target("fork point", self.step, self.event_id)


@dataclass(frozen=True, kw_only=True)
class OverrideSpec:
    """A new output for the event with this id, or for the result at this step. An id wins over a step.

    `status`: "ok" or "error" for the event; left out, a failed call that is given an ordinary output is ok, and else
    it stays as it is. With "error" the output is `{"error_type", "message"}`, which replay raises.

    Raises:
        ValueError: Neither or both targets are given, one of another type, or another status.
    """

    step: int | None = None
    event_id: str | None = None
    output: object
    status: str | None = None

    def __post_init__(self) -> None:
        if self.step is None and self.event_id is None:
            raise ValueError("override requires either step or event_id")
        if self.step is not None and self.event_id is not None:
            raise ValueError("override cannot specify both step and event_id")
        _require_target("override", self.step, self.event_id)
        if self.status not in (None, "ok", "error"):
            raise ValueError(f"override status {self.status!r}: it is 'ok' or 'error'")


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


class Outline:
    """What forking asks of a trace: ids, steps, types, parents and costs. Built by `add`, one event after the other.

    `plain` says of which events the line can be taken over with nothing but another run id put in: those that are
    written as this package writes them, with the run id of the manifest (`run_id`).
    """

    def __init__(self, run_id: str = "") -> None:
        self.run_id = run_id
        self.plain = bytearray()
        self.costs: dict[int, float | None] = {}
        self.at: dict[str, int] = {}
        self.ids: list[str] = []
        self.steps = array("q")
        self._types = bytearray()
        self._parents = array("q")
        self._unseen: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, event: EventBase) -> None:
        """Take note of the next event."""
        number = len(self.ids)
        self.at.setdefault(event.id, number)
        self.ids.append(event.id)
        self.steps.append(event.step)
        self._types.append(_NUMBERS[event.type])
        self.plain.append(event.kept is msgspec.UNSET and event.run_id == self.run_id)
        if isinstance(event, LLMResponse):
            self.costs[number] = event.cost_usd
        parent = event.parent_id
        if parent is None:
            self._parents.append(-1)
        else:
            found = self.at.get(parent, -2)
            self._parents.append(found)
            if found == -2:
                self._unseen[number] = parent

    def type(self, number: int) -> str:
        """The type of an event."""
        return _TYPES[self._types[number]]

    def parent(self, number: int) -> str | None:
        """The id of an event's parent."""
        found = self._parents[number]
        return self.ids[found] if found >= 0 else self._unseen.get(number)

    def leaning(self, step: int) -> list[int]:
        """The events up to a step whose parent is not among these."""
        steps = self.steps
        return [
            number
            for number, (own, parent) in enumerate(zip(steps, self._parents, strict=True))
            if own <= step and parent != -1 and (parent == -2 or steps[parent] > step)
        ]

    def fitting(self, target: int | str) -> list[int]:
        """The events of a step, or with an id."""
        if isinstance(target, str):
            first = self.at.get(target)
            return [] if first is None else [number for number in range(first, len(self)) if self.ids[number] == target]
        return [number for number, step in enumerate(self.steps) if step == target]


_TYPES = tuple(EVENT_CLASSES)
_NUMBERS = {name: number for number, name in enumerate(_TYPES)}


def outline(events: Iterable[EventBase], run_id: str = "") -> Outline:
    """The outline of the events of a run."""
    made = Outline(run_id)
    for event in events:
        made.add(event)
    return made


class Plan:
    """A fork that was decided. `take` goes through the events once; after that the rest is known.

    Attributes:
        event_id, step: The fork point, both ways.
        stale: Ids of events whose sidecar rows no longer hold: left out, overridden, or asking for one of these.
        cut: Those of them that are left out.
        overridden: The overrides that were applied, in the order of the events; after `take`.
    """

    def __init__(
        self,
        parent: Manifest,
        redactions: Sequence[RedactionEntry],
        made: Outline,
        point: ForkPoint,
        overrides: Sequence[OverrideSpec],
        run_id: str,
        clean: Clean,
        prices: Prices | None = None,
    ) -> None:
        by_target = _index(overrides)
        last = _find(made, point)
        self.event_id, self.step = made.ids[last], made.steps[last]
        _require_parents(made, self.step)
        self._chosen = _choose(made, by_target, self.step)
        self.stale = _stale(made, self.step, self._chosen)
        self.cut = frozenset(id_ for id_, step in zip(made.ids, made.steps, strict=True) if step > self.step)
        self.overridden: list[Overridden] = []
        self._parent = parent
        self._run_id = run_id
        self._clean = clean
        self._prices = prices
        self._entries = list(redactions)
        self._counts = Totals()
        self._whole = True
        self._dearer = False
        self._costs: list[float] = []
        self._types: set[str] = set()
        self._kept: set[str] = {MANIFEST_ENTRY}

    def take_lines(self, lines: Iterable[bytes], made: Outline) -> Iterator[bytes]:
        """As `take`, from line to line of `events.jsonl`, each with its newline; a plain line is not parsed again.

        Args:
            lines: The lines that `made` was made of.
            made: The outline that the fork was decided by.
        """
        found = dict.fromkeys(EVENT_CLASSES, 0)
        # In a plain line the id is the first value and its quotes are escaped: the first match ends the id.
        old, new = (b'","run_id":%s,"parent_id":' % msgspec.json.encode(one) for one in (made.run_id, self._run_id))
        last, steps, plain = self.step, made.steps, made.plain
        for number in (made.at[event_id] for event_id in self._chosen):
            plain[number] = False
        for number, line in enumerate(lines):
            if number >= len(steps) or steps[number] > last:  # more lines than there were: their digest will tell
                self._whole = False
                continue
            if plain[number]:
                yield line.replace(old, new, 1)
            else:
                yield sftrace.dump_event(self._taken(sftrace.parse_event(line.removesuffix(b"\n")))) + b"\n"
        for number in (number for number in range(len(made)) if steps[number] <= last):
            found[made.type(number)] += 1
            self._kept.add(made.ids[number])
            if plain[number]:
                self._spent(made.costs.get(number))
        self._count(found)

    def take(self, events: Iterable[EventBase]) -> Iterator[EventBase]:
        """The events of the fork, of the same events that the outline was made of."""
        found = dict.fromkeys(EVENT_CLASSES, 0)
        for event in events:
            if event.step > self.step:
                self._whole = False
                continue
            found[event.type] += 1
            self._kept.add(event.id)
            yield self._taken(event)
        self._count(found)

    def _taken(self, event: EventBase) -> EventBase:
        changed = self._changed(event)
        if isinstance(event, LLMResponse) and isinstance(changed, LLMResponse):
            self._dearer |= event.cost_usd != changed.cost_usd
            self._spent(changed.cost_usd)
        return changed.replace(run_id=self._run_id)

    def _spent(self, cost: float | None) -> None:
        if cost is not None:
            self._costs.append(cost)

    def _count(self, found: Mapping[str, int]) -> None:
        self._types = {kind for kind, count in found.items() if count}
        self._counts = Totals(events=sum(found.values()), llm_calls=found["llm_request"], tool_calls=found["tool_call"])

    def _changed(self, event: EventBase) -> EventBase:
        spec = self._chosen.get(event.id)
        if spec is None:
            return event
        changed, record, findings = _override(event, spec, self._clean, self._prices)
        self.overridden.append(record)
        self._entries = _replaced(self._entries, changed, findings)
        return changed

    @property
    def manifest(self) -> Manifest:
        """The fork's manifest; after `take`."""
        parent = self._parent
        failed = parent.failure is not None and parent.failure.step <= self.step and "error" in self._types
        ended = "run_end" in self._types and parent.status == "completed"
        cost = math.fsum(self._costs) if self._costs else None
        known = parent.totals if self._whole else Totals(cost_usd=cost)
        if self._dearer:
            known = known.replace(cost_usd=cost)
        counts = self._counts
        return parent.replace(
            run_id=self._run_id,
            status="failed" if failed else "completed" if ended else "running",
            failure=parent.failure if failed else None,
            totals=known.replace(events=counts.events, llm_calls=counts.llm_calls, tool_calls=counts.tool_calls),
        )

    @property
    def redactions(self) -> tuple[RedactionEntry, ...]:
        """The fork's redactions; after `take`."""
        failed = self.manifest.failure is not None
        return tuple(
            entry
            for entry in self._entries
            if entry.event_id in self._kept
            and (failed or entry.event_id != MANIFEST_ENTRY or not entry.path.startswith("/failure"))
        )


def plan(
    manifest: Manifest,
    redactions: Sequence[RedactionEntry],
    made: Outline,
    point: ForkPoint,
    overrides: Sequence[OverrideSpec] = (),
    *,
    run_id: str,
    clean: Clean,
    prices: Prices | None = None,
) -> Plan:
    """Decide a fork.

    Args:
        manifest, redactions: Of the parent.
        made: The outline of the parent's events.
        point: The last step to keep.
        overrides: Outputs to replace, at most one for each target.
        run_id: Id of the new run.
        clean: Makes a payload of an output, by the redaction policy.
        prices: What tokens cost, for an answer that is given others; without it such an answer has no cost.

    Raises:
        ForkError: The point or a target does not exist, an override fits no result, a target is named twice, or an
            event that stays has a parent that does not.
    """
    return Plan(manifest, redactions, made, point, overrides, run_id, clean, prices)


def fork(
    trace: TraceData,
    point: ForkPoint,
    overrides: Sequence[OverrideSpec] = (),
    *,
    run_id: str,
    clean: Clean,
    prices: Prices | None = None,
) -> Forked:
    """Cut a trace in memory after `point` and replace outputs; the trace is not changed. Arguments as of `plan`.

    Raises:
        ForkError: As `plan`.
    """
    made = plan(
        trace.manifest, trace.redactions, outline(trace.events), point, overrides,
        run_id=run_id, clean=clean, prices=prices,
    )  # fmt: skip
    events = tuple(made.take(trace.events))
    data = TraceData(manifest=made.manifest, events=events, redactions=made.redactions)
    return Forked(data, made.event_id, made.step, tuple(made.overridden), made.stale)


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


def _find(made: Outline, point: ForkPoint) -> int:
    found = made.fitting(point.event_id if point.event_id is not None else point.step or 0)
    if found:
        return found[0]
    if point.event_id is not None:
        raise ForkError(f"event ID {point.event_id!r} not found in trace", code="fork_point_not_found")
    raise ForkError(f"step {point.step} not found in trace", code="fork_point_not_found")


def _require_parents(made: Outline, step: int) -> None:
    for number in made.leaning(step):
        parent = made.parent(number)
        at = None if parent is None else made.at.get(parent)
        if parent is not None and (at is None or made.steps[at] > step):
            raise ForkError(
                f"fork at step {step} would break parent dependency: event {made.ids[number]} references parent "
                f"{parent} which occurs after fork point",
                code="broken_parent",
            )


def _choose(made: Outline, by_target: Mapping[int | str, OverrideSpec], last: int) -> dict[str, OverrideSpec]:
    """Event id to the override it gets. An override that fits nothing is an error, all of them in one."""
    chosen: dict[str, OverrideSpec] = {}
    errors: list[str] = []
    for target, spec in by_target.items():
        fitting = made.fitting(target)
        found = [number for number in fitting if made.steps[number] <= last]
        results = [made.ids[number] for number in found if made.type(number) in _OVERRIDABLE]
        if len(results) == 1:
            if results[0] not in chosen or isinstance(target, str):
                chosen[results[0]] = spec
        elif results:
            errors.append(f"override targets step {target}, which has several results; name one by its event ID")
        else:
            errors.append(_misfit(made, found or fitting, target, last))
    if errors:
        raise ForkError(f"invalid overrides: {'; '.join(errors)}", code="invalid_override")
    return chosen


def _misfit(made: Outline, found: Sequence[int], target: int | str, last: int) -> str:
    """Why an override fits nothing."""
    if found and made.steps[found[0]] <= last:
        kind = made.type(found[0])
        what = f"step {target} ({kind})" if isinstance(target, int) else f"{kind} event {target}"
        return f"override targets {what}; {_ONLY}"
    if found:
        what = f"step {target}" if isinstance(target, int) else f"event {target}"
        return f"override targets {what}, which comes after the fork point (step {last})"
    if isinstance(target, str):
        return f"override targets non-existent event {target}"
    steps = max(made.steps, default=-1) + 1
    if 0 <= target < steps:
        return f"override targets step {target}, which no event has"
    return f"override targets step {target} but trace only has {steps} steps"


def _override(
    event: EventBase, spec: OverrideSpec, clean: Clean, prices: Prices | None
) -> tuple[EventBase, Overridden, list[tuple[str, str]]]:
    """The event with its new output, what was done, and the findings in that output as (pointer, reason)."""
    data, findings = clean(spec.output)
    digest = hashlib.sha256(canonical.reread(data)[1]).hexdigest()
    found = [(f"/output{pointer}", reason) for pointer, reason in findings]
    value = canonical.loads(data)
    elsewhere = [pointer for pointer in event.redactions if not _is_output(pointer) or _is_marked(value, pointer)]
    changes: dict[str, object] = {
        "output": msgspec.Raw(data),
        "output_hash": digest,
        "redactions": tuple(dict.fromkeys([*elsewhere, *(pointer for pointer, _ in found)])),
        "status": spec.status or ("ok" if event.status == "error" and not _is_error_form(value) else event.status),
    }
    if isinstance(event, LLMResponse):
        changes.update(_usage(event, value, prices))
    return event.replace(**changes), Overridden(event.id, event.step, event.output_hash, digest), found


def _usage(event: LLMResponse, output: Json, prices: Prices | None) -> dict[str, object]:
    """Tokens and cost of an answer whose output says other tokens than the recorded one; else nothing changes."""
    new = tokens_of(output)
    if new == (None, None, None) or new == tokens_of(event.output):
        return {}
    prompt, completion, total = new
    cost = None if prices is None else prices.cost((event.model,), prompt=prompt, completion=completion)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total,
        "cost_usd": None if cost is None else float(cost),
    }


def _is_marked(output: Json, pointer: str) -> bool:
    """Whether the place in an event that `pointer` names (it begins with `/output`) still says that it was redacted."""
    value = output
    for part in pointer.split("/")[2:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isascii() and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return False
    return isinstance(value, str) and REPLACEMENT in value


def _is_error_form(output: Json) -> bool:
    """Whether an output says that its call failed (format page, "Pairing")."""
    return isinstance(output, dict) and output.keys() == {"error_type", "message"}


def _is_output(pointer: str) -> bool:
    return pointer == "/output" or pointer.startswith("/output/")


def _replaced(
    entries: Sequence[RedactionEntry], event: EventBase, found: Iterable[tuple[str, str]]
) -> list[RedactionEntry]:
    """`entries` with those of the changed event's output that hold for its new one, and the new findings."""
    new = dict(found)
    rest = [
        entry
        for entry in entries
        if entry.event_id != event.id
        or not _is_output(entry.path)
        or (entry.path in event.redactions and entry.path not in new)
    ]
    return [*rest, *(RedactionEntry(event_id=event.id, path=path, reason=reason) for path, reason in found)]


def _stale(made: Outline, step: int, chosen: Mapping[str, OverrideSpec]) -> frozenset[str]:
    """Ids that no row of a sidecar may speak of any more: a row would bring back what was cut off or replaced."""
    stale: set[str] = set()
    for number, own in enumerate(made.steps):
        if own > step or made.ids[number] in chosen:
            stale.add(made.ids[number])
            parent = made.parent(number)
            if parent is not None and made.type(number) in ("tool_result", "llm_response", "error"):
                stale.add(parent)
    return frozenset(stale)
