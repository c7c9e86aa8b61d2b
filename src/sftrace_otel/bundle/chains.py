# SPDX-License-Identifier: Apache-2.0
"""The journal of a run that is recorded as `.flight`, alone or beside a `.sftrace`.

Decision: a chain takes the calls that a journal takes, so the recorder knows one thing only. Where both formats are on,
the `.sftrace` journal comes first and decides what the run is told; a fault of the chain is reported, once for each
kind, and costs the run nothing but the events that could not be appended: what is in the chain still verifies.
Rejected: a chain made at close from the journal (a killed run would have none), and one lock more (a run has one).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path

from sftrace_otel.bundle import flight_out
from sftrace_otel.bundle.build import Closing, Counts, timestamp
from sftrace_otel.bundle.flight import FlightWriter
from sftrace_otel.bundle.journal import Journal
from sftrace_otel.bundle.records import Begin, End, Head, Single
from sftrace_otel.formats import Json, flight

__all__ = ["Both", "Chain", "RunJournal", "new_journal"]


class Chain:
    """A run written as a `.flight` chain. Not thread-safe: the run that owns it holds a lock.

    Attributes are those of `Journal`. Raises OSError.
    """

    takes_requests = True

    def __init__(self, target: Path, *, run_id: str, fsync: str) -> None:
        self.target = target
        self._writer = FlightWriter(target, run_id=run_id, fsync=fsync, overwrite=True)
        self.folder = self._writer.folder
        self.earlier = self._writer.earlier
        self._events = flight_out.Projection(self._writer)
        self._counts = Counts()
        self._open: set[int] = set()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._writer.size

    def introduce(self, head: Head) -> None:
        """Say whose run it is, before anything else."""
        self._events.introduce(head)

    def record(self, record: Begin | End | Single, *, sends: bool = False) -> None:
        """Append what happened. `sends`: the request of a beginning call follows (`sent`)."""
        counts = self._counts
        counts.events += 1
        if isinstance(record, Begin):
            counts.llm += record.kind == "llm"
            counts.tool += record.kind != "llm"
            self._open.add(record.n)
        elif isinstance(record, End):
            self._open.discard(record.n)
            if record.cost is not None:
                counts.cost = (counts.cost or Decimal(0)) + record.cost
        self._events.record(record, sends=sends)

    def sent(self, call: int, row: Mapping[str, object]) -> None:
        """An attempt of a call is going out."""
        self._events.sent(call, row)

    def row(self, sidecar: str, row: Mapping[str, object]) -> None:
        """What a sidecar of `.sftrace` would hold."""
        self._events.row(sidecar, row)

    def blob(self, data: bytes) -> str:
        """Store `data` (already redacted); give `sha256:<hex>`."""
        return str(self._writer.blob(data, flight.BYTES_MEDIA)["$blob"])

    def abandon(self) -> None:
        """Let go of the files and leave the folder. Takes no lock: a forked child may have one that nobody returns."""
        self._writer.let_go()

    def close(self, closing: Closing, *, overwrite: bool = False) -> tuple[Path, Counts]:
        """End the chain and put the bundle in place. Raises OSError or TraceStorageError; the journal then stays."""
        self._events.close(closing)
        self._counts.open = len(self._open)
        self._writer.overwrite = overwrite
        return self._writer.close(extra={flight_out.EXTRA: self._summary(closing)}), self._counts

    def _summary(self, closing: Closing) -> dict[str, Json]:
        """What a list of bundles shows, so that it need not read the chain. Verbs that judge do not look at it."""
        failure, traces = closing.failure, closing.run.get("trace_ids")
        return {
            "agent": closing.agent,
            "created_at": timestamp(closing.created_ns),
            "status": closing.status,
            "failure": None if failure is None else f"{failure[0]}: {failure[1]}",
            "duration_ms": closing.duration_ms,
            "llm_calls": self._counts.llm,
            "tool_calls": self._counts.tool,
            "trace_ids": [str(one) for one in traces] if isinstance(traces, list) else [],
            "tool": closing.version,
            "origin": str(closing.provenance.get("origin")),
            "kept": "kept" in closing.run,
        }

    def discard(self) -> None:
        """Remove the journal and everything in it."""
        self._writer.discard()


class Both:
    """A journal and a chain of the same run. `fault` is told what the chain could not take."""

    takes_requests = True

    def __init__(self, journal: Journal, chain: Chain, fault: Callable[[Exception], None]) -> None:
        self._journal = journal
        self._chain = chain
        self._fault = fault
        self.target = journal.target
        self.folder = journal.folder
        self.earlier = journal.earlier or chain.earlier

    @property
    def size(self) -> int:
        """Bytes written to the larger of the two."""
        return max(self._journal.size, self._chain.size)

    def introduce(self, head: Head) -> None:
        """Say whose run it is, before anything else."""
        self._journal.introduce(head)
        self._chain.introduce(head)

    def record(self, record: Begin | End | Single, *, sends: bool = False) -> None:
        """Append what happened to both."""
        self._journal.record(record)
        try:
            self._chain.record(record, sends=sends)
        except Exception as error:
            self._fault(error)

    def sent(self, call: int, row: Mapping[str, object]) -> None:
        """An attempt of a call is going out."""
        try:
            self._chain.sent(call, row)
        except Exception as error:
            self._fault(error)

    def row(self, sidecar: str, row: Mapping[str, object]) -> None:
        """Append a row to both."""
        self._journal.row(sidecar, row)
        try:
            self._chain.row(sidecar, row)
        except Exception as error:
            self._fault(error)

    def blob(self, data: bytes) -> str:
        """Store `data` in both."""
        name = self._journal.blob(data)
        try:
            self._chain.blob(data)
        except Exception as error:
            self._fault(error)
        return name

    def abandon(self) -> None:
        """Let go of the files of both."""
        self._journal.abandon()
        self._chain.abandon()

    def close(self, closing: Closing, *, overwrite: bool = False) -> tuple[Path, Counts]:
        """Put both bundles in place; gives the `.sftrace`. Raises as a journal does, when the chain is closed."""
        try:
            self._chain.close(closing, overwrite=overwrite)
        except Exception as error:
            self._fault(error)
        return self._journal.close(closing, overwrite=overwrite)

    def discard(self) -> None:
        """Remove both."""
        self._journal.discard()
        self._chain.discard()


RunJournal = Journal | Chain | Both


def new_journal(
    target: Path, *, formats: tuple[str, ...], run_id: str, fsync: str, fault: Callable[[Exception], None]
) -> RunJournal:
    """The journal of a run in `formats`; `target` is where its first bundle will be. Raises OSError."""
    if "flight" not in formats:
        return Journal(target, fsync=fsync)
    place = target.with_suffix(flight.SUFFIX)
    if "sftrace" not in formats:
        return Chain(place, run_id=run_id, fsync=fsync)
    journal = Journal(target, fsync=fsync)
    try:
        return Both(journal, Chain(place, run_id=run_id, fsync=fsync), fault)
    except Exception as error:  # the run is recorded all the same
        fault(error)
        return journal
