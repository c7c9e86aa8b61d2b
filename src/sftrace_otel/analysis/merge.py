# SPDX-License-Identifier: Apache-2.0
"""The bundles of the processes of one run, joined into one.

Each process writes its own bundle; that of a child names its parent's run (`run.json`, `origin.parent_run`). `family`
finds them in a folder, `merge` joins them: the run's own start and end, the events of all by time (`core.merge`), the
rows of the sidecars with ids, numbers and times that fit, losses added up, and a verdict of the whole.

Decision: the merged bundle keeps the run's id, since it is that run, seen whole; `provenance.json` names every bundle
it was made of by run id, name and the digest of its events. Everything is streamed, and only what has its checksum goes
in. Which tools left no event is asked anew of the whole: a child may hold what its parent lacks. Rejected: merging what
only may belong together (same trace id, same time), and leaving out a child that cannot be read without a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from sftrace_otel.bundle import read, write
from sftrace_otel.bundle.carry import carry, intact
from sftrace_otel.bundle.recover import find_journals, head_of
from sftrace_otel.core.mapping import dialects
from sftrace_otel.core.merge import Merging, Process
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats import canonical, sftrace, sidecars
from sftrace_otel.formats.sftrace import (
    EVENTS_FILE,
    EventBase,
    Failure,
    LLMRequest,
    LLMResponse,
    Manifest,
    RedactionEntry,
    ToolResult,
)
from sftrace_otel.recorder import Answered
from sftrace_otel.recorder.verdict import Obstacle, untraced_tool
from sftrace_otel.version import __version__

__all__ = ["UNRELATED", "Family", "Merged", "family", "merge"]

UNRELATED = "not_one_run"
"""Code of the error for bundles that are not of one run."""

_OWN = (sidecars.CALLS_FILE, sidecars.WIRE_FILE, sidecars.SPANS_FILE, sidecars.RUN_FILE)
_EVENTS_OF_ROWS = {"calls": ("request", "response", "error"), "wire": ("event_id",), "spans": ("same_as",)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The bundles of a run in a folder, the run's own first, and what is missing, in lines for people."""

    bundles: tuple[Path, ...]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """What `merge` made.

    Attributes:
        path: The new bundle.
        run_id: Its run.
        parents: Run id and name of each bundle in it, the run's own first.
        events, llm_calls, tool_calls: Totals.
        notes: What a reader should know: processes that did not end, files that were left out.
    """

    path: Path
    run_id: str
    parents: tuple[tuple[str, str], ...]
    events: int
    llm_calls: int
    tool_calls: int
    notes: tuple[str, ...] = ()


class _Source:
    """A bundle that goes in: its place in the family, and how far its numbers are moved."""

    def __init__(self, bundle: read.Bundle) -> None:
        self.bundle = bundle
        self.run_id = bundle.manifest.run_id
        self.name = bundle.path.name
        self.listed = bundle.listed()
        origin = bundle.run.get("origin")
        self.origin: Mapping[str, Any] = origin if isinstance(origin, Mapping) else {}
        made_of = bundle.provenance.get("parents", ()) if _is_merged(bundle) else ()
        self.runs = {self.run_id, *(str(one.get("run_id")) for one in made_of)}
        self.process = Process(0, None)
        self.digest = hashlib.sha256()
        """Of its events, once they are through."""
        self.calls = 0
        self.resources = 0
        self.late = 0

    @property
    def above(self) -> str | None:
        """The run that this one belongs to: that of the process which started it, or which it goes on for."""
        found = self.origin.get("parent_run") or self.origin.get("continues")
        return found if isinstance(found, str) else None

    def events(self) -> Iterator[EventBase]:
        """Its events, from bytes that have their checksum."""
        return read.parse_lines(self.bundle.store, self._noted())

    def _noted(self) -> Iterator[bytes]:
        for line in intact(
            self.bundle, EVENTS_FILE, self.bundle.lines(EVENTS_FILE, ends=True), self.listed[EVENTS_FILE]
        ):
            self.digest.update(line)
            yield line

    def rows(self, name: str, parse: Callable[[Iterator[bytes]], Iterable[Any]]) -> Iterator[dict[str, Any]]:
        """The rows of a sidecar; none where it has no such file."""
        if name in self.listed and self.bundle.has(name):
            lines = intact(self.bundle, name, self.bundle.lines(name, ends=True), self.listed[name])
            yield from parse(line.removesuffix(b"\n") for line in lines)


