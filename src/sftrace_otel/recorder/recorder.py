# SPDX-License-Identifier: Apache-2.0
"""Runs: which one a call belongs to, its journal, and closing it into a bundle.

Decision: one recorder per process and destination. Boundaries hand it calls as they begin and end; the OTel side hands
it spans. A call goes into the journal when it begins, whatever sampling or span processors do; a span with a reference
only completes it. Everything public here fails open: an error becomes one log line and a counted loss, never an
exception in the recorded program. The clock, the ids and the output of notices come in as arguments.
Rejected: finding the run by a context variable alone (threads have none) or by trace id alone (an agent without a root
span has a trace per call); we use the scope of the context, then the live span tree, then the only open run.

Source: `design.md`, "Runs" and "The flow".
"""

from __future__ import annotations

import importlib
import logging
import operator
import os
import re
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence, Sized
from contextvars import ContextVar
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from sftrace_otel.bundle.disk import Budget
from sftrace_otel.bundle.journal import NOTHING, Begin, Closing, Counts, End, Head, Single
from sftrace_otel.core.mapping import MappedCall, SpanRecord
from sftrace_otel.core.mapping.dialects import results_of
from sftrace_otel.core.mapping.wire import LLM_HOSTS
from sftrace_otel.core.prepare import Prepared, prepare
from sftrace_otel.core.prices import Prices
from sftrace_otel.core.redact import RedactionPolicy, Vouched
from sftrace_otel.errors import SettingsError
from sftrace_otel.formats import Json
from sftrace_otel.formats.sftrace import is_inner_name
from sftrace_otel.recorder.bodies import clean_body, moved_chunks, stored_body
from sftrace_otel.recorder.exceptions import how_ended, members_of
from sftrace_otel.recorder.keeper import Keeper
from sftrace_otel.recorder.lineage import UNPLACED, Scope, current_scope, current_task
from sftrace_otel.recorder.run import NULL, Call, NoLongerRecords, Run, found_in
from sftrace_otel.recorder.verdict import Obstacle, obstacles_of
from sftrace_otel.settings import Settings
from sftrace_otel.version import __version__

if TYPE_CHECKING:
    from sftrace_otel.bundle.chains import RunJournal

__all__ = ["Recorder"]

_log = logging.getLogger("sftrace_otel")

OWN_RUN_KINDS = frozenset({"SERVER", "CONSUMER"})
"""Span kinds whose local root is a run of its own (design "Runs")."""

WAIT_NS = 1_000_000_000
"""How long an ended run waits for calls that are still open."""

IDLE_NS = 60_000_000_000
"""After that long without an open call a run without a root ends: the process's beside others, and a linked one."""

_GLANCE = 10.0
"""Seconds until a run with an open call, or without any yet, is looked at again."""

_SERVING = frozenset({"trace", "request", "task"})
"""Kinds of runs that a server or a worker has."""

_AGENTS = 256
"""Agents of one run that are remembered."""

_OVER = 4_096
"""Spans of ended runs that are remembered, for what is called below them later."""

_telling: ContextVar[bool] = ContextVar("sftrace_telling", default=False)
"""Whether a hook of the program is being told about a bundle; what it records tells nobody."""

PARENT = "sftrace_parent"
"""Where the configuration of a process of multiprocessing holds the id of the run that started it."""

_environment: Sized = getattr(os.environ, "_data", os.environ)
"""What changes its length with the environment; CPython's own dictionary tells it in one step."""

_EXPECTED = 65_536
"""Spans of recorded calls that may be on their way to us."""

_RECORDED = 8_192
"""Spans that are known to tell of what is recorded, without the call."""

_noticing: ContextVar[bool] = ContextVar("sftrace_noticing", default=False)
"""Whether a notice or log line of ours is being written here; what its writing calls is not recorded."""


def _pairs(prepared: Prepared) -> list[tuple[str, str]]:
    return [(f.pointer, f.reason) for f in prepared.findings] if prepared.findings else []


MAX_WAITING_DRAWS = 10_000
"""Draws that wait for the first call of their run; a run that makes none is not on disk."""


