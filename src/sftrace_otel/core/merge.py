# SPDX-License-Identifier: Apache-2.0
"""The events of the processes of one run as one sequence: who hangs on whom, in which order, under which ids.

Pure: each process hands in its events one after the other, and what comes out goes to the writer; held are the ids and
the calls that are open.

Decision: times are compared by wall clock, the only one that processes share, and each process keeps its own order, so
a clock that steps back cannot put a result before its request. What a child did at its top level hangs on the tool call
that its parent process had in flight at that moment; where several were in flight that are not inside each other, on
what encloses them all, in the end on the run's start: never guessed. LLM calls and HTTP exchanges start no process and
are not hung on. Lineage of children is dropped: it numbers from 0 in each process, and equal paths would mean equal
places. Rejected: hanging all of a child on the call that was in flight when it started (a pool's worker lives longer
than a call), and sorting all events by time (a child's whole recording would have to be in memory).

Source: `design.md`, "Runs".
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from sftrace_otel.formats.sftrace import ErrorEvent, EventBase, RunEnd, RunStart, ToolCall, ToolResult

__all__ = ["Merging", "Process"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Process:
    """One process's bundle while it is being merged.

    Args:
        number: Its place: 0 for the run itself, parents before children.
        parent: The process that started it; None for the run itself.

    Attributes:
        began: When its run began, in microseconds since the epoch; None before its first event.
        renamed: Ids that another process had used already, and what they became.
        outside: Whether anything of it hangs on the run's start, outside every call.
    """

    def __init__(self, number: int, parent: Process | None) -> None:
        self.number = number
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.began: int | None = None
        self.renamed: dict[str, str] = {}
        self.outside = False
        self._starts: set[str] = set()
        self._open: dict[str, tuple[str, ...]] = {}

    def now(self, event_id: str) -> str:
        """The id that an event of this process has in the merged run."""
        return self.renamed.get(event_id, event_id)

    def starts(self, event: EventBase) -> None:
        """Take note of the start of its own run, which stands for the process."""
        self._starts.add(event.id)

    def is_top(self, event: EventBase) -> bool:
        """Whether an event hangs on nothing but its run."""
        return event.parent_id is None or event.parent_id in self._starts

    def follow(self, event: EventBase) -> None:
        """Take note of which tool calls are in flight, after `event` in its merged form."""
        if isinstance(event, ToolCall) and not event.name.startswith("http "):
            self._open[event.id] = (*self._open.get(event.parent_id or "", ()), event.id)
        elif isinstance(event, ToolResult) and event.parent_id is not None:
            self._open.pop(event.parent_id, None)

    def in_flight(self) -> str | None:
        """The innermost call that encloses everything in flight; None without one."""
        paths = list(self._open.values())
        inside = {path[:size] for path in paths for size in range(1, len(path))}
        leaves = [path for path in paths if path not in inside]
        if not leaves:
            return None
        shared = min(leaves, key=len)
        for path in leaves:
            while path[: len(shared)] != shared:
                shared = shared[:-1]
        return next((one for one in reversed(shared) if one in self._open), None)


class Merging:
    """The events of `processes` in one order. `events` goes through them once; after that the rest is known.

    Args:
        run_id: Of the merged run.
        failed_at: The step that the run's own manifest names as its failure.

    Attributes:
        hung: Merged id of a child's top-level request → the call of another process that it hangs on.
        failure_step: Where the failure is now.
        counts: Events by type.
        last: Time of the last event in microseconds since the epoch.
    """

    def __init__(self, processes: Sequence[Process], run_id: str, failed_at: int | None = None) -> None:
        self._processes = processes
        self._run_id = run_id
        self._failed_at = failed_at
        self._owners: dict[str, int] = {}
        self._step = 0
        self._start: str | None = None
        self.hung: dict[str, str] = {}
        self.failure_step = 0
        self.counts: dict[str, int] = {}
        self.last = 0

    def events(self, streams: Mapping[int, Iterable[EventBase]]) -> Iterator[EventBase]:
        """The merged events, of the events of each process by its number."""
        end: EventBase | None = None
        keyed = [self._keyed(process, iter(streams[process.number])) for process in self._processes]
        for key, _, number, _, event in heapq.merge(*keyed):
            process = self._processes[number]
            if process.parent is None and isinstance(event, RunEnd):
                end = event
            elif process.parent is None or not isinstance(event, RunStart | RunEnd):
                yield self._taken(process, event)
                self.last = max(self.last, key)
        if end is not None:
            yield self._taken(self._processes[0], end)

    def _keyed(self, process: Process, events: Iterator[EventBase]) -> Iterator[tuple[int, int, int, int, EventBase]]:
        """Events with what they are sorted by: time as far as it does not step back, then parents before children."""
        key = 0
        for number, event in enumerate(events):
            moment = (event.timestamp - _EPOCH) // _MICROSECOND
            if process.began is None:
                process.began = moment
            if isinstance(event, RunStart):
                process.starts(event)
            above = process.parent.began if process.parent is not None else None
            key = max(key, moment, above or 0)
            yield key, process.depth, process.number, number, event

    def _taken(self, process: Process, event: EventBase) -> EventBase:
        parent = None if event.parent_id is None else process.now(event.parent_id)
        if process.parent is not None and process.is_top(event):
            parent = self._above(process)
            process.outside |= parent == self._start
        named = self._named(process, event.id)
        if process.parent is None:
            if isinstance(event, RunStart):
                self._start = named
            if isinstance(event, ErrorEvent) and event.step == self._failed_at:
                self.failure_step = self._step
        elif parent is not None and parent != self._start and process.is_top(event):
            self.hung[named] = parent
        taken = event.replace(id=named, run_id=self._run_id, parent_id=parent, step=self._step)
        self._step += 1
        self.counts[event.type] = self.counts.get(event.type, 0) + 1
        process.follow(taken)
        return taken

    def holds(self, process: Process, event_id: str) -> bool:
        """Whether an event of a process is in the merged run."""
        return self._owners.get(process.now(event_id)) == process.number

    def _above(self, process: Process) -> str | None:
        """What an event at the top of a process hangs on: a call that a process above it has in flight."""
        above = process.parent
        while above is not None:
            found = above.in_flight()
            if found is not None:
                return found
            above = above.parent
        return self._start

    def _named(self, process: Process, event_id: str) -> str:
        """An id of its own: one that another process used gets a number behind it."""
        named = event_id
        copies = 2
        while self._owners.get(named, process.number) != process.number:
            named = f"{event_id}-{copies}"
            copies += 1
        if named != event_id:
            process.renamed[event_id] = named
        self._owners[named] = process.number
        return named