def _is_merged(bundle: read.Bundle) -> bool:
    return bundle.provenance.get("origin") == "merged"


# --- finding ----------------------------------------------------------------------------------------------------------


def family(folder: Path, run_id: str) -> Family:
    """The bundles in `folder` of the run `run_id` and of the processes that it started, and theirs.

    Raises:
        TraceStorageError: The folder cannot be read, or has no bundle of that run.
    """
    found: dict[str, read.Bundle] = {}
    missing: list[str] = []
    for summary in read.list_bundles(folder):
        if summary.status == "unreadable":
            missing.append(f"{summary.path.name} cannot be read and may be one of them: {summary.failure}")
            continue
        bundle = read.open_bundle(summary.path)
        if not _is_merged(bundle):
            found.setdefault(summary.run_id, bundle)
    if run_id not in found:
        text = f"holds no bundle of the run {canonical.printable(run_id)}; list what is there with: sftrace ls DIR"
        raise TraceStorageError(text, where=str(folder), code="missing_file")
    above = {one: _Source(bundle).above for one, bundle in found.items()}
    known = _below(run_id, above)
    return Family(
        bundles=tuple(found[one].path for one in known),
        missing=(*missing, *_unfinished(folder, dict.fromkeys(known))),
    )


def _below(run_id: str, above: Mapping[str, str | None]) -> list[str]:
    """`run_id` and what belongs to it, parents before children; a run that goes on for another counts as below it."""
    known = [run_id]
    for one in known:
        known += [below for below, parent in above.items() if parent == one and below not in known]
    return known


def _unfinished(folder: Path, known: dict[str, None]) -> Iterator[str]:
    """Journals of processes of the run: they have not ended, or were killed."""
    heads = [(path, head_of(path)) for path in find_journals(folder)]
    for _ in heads:  # as deep as there are journals
        for _, head in heads:
            if head is not None and head.origin.get("parent_run") in known:
                known[head.run] = None
    for path, head in heads:
        if head is not None and head.run in known:
            yield (
                f"process {head.pid} of this run has not ended, or was killed: {path.name}; if it is gone: "
                f"sftrace recover {path}"
            )


# --- merging ----------------------------------------------------------------------------------------------------------


def merge(target: Path, bundles: Sequence[Path], *, missing: Sequence[str] = (), overwrite: bool = False) -> Merged:
    """Join the bundles of one run into a new one at `target`; they are not changed.

    Args:
        target: A path that ends in `.sftrace`.
        bundles: The run's own and those of the processes under it, in any order.
        missing: Lines about processes of the run that are not among them; the merged bundle says so.
        overwrite: Replace a bundle that is there.

    Raises:
        TraceStorageError: A bundle cannot be read, is invalid or was changed; they are not of one run (code
            `not_one_run`); or `target` cannot be written. Nothing is left behind then.
    """
    write.require_free(target, overwrite=overwrite)
    sources = _in_order([_opened(path) for path in bundles])
    return _Merge(sources, tuple(missing)).write(target, overwrite)


def _opened(path: Path) -> _Source:
    found = read.validate_bundle(path, strict=False, verify_integrity=True)
    if found.exit_code not in (0, 3):
        first = next(issue for issue in found.issues if issue.code != "integrity_unverified")
        place = f"{path}: {first.location}" if first.location else str(path)
        raise TraceStorageError(f"{first.message}; it cannot be merged", where=place, code=first.code)
    return _Source(read.open_bundle(path))


