# SPDX-License-Identifier: Apache-2.0
"""A run and its calls: ids, times, what was lost, and the journal that is opened with the first record."""

from __future__ import annotations

import itertools
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from sftrace_otel.bundle.journal import Journal, Single
from sftrace_otel.core.prepare import Prepared, prepare
from sftrace_otel.core.redact import RedactionPolicy

if TYPE_CHECKING:
    from sftrace_otel.bundle.chains import RunJournal
    from sftrace_otel.recorder.recorder import Recorder

__all__ = ["NULL", "Answered", "Call", "NoLongerRecords", "Run", "found_in"]


NULL = prepare(None, RedactionPolicy.reference())


def found_in(prepared: Prepared | None, prefix: str) -> list[tuple[str, str]]:
    return [] if prepared is None else [(prefix + f.pointer, f.reason) for f in prepared.findings]


class Call:
    """A call in the journal: begun, and ended exactly once."""

    __slots__ = ("attempts", "began", "ended", "hash", "id", "kind", "model", "n", "name", "run")

    def __init__(self, run: Run, n: int, event_id: str, kind: str, name: str, model: str | None, digest: str) -> None:
        self.run = run
        self.n = n
        self.id = event_id
        self.kind = kind
        self.name = name
        self.model = model
        self.hash = digest
        self.attempts = 0
        self.began = 0
        self.ended = False


class Reading(Protocol):
    """An answer that the program is still reading. `reader`: the thread in which it began to."""

    reader: int

    def cut(self) -> None:
        """The run ends: keep what came so far. Never raises."""


class NoLongerRecords(OSError):
    """The run's journal could not be opened, which was said; its calls are counted as lost."""