class Recorder:
    """Records the runs of this process into one folder.

    `clock` gives ns since the epoch, `ticks` monotonic ns; `notify` shows one line to the person who started the
    program. All methods may be called from any thread.
    """

    def __init__(
        self,
        settings: Settings,
        policy: RedactionPolicy,
        *,
        clock: Callable[[], int] = time.time_ns,
        ticks: Callable[[], int] = time.perf_counter_ns,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.clock = clock
        self.ticks = ticks
        self.notify = notify or _stderr
        self.service: str | None = None
        self.connections: Callable[[], list[dict[str, object]]] = list
        self.commands: Callable[[], list[dict[str, object]]] = list
        self.propagate = False
        """Whether processes that this one starts are told the run they belong to (`OTEL_SFTRACE_PARENT`)."""
        self.before_close: list[Callable[[], None]] = []
        self._runs: dict[str, Run] = {}
        self._process: Run | None = None
        self._live: dict[int, Run] = {}
        self._refs: dict[int, Call] = {}
        self._recorded: OrderedDict[int, bool] = OrderedDict()  # a plain one is slow to give its oldest entry
        self._lock = threading.RLock()
        self._unplaced: dict[str, int] = {}  # losses of no open run; the next run of the process tells of them
        self._reported: set[str] = set()
        self._variables = len(_environment)
        self._notices: deque[Callable[[], None]] = deque()
        self._writing = threading.Lock()
        self._names: dict[str, tuple[str, list[tuple[str, str]]]] = {}
        self._closing = False
        self.max_run_bytes = settings.max_run_mb << 20
        self.has_content = settings.capture == "full"
        self.draws = settings.nondeterminism == "record" and self.has_content
        """Whether reads of the clock and random draws of the program are recorded."""
        self._prices = _prices_of(settings)
        self.folder = absolute(settings.dir)
        self._budget = Budget(self.folder, settings.max_disk_mb << 20)
        self._budget_lock = threading.Lock()
        self._closers: list[threading.Thread] = []
        self._over: OrderedDict[int, Run] = OrderedDict()
        self._traces: OrderedDict[int, Run] = OrderedDict()
        self._beside = False
        """Whether this process has had runs of another kind than its own."""
        self._serves = False
        self._keeper = Keeper(self.sweep)
        self._sweeping = threading.RLock()

    # -- what fails open

    def fault(self, what: str, error: BaseException, run: Run | None = None) -> None:
        """Count a loss; log it once for each place and class of error, never its message, which may hold a secret."""
        if run is None:
            try:
                here = current_scope().run
            except Exception:  # what is to be told may be that
                here = None
            run = here if here is not None and here.recorder is self and not here.closed else self._process
        if run is not None and run.closed:
            run = None
        if run is not None:
            run.lost(what)
        else:
            self._unplaced[what] = self._unplaced.get(what, 0) + 1
        if isinstance(error, NoLongerRecords):
            return
        key = f"{what}:{type(error).__name__}"
        if key not in self._reported:
            self._reported.add(key)
            self.later(lambda: _log.error("sftrace: %s failed with %s; the program goes on", what, _kind_of(error)))
            self.tell()

    def told(self, key: str) -> None:
        """A fault (`what:class`) was logged before this recorder was there."""
        self._reported.add(key)

    def no_room(self, folder: Path, error: BaseException) -> None:
        """Have it said, once for a folder, that nothing can be recorded into it."""
        if str(folder) not in self._reported:
            self._reported.add(str(folder))
            why = _kind_of(error)
            self.later(lambda: _log.error("sftrace: nothing is recorded: %s cannot be written: %s", folder, why))

    def later(self, notice: Callable[[], None]) -> None:
        """Keep a notice until no lock is held: what the program does with it may wait for another recorded thread."""
        self._notices.append(notice)

    def tell(self) -> None:
        """Write the notices that were kept. Hold no lock. Never raises.

        One thread at a time: what the program does with a notice may be to wait for a thread of its own that makes a
        recorded call, and a notice of that one must not wait for the first. The thread that writes takes it too.
        """
        while self._notices and self._writing.acquire(blocking=False):
            try:
                if self._notices:
                    _written(self._notices.popleft())
            finally:
                self._writing.release()

    # -- runs

    def process_run(self) -> Run:
        """The run of the process, made when first needed; a new one, linked, after it closed."""
        known = self._process
        if known is not None and not known.closed and self._is_idle(known):
            self.end_run(known, beside=True)
        with self._lock:
            known = self._process
            if known is not None and not known.closed and not known.ended:
                return known
            run = self._process = self.new_run("process", origin={} if known is None else {"continues": known.id})
            run.losses, self._unplaced = self._unplaced, {}
            if self.propagate:
                os.environ["OTEL_SFTRACE_PARENT"] = run.id
            return run

    def parent_origin(self) -> dict[str, object]:
        """What a run of this process says of the run that started the process, as far as that is known."""
        process = sys.modules.get("multiprocessing.process")
        told = None if process is None else process.current_process()._config.get(PARENT)
        parent = told or self.settings.parent
        return {"parent_run": parent} if parent else {}

    def known_run(self, scope: Scope) -> Run | None:
        """The open run that a call in `scope` would go to, if there is one already. Takes no lock."""
        run = scope.run
        if run is not None and run.recorder is self and _is_open(run):
            return run
        if scope is UNPLACED:
            others = [run for run in list(self._runs.values()) if run.kind != "process" and _is_open(run)]
            if len(others) == 1:
                return others[0]
        return self._process

    def run_here(self) -> Run:
        """The run of what happens here and now."""
        return self.known_run(current_scope()) or self.process_run()

    def adopt(self, run: Run) -> None:
        """Let `run` be the run of the process: it takes what has no run of its own."""
        with self._lock:
            self._process = run

    def new_run(self, kind: str, *, target: Path | None = None, origin: Mapping[str, object] | None = None) -> Run:
        self._learn()
        run = Run(self, kind=kind, target=target, origin={**self.parent_origin(), **(origin or {})})
        with self._lock:
            self._runs[run.id] = run
            self._beside |= kind != "process"
            serves = kind in _SERVING or (kind == "process" and self._serves)
            self._serves |= serves
        if serves and (kind == "process" or self._process is not None):
            self._keeper.wake()
        return run

    def run_for(self, scope: Scope, span_id: int = 0) -> Run:
        """The run of a call: that of its scope, of the live span around it, the only open one, or the process's."""
        run = scope.run
        if run is None and span_id:
            run = self.span_run(span_id)
        if run is not None:
            return self.going_on(run)
        if scope is UNPLACED and not span_id:
            with self._lock:
                others = [run for run in self._runs.values() if run.kind != "process" and _is_open(run)]
            if len(others) == 1:
                return others[0]
        return self.process_run()

    def going_on(self, run: Run) -> Run:
        """`run` while it takes calls; later the one that goes on for it, or that is linked to it."""
        while run.next is not None:
            run = run.next
        return run if not run.closed and not run.ended else self._linked(run)

    def _linked(self, run: Run) -> Run:
        """The run of what is called after `run` has ended: one, as long as calls come within a minute."""
        if run.kind == "process":
            return self.process_run()
        with self._lock:
            while run.later is not None:
                run = run.later
            if not run.closed and not run.ended:
                return run
            run.later = linked = self._continuation(run)
            linked.linked = True
        self._keeper.wake()
        return linked

    def latest(self, run: Run) -> Run:
        """`run`, or the run that goes on for it since it is full. Full ones are closed once their calls have ended."""
        while run.next is not None:
            run = run.next
        if not run.full or run.closed:
            return run
        with self._lock:
            if run.next is None:
                run.next = self._continuation(run)
                if run is self._process:
                    self._process = run.next
        self._close_when_idle(run)
        return run.next

    def _continuation(self, run: Run) -> Run:
        target = run.target if run.explicit else None
        number = 2
        while target is not None and (target == run.target or os.path.lexists(target)):
            target = run.target.with_name(f"{run.target.stem}-{number}{run.target.suffix}")
            number += 1
        following = self.new_run(run.kind, target=target, origin={"continues": run.id})
        following.agent, following.kept, following.linked = run.agent, run.kept, run.linked
        following.trace_ids = dict(run.trace_ids)
        return following

    def _close_when_idle(self, run: Run) -> None:
        """Close a run that another one continues, beside the program, as soon as no call of it is open."""
        if run.next is None:
            return
        with run.lock:  # with a successor it takes no new call, so an idle one stays idle
            if run.open_calls > 0 or run.closed:
                return
        closer = threading.Thread(target=self._close_one, args=(run,), name="sftrace-close")
        with self._lock:
            self._closers = [thread for thread in self._closers if thread.is_alive()]
            self._closers.append(closer)
        try:
            closer.start()
        except RuntimeError:  # the interpreter is going down: no thread begins any more
            self._closers.remove(closer)
            self._close_one(run)

    def _locked(self, run: Run) -> Run:
        """The run that takes what belongs to `run` now, its lock taken."""
        while True:
            journal = run.journal
            if run.next is not None or (journal is not None and journal.size >= self.max_run_bytes):
                run = self.latest(run)
            run.lock.acquire()
            if run.next is None and not run.ended and not run.closed:
                return run
            run.lock.release()
            run = self.going_on(run)

    def keep(self, run: Run, reason: str) -> None:
        """Keep the bundle of `run`, whatever OTEL_SFTRACE_KEEP says, and note why."""
        try:
            self.latest(run).kept = self.policy.redact_text(str(reason))[0] if self.has_content else ""
        except Exception as error:
            self.fault("keeping a run", error, run)

    def joinable(self, span_id: int = 0) -> Run | None:
        """The open run of the current scope, or of the current span, if it is not the process's."""
        run = current_scope().run
        if run is None and span_id:
            run = self.span_run(span_id)
        return run if run is not None and _is_open(run) and run.kind != "process" else None

    def allocate(self, run: Run) -> Path:
        """A file name for a run: `<agent>-<time>-<first 8 of the trace id>-<run>.sftrace`, or `.flight`."""
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(run.wall0 / 1e9))
        trace = next(iter(run.trace_ids), "")[:8] or "00000000"
        named = self.policy.redact_text(run.agent or self.agent())[0]
        agent = re.sub(r"[^A-Za-z0-9._-]+", "-", named).strip("-.")[:60] or "agent"
        suffix = ".sftrace" if "sftrace" in self.settings.formats else ".flight"
        name = f"{agent}-{moment}-{trace}-{run.id[4:12]}{suffix}"
        return self.folder / (name if is_inner_name(name) else f"agent-{name}")

    def agent(self) -> str:
        """The agent's name: the setting, else service.name, else the script."""
        if self.settings.agent:
            return self.settings.agent
        if self.service and not self.service.startswith("unknown_service"):
            return self.service
        script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ""
        return script or "python"

    def head(self, run: Run) -> Head:
        """What the journal of `run` says of it, so that a bundle can be made of it after the process died."""
        agent, found = self.policy.redact_text(run.agent or self.agent())
        return Head(
            run=run.id,
            agent=spelled(agent),
            at=run.wall0,
            target=run.target.name,
            pid=os.getpid(),
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            os=sys.platform,
            version=f"sftrace-otel {__version__}",
            kind=run.kind,
            origin=dict(run.origin),
            policy=self.policy.describe(),
            settings=self.settings.public(),
            command=self.command(),
            found=[("/agent_name", finding.reason) for finding in found[:1]],
        )

    def command(self) -> list[str]:
        """The command line without secrets: an option with a secret's name hides the word after it too.

        Without content only the program's own name is left.
        """
        words: Json = [spelled(str(word)) for word in (sys.argv if self.has_content else sys.argv[:1])]
        return [str(word) for word in cast("list[Json]", self.policy.redact(words)[0])]

    def content(self, prepared: Prepared) -> Prepared:
        """The one gate for payloads: `prepared`, or null where OTEL_SFTRACE_CAPTURE asks for none."""
        return prepared if self.has_content else NULL

    # -- calls

    def begin(
        self,
        kind: str,
        name: str,
        prepared: Prepared,
        *,
        scope: Scope,
        lineage: str | None,
        provider: str | None = None,
        model: str | None = None,
        policy: str = "frozen",
        span: tuple[int, int] | None = None,
        run: Run | None = None,
        event_id: str | None = None,
        at: tuple[int, int] | None = None,
        sends: bool = False,
    ) -> Call | None:
        """Journal the start of a call. `span` is (trace id, span id); `at` (ns since run start, ns since the epoch) for
        calls known afterwards; `sends`: what it sends is told next (`sent`). None when it could not be recorded."""
        if _noticing.get():
            return None
        try:
            run = run or self.run_for(scope, span[1] if span else 0)
            payload = prepared if self.has_content else NULL
            clean, redactions = self._name(name, payload)
            trace = f"{span[0]:032x}" if span and span[0] else None
            run = self._locked(run)
            try:
                parent = scope.parent if scope.run is None or scope.run is run else None
                if trace is not None and trace not in run.trace_ids:
                    run.trace_ids[trace] = None
                journal = run.opened()
                run.calls += 1
                call = Call(run, run.calls, event_id or run.new_id(), kind, name, model, payload.digest)
                moment = at or (self.ticks() - run.mono0, self.clock())
                call.began = moment[0]
                journal.record(
                    Begin(
                        n=call.n,
                        id=call.id,
                        m=moment[0],
                        w=moment[1],
                        kind=kind,
                        name=clean,
                        p=msgspec.Raw(payload.data),
                        h=payload.digest,
                        parent=parent or run.start_id,
                        provider=provider,
                        model=model,
                        policy=policy,
                        lineage=lineage,
                        trace=trace,
                        span=f"{span[1]:016x}" if span and span[1] else None,
                        r=redactions,
                        tags=payload.tags,
                        cut=payload.truncated,
                    ),
                    sends=sends and self.has_content,
                )
                run.open_calls += 1
            finally:
                run.lock.release()
                if self._notices:
                    self.tell()
        except Exception as error:
            self.fault("recording a call", error, run)
            return None
        return call

    def _name(self, name: str, payload: Prepared) -> tuple[str, list[tuple[str, str]]]:
        """A call's name without secrets, and all redactions of its request event."""
        known = self._names.get(name)
        if known is None:
            clean, found = self.policy.redact_text(name)
            known = (clean, [("#/name", finding.reason) for finding in found])
            if len(self._names) < 1024:
                self._names[name] = known
        clean, reasons = known
        if not payload.findings:
            return clean, reasons
        return clean, [*_pairs(payload), *reasons]

    def end(
        self,
        call: Call | None,
        prepared: Prepared | None,
        *,
        end: str = "finished",
        status: str = "ok",
        error: Mapping[str, Any] | None = None,
        model: str | None = None,
        tokens: tuple[int | None, int | None, int | None] = (None, None, None),
        cached: int | None = None,
        extra: Mapping[str, object] | None = None,
        at: tuple[int, int] | None = None,
    ) -> str | None:
        """Journal the end of a call, once: an output, an `error` (`describe_error`), or both. Gives the output hash.

        `tokens` are (prompt, completion, total), `cached` those of the prompt that came from the provider's cache.
        """
        if call is None or call.ended:
            return None
        call.ended = True
        run = call.run
        try:
            payload = prepared if prepared is None or self.has_content else NULL
            if call.kind == "tool" and payload is not None:
                self._note_tool(call, payload, extra)
            with run.lock:
                if run.closed:
                    run.lost("calls ended after the run closed")
                    return None
                moment = at or (self.ticks() - run.mono0, self.clock())
                run.open_calls -= 1
                run.touched = moment[0]
                run.errors += error is not None
                run.opened().record(
                    End(
                        n=call.n,
                        m=moment[0],
                        w=moment[1],
                        end=end,
                        id=run.new_id() if payload is not None else None,
                        p=msgspec.Raw(payload.data) if payload is not None else NOTHING,
                        h=payload.digest if payload is not None else None,
                        status=status,
                        model=model,
                        tokens=tokens,
                        error=dict(error) if error else None,
                        error_id=run.new_id() if error else None,
                        r=_pairs(payload) if payload is not None and payload.findings else [],
                        tags=payload.tags if payload is not None else {},
                        extra=dict(extra) if extra else {},
                        cut=payload.truncated if payload is not None else False,
                        cost=self._cost(call, model, tokens, cached),
                    )
                )
            if self._notices:
                self.tell()
            if run.next is not None:
                self._close_when_idle(run)
            if run.ended and run.open_calls <= 0:
                self._keeper.wake()
            return payload.digest if payload is not None else None
        except Exception as fault:
            self.fault("recording a result", fault, run)
            return None

    def _note_tool(self, call: Call, payload: Prepared, extra: Mapping[str, object] | None) -> None:
        """Have a tool's result account for an answer that the model gets."""
        digests = [payload.digest]
        if type(payload.value) is dict and "content" in payload.value:  # as MCP servers answer
            digests += [self.prepare(value).digest for value in results_of(payload.value)]
        ids = extra.get("tool_call_ids") if extra else None
        call.run.answered.tool(call.name, digests, ids if isinstance(ids, list) else ())

    def _cost(
        self, call: Call, model: str | None, tokens: tuple[int | None, int | None, int | None], cached: int | None
    ) -> Decimal | None:
        if not self._prices or call.kind != "llm":
            return None
        return self._prices.cost((model, call.model), prompt=tokens[0], completion=tokens[1], cached=cached)

    def fail(
        self,
        call: Call | None,
        error: BaseException,
        *,
        end: str | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Journal that a call raised `error`: a failed tool has a result with status error and an error event."""
        if call is None or call.ended:
            return
        try:
            described = self.describe_error(error)
            prepared = None
            if call.kind != "llm":
                prepared = self.prepare({"error_type": described["type"], "message": described["message"]})
            how = end or how_ended(error)
        except Exception as fault:
            call.ended = True
            self.fault("recording an error", fault, call.run)
            return
        self.end(call, prepared, end=how, status="error", error=described, extra=extra)

    def describe_error(self, error: BaseException) -> dict[str, Any]:
        """Class, redacted message and members of an exception. An empty message becomes the class name."""
        kind = type(error)
        try:
            text = str(error)
        except Exception:
            text = ""
        if not self.has_content:
            text = ""
        message, found = self.policy.redact_text(spelled(text) or kind.__name__)
        described: dict[str, Any] = {
            "type": kind.__name__,
            "message": message,
            "module": kind.__module__,
            "qualname": kind.__qualname__,
            "findings": sorted({finding.reason for finding in found}),
        }
        if self.has_content:
            described.update(members_of(error, self.prepare))
        return described

    def prepare(self, value: object, serializer: Callable[[object], object] | None = None) -> Prepared:
        """`core.prepare` with this recorder's policy and limit."""
        if len(_environment) != self._variables:
            self._learn()
        return prepare(value, self.policy, serializer=serializer, max_bytes=self.settings.max_payload_bytes)

    def _learn(self) -> None:
        """Read the secrets of the environment again: a program may load them after it started."""
        try:
            self._variables = len(_environment)
            self.policy.learn(os.environ.copy())
        except (KeyError, RuntimeError):  # another thread changes it just now: the next call looks again
            self._variables = -1

    def takes_requests(self, call: Call) -> bool:
        """Whether the run of `call` is recorded in a format that holds a request before its answer is here."""
        journal = call.run.journal
        return journal is not None and journal.takes_requests and self.has_content

    def sent(self, call: Call, row: dict[str, object], request: bytes | None, vouched: Vouched | None = None) -> None:
        """Journal that an attempt of a call is going out; the body is redacted here, as by `wire`."""
        run = call.run
        try:
            part = row["request"]
            assert isinstance(part, dict)
            out = clean_body(self.policy, request, vouched)
            with run.lock:
                if not run.closed:
                    journal = run.opened()
                    part["body"] = stored_body(journal, out, None)
                    journal.sent(call.n, row)
        except Exception as error:
            self.fault("recording a request", error, run)
        if self._notices:
            self.tell()

    def wire(
        self,
        call: Call | None,
        row: dict[str, object],
        request: bytes | None,
        response: bytes | None,
        media: str | None,
        vouched: tuple[Vouched | None, Vouched | None] = (None, None),
    ) -> None:
        """Journal one HTTP attempt of a call; bodies are redacted here, before they are named, but for those that the
        policy has `vouched` for."""
        if call is None or not self.has_content:
            return
        run = call.run
        try:
            sent = row["request"]
            assert isinstance(sent, dict)
            out = clean_body(self.policy, request, vouched[0])
            back = clean_body(self.policy, response, vouched[1])
            if back is not None and back.changed and response is not None:
                row["chunks"] = moved_chunks(row.get("chunks"), response, back.data)
            if (out is not None and out.changed) or (back is not None and back.changed):
                row["redacted"] = True
            full = row.get("full")
            if isinstance(full, dict) and back is not None and back.changed:
                del full["sha256"]  # a digest would let guesses at the secret be tested
            with run.lock:
                if run.closed:
                    run.lost("exchanges ended after the run closed")
                    return
                journal = run.opened()
                sent["body"] = stored_body(journal, out, None)
                row["body"] = stored_body(journal, back, media)
                row = {"event_id": call.id, "call": call.n, "attempt": call.attempts, **row}
                call.attempts += 1
                journal.row("wire", row)
        except Exception as error:
            self.fault("recording an exchange", error, run)
        if self._notices:
            self.tell()

    def single(
        self, run: Run, kind: str, members: Mapping[str, Prepared], *, parent: str | None = None, status: str = "ok",
        hashes: Sequence[str] = (),
    ) -> str | None:  # fmt: skip
        """Journal an event that is no call. `hashes` names the members behind input_hash and output_hash, in order."""
        if _noticing.get():
            return None
        try:
            members = {name: self.content(item) for name, item in members.items()}
            given, run = run, self._locked(run)
            try:
                event_id = run.new_id()
                journal = run.opened()
                if run is not given:
                    parent = run.start_id
                journal.record(
                    Single(
                        id=event_id,
                        m=run.now(),
                        w=self.clock(),
                        type=kind,
                        f={name: msgspec.Raw(item.data) for name, item in members.items()},
                        parent=parent,
                        status=status,
                        ih=members[hashes[0]].digest if hashes and hashes[0] else None,
                        oh=members[hashes[1]].digest if len(hashes) > 1 else None,
                        r=[pair for name, item in members.items() for pair in found_in(item, f"/{name}")],
                    )
                )
            finally:
                run.lock.release()
                self.tell()
            return event_id
        except Exception as error:
            self.fault("recording an event", error, run)
            return None

    def websocket(self, host: str) -> None:
        """Note that a websocket to `host` was opened: nothing records its messages. One inside a tool is skipped with
        the tool, also by a replay. Never raises."""
        scope = current_scope()
        if scope.parent is not None or _noticing.get():
            return
        try:
            run = self.latest(self.run_for(scope))
            with run.lock:
                run.websockets[host] = run.websockets.get(host, 0) + 1
        except Exception as error:
            self.fault("noting a websocket", error)

    # -- spans

    def span_started(
        self,
        span_id: int,
        trace_id: int,
        parent_id: int | None,
        kind: str,
        operation: str | None,
        *,
        remote: tuple[int, int] | None = None,
        agent: tuple[str | None, str | None, str | None] | None = None,
    ) -> str | None:
        """A span began. `parent_id` is None for a local root, whose parent in another process is `remote` (trace id,
        span id); `operation` is gen_ai.operation.name, `agent` what the span says of an agent that it invokes (name,
        id, conversation id). For a local root gives the bundle's name, to be put on the span as `sftrace.bundle`."""
        if parent_id is not None:
            run = self.span_run(parent_id)
            if run is not None:
                self._follow(span_id, run)
            return None
        scope = current_scope()
        if scope.run is not None:
            run = self.going_on(scope.run)
            is_root = run.responding and kind in OWN_RUN_KINDS  # a server instrumentation inside our own boundary
        else:
            run = self.run_of_root(kind, operation, trace_id)
            is_root = run.kind == "trace"
        if is_root:
            run.roots.add(span_id)
        if remote is not None and run.kind != "process":
            run.came_from(*remote)
        trace = f"{trace_id:032x}"
        run.trace_ids.setdefault(trace, None)
        if agent is not None:
            self.agent_seen(run, agent)
        self._follow(span_id, run)
        return run.name

    def _follow(self, span_id: int, run: Run) -> None:
        self._live[span_id] = run
        run.spans.add(span_id)

    def span_reference(self, span_id: int, scope_name: str) -> bool:
        """A span ended; True if a boundary of ours has recorded what it is about."""
        return self.span_arrived(span_id, scope_name) is not None or self._recorded.pop(span_id, False)

    def expects(self, span_id: int) -> bool:
        """Whether the span `span_id` is known to be that of a call of our boundaries."""
        return span_id in self._refs

    def span_arrived(self, span_id: int, scope_name: str) -> Call | None:
        """The span of a call of our boundaries ended; gives the call, None if no boundary expects this span."""
        call = self._refs.pop(span_id, None)
        if call is not None:
            call.run.refs.discard(span_id)
            call.run.note_span(call.n, scope_name)
        return call

    def refer(self, span_id: int, call: Call) -> None:
        """Expect the span `span_id`: it is the span of `call`. A span that is another call's already stays so."""
        if span_id and self._refs.setdefault(span_id, call) is call:
            call.run.refs.add(span_id)
            if len(self._refs) > _EXPECTED:
                self._forget(next(iter(self._refs), 0))

    def fold(self, span_id: int) -> None:
        """Expect the span `span_id` of an HTTP instrumentation below an LLM call: it is no call of its own."""
        if span_id not in self._refs:
            self._remember(span_id)

    def _forget(self, span_id: int) -> None:
        """Nobody waits for the span `span_id` any more; should it come, it is still known that it is recorded."""
        call = self._refs.pop(span_id, None)
        if call is not None:
            call.run.refs.discard(span_id)
            self._remember(span_id)

    def _remember(self, span_id: int) -> None:
        recorded = self._recorded
        recorded[span_id] = True
        while len(recorded) > _RECORDED:
            recorded.popitem(last=False)

    def span_run(self, span_id: int) -> Run | None:
        """The run of a live span, or of the call that a boundary made it for."""
        run = self._live.get(span_id)
        if run is None:
            call = self._refs.get(span_id)
            run = call.run if call is not None else self._over.get(span_id)
        return run

    def agent_seen(self, run: Run, agent: tuple[str | None, str | None, str | None]) -> None:
        """An `invoke_agent` span of `run` tells of an agent: name, id, conversation id. The first one names the run,
        where neither the program nor a setting did."""
        name, number, conversation = (
            None if text is None else spelled(self.policy.redact_text(text)[0]) for text in agent
        )
        if len(run.agents) < _AGENTS:
            run.agents.setdefault((name, number, conversation), None)
        if name and run.agent is None and not self.settings.agent:
            run.agent = name

    def span_closed(self, span_id: int, *, root: bool, error: tuple[str, str] | None = None) -> None:
        """A span ended. The last open local root of a run of its own ends that run; `error`: (class, message) of a
        failed one."""
        run = self._live.pop(span_id, None)
        if run is None:
            return
        run.spans.discard(span_id)
        if not root or span_id not in run.roots:
            return
        run.roots.discard(span_id)
        self._remember_over(span_id, run)
        run.failure = run.failure or error
        if not run.roots and not run.responding:
            self.end_run(run, beside=current_task() is not None)

    def _remember_over(self, span_id: int, run: Run) -> None:
        self._over[span_id] = run
        while len(self._over) > _OVER:
            self._over.popitem(last=False)

    def run_of_root(self, kind: str, operation: str | None, trace_id: int = 0) -> Run:
        """The run of a local root: one of its own, else the process's. With a run for each trace, the open run of that
        trace, or one linked to it once it has ended."""
        mode = self.settings.scope
        if mode == "trace" and trace_id:
            return self._run_of_trace(trace_id)
        own = mode == "trace" or (mode == "auto" and (kind in OWN_RUN_KINDS or operation == "invoke_agent"))
        origin = {"parent_run": self.settings.parent} if self.settings.parent else {}
        return self.new_run("trace", origin=origin) if own else self.process_run()

    def _run_of_trace(self, trace_id: int) -> Run:
        with self._lock:
            run = self._traces.get(trace_id)
            while run is not None and run.next is not None:
                run = run.next
            if run is None:
                run = self.new_run("trace")
            elif run.closed or run.ended:
                run = self._continuation(run)
            self._traces[trace_id] = run
            while len(self._traces) > _OVER:
                self._traces.popitem(last=False)
            return run

    def span_call(self, run: Run, record: SpanRecord, mapped: MappedCall, *, above: Call | None = None) -> Call | None:
        """Journal a call that is known only from its ended span, under the call `above`. Never raises.

        Times are the span's own, moved into the run: not before it, and not before `above` began.
        """
        try:
            start = self._moment(run, record.start_ns, above)
            scope = Scope(parent=above.id if above is not None else None, run=run)
            call = self.begin(
                mapped.kind,
                mapped.name,
                self.prepare(mapped.input),
                scope=scope,
                lineage=None,
                provider=mapped.provider,
                model=mapped.model,
                span=(int(record.trace_id, 16), int(record.span_id, 16)),
                run=run,
                at=start,
            )
            if call is None:
                return None
            run.note_span(call.n, record.scope_name or "")
            self._span_end(call, record, mapped)
            return call
        except Exception as error:
            self.fault("recording a span", error, run)
            return None

    def _moment(self, run: Run, unix_ns: int, above: Call | None) -> tuple[int, int]:
        floor = above.began if above is not None else 0
        return (max(unix_ns - run.wall0, floor, 0), unix_ns)

    def _span_end(self, call: Call, record: SpanRecord, mapped: MappedCall) -> None:
        end = self._moment(call.run, record.end_ns, call)
        error: dict[str, Any] | None = None
        prepared: Prepared | None = self.prepare(mapped.output)
        if mapped.error is not None:
            kind, text = mapped.error
            message, found = self.policy.redact_text((text if self.has_content else "") or kind)
            error = {"type": kind, "message": message, "findings": sorted({item.reason for item in found})}
            if mapped.kind == "llm":
                prepared = None if mapped.output is None else prepared
            elif mapped.output is None:
                prepared = self.prepare({"error_type": kind, "message": message})
        extra: dict[str, object] = {"dialect": mapped.dialect}
        if mapped.missing or mapped.cut:
            extra["no_content"] = sorted({*mapped.missing, *mapped.cut})
            call.run.lost("calls whose span carried no or cut content")
        if mapped.tool_call_id:
            extra["tool_call_ids"] = [mapped.tool_call_id]
        self.end(
            call,
            prepared,
            end="failed" if error else "finished",
            status="error" if error else "ok",
            error=error,
            model=mapped.response_model,
            tokens=(mapped.prompt_tokens, mapped.completion_tokens, mapped.total_tokens),
            extra=extra,
            at=end,
        )

    def wait_for(self, run: Run) -> None:
        """Give open calls of a run that ends their second, unless waiting would block an event loop.

        Those that this very thread was reading are not waited for: nobody reads on.
        """
        if run.open_calls <= 0 or current_task() is not None:
            return
        deadline = self.ticks() + WAIT_NS
        while self.has_others_at_work(run) and self.ticks() < deadline:
            time.sleep(0.01)

    def draw(
        self, scope: Scope, span_id: int, source: str, lineage: str | None, value: object, bits: int | None = None
    ) -> None:
        """The program read the clock, or drew; never opens a run for it. Raises OSError."""
        run = self.run_for(scope, span_id)
        with run.lock:
            key = (source, lineage)
            index = run.drawn[key] = run.drawn.get(key, -1) + 1
            row: dict[str, object] = {
                "kind": "rng" if source.startswith(("random.", "uuid.")) else "clock",
                "source": source,
                "lineage": lineage,
                "index": index,
                "value": value,
                "start_ns": run.now(),
            }
            if bits is not None:
                row["bits"] = bits
            if run.closed:
                run.lost("draws that came after their run was over")
            elif run.journal is not None:
                run.journal.row("nondeterminism", row)
            elif len(run.draws) < MAX_WAITING_DRAWS:
                run.draws.append(row)
            else:
                run.lost("draws before the first call")

    def has_others_at_work(self, run: Run) -> bool:
        """Whether a call of `run` is open that is not an answer which this very thread was reading. Never raises."""
        me = threading.get_ident()
        return run.open_calls > sum(answer.reader == me for answer in tuple(run.reading))

    def span_row(self, run: Run, row: Mapping[str, object]) -> None:
        """Keep a span that has no event of its own in `spans.jsonl`; never opens a run for it. One that comes when its
        run is over belongs to the run that goes on for it, and is counted as lost where there is none."""
        try:
            while run.closed and run.next is not None:
                run = run.next
            with run.lock:
                if run.journal is not None and not run.closed:
                    run.journal.row("spans", row)
                else:
                    run.lost("spans that came after their run was over")
        except Exception as error:
            self.fault("recording a span", error, run)

    # -- closing

    def set_failure(self, error: BaseException) -> None:
        """The program is ending with `error` uncaught: the process's run, if it has one, failed."""
        run = self._process
        if run is not None and not run.closed:
            described = self.describe_error(error)
            run.failure = (described["type"], described["message"])

    def end_run(self, run: Run, *, failure: tuple[str, str] | None = None, beside: bool = False) -> None:
        """The root of a run ended. `beside`: close it in a thread of ours, once its open calls are over, after a second
        at the latest; else wait for them here and close it. What is called from now on is a run linked to it. Never
        raises."""
        run.failure = failure or run.failure
        if not beside:
            self.wait_for(run)
            self.close_run(run)
            return
        with run.lock:
            if run.ended or run.closed:
                return
            run.due = self.ticks() + WAIT_NS
            run.ended = True
        following = run.next
        while following is not None:
            following.ended = True
            following = following.next
        if not self._keeper.wake():
            self.close_run(run)

    def sweep(self) -> float | None:
        """Close the runs whose time has come. Gives the seconds until the next may have to be; None: nothing waits.
        Never raises."""
        wait: list[float] = []
        try:
            with self._sweeping:
                with self._lock:
                    runs = list(self._runs.values())
                for run in runs:
                    left = self._left(run)
                    if left is not None and left <= 0:
                        self.close_run(run)
                    elif left is not None:
                        wait.append(left)
        except Exception as error:
            self.fault("closing a run", error)
            wait.append(_GLANCE)
        return min(wait, default=None)

    def _left(self, run: Run) -> float | None:
        """Seconds until `run` has to be closed; None where its end is somebody else's."""
        if run.closed:
            return None
        if run.ended and not run.due:  # it ends with the one that it goes on for
            return None
        if run.ended:
            return 0 if _open_calls(run) <= 0 else (run.due - self.ticks()) / 1e9
        if not run.linked and not (run is self._process and self._serves):
            return None
        if run.open_calls > 0 or (run.journal is None and not run.linked):
            return _GLANCE
        return (run.mono0 + run.touched + IDLE_NS - self.ticks()) / 1e9

    def _is_idle(self, run: Run) -> bool:
        """Whether the process's run has ended, since there are others and it had no open call for a minute."""
        quiet = self._beside and run.journal is not None and run.open_calls <= 0
        return quiet and self.ticks() - run.mono0 - run.touched >= IDLE_NS

    def close_run(self, run: Run, *, failure: tuple[str, str] | None = None) -> Path | None:
        """End a run and put its bundle in place; gives its path. Never raises.

        A run without a record leaves nothing, one that OTEL_SFTRACE_KEEP does not want neither. What ends a run ends
        those that continued it, and its output and failure are theirs.
        """
        following = run.next
        if following is not None:
            following.output, run.output = following.output or run.output, None
            following.failure, run.failure = following.failure or run.failure, None
            self._close_one(run)
            for closer in list(self._closers):
                closer.join()
            path = run.path
            self.close_run(following, failure=failure)
            return path
        return self._close_one(run, failure)

    def _close_one(self, run: Run, failure: tuple[str, str] | None = None) -> Path | None:
        for answer in tuple(run.reading):
            answer.cut()
        with run.lock:
            if run.closed:
                return run.path
            run.closed = True
        with self._lock:
            self._runs.pop(run.id, None)
        self._let_go(run)
        if run.journal is None:
            return None
        try:
            run.failure = failure or run.failure
            if not self._wanted(run):
                run.journal.discard()
                if run.kind == "process":
                    self.say(f"sftrace: the run completed; nothing is kept (OTEL_SFTRACE_KEEP={self.settings.keep})")
                return None
            run.path, counts = self._finish(run, run.journal)
        except Exception as error:
            self.fault("writing the bundle", error, run)
            self.say(f"sftrace: the bundle could not be written; what was recorded is in {run.journal.folder}")
            return None
        self._report(run, counts)
        self._closed(run.path)
        return run.path

    def _let_go(self, run: Run) -> None:
        """Follow no more spans for an ended run: the provider may be one that never tells us of their end."""
        for span_id in list(run.refs):
            self._forget(span_id)
        for span_id in list(run.spans):
            if self._live.pop(span_id, None) is not None:
                self._remember_over(span_id, run)
        run.spans.clear()
        run.roots.clear()
        run.input = run.inbound = None

    def _wanted(self, run: Run) -> bool:
        """Whether the bundle of an ended run is kept. One at a path that the program named always is."""
        keep = self.settings.keep
        if keep == "all" or run.kept is not None or run.explicit:
            return True
        return keep == "failed" and (run.failure is not None or run.errors > 0)

    def _closed(self, path: Path) -> None:
        """A bundle is in place: make room for it, and tell who wants to know."""
        try:
            if path.parent == self._budget.folder:
                with self._budget_lock:
                    self._budget.spent(path)
        except Exception as error:
            self.fault("making room for bundles", error)
        if self.settings.on_close and not _telling.get():
            token = _telling.set(True)
            try:
                module, _, name = self.settings.on_close.partition(":")
                operator.attrgetter(name)(importlib.import_module(module))(path)
            except Exception as error:
                self.fault(f"OTEL_SFTRACE_ON_CLOSE={self.settings.on_close}", error)
            finally:
                _telling.reset(token)

    def _finish(self, run: Run, journal: RunJournal) -> tuple[Path, Counts]:
        moment = (run.now(), self.clock())
        status: Literal["completed", "failed"] = "completed" if run.failure is None else "failed"
        output = self.content(run.output) if run.output is not None and run.failure is None else None
        with run.lock:
            if run.failure is not None:
                journal.record(self._failure_event(run, *moment))
            journal.record(
                Single(
                    id=run.new_id(),
                    m=moment[0],
                    w=moment[1],
                    type="run_end",
                    f={
                        "run_status": msgspec.Raw(b'"%s"' % status.encode()),
                        "output": msgspec.Raw(output.data if output else b"null"),
                    },
                    oh=output.digest if output else NULL.digest,
                    r=found_in(output, "/output"),
                )
            )
        agent, found = self.policy.redact_text(run.agent or self.agent())
        closing = Closing(
            run_id=run.id,
            agent=spelled(agent),
            created_ns=run.wall0,
            status=status,
            failure=run.failure,
            duration_ms=moment[0] // 1_000_000,
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            os=sys.platform,
            version=f"sftrace-otel {__version__}",
            run=self._run_json(run),
            provenance={
                "schema_version": "1",
                "origin": "recorded",
                "tool": f"sftrace-otel {__version__}",
                **run.provenance,
            },
            seen=run.seen,
            redactions=[("/agent_name", finding.reason) for finding in found[:1]],
        )
        return journal.close(closing, overwrite=run.overwrite)

    def _failure_event(self, run: Run, mono: int, wall: int) -> Single:
        assert run.failure is not None
        kind, message = (msgspec.Raw(msgspec.json.encode(text)) for text in run.failure)
        return Single(
            id=run.new_id(),
            m=mono,
            w=wall,
            type="error",
            f={"error_type": kind, "message": message, "details": msgspec.Raw(b"null")},
            parent=run.start_id,
            status="error",
            oh=NULL.digest,
        )

    def _run_json(self, run: Run) -> dict[str, object]:
        connections, programs = self._ways_out(run)
        obstacles = self.obstacles(run)
        return {
            "schema_version": "1",
            "agent": spelled(self.policy.redact_text(run.agent or self.agent())[0]),
            "kind": run.kind,
            "origin": dict(run.origin),
            "trace_ids": list(run.trace_ids),
            **({"agents": _agents(run)} if run.agents else {}),
            "losses": dict(run.losses),
            "verdict": {"offline": not obstacles, "obstacles": obstacles},
            "connections": connections,
            **({"programs": programs} if programs else {}),
            "policy": self.policy.describe(),
            "settings": self.settings.public(),
            "command": self.command(),
            **({} if run.kept is None else {"kept": run.kept}),
        }

    def obstacles(self, run: Run) -> list[Obstacle]:
        """What keeps a run from replaying offline."""
        connections, programs = self._ways_out(run)
        return obstacles_of(run, connections, programs, content=self.has_content)

    def _ways_out(self, run: Run) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
        """Connections made and programs started outside every boundary: of the process, so they are told of its run."""
        if run.kind != "process":
            return [], []
        return self.connections(), [
            {key: spelled(self.policy.redact_text(str(value))[0]) for key, value in one.items()}
            for one in self.commands()
        ]

    def close(self) -> None:
        """End every open run; called at exit. Runs that begin later are closed by a second call."""
        for hook in self.before_close:
            try:
                hook()
            except Exception as error:
                self.fault("flushing spans", error)
        for closer in list(self._closers):
            closer.join()
        with self._sweeping:  # what the keeper is writing now is whole before the process goes
            with self._lock:
                runs = list(self._runs.values())
            for run in runs:
                try:
                    if run is self._process or run.linked or run.ended:
                        self.wait_for(run)
                    self.close_run(run)
                except Exception as error:
                    self.fault("closing a run", error, run)
        try:
            self._warn_uncaptured(runs)
        except Exception as error:
            self.fault("looking at connections", error)

    def _warn_uncaptured(self, runs: Sequence[Run]) -> None:
        """Be loud when the process talked to an LLM host and nothing of it was captured."""
        hosts = {str(item["host"]) for item in self.connections() if item.get("llm")}
        hosts |= {host for run in runs for host in run.websockets if host in LLM_HOSTS}
        if hosts and not any(run.calls for run in runs):
            names = ", ".join(sorted(hosts))
            line = "sftrace: this process connected to %s and NO call was captured; run `python -m sftrace_otel doctor`"
            self.later(lambda: _log.error(line, names))
            self.tell()

    # -- notices

    def announce(self, run: Run) -> None:
        """The line at the start: where, which content, how to switch off. For the process's run."""
        if run.kind == "process":
            content = {"full": "prompts and results, redacted", "metadata": "no payloads"}[self.settings.capture]
            where = os.path.relpath(run.target) if _below(run.target) else str(run.target)
            self.say(f"sftrace: recording to {where} ({content}; off: OTEL_SFTRACE_CAPTURE=off)")

    def _report(self, run: Run, counts: Counts) -> None:
        """The line at the end: calls, bundle, whether it replays, the next command."""
        if run.kind != "process" or run.path is None:
            return
        where = os.path.relpath(run.path) if _below(run.path) else str(run.path)
        obstacles = self.obstacles(run)
        verdict = "replays offline" if not obstacles else f"does not replay offline: {obstacles[0]['what']}"
        ended = "completed" if run.failure is None else f"failed with {run.failure[0]}"
        self.say(
            f"sftrace: {counts.llm} LLM and {counts.tool} tool and HTTP calls, {ended}, {verdict}: {where}\n"
            f"sftrace: next: python -m sftrace_otel inspect {where}"
        )

    def say(self, line: str) -> None:
        if not self.settings.quiet:
            self.later(lambda: self.notify(line))
            self.tell()


def _is_open(run: Run) -> bool:
    """Whether a run takes calls as a whole: one that is linked to an ended one is no place for others' calls."""
    return not run.closed and not run.ended and not run.linked


def _open_calls(run: Run) -> int:
    """Calls in flight of a run and of those that go on for it."""
    count = run.open_calls
    while run.next is not None:
        run = run.next
        count += run.open_calls
    return count


def _agents(run: Run) -> list[dict[str, str]]:
    names = ("name", "id", "conversation_id")
    return [{key: text for key, text in zip(names, agent, strict=True) if text is not None} for agent in run.agents]


def _prices_of(settings: Settings) -> Prices:
    """The price table that the settings name; one that cannot be used is one log line, and nothing has a cost."""
    if settings.prices is None:
        return Prices()
    try:
        return Prices.from_json(settings.prices.read_text("utf-8"))
    except (OSError, ValueError) as error:
        why = str(error) if isinstance(error, SettingsError) else _kind_of(error)
        _log.error("OTEL_SFTRACE_PRICES=%s cannot be used (%s); no call has a cost", settings.prices, why)
        return Prices()


def absolute(path: Path) -> Path:
    """`path` from the root on; as it is where the current folder is gone."""
    try:
        return path.absolute()
    except OSError:
        return path


def spelled(text: str) -> str:
    """`text` with lone surrogates (bytes of a command line that are no UTF-8) spelled out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _below(path: Path) -> bool:
    """Whether a path is best shown relative to the current folder, which may be gone."""
    try:
        return path.is_relative_to(Path.cwd())
    except OSError:
        return False


def _written(notice: Callable[[], None]) -> None:
    """Write a notice; what handlers and streams of the program call meanwhile is not recorded, what they raise is
    theirs."""
    token = _noticing.set(True)
    try:
        notice()
    except Exception:
        pass
    finally:
        _noticing.reset(token)


def _kind_of(error: BaseException) -> str:
    """Class of an error, and what the system says of it; never its message, which may hold a secret."""
    name, cause = type(error).__name__, error if isinstance(error, OSError) else error.__cause__
    return f"{name} ({cause.strerror})" if isinstance(cause, OSError) and cause.strerror else name


def _stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
