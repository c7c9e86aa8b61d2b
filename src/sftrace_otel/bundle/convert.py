# SPDX-License-Identifier: Apache-2.0
"""Bundles from one format into the other, and a `.flight` read as if it were a `.sftrace`.

Decision: both ways go through the records of a journal (`flight_out`, `flight_in`), so a bundle that was converted is
what recording it would have given. The source is verified first: what is not whole is not carried on. A `.flight` that
a verb reads is converted into a private folder that goes with the process. Deterministic: no clock, no new id.
Rejected: readers of their own for each verb (every verb would have two).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
from msgspec import Struct

from sftrace_otel.bundle.build import Closing
from sftrace_otel.bundle.chains import Chain
from sftrace_otel.bundle.flight import FlightBundle, open_flight
from sftrace_otel.bundle.flight_in import Unchained
from sftrace_otel.bundle.journal import Journal
from sftrace_otel.bundle.read import Bundle, open_bundle, validate_bundle
from sftrace_otel.bundle.records import NOTHING, Begin, End, Head, Single
from sftrace_otel.bundle.store import FolderStore, Store
from sftrace_otel.bundle.write import reporting, require_free
from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats import canonical, flight, sidecars
from sftrace_otel.formats.sftrace import UNSET_TIME, EventBase
from sftrace_otel.version import __version__

__all__ = ["ConvertedStore", "to_flight", "to_sftrace"]


class Converted(Struct, frozen=True):
    """What a conversion made.

    Attributes:
        path: The new bundle.
        events: How many events it holds.
        left: What the target has no room for: a name and how many.
    """

    path: Path
    events: int
    left: dict[str, int]


def to_sftrace(
    source: Path | str, target: Path | str, *, overwrite: bool = False, policy: RedactionPolicy | None = None
) -> Converted:
    """Make a `.sftrace` bundle of the `.flight` bundle at `source`.

    Args:
        policy: Redacts what another writer than ours recorded; the default policy where it is left out.

    Raises:
        TraceStorageError: `source` does not verify, cannot be read, or `target` cannot be written.
    """
    bundle, place = verified(source), Path(target).expanduser()
    require_free(place, overwrite=overwrite)
    journal = Journal(place, fsync="close")
    return _into(journal, bundle, policy, overwrite)


def verified(source: Path | str) -> FlightBundle:
    """The `.flight` bundle at `source`, if it verifies. Raises TraceStorageError with the first fault."""
    bundle = open_flight(source)
    result = bundle.verify()
    if not result.valid:
        first = result.findings[0]
        text = f"does not verify: {first.message}; see: sftrace validate {source}"
        raise TraceStorageError(text, where=f"{bundle.path}/{first.location}", code=first.code)
    return bundle


def _into(journal: Journal, bundle: FlightBundle, policy: RedactionPolicy | None, overwrite: bool) -> Converted:
    try:
        taker = Unchained(journal, bundle.blob, policy or RedactionPolicy())
        with reporting(journal.target):
            loaded = taker.read(bundle.events(), bundle.path.stem)
        closing = msgspec.structs.replace if False else loaded.closing
        closing = _said(closing, bundle)
        path, counts = journal.close(closing, overwrite=overwrite)
    except BaseException:
        journal.discard()
        raise
    return Converted(path, counts.events, loaded.left)


def _said(closing: Closing, bundle: FlightBundle) -> Closing:
    """The closing with where the bundle comes from."""
    from dataclasses import replace

    parent = {
        "run_id": closing.run_id,
        "name": bundle.path.name,
        "events_sha256": bundle.store.digest(flight.EVENTS_FILE),
    }
    told = dict(closing.provenance)
    if told.get("origin") == "converted":
        told["parents"] = [parent]
    else:
        told["converted_from"] = parent
    return replace(closing, provenance=told)


def to_flight(source: Path | str, target: Path | str, *, overwrite: bool = False) -> Converted:
    """Make a `.flight` bundle of the `.sftrace` bundle (folder or pack) at `source`.

    Raises:
        TraceStorageError: `source` is no valid bundle or does not match its checksums, or `target` cannot be written.
    """
    result = validate_bundle(source, strict=False, verify_integrity=True)
    wrong = [issue for issue in result.issues if issue.code != "integrity_unverified"]
    if wrong:
        text = f"is not valid: {wrong[0].message}; see: sftrace validate {source}"
        raise TraceStorageError(text, where=str(source), code=wrong[0].code)
    bundle, place = open_bundle(source), Path(target).expanduser()
    require_free(place, overwrite=overwrite, suffix=flight.SUFFIX)
    chain = Chain(place, run_id=bundle.manifest.run_id, fsync="close")
    try:
        told = _Telling(chain, bundle)
        closing = told.tell()
        path, counts = chain.close(closing, overwrite=overwrite)
    except BaseException:
        chain.discard()
        raise
    return Converted(path, counts.events, told.left)


class _Telling:
    """Tells a chain what a bundle holds, in the order of its events."""

    def __init__(self, chain: Chain, bundle: Bundle) -> None:
        self._chain = chain
        self._bundle = bundle
        self._rows = {row["request"]: row for row in bundle.calls if isinstance(row.get("request"), str)}
        self._wire: dict[str, list[dict[str, Any]]] = {}
        for row in bundle.wire():
            self._wire.setdefault(str(row.get("event_id")), []).append(cast("dict[str, Any]", row))
        self._at = _ns(datetime.fromisoformat(bundle.manifest.created_at))
        self._numbers: dict[str, int] = {}
        self._reasons = {(one.event_id, one.path): one.reason for one in bundle.trace.redactions}
        self._next = max((int(row.get("call", 0)) for row in bundle.calls), default=0)
        self._draws = sorted(bundle.draws(), key=lambda row: int(row.get("start_ns", 0)), reverse=True)
        self.left: dict[str, int] = {}

    def tell(self) -> Closing:
        bundle, manifest = self._bundle, self._bundle.manifest
        run = cast("dict[str, Any]", dict(bundle.run))
        self._chain.introduce(
            Head(
                run=manifest.run_id,
                agent=manifest.agent_name,
                at=self._at,
                target="",
                pid=0,
                python=manifest.environment.python or "",
                os=manifest.environment.os or "",
                version=manifest.environment.stepfork_version or "",
                kind=str(run.get("kind", "process")),
                origin=cast("dict[str, Any]", run["origin"]) if isinstance(run.get("origin"), dict) else {},
                policy=run.get("policy", {}),
                settings=run.get("settings", {}),
                command=run.get("command") or [],
            )
        )
        if not bundle.events or bundle.events[0].type != "run_start":
            self._chain.record(Single(id="", m=0, w=self._at, type="run_start", f={"input": msgspec.Raw(b"null")}))
        self._events()
        self._other_files()
        return self._closing(run)

    def _events(self) -> None:
        results: dict[str, EventBase] = {}
        errors: dict[str, EventBase] = {}
        owners = {event.id: event for event in self._bundle.events if event.type in ("llm_request", "tool_call")}
        for event in self._bundle.events:
            parent = event.parent_id or ""
            if event.type in ("llm_response", "tool_result") and parent in owners and parent not in results:
                results[parent] = event
        of_result = {event.id: request for request, event in results.items()}
        for event in self._bundle.events:
            request = of_result.get(event.parent_id or "", event.parent_id or "")
            if event.type == "error" and request in owners and request not in errors:
                errors[request] = event
        of_error = {event.id: request for request, event in errors.items()}
        for event in self._bundle.events:
            of = of_result.get(event.id) or of_error.get(event.id)
            if event.id in owners:
                self._begin(event)
            elif of is None:
                self._single(event)
            elif event.type != "error" or of not in results:  # else it is told with the result
                self._end(of, results.get(of), errors.get(of))
        for request in sorted(owners.keys() - results.keys() - errors.keys()):
            self._attempts(request)
        self._drawn_by(None)
        for row in self._bundle.spans():
            self._chain.row("spans", row)

    def _drawn_by(self, moment: int | None) -> None:
        """Tell what was drawn until `moment` (ns since the run began)."""
        while self._draws and (moment is None or int(self._draws[-1].get("start_ns", 0)) <= moment):
            self._chain.row("nondeterminism", cast("dict[str, object]", self._draws.pop()))

    def _begin(self, event: EventBase) -> None:
        row: dict[str, Any] = dict(self._rows.get(event.id, {}))
        number = row.get("call")
        if not isinstance(number, int):
            self._next += 1
            number = self._next
        self._numbers[event.id] = number
        name = str(getattr(event, "name", ""))
        kind: Any = row.get("kind") or _kind(event, name)
        attempts = self._wire.get(event.id, [])
        begin = Begin(
            n=number,
            id=event.id,
            m=int(row.get("start_ns", self._since(event))),
            w=_ns(event.timestamp),
            kind=kind,
            name=self._method(event, name),
            p=msgspec.Raw(_payload(event, "input")),
            h=event.input_hash or _hash(event, "input"),
            parent=event.parent_id,
            provider=getattr(event, "provider", None),
            model=getattr(event, "model", None),
            policy=event.replay_policy,
            lineage=row.get("lineage"),
            trace=row.get("trace_id"),
            span=row.get("span_id"),
            r=self._found(event, "input"),
            tags=_side(row.get("tags"), "/input"),
            cut=row.get("truncated") is True and "full" not in row,
        )
        self._drawn_by(begin.m)
        self._chain.record(begin, sends=bool(attempts))
        if attempts:
            self._blobs(attempts[0])
            self._chain.sent(number, attempts[0])

    def _method(self, event: EventBase, name: str) -> str:
        if event.type != "llm_request":
            return name
        value = getattr(event, "input", None)
        method = value.get("method") if isinstance(value, dict) else None
        return method if isinstance(method, str) and method else "llm"

    def _end(self, request: str, result: EventBase | None, error: EventBase | None) -> None:
        number, row = self._numbers[request], dict(self._rows.get(request, {}))
        self._attempts(request)
        event = result or error
        assert event is not None
        if result is not None and error is not None and error.timestamp != result.timestamp:
            self._leave("times of errors that differ from those of their results")
        extra = {key: item for key, item in row.items() if key not in _ROW}
        if row.get("truncated") is True:
            extra["truncated"] = True
        told: dict[str, Any] | None = None
        if error is not None:
            told = {"type": getattr(error, "error_type", "Error"), "message": getattr(error, "message", "")}
            told.update(cast("dict[str, Any]", row.get("exception") or {}))
            found = self._found(error, "")
            if found:
                told["findings"] = sorted({reason for _, reason in found})
        cost = getattr(result, "cost_usd", None)
        self._chain.record(
            End(
                n=number,
                m=int(cast("int", row.get("end_ns")) if isinstance(row.get("end_ns"), int) else self._since(event)),
                w=_ns(event.timestamp),
                end=str(row.get("end") or ("failed" if error is not None else "finished")),
                id=result.id if result is not None else None,
                p=msgspec.Raw(_payload(result, "output")) if result is not None else NOTHING,
                h=(result.output_hash or _hash(result, "output")) if result is not None else None,
                status=event.status if result is not None else "error",
                model=getattr(result, "model", None),
                tokens=tuple(getattr(result, name, None) for name in _TOKENS),  # type: ignore[arg-type]
                error=told,
                error_id=error.id if error is not None else None,
                r=self._found(result, "output") if result is not None else [],
                tags=_side(row.get("tags"), "/output"),
                extra=extra,
                cost=None if cost is None else Decimal(repr(cost)),
            )
        )

    def _attempts(self, request: str) -> None:
        for attempt in self._wire.get(request, []):
            self._blobs(attempt)
            self._chain.row("wire", {**attempt, "call": self._numbers[request]})

    def _single(self, event: EventBase) -> None:
        members = {name: getattr(event, name) for name in _MEMBERS.get(event.type, ())}
        plain = {
            name: msgspec.Raw(_payload(event, name) if name in event.__payloads__ else msgspec.json.encode(item))
            for name, item in members.items()
        }
        self._chain.record(
            Single(
                id=event.id,
                m=self._since(event),
                w=_ns(event.timestamp),
                type=event.type,
                f=plain,
                parent=event.parent_id,
                status=event.status,
                ih=event.input_hash,
                oh=event.output_hash,
                r=[(path, self._reasons.get((event.id, path), "unknown")) for path in event.redactions],
            )
        )

    def _closing(self, run: dict[str, Any]) -> Closing:
        manifest, rows = self._bundle.manifest, self._bundle.calls
        failure = manifest.failure
        scopes = {row.get("call"): row.get("scope") for row in rows if row.get("span") == "recorded"}
        losses = run.get("losses")
        known = any("span" in row for row in rows) or (isinstance(losses, dict) and "spans_absent" in losses)
        if isinstance(run.get("losses"), dict):
            run["losses"] = {key: item for key, item in run["losses"].items() if key not in _COUNTED}
        provenance = dict(self._bundle.provenance) or {
            "schema_version": sidecars.VERSION,
            "origin": "converted",
            "tool": f"sftrace-otel {__version__}",
        }
        return Closing(
            run_id=manifest.run_id,
            agent=manifest.agent_name,
            created_ns=self._at,
            status=manifest.status,
            failure=None if failure is None else (failure.type, failure.message),
            duration_ms=manifest.totals.duration_ms,
            python=manifest.environment.python or "",
            os=manifest.environment.os or "",
            version=manifest.environment.stepfork_version or "",
            run=run,
            provenance=provenance,
            seen=(lambda number: _scope(scopes.get(number))) if known else None,
            redactions=[(path, why) for (owner, path), why in self._reasons.items() if owner == "__manifest__"],
        )

    def _found(self, event: EventBase, member: str) -> list[tuple[str, str]]:
        """Redactions as a record has them: below the payload, or with `#` about another member."""
        before = f"/{member}" if member else "\0"
        found = []
        for path in event.redactions:
            inner = path.removeprefix(before)
            below = inner != path and (inner == "" or inner.startswith("/"))
            found.append((inner if below else f"#{path}", self._reasons.get((event.id, path), "unknown")))
        return found

    def _since(self, event: EventBase) -> int:
        return max(0, _ns(event.timestamp) - self._at)

    def _blobs(self, row: dict[str, Any]) -> None:
        """Copy what a row of the wire refers to."""
        for body in (row.get("body"), (row.get("request") or {}).get("body")):
            if isinstance(body, dict) and isinstance(body.get("$blob"), str):
                self._chain.blob(self._bundle.blob(body["$blob"]))

    def _other_files(self) -> None:
        known = {"manifest.json", "events.jsonl", "redactions.json", "integrity.json", *sidecars.FILES}
        for name in self._bundle.store.names():
            if name not in known and not name.startswith(f"{sidecars.BLOBS_FOLDER}/"):
                self._leave(name)

    def _leave(self, what: str) -> None:
        self.left[what] = self.left.get(what, 0) + 1


_TOKENS = ("prompt_tokens", "completion_tokens", "total_tokens")
_COUNTED = frozenset({"open_calls", "spans_absent", "damaged_records"})
_ROW = frozenset(
    {
        "call", "kind", "request", "response", "error", "trace_id", "span_id", "lineage", "start_ns", "end_ns", "end",
        "span", "tags", "exception", "scope", "truncated",
    }
)  # fmt: skip
_MEMBERS = {
    "run_start": ("input",),
    "state_change": ("key", "before", "after"),
    "error": ("error_type", "message", "details"),
    "run_end": ("run_status", "output"),
    "tool_result": ("name", "output"),  # these two where their request is not there
    "llm_response": ("model", "output", "prompt_tokens", "completion_tokens", "total_tokens", "cost_usd"),
}


def _payload(event: EventBase | None, name: str) -> bytes:
    """The JSON text of a payload as the bundle holds it, in the order of its keys."""
    raw = getattr(type(event), name).slot.__get__(event)
    return b"null" if raw is msgspec.UNSET else bytes(raw)


def _hash(event: EventBase, name: str) -> str:
    return canonical.digest(getattr(event, name))


def _kind(event: EventBase, name: str) -> str:
    if event.type == "llm_request":
        return "llm"
    return "http" if name.startswith("http ") else "tool"


def _side(tags: object, before: str) -> dict[str, str]:
    """The tags of one payload, by pointers into it."""
    if not isinstance(tags, dict):
        return {}
    return {pointer.removeprefix(before): tag for pointer, tag in tags.items() if pointer.startswith(before)}


def _scope(scope: object) -> str | None:
    return None if scope is None else str(scope)


def _ns(moment: datetime) -> int:
    if moment is UNSET_TIME:
        return 0
    second = int(moment.timestamp() // 1)
    return second * 1_000_000_000 + moment.microsecond * 1000


# Reading a `.flight` as a `.sftrace`


class ConvertedStore(Store):
    """The files of a `.sftrace` that a `.flight` amounts to. Its faults name the `.flight`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        folder = tempfile.mkdtemp(prefix="sftrace-")
        weakref.finalize(self, _remove, folder, os.getpid())
        made = _into(
            Journal(Path(folder) / f"{path.stem or 'run'}.sftrace", fsync="never"), verified(path), None, False
        )
        self._inner = FolderStore(made.path)

    def require(self, name: str) -> None:
        self._inner.require(name)

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        return self._inner.open(name)

    def has(self, name: str) -> bool:
        return self._inner.has(name)

    def names(self) -> Iterator[str]:
        return self._inner.names()


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # a forked child's copy is not the owner
        shutil.rmtree(folder, ignore_errors=True)