def _in_order(sources: Sequence[_Source]) -> list[_Source]:
    """The sources, the run's own first and parents before children; refuses those that are not of one run."""
    owners: dict[str, _Source] = {}
    for source in sources:
        for run in source.runs:
            if run in owners:
                raise _refusal(source, f"the run {run} is in {owners[run].name} already")
            owners[run] = source
    roots = [source for source in sources if owners.get(source.above or "") is None]
    if len(roots) > 1:
        others = ", ".join(f"{one.name} ({_belongs(one)})" for one in roots)
        raise _refusal(roots[1], f"not of one run: there is no bundle above {others}")
    if not roots:
        raise _refusal(sources[0], "the bundles name each other as parents in a circle")
    ordered = [roots[0]]
    sources = sorted(sources, key=lambda one: sftrace.parse_time(one.bundle.manifest.created_at))
    for one in ordered:
        ordered += [below for below in sources if below is not roots[0] and owners[below.above or ""] is one]
    if len(ordered) < len(sources):
        lost = next(source for source in sources if source not in ordered)
        raise _refusal(lost, "the bundles name each other as parents in a circle")
    for number, source in enumerate(ordered):
        source.process = Process(number, owners[source.above or ""].process if number else None)
    return ordered


def _belongs(source: _Source) -> str:
    return (
        "a run of its own"
        if source.above is None
        else f"its parent is {canonical.printable(source.above, quote=False)}"
    )


def _refusal(source: _Source, text: str) -> TraceStorageError:
    return TraceStorageError(text, where=str(source.bundle.path), code=UNRELATED)