class Run:
    """One run and its journal; opened on disk with its first record."""

    def __init__(self, recorder: Recorder, *, kind: str, target: Path | None, origin: Mapping[str, object]) -> None:
        self.recorder = recorder
        self.kind = kind
        self.id = f"run_{secrets.token_hex(16)}"
        self._ids = secrets.token_hex(10)
        self._numbers = itertools.count(1)
        self.wall0 = recorder.clock()
        self.mono0 = recorder.ticks()
        self.origin = origin
        self.provenance: Mapping[str, object] = {}
        """What `provenance.json` says beside who wrote the bundle, where that is more than that it was recorded."""
        self.agent: str | None = None
        self.overwrite = False
        self.closed = False
        self.broken = False
        self.path: Path | None = None
        self.journal: RunJournal | None = None
        self.lock = threading.RLock()  # a log handler of the program may be traced itself
        self.calls = 0
        self.open_calls = 0
        self.errors = 0
        self.kept: str | None = None
        self.explicit = target is not None
        self.next: Run | None = None
        """The run that goes on for this one since it is full; it ends with it."""
        self.later: Run | None = None
        """The run of what was called after this one had ended."""
        self.linked = False
        """Whether this one is such a run: it has no root to end with."""
        self.ended = False
        """Whether its root has ended: it takes no new call, and is closed once its calls are over, or at `due`."""
        self.due = 0
        self.touched = 0
        """ns from its start to the end of its last call."""
        self.roots: set[int] = set()
        """Local roots that are open; the last one to end ends the run."""
        self.responding = False
        """Whether the answer to its inbound request is under way."""
        self.agents: dict[tuple[str | None, str | None, str | None], None] = {}
        """Agents that took part: name, id, conversation id."""
        self.losses: dict[str, int] = {}
        self.websockets: dict[str, int] = {}
        self.trace_ids: dict[str, None] = {}
        self.input: Prepared | None = None
        self.inbound: Callable[[], Prepared | None] | None = None
        """Gives the inbound request as far as the program has read it; the input where no other was set."""
        self.output: Prepared | None = None
        self.failure: tuple[str, str] | None = None
        self.start_id = self.new_id()
        self.answered = Answered()
        self.wire_calls = 0
        self.refs: set[int] = set()
        self.spans: set[int] = set()
        self.reading: set[Reading] = set()
        """Answers that are still being read; what was read of them until the run ends is recorded then."""
        self.draws: list[dict[str, object]] = []
        """Reads of the clock and random draws that wait for the journal."""
        self.drawn: dict[tuple[str, str | None], int] = {}
        """The index of the last one, by source and place."""
        self._target = target
        self._name: str | None = None
        self._seen = bytearray()
        self._scopes: list[str] = []

    def new_id(self) -> str:
        return f"evt_{self._ids}{next(self._numbers):012x}"

    def now(self) -> int:
        """ns since this run started, monotonic."""
        return max(0, self.recorder.ticks() - self.mono0)

    @property
    def target(self) -> Path:
        """Where the bundle will be; decided when first asked, since the name holds the first trace id."""
        if self._target is None:
            self._target = self.recorder.allocate(self)
        return self._target

    @property
    def named(self) -> bool:
        """Whether the name is decided; before the first span it would lack the trace id."""
        return self._target is not None

    @property
    def name(self) -> str:
        """The bundle's file name."""
        if self._name is None:
            self._name = self.target.name
        return self._name

    def came_from(self, trace_id: int, span_id: int) -> None:
        """The run was caused by a span of another process."""
        if "remote_parent" not in self.origin:
            remote = {"trace_id": f"{trace_id:032x}", "span_id": f"{span_id:016x}"}
            self.origin = {**self.origin, "remote_parent": remote}

    def note_span(self, n: int, scope: str) -> None:
        """Call `n`'s span reached us."""
        if scope not in self._scopes:
            if len(self._scopes) == 255:
                scope = self._scopes[-1]
            else:
                self._scopes.append(scope)
        if n >= len(self._seen):
            self._seen.extend(bytes(n + 1 - len(self._seen)))
        self._seen[n] = self._scopes.index(scope) + 1

    def seen(self, n: int) -> str | None:
        code = self._seen[n] if n < len(self._seen) else 0
        return self._scopes[code - 1] if code else None

    def lost(self, what: str, count: int = 1) -> None:
        self.losses[what] = self.losses.get(what, 0) + count

    def open(self) -> None:
        """Open the journal now, whether or not there is a call. Raises NoLongerRecords."""
        try:
            with self.lock:
                self.opened()
        finally:
            self.recorder.tell()

    def opened(self) -> RunJournal:
        """The journal, made on first use with the run_start in it. Raises NoLongerRecords.

        The caller holds `lock`, and after releasing it has the recorder `tell` what there is to say.
        """
        if self.journal is not None:
            return self.journal
        if self.broken or self.closed:
            raise NoLongerRecords
        journal = None
        try:
            head, start = self.recorder.head(self), self._start()
            journal = self._new_journal()
            journal.introduce(head)
            journal.record(start)
            for row in self.draws:
                journal.row("nondeterminism", row)
        except Exception as error:
            self.broken = True
            if journal is not None:
                journal.discard()
            self.recorder.no_room(self._place(), error)
            raise NoLongerRecords from error
        self.draws.clear()
        self.journal = journal
        self.recorder.later(partial(self.recorder.announce, self))
        if journal.earlier is not None:
            line = f"sftrace: an earlier run did not end; get its bundle with: sftrace recover {journal.earlier}"
            self.recorder.later(partial(self.recorder.say, line))
        return journal

    @property
    def formats(self) -> tuple[str, ...]:
        """What is written: the settings' formats, unless the program named the path of a `.flight`."""
        if self.explicit and self._target is not None and self._target.suffix == ".flight":
            return ("flight",)
        return self.recorder.settings.formats

    def _new_journal(self) -> RunJournal:
        fsync = self.recorder.settings.fsync
        if "flight" not in self.formats:
            return Journal(self.target, fsync=fsync)
        from sftrace_otel.bundle.chains import new_journal

        fault = partial(self.recorder.fault, "writing .flight", run=self)
        return new_journal(self.target, formats=self.formats, run_id=self.id, fsync=fsync, fault=fault)

    def _place(self) -> Path:
        """What cannot be written when the journal cannot be opened."""
        if self._target is None:
            return self.recorder.settings.dir
        return self._target if self.explicit else self._target.parent

    @property
    def full(self) -> bool:
        """Whether the run has reached MAX_RUN_MB."""
        return self.journal is not None and self.journal.size >= self.recorder.max_run_bytes

    def reword(self) -> None:
        """The inbound request was read further than when the journal was opened: say so. Raises OSError.

        The caller holds `lock`.
        """
        if self.journal is not None and self.input is None and not self.closed:
            self.journal.record(self._start())

    def _start(self) -> Single:
        given = self.input
        if given is None and self.inbound is not None:
            given = self.inbound()
        prepared = None if given is None else self.recorder.content(given)
        value = msgspec.Raw(prepared.data if prepared else b"null")
        return Single(
            id=self.start_id,
            m=0,
            w=self.wall0,
            type="run_start",
            f={"input": value},
            ih=prepared.digest if prepared else NULL.digest,
            r=found_in(prepared, "/input"),
        )


