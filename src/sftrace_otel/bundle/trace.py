# SPDX-License-Identifier: Apache-2.0
"""A trace in memory that can grow, be saved as a bundle, and be loaded from one.

Decision: an event is redacted and hashed when it is added, so no unredacted payload waits in a trace and saving only
writes bytes. A loaded trace remembers its bundle and takes the sidecars along when it is saved elsewhere. Rejected:
redacting at save (a secret would be in memory until then, and a saved trace would differ from the one shown).
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import uuid4

import msgspec

from sftrace_otel.bundle import read, write
from sftrace_otel.bundle.carry import Carried, carry
from sftrace_otel.errors import PayloadError
from sftrace_otel.formats import sftrace, sidecars
from sftrace_otel.formats.sftrace import (
    UNSET_TIME,
    Environment,
    EventBase,
    Failure,
    Manifest,
    RedactionEntry,
    Totals,
    TraceData,
)

if TYPE_CHECKING:
    from sftrace_otel.core.redact import RedactionPolicy

_E = TypeVar("_E", bound=EventBase)
_TEXTS = ("name", "model", "provider", "key", "error_type", "message")


class Trace:
    """A run as a list of events with its manifest.

    Args:
        agent_name: Whose run it is; not empty.
        run_id: Drawn where it is left out.
        created_at: Now, where it is left out.
        status: `running`, `completed` or `failed`.
        failure: Why it failed; required with `failed`, forbidden otherwise (checked when it is saved).
        environment: This interpreter and system, where it is left out.
        events: Added one after the other.
        policy: Redacts what is added; the default policy where it is left out.
    """

    def __init__(
        self,
        *,
        agent_name: str,
        run_id: str | None = None,
        created_at: datetime | None = None,
        status: str = "running",
        failure: Failure | None = None,
        environment: Environment | None = None,
        events: Iterable[EventBase] = (),
        policy: RedactionPolicy | None = None,
    ) -> None:
        self._manifest = Manifest(
            run_id=run_id or new_run_id(),
            agent_name=agent_name,
            created_at=_text(created_at or datetime.now(UTC)),
            status=status,  # type: ignore[arg-type]
            failure=failure,
            environment=environment or Environment(python=platform.python_version(), os=sys.platform),
        )
        self._events: list[EventBase] = []
        self._redactions: list[RedactionEntry] = []
        self._policy = policy
        self._source: read.Bundle | None = None
        self._stale: frozenset[str] = frozenset()
        self._provenance: Mapping[str, Any] | None = None
        for event in events:
            self.add(event)

    @classmethod
    def of(
        cls,
        data: TraceData,
        *,
        source: read.Bundle | None = None,
        stale: frozenset[str] = frozenset(),
        provenance: Mapping[str, Any] | None = None,
        policy: RedactionPolicy | None = None,
    ) -> Self:
        """A trace of parts that are already redacted.

        Args:
            data: Manifest, events and redactions.
            source: The bundle whose sidecars go along when the trace is saved.
            stale: Events whose rows stay behind.
            provenance: What `provenance.json` will say; as in `source` where it is left out.
            policy: Redacts what is added later.
        """
        trace = cls.__new__(cls)
        trace._manifest = data.manifest
        trace._events = list(data.events)
        trace._redactions = list(data.redactions)
        trace._policy, trace._source, trace._stale, trace._provenance = policy, source, stale, provenance
        return trace

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a bundle.

        Raises:
            TraceStorageError: It cannot be read; the text names file, line and reason.
        """
        bundle = read.open_bundle(path)
        return cls.of(bundle.trace, source=bundle)

    def add(self, event: _E) -> _E:
        """Append an event: with this trace's run id and the next step, redacted and hashed.

        Returns:
            The event as it was added; the one handed in is not changed.

        Raises:
            PayloadError: It breaks the format (an empty name, a negative duration, …).
        """
        changes: dict[str, Any] = {"run_id": self.run_id, "step": self._events[-1].step + 1 if self._events else 0}
        if not event.id:
            changes["id"] = f"evt_{uuid4().hex}"
        if event.timestamp == UNSET_TIME:
            changes["timestamp"] = datetime.now(UTC)
        added, entries = _redacted(event.replace(**changes), self._policy_in_use())
        added = sftrace.with_hashes(added)
        sftrace.parse_event(sftrace.dump_event(added))
        self._events.append(added)
        self._redactions += entries
        return added

    def save(
        self,
        path: str | Path,
        *,
        status: str | None = None,
        failure: Failure | None = None,
        environment: Environment | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write the trace as a bundle; its `integrity.json` is always written anew.

        Args:
            path: Where to; the name ends in `.sftrace`.
            status, failure, environment: Instead of what the trace says.
            overwrite: Replace a bundle that is there; nothing else is ever replaced.

        Raises:
            TraceStorageError: The place is taken or cannot be written, the manifest is not valid, or a sidecar that
                should go along cannot be read.
        """
        target = Path(path).expanduser()
        write.require_free(target, overwrite=overwrite)
        manifest = self.manifest.replace(
            status=status or self.status,
            failure=failure or self.failure,
            environment=environment or self.environment,
        )
        sftrace.parse_manifest(sftrace.dump_manifest(manifest))
        data = TraceData(manifest=manifest, events=tuple(self._events), redactions=tuple(self._redactions))
        cut = self._stale.difference(event.id for event in self._events)
        carried = Carried({}, {}) if self._source is None else carry(self._source, stale=self._stale, cut=cut)
        extra: dict[str, bytes | Iterable[bytes]] = {**carried.sidecars, **self._provenance_file()}
        return write.save(data, target, overwrite=overwrite, sidecars=extra, blobs=carried.blobs)

    @property
    def manifest(self) -> Manifest:
        """The manifest, its counts fitting the events."""
        return self._manifest.replace(totals=sftrace.totals(self._events, known=self._manifest.totals))

    @property
    def events(self) -> tuple[EventBase, ...]:
        """The events, in order; `add` is the way to have more."""
        return tuple(self._events)

    @property
    def redactions(self) -> tuple[RedactionEntry, ...]:
        """What was redacted where."""
        return tuple(self._redactions)

    @property
    def provenance(self) -> Mapping[str, Any]:
        """How the trace came to be (`provenance.json`); empty where that is not known."""
        if self._provenance is not None:
            return self._provenance
        return self._source.provenance if self._source is not None else {}

    @property
    def source(self) -> read.Bundle | None:
        """The bundle it was loaded from, or forked from."""
        return self._source

    @property
    def stale(self) -> frozenset[str]:
        """Events whose rows in the sidecars of `source` do not hold for this trace."""
        return self._stale

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self._manifest.run_id

    @property
    def agent_name(self) -> str:
        """Whose run it is."""
        return self._manifest.agent_name

    @property
    def created_at(self) -> datetime:
        """When the run began."""
        return sftrace.parse_time(self._manifest.created_at)

    @property
    def environment(self) -> Environment:
        """Where it was recorded."""
        return self._manifest.environment

    @property
    def totals(self) -> Totals:
        """Counts of events and calls; cost and duration where known."""
        return self.manifest.totals

    @property
    def status(self) -> str:
        """`running`, `completed` or `failed`."""
        return self._manifest.status

    @status.setter
    def status(self, value: str) -> None:
        self._manifest = self._manifest.replace(status=str(value))

    @property
    def failure(self) -> Failure | None:
        """Why it failed."""
        return self._manifest.failure

    @failure.setter
    def failure(self, value: Failure | None) -> None:
        self._manifest = self._manifest.replace(failure=value)

    @property
    def data(self) -> TraceData:
        """Manifest, events and redactions in one, frozen."""
        return TraceData(manifest=self.manifest, events=self.events, redactions=self.redactions)

    def __repr__(self) -> str:
        return f"Trace(agent_name={self.agent_name!r}, run_id={self.run_id!r}, {len(self._events)} events)"

    def _policy_in_use(self) -> RedactionPolicy:
        if self._policy is None:
            self._policy = default_policy()
        return self._policy

    def _provenance_file(self) -> dict[str, bytes]:
        if self._provenance is not None:
            return {sidecars.PROVENANCE_FILE: sidecars.dump_object(self._provenance)}
        if self._source is not None and self._source.has(sidecars.PROVENANCE_FILE):
            return {sidecars.PROVENANCE_FILE: self._source.read(sidecars.PROVENANCE_FILE)}
        return {}


def new_run_id() -> str:
    """An id for a run; drawn from the operating system, not from the program's own random numbers."""
    return f"run_{uuid4().hex}"


def default_policy() -> RedactionPolicy:
    """The default redaction policy, knowing the secrets in this process's environment."""
    from sftrace_otel.core.redact import RedactionPolicy

    return RedactionPolicy.default(os.environ)


def cleaner(policy: RedactionPolicy) -> Callable[[object], tuple[bytes, Sequence[tuple[str, str]]]]:
    """The way from a value to a payload under `policy`: JSON text, and what was redacted as (pointer, reason)."""
    from sftrace_otel.core.prepare import prepare

    def clean(value: object) -> tuple[bytes, Sequence[tuple[str, str]]]:
        prepared = prepare(value, policy, max_bytes=sys.maxsize)
        return prepared.data, [(found.pointer, found.reason) for found in prepared.findings]

    return clean


def _redacted(event: _E, policy: RedactionPolicy) -> tuple[_E, list[RedactionEntry]]:
    """`event` with its payloads and texts redacted, and what was done to it."""
    clean = cleaner(policy)
    changes: dict[str, Any] = {}
    found: list[tuple[str, str]] = []
    for name in event.__payloads__:
        if sftrace.raw_payload(event, name) is not None:
            data, findings = clean(getattr(event, name))
            changes[name] = msgspec.Raw(data)
            found += [(f"/{name}{pointer}", reason) for pointer, reason in findings]
    for name in _TEXTS:
        text = getattr(event, name, None)
        if isinstance(text, str):
            changes[name], findings_of_text = policy.redact_text(text)
            found += [(f"/{name}", one.reason) for one in findings_of_text]
    pointers = dict.fromkeys([*event.redactions, *(pointer for pointer, _ in found)])
    entries = [RedactionEntry(event_id=event.id, path=pointer, reason=reason) for pointer, reason in found]
    return event.replace(redactions=tuple(pointers), **changes), entries


def _text(moment: datetime) -> str:
    if moment.tzinfo is None:
        raise PayloadError("created_at needs a UTC offset; a time without one is ambiguous")
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