@dataclass
class _Merge:
    """One merge, step by step in the order in which the files are written."""

    sources: Sequence[_Source]
    missing: tuple[str, ...]
    answered: Answered = field(default_factory=Answered)
    merging: Merging = field(init=False)
    _methods: dict[str, str] = field(default_factory=dict)
    """Id of an LLM request without an answer yet → its method."""
    _started: dict[str, int] = field(default_factory=dict)
    """Merged id of a call that others hang on → when it began, in ns since the run did."""

    def __post_init__(self) -> None:
        manifest = self.root.bundle.manifest
        failed_at = manifest.failure.step if manifest.failure is not None else None
        self.merging = Merging([source.process for source in self.sources], self.root.run_id, failed_at)

    @property
    def root(self) -> _Source:
        return self.sources[0]

    def write(self, target: Path, overwrite: bool) -> Merged:
        carried = [carry(source.bundle) for source in self.sources]
        kept = {name: pieces for name, pieces in carried[0].sidecars.items() if name not in _OWN}
        notes = [*self.missing, *self._cut_off(), *self._left_behind([set(one.sidecars) for one in carried[1:]])]
        files: dict[str, Iterable[bytes]] = {
            **kept,
            **self._rows(sidecars.CALLS_FILE, "calls", sidecars.parse_calls, self._calls),
            **self._rows(sidecars.WIRE_FILE, "wire", sidecars.parse_wire, self._wire),
            **self._rows(sidecars.SPANS_FILE, "spans", sidecars.parse_spans, self._spans),
            sidecars.RUN_FILE: self._once(self._run),
            sidecars.PROVENANCE_FILE: self._once(self._provenance),
        }
        blobs = {name: pieces for one in reversed(carried) for name, pieces in one.blobs.items()}
        path = write.save_lines(
            (sftrace.dump_event(event) + b"\n" for event in self._events()),
            lambda: (self._manifest(), self._redactions()),
            target,
            overwrite=overwrite,
            sidecars=cast("Mapping[str, bytes | Iterable[bytes]]", files),
            blobs=blobs,
        )
        totals = self._manifest().totals
        return Merged(
            path=path,
            run_id=self.root.run_id,
            parents=tuple((source.run_id, source.name) for source in self.sources),
            events=totals.events,
            llm_calls=totals.llm_calls,
            tool_calls=totals.tool_calls,
            notes=tuple(notes),
        )

    def _once(self, make: Callable[[], Mapping[str, Any]]) -> Iterator[bytes]:
        """The bytes of an object that is known once the events are through."""
        yield sidecars.dump_object(make())

    def _cut_off(self) -> Iterator[str]:
        for source in self.sources:
            if source.bundle.manifest.status == "running":
                yield f"{source.name} does not hold the end of its process: it was cut off"

    def _left_behind(self, others: Sequence[set[str]]) -> Iterator[str]:
        for source, names in zip(self.sources[1:], others, strict=True):
            for name in sorted(names.difference(_OWN)):
                yield f"{name} of {source.name} is left out: nothing is known of what it says"

    # -- events

    def _events(self) -> Iterator[EventBase]:
        for event in self.merging.events({source.process.number: source.events() for source in self.sources}):
            self._note_answers(event)
            yield event

    def _note_answers(self, event: EventBase) -> None:
        """Which results went back to the model, and which tool events there are: of all processes together."""
        if isinstance(event, ToolResult):
            self.answered.tool(event.name, map(canonical.digest, dialects.results_of(event.output)))
        elif isinstance(event, LLMRequest) and isinstance(event.input, dict):
            method, request = str(event.input.get("method")), event.input.get("request")
            self._methods[event.id] = method
            for call_id, name, content in dialects.tool_answers(method, request):
                self.answered.answer(call_id, name, map(canonical.digest, dialects.results_of(content)))
        elif isinstance(event, LLMResponse):
            for call_id, name in dialects.tool_calls(self._methods.pop(event.parent_id or "", None), event.output):
                self.answered.called(call_id, name)

    def _manifest(self) -> Manifest:
        own = self.root.bundle.manifest
        counts = self.merging.counts
        costs = [cost for source in self.sources if (cost := source.bundle.manifest.totals.cost_usd) is not None]
        duration = own.totals.duration_ms
        if duration is not None and self.root.process.began is not None:
            duration = max(duration, (self.merging.last - self.root.process.began) // 1000)
        failure = own.failure
        if failure is not None:
            failure = Failure(type=failure.type, message=failure.message, step=self.merging.failure_step)
        return own.replace(
            failure=failure,
            totals=own.totals.replace(
                events=sum(counts.values()),
                llm_calls=counts.get("llm_request", 0),
                tool_calls=counts.get("tool_call", 0),
                cost_usd=sum(costs) if costs else None,
                duration_ms=duration,
            ),
        )

    def _redactions(self) -> list[RedactionEntry]:
        entries: list[RedactionEntry] = []
        for source in self.sources:
            own = sftrace.parse_redactions(source.bundle.read(sftrace.REDACTIONS_FILE)).entries
            for entry in own:
                if source is self.root or not self._is_gone(source, entry.event_id):
                    entries.append(entry.replace(event_id=source.process.now(entry.event_id)))
        return entries

    def _is_gone(self, source: _Source, event_id: str) -> bool:
        """Whether an event of a child is not in the merged run: its own start and end, and its manifest."""
        return event_id == sftrace.MANIFEST_ENTRY or not self.merging.holds(source.process, event_id)

    # -- rows

    def _rows(
        self,
        file: str,
        sidecar: str,
        parse: Callable[[Iterator[bytes]], Iterable[Any]],
        change: Callable[[_Source, Iterable[dict[str, Any]]], Iterator[dict[str, Any]]],
    ) -> dict[str, Iterable[bytes]]:
        if not any(file in source.listed for source in self.sources):
            return {}
        return {file: self._lines(file, sidecar, parse, change)}

    def _lines(
        self,
        file: str,
        sidecar: str,
        parse: Callable[[Iterator[bytes]], Iterable[Any]],
        change: Callable[[_Source, Iterable[dict[str, Any]]], Iterator[dict[str, Any]]],
    ) -> Iterator[bytes]:
        yield sidecars.header(sidecar) + b"\n"
        for source in self.sources:
            for row in change(source, source.rows(file, parse)):
                for member in _EVENTS_OF_ROWS[sidecar]:
                    if isinstance(row.get(member), str):
                        row[member] = source.process.now(row[member])
                yield canonical.dumps(row) + b"\n"

    def _moved(self, source: _Source) -> int:
        """ns by which times since the start of a process are moved to be since the start of the run."""
        began, zero = source.process.began, self.root.process.began
        return source.late + (0 if began is None or zero is None else (began - zero) * 1000)

    def _calls(self, source: _Source, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        base = self._calls_until(source)
        source.late = self._late(source, self._moved(source))
        moved = self._moved(source)
        above = set(self.merging.hung.values())
        for row in rows:
            if isinstance(row.get("call"), int):
                source.calls = max(source.calls, row["call"])
                row["call"] += base
            for name in ("start_ns", "end_ns"):
                if isinstance(row.get(name), int):
                    row[name] = max(0, row[name] + moved)
            if source is not self.root:
                row["lineage"] = None
            request = source.process.now(str(row.get("request")))
            if request in above and isinstance(row.get("start_ns"), int):
                self._started[request] = row["start_ns"]
            yield row

    def _late(self, source: _Source, moved: int) -> int:
        """ns by which the clocks of two processes disagree, as far as a call would begin before what it hangs on."""
        late = 0
        for row in source.rows(sidecars.CALLS_FILE, sidecars.parse_calls):
            start = row.get("start_ns")
            floor = self._started.get(self.merging.hung.get(source.process.now(str(row.get("request"))), ""))
            if floor is not None and isinstance(start, int):
                late = max(late, floor - (start + moved))
        return late

    def _calls_until(self, source: _Source) -> int:
        return sum(one.calls for one in self.sources[: source.process.number])

    def _wire(self, source: _Source, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        base, moved = self._calls_until(source), self._moved(source)
        for row in rows:
            if isinstance(row.get("call"), int):
                row["call"] += base
            for name in ("start_ns", "end_ns"):
                if isinstance(row.get(name), int):
                    row[name] = max(0, row[name] + moved)
            yield row

    def _spans(self, source: _Source, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        base = sum(one.resources for one in self.sources[: source.process.number])
        for row in rows:
            resource = row.get("resource")
            if isinstance(resource, dict) and isinstance(resource.get("id"), int):
                source.resources = max(source.resources, resource["id"] + 1)
                row["resource"] = {**resource, "id": resource["id"] + base}
            yield row

    # -- run.json and provenance.json

    def _run(self) -> dict[str, Any]:
        infos: list[Mapping[str, Any]] = [source.bundle.run for source in self.sources]
        obstacles = self._obstacles(infos)
        traces = dict.fromkeys(trace for info in infos for trace in info.get("trace_ids", ()))
        kept = [str(info["kept"]) for info in infos if info.get("kept")]
        return {
            **infos[0],
            "schema_version": sidecars.VERSION,
            "trace_ids": list(traces),
            "losses": self._losses(infos),
            "verdict": {"offline": not obstacles, "obstacles": obstacles},
            "connections": [one for info in infos for one in info.get("connections", ())],
            **({"kept": "; ".join(kept)} if kept else {}),
        }

    def _losses(self, infos: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """All that was lost: numbers added up, of anything else what the first to tell says."""
        sums: dict[str, Any] = {}
        for info in infos:
            losses = info.get("losses")
            for name, value in losses.items() if isinstance(losses, Mapping) else ():
                known = sums.get(name)
                countable = type(value) is int and type(known) is int
                sums[name] = known + value if countable else known if name in sums else value
        if self.missing:
            sums["processes missing"] = len(self.missing)
        return sums

    def _obstacles(self, infos: Iterable[Mapping[str, Any]]) -> list[Obstacle]:
        found: list[Obstacle] = []
        for info in infos:
            verdict = info.get("verdict")
            told = verdict.get("obstacles", ()) if isinstance(verdict, Mapping) else ()
            found += [one for one in told if one.get("kind") != "untraced_tool" and one not in found]
        found += map(untraced_tool, self.answered.untraced())
        outside = [source.name for source in self.sources[1:] if source.process.outside]
        if outside:
            what = f"{len(outside)} of {len(self.sources)} processes made calls of their own outside every tool"
            found.append({"kind": "processes", "what": what, "do": "replay the bundle of each process"})
        for line in self.missing:
            found.append({"kind": "missing_process", "what": line, "do": "merge again once its bundle is there"})
        return found

    def _provenance(self) -> dict[str, Any]:
        return {
            "schema_version": sidecars.VERSION,
            "origin": "merged",
            "tool": f"sftrace-otel {__version__}",
            "created_at": datetime.now(UTC).isoformat(),
            "parents": [
                {"run_id": source.run_id, "name": source.name, "events_sha256": source.digest.hexdigest()}
                for source in self.sources
            ],
        }