class Answered:
    """Which of the model's tool calls were answered in later requests, and which tool events account for them.

    An event accounts for one answer: the one whose call id it carries, else one of its name and with its result, else
    one of its name, else one with its result (a tool that the model knows by another name).
    """

    def __init__(self) -> None:
        self._answers: dict[str, tuple[str, frozenset[int]]] = {}
        self._called: dict[str, str] = {}
        self._names: dict[str, int] = {}
        self._results: dict[int, str] = {}
        self._held: set[str] = set()

    def called(self, call_id: str, name: str) -> None:
        """The model asked for the function `name`; a later answer may name the call only by its id."""
        self._called.setdefault(call_id, name)

    def answer(self, call_id: str, name: str | None, digests: Iterable[str]) -> None:
        """A request carries the answer of tool call `call_id`: the function's `name`, None where the request does not
        say it, and digests of what the function may have given."""
        self._answers.setdefault(call_id, (name or self._called.get(call_id, call_id), frozenset(map(hash, digests))))

    def tool(self, name: str, digests: Iterable[str], call_ids: Iterable[str] = ()) -> None:
        """A tool event `name`; `digests` of its output, `call_ids` where it is known which calls it answered."""
        before = len(self._held)
        self._held.update(call_ids)
        if len(self._held) == before:
            self._names[name] = self._names.get(name, 0) + 1
            for digest in digests:
                self._results.setdefault(hash(digest), name)

    @property
    def any(self) -> bool:
        """Whether a request carried an answer."""
        return bool(self._answers)

    def known(self, call_id: str) -> bool:
        return call_id in self._answers

    def untraced(self) -> list[str]:
        """Functions whose result went back to the model although no tool event holds it, sorted."""
        left: dict[str, int] = {}
        for name, count in self._names.items():
            left[_short(name)] = left.get(_short(name), 0) + count
        open_answers: list[tuple[str, set[str]]] = []
        for call_id, (name, digests) in self._answers.items():
            under = {_short(self._results[one]) for one in digests if one in self._results}
            if call_id in self._held:
                continue
            if _short(name) in under:
                left[_short(name)] -= 1
            else:
                open_answers.append((name, under))
        renamed: list[tuple[str, set[str]]] = []
        for name, under in open_answers:
            if not _taken(left, _short(name)):
                renamed.append((name, under))
        return sorted({name for name, under in renamed if not any(_taken(left, one) for one in sorted(under))})


def _taken(left: dict[str, int], name: str) -> bool:
    """Take one event of that name, if there is one left."""
    if left.get(name, 0) <= 0:
        return False
    left[name] -= 1
    return True


_SEPARATORS = re.compile(r"[./:]|__")


def _short(name: str) -> str:
    """A tool's name without what frameworks put before it: module, class, server."""
    return _SEPARATORS.split(name)[-1] or name
