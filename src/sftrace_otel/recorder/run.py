# SPDX-License-Identifier: Apache-2.0
"""A run and its calls: ids, times, what was lost, and the journal that is opened with the first record."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from sftrace_otel.bundle.journal import Journal, Single
from sftrace_otel.core.prepare import Prepared, prepare
from sftrace_otel.core.redact import RedactionPolicy

if TYPE_CHECKING:
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
        self.agent: str | None = None
        self.overwrite = False
        self.closed = False
        self.broken = False
        self.path: Path | None = None
        self.journal: Journal | None = None
        self.lock = threading.RLock()  # a log handler of the program may be traced itself
        self.calls = 0
        self.open_calls = 0
        self.errors = 0
        self.kept: str | None = None
        self.explicit = target is not None
        self.next: Run | None = None
        self.losses: dict[str, int] = {}
        self.websockets: dict[str, int] = {}
        self.trace_ids: dict[str, None] = {}
        self.input: Prepared | None = None
        self.output: Prepared | None = None
        self.failure: tuple[str, str] | None = None
        self.start_id = self.new_id()
        self.answered = Answered()
        self.wire_calls = 0
        self.refs: set[int] = set()
        self.spans: set[int] = set()
        self.reading: set[Reading] = set()
        """Answers that are still being read; what was read of them until the run ends is recorded then."""
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

    def opened(self) -> Journal:
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
            journal = Journal(self.target, fsync=self.recorder.settings.fsync)
            journal.introduce(head)
            journal.record(start)
        except Exception as error:
            self.broken = True
            if journal is not None:
                journal.discard()
            self.recorder.no_room(self._place(), error)
            raise NoLongerRecords from error
        self.journal = journal
        self.recorder.later(partial(self.recorder.announce, self))
        if journal.earlier is not None:
            line = f"sftrace: an earlier run did not end; get its bundle with: sftrace recover {journal.earlier}"
            self.recorder.later(partial(self.recorder.say, line))
        return journal

    def _place(self) -> Path:
        """What cannot be written when the journal cannot be opened."""
        if self._target is None:
            return self.recorder.settings.dir
        return self._target if self.explicit else self._target.parent

    @property
    def full(self) -> bool:
        """Whether the run has reached MAX_RUN_MB."""
        return self.journal is not None and self.journal.size >= self.recorder.max_run_bytes

    def _start(self) -> Single:
        prepared = None if self.input is None else self.recorder.content(self.input)
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
    """Which of the model's tool calls were answered in later requests, and which tool events account for them."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[str, str]] = {}
        self._names: dict[str, int] = {}
        self._results: set[int] = set()
        self._held: set[str] = set()

    def answer(self, call_id: str, name: str, digest: str) -> None:
        """A request carries the answer of tool call `call_id`: the function's `name`, the digest of the content."""
        self._answers.setdefault(call_id, (name, digest))

    def tool(self, name: str, digest: str, call_ids: Iterable[str] = ()) -> None:
        """A tool event `name` whose output has `digest`; `call_ids` where it is known which calls it answered."""
        before = len(self._held)
        self._held.update(call_ids)
        if len(self._held) > before:
            return
        self._names[name] = self._names.get(name, 0) + 1
        self._results.add(hash(digest))

    def known(self, call_id: str) -> bool:
        return call_id in self._answers

    def untraced(self) -> list[str]:
        """Functions whose result went back to the model although no tool event holds it, sorted."""
        left: dict[str, int] = {}
        for name, count in self._names.items():
            short = name.rpartition(".")[2]
            left[short] = left.get(short, 0) + count
        missing = set()
        for call_id, (name, digest) in self._answers.items():
            if call_id in self._held:
                continue
            short = name.rpartition(".")[2]
            if left.get(short, 0) > 0:
                left[short] -= 1
            elif hash(digest) not in self._results:
                missing.add(name)
        return sorted(missing)
