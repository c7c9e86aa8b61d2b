# SPDX-License-Identifier: Apache-2.0
"""Ended spans on their way into the recorder: each once, complete, and told apart from calls recorded already.

Decision: one intake per recorder, whoever delivers. Our processor tells of starts too, so a span finds its run at once
and is written as it ends; it waits only while a span above it is open that may turn out to be the same call (a
framework's LLM span around an SDK's). An exporter alone hears of ends only, children first and in batches: its spans
wait, bounded, for their local root and then go the same way as if they had just happened.
Rejected: mapping each span by itself (one model call becomes three events) and always waiting for the root (an agent
killed after an hour leaves none of its spans).

Nothing here raises: what fails is counted and logged by the recorder.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from opentelemetry.sdk.trace import ReadableSpan, Span
from opentelemetry.trace import SpanKind

from sftrace_otel.core.mapping import (
    MappedCall,
    Past,
    Selected,
    SpanRecord,
    failure,
    is_log,
    is_pending,
    is_reference,
    looks_like_call,
    map_content,
    select_calls,
)
from sftrace_otel.otel.convert import to_record
from sftrace_otel.otel.rows import Resources, span_row
from sftrace_otel.recorder import Call, Recorder, Run

__all__ = ["SpanIntake", "intake_of"]

_MARK = "_sftrace_intake"
_KIND_NAMES = {kind: kind.name for kind in SpanKind}
_REMEMBERED = 8_192
"""Ended spans that are remembered, for spans that end after those above them and for second deliveries."""
_HELD = 10_000
"""Spans of an exporter without our processor that may wait for their local root."""
_EARLY = 1_000
"""Rows of spans that a run keeps until its first call opens its journal."""
_BESIDE = 256
"""How many ended spans back a call is looked for that another span tells of again."""
_UNENDED = 100_000
"""Open spans that are followed; a program that never ends its spans must not fill the memory."""


class _Open(NamedTuple):
    parent: int
    root: bool
    attributes: Mapping[str, Any]


class _Ended(NamedTuple):
    record: SpanRecord
    call: MappedCall | None
    run: Run


class SpanIntake:
    """Takes spans for one recorder. All methods may be called from any thread."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.always_write = False
        """Whether a span alone makes a bundle: set where the destination was named by the program."""
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._open: dict[int, _Open] = {}
        self._live: dict[int, _Open] = {}  # of these, those that refer to a call of ours or may come to
        self._past: OrderedDict[str, Past] = OrderedDict()  # a plain one is slow to give its oldest entry
        self._calls: dict[str, Call] = {}
        self._own: deque[tuple[int, Call, int]] = deque(maxlen=_REMEMBERED)
        self._by_trace = self.recorder.settings.scope == "trace"
        self._waiting: dict[int, list[_Ended]] = {}
        self._below: dict[int, list[str]] = {}
        self._held: dict[str, list[SpanRecord]] = {}
        self._held_count = 0
        self._early: dict[str, tuple[Run, list[dict[str, object]]]] = {}
        self._resources: dict[str, Resources] = {}

    # -- what processor and exporter call

    def started(self, span: Span) -> None:
        """A span began in this process; heard once however many processors tell."""
        try:
            marks = span.__dict__
            if marks.get(_MARK) is self:
                return
            marks[_MARK] = self
            context, parent = span.get_span_context(), span.parent
            if context is None:
                return
            if self.recorder.service is None:
                self._name_service(span.resource.attributes)
            above = parent.span_id if parent is not None and not parent.is_remote else None
            attributes = span.attributes or {}
            if "sftrace.event.id" in attributes and not self._by_trace:  # a boundary of ours knows its run
                self._open[context.span_id] = here = _Open(above or 0, above is None, attributes)
                self._live[context.span_id] = here
                return
            remote = (parent.trace_id, parent.span_id) if parent is not None and parent.is_remote else None
            bundle = self._begin(
                context.span_id, context.trace_id, above, _KIND_NAMES[span.kind], span.name, attributes, remote
            )
            if bundle is not None:
                span.set_attribute("sftrace.bundle", bundle)
        except BaseException as error:
            self.recorder.fault("following a span", error)

    def ended(self, span: ReadableSpan) -> bool:
        """A span ended. False if it could not be taken; True also for one that was delivered before."""
        try:
            marks = span.__dict__
            if marks.get(_MARK) is self:
                return True
            marks[_MARK] = self
            if self._end_own(span):
                return True
            if self._own:
                self._settle_own()
            record = to_record(span)
            if record.span_id in self._past or is_pending(record.attributes):
                return True
            self._name_service(record.resource)
            if int(record.span_id, 16) in self._open:
                self._end(record)
            else:
                self._hold(record)
        except BaseException as error:
            self.recorder.fault("recording a span", error)
            return False
        return True

    def _end_own(self, span: ReadableSpan) -> bool:
        """The short way of a span that refers to a call of our boundaries: nothing of it needs to be mapped or written.

        False where it must go the long way: others wait for it, it may end a run, or it is not ours after all.
        """
        context = span.get_span_context()
        span_id = context.span_id if context is not None else 0
        here = self._open.get(span_id)
        if here is None or self._by_trace or span_id in self._waiting or not self.recorder.expects(span_id):
            return False
        if "sftrace.event.id" not in here.attributes:
            return False
        scope = span.instrumentation_scope
        call = self.recorder.span_arrived(span_id, scope.name if scope else "")
        if call is None:
            return False
        parent = span.parent
        self._open.pop(span_id, None)
        self._live.pop(span_id, None)
        self._own.append((span_id, call, parent.span_id if parent is not None else 0))
        return True

    def _settle_own(self) -> None:
        """Remember our own ended spans as the others are: spans of other layers are about to be compared with them."""
        with self._lock:
            own, self._own = self._own, deque(maxlen=_REMEMBERED)
            for span_id, call, parent in own:
                bare = MappedCall(
                    kind=call.kind, name=call.name, model=call.model, input=None, missing=("input", "output")
                )
                key = f"{span_id:016x}"
                self._past[key] = Past(f"{parent:016x}" if parent else None, bare, recorded=True, own=True)
                self._calls[key] = call
                if parent in self._open:
                    self._below.setdefault(parent, []).append(key)
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        while len(self._past) > _REMEMBERED:
            self._calls.pop(self._past.popitem(last=False)[0], None)

    def flush(self) -> None:
        """Take what still waits for a root or for a span above it: the process or the exporter ends."""
        try:
            self._settle_own()
            with self._lock:
                held, self._held, self._held_count = list(self._held.values()), {}, 0
                waiting, self._waiting = list(self._waiting.values()), {}
            for records in held:
                self._relive(records)
            for group in waiting:
                self._emit(group)
            for run, _ in list(self._early.values()):
                if run.journal is not None:
                    self._write_early(run)
        except BaseException as error:
            self.recorder.fault("flushing spans", error)

    def _name_service(self, resource: Mapping[str, Any]) -> None:
        if self.recorder.service is None:
            self.recorder.service = str(resource.get("service.name", ""))

    # -- one span

    def _begin(
        self,
        span_id: int,
        trace_id: int,
        above: int | None,
        kind: str,
        name: str,
        attributes: Mapping[str, Any],
        remote: tuple[int, int] | None = None,
        *,
        ended: bool = False,
    ) -> str | None:
        """A span begins; one that has `ended` gets no more attributes."""
        operation = attributes.get("gen_ai.operation.name")
        if operation is None and name.startswith("invoke_agent"):
            operation = "invoke_agent"
        with self._lock:
            self._open[span_id] = here = _Open(above or 0, above is None, attributes)
            if not ended or "sftrace.event.id" in attributes:
                self._live[span_id] = here
            if len(self._open) > _UNENDED:
                oldest = next(iter(self._open))
                del self._open[oldest]
                self._live.pop(oldest, None)
                self._below.pop(oldest, None)
        return self.recorder.span_started(
            span_id, trace_id, above, kind, operation, remote=remote, agent=_agent(attributes)
        )

    def _end(self, record: SpanRecord) -> None:
        span_id = int(record.span_id, 16)
        with self._lock:
            here = self._open.pop(span_id, None)
            self._live.pop(span_id, None)
        root = here is not None and here.root
        run = own = self.recorder.span_run(span_id) or self.recorder.process_run()
        try:
            recorded = self.recorder.span_reference(span_id, record.scope_name or "") or is_reference(record)
            call = map_content(record, partial(self.recorder.fault, "reading a span", run=run))
            if call is not None and self._told_already(record, call):
                call = None
            if call is not None:
                run = self.recorder.going_on(run)
            self._tell_of_agent(record.attributes, run)
            self._remember(record, call, recorded, run)
            self._sort(_Ended(record, call, run), span_id, here, recorded)
        finally:
            self.recorder.span_closed(span_id, root=root, error=self._failure(record) if root else None)
        if own.closed:
            self._resources.pop(own.id, None)
            self._early.pop(own.id, None)

    def _tell_of_agent(self, attributes: Mapping[str, Any], run: Run) -> None:
        agent = _agent(attributes)
        if agent is not None:
            self.recorder.agent_seen(run, agent)

    def _sort(self, ended: _Ended, span_id: int, here: _Open | None, recorded: bool) -> None:
        parent = here.parent if here is not None else 0
        above = self._open_call_above(parent)
        with self._lock:
            below = self._passed_up(ended, span_id, parent)
            group = self._waiting.pop(span_id, [])
            if ended.call is not None:
                group.append(ended)
            if group and above:
                self._waiting.setdefault(above, []).extend(group)
                return
        if ended.call is None and not recorded:
            self._write(ended.run, ended.record)
        if group:
            self._emit(group, below)

    def _passed_up(self, ended: _Ended, span_id: int, parent: int) -> list[str]:
        """The calls directly below this span; and the span above learns of them, or of this one if it is a call."""
        below = self._below.pop(span_id, [])
        if parent in self._open:
            told = self._below.setdefault(parent, [])
            told += below if ended.call is None else [ended.record.span_id]
            del told[:-_BESIDE]
        return below

    def _open_call_above(self, parent: int) -> int:
        """The outermost open span above that may be a call, 0 if there is none; the way may lead over ended spans."""
        found, steps = 0, 0
        while parent and steps < 256:
            here = self._open.get(parent)
            if here is not None:
                found = parent if looks_like_call(here.attributes) else found
                parent = here.parent
            else:
                past = self._past.get(format(parent, "016x"))
                parent = int(past.parent_id, 16) if past is not None and past.parent_id else 0
            steps += 1
        return found

    def _told_already(self, record: SpanRecord, call: MappedCall) -> bool:
        if is_log(record.attributes):
            return self._recorded_beside(record, call)
        return call.kind == "llm" and self._recorded_below(record, call)

    def _recorded_beside(self, record: SpanRecord, call: MappedCall) -> bool:
        """Whether a boundary recorded the call that a log tells of again: its span is below the log's own parent."""
        with self._lock:
            still_open = [
                format(span_id, "016x")
                for span_id, here in list(self._live.items())
                if here.attributes.get("gen_ai.request.model") == call.model and "sftrace.event.id" in here.attributes
            ]
            ended = [
                span_id
                for span_id, past in islice(reversed(self._past.items()), _BESIDE)
                if past.own and past.call is not None and past.call.model == call.model
            ]
            return any(self._is_below(span_id, record.parent_id) for span_id in still_open + ended)

    def _recorded_below(self, record: SpanRecord, call: MappedCall) -> bool:
        """Whether a boundary is still recording the call of a span that ended before the answer's stream did."""
        with self._lock:
            return any(
                "sftrace.event.id" in here.attributes
                and here.attributes.get("gen_ai.request.model") == call.model
                and self._is_below(format(span_id, "016x"), record.span_id)
                for span_id, here in list(self._live.items())
            )

    def _is_below(self, span_id: str | None, ancestor: str | None) -> bool:
        for _ in range(256):
            if span_id is None or span_id == ancestor:
                break
            here, past = self._open.get(int(span_id, 16)), self._past.get(span_id)
            if here is not None:
                span_id = format(here.parent, "016x") if here.parent else None
            else:
                span_id = past.parent_id if past is not None else None
        return span_id == ancestor

    def _remember(self, record: SpanRecord, call: MappedCall | None, recorded: bool, run: Run) -> None:
        with self._lock:
            own = is_reference(record)
            if own:
                self._calls[record.span_id] = _referred(record, run)
            self._past[record.span_id] = Past(record.parent_id, _bare(call), recorded, own)
            self._forget_oldest()

    def _failure(self, record: SpanRecord) -> tuple[str, str] | None:
        """Class and redacted message of a failed local root."""
        error = failure(record)
        if error is None:
            return None
        kind = _clean(_class_name(error[0]))
        if self.recorder.settings.capture != "full":
            return kind, kind
        return kind, _clean(self.recorder.policy.redact_text(error[1])[0])

    # -- spans of an exporter alone

    def _hold(self, record: SpanRecord) -> None:
        root = record.parent_id is None or record.parent_is_remote
        if root and record.trace_id not in self._held:
            self._begin_late(record, frozenset())
            self._end(record)
            return
        with self._lock:
            self._held.setdefault(record.trace_id, []).append(record)
            self._held_count += 1
            ready = self._held.pop(record.trace_id) if root else []
            if self._held_count > _HELD and not ready:
                ready = self._held.pop(next(iter(self._held)))
            self._held_count -= len(ready)
        if ready:
            self._relive(ready)

    def _relive(self, records: list[SpanRecord]) -> None:
        """Let held spans start and end again, in order, as if our processor had seen them."""
        records = [record for record in records if record.span_id not in self._past]
        here = {record.span_id for record in records}
        for record in sorted(records, key=lambda item: (item.start_ns, -item.end_ns)):
            self._begin_late(record, here)
        for record in _children_first(records):
            self._end(record)

    def _begin_late(self, record: SpanRecord, here: AbstractSet[str]) -> None:
        span_id, parent = int(record.span_id, 16), record.parent_id
        above = int(parent, 16) if parent is not None and not record.parent_is_remote and parent in here else None
        trace_id = int(record.trace_id, 16)
        remote = (trace_id, int(parent, 16)) if parent is not None and record.parent_is_remote else None
        self._begin(span_id, trace_id, above, record.kind, record.name, record.attributes, remote, ended=True)
        run = self.recorder.span_run(span_id)
        if run is not None:
            _begin_earlier(run, record.start_ns)

    # -- into the recorder

    def _emit(self, group: list[_Ended], below: Iterable[str] = ()) -> None:
        runs = {item.record.span_id: self.recorder.going_on(item.run) for item in group}
        records = {item.record.span_id: item.record for item in group}
        for chosen in select_calls([(item.record, item.call) for item in group], self._past, below):
            event = self._record(chosen, runs[chosen.record.span_id])
            for span_id in chosen.absorbed:
                if span_id in records and event is not None:
                    self._write(runs[span_id], records[span_id], same_as=event)

    def _record(self, chosen: Selected, run: Run) -> str | None:
        record = chosen.record
        above = self._calls.get(chosen.above or "")
        call = self.recorder.span_call(
            run, record, _as_event(chosen.call), above=above if above is not None and above.run is run else None
        )
        if call is None:
            return None
        if record.dropped[0]:
            run.lost("span attributes dropped by a limit", record.dropped[0])
        with self._lock:
            for span_id in (record.span_id, *chosen.absorbed):
                self._calls[span_id] = call
                past = self._past.get(span_id)
                if past is not None:
                    self._past[span_id] = Past(past.parent_id, past.call, recorded=True, own=past.own)
        return call.id

    def _write(self, run: Run, record: SpanRecord, *, same_as: str | None = None) -> None:
        row = span_row(self.recorder, record, self._resources.setdefault(run.id, Resources()), same_as=same_as)
        if run.closed or (run.linked and run.journal is None):
            self.recorder.span_row(run, row)
            return
        if run.journal is None and self.always_write:
            self._open_journal(run)
        if run.journal is None:
            _, rows = self._early.setdefault(run.id, (run, []))
            rows.append(row)
            if len(rows) > _EARLY:
                rows.pop(0)
                run.lost("spans before the first call")
        else:
            self._write_early(run)
            self.recorder.span_row(run, row)

    def _write_early(self, run: Run) -> None:
        _, rows = self._early.pop(run.id, (run, []))
        for row in rows:
            self.recorder.span_row(run, row)

    def _open_journal(self, run: Run) -> None:
        try:
            run.open()
        except OSError as error:
            self.recorder.fault("opening the bundle", error, run)


def _agent(attributes: Mapping[str, Any]) -> tuple[str | None, str | None, str | None] | None:
    """Name, id and conversation id that an `invoke_agent` span tells of; None where it is none or tells nothing."""
    if attributes.get("gen_ai.operation.name") != "invoke_agent":
        return None
    found = [attributes.get(f"gen_ai.{key}") for key in ("agent.name", "agent.id", "conversation.id")]
    name, number, conversation = (text if isinstance(text, str) and text else None for text in found)
    return (name, number, conversation) if name or number or conversation else None


def _bare(call: MappedCall | None) -> MappedCall | None:
    """A call without its content: all that is compared later."""
    if call is None:
        return None
    return MappedCall(
        kind=call.kind,
        name=call.name,
        model=call.model,
        input=None,
        response_id=call.response_id,
        missing=("input", "output"),
    )


def _referred(record: SpanRecord, run: Run) -> Call:
    """The call that a span of ours refers to, as far as those below it need it."""
    call = Call(run, 0, str(record.attributes["sftrace.event.id"]), "", record.name, None, "")
    call.began = max(0, record.start_ns - run.wall0)
    return call


def _begin_earlier(run: Run, unix_ns: int) -> None:
    """A run that is known only now, from spans that ended, began when they did."""
    earlier = run.wall0 - unix_ns
    if run.journal is None and earlier > 0 and unix_ns > 0:
        run.wall0 -= earlier
        run.mono0 -= earlier


def _as_event(call: MappedCall) -> MappedCall:
    """`call` with names that have a UTF-8 form, and its error's class without the module that OpenTelemetry puts there.

    What is in payloads is `prepare`'s to spell.
    """
    error = call.error
    return msgspec.structs.replace(
        call,
        name=_clean(call.name),
        provider=call.provider and _clean(call.provider),
        model=call.model and _clean(call.model),
        response_model=call.response_model and _clean(call.response_model),
        tool_call_id=call.tool_call_id and _clean(call.tool_call_id),
        error=error and (_clean(_class_name(error[0])), _clean(error[1])),
    )


def _class_name(name: str) -> str:
    return name.rpartition(".")[2] or name


def _clean(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _children_first(records: Iterable[SpanRecord]) -> list[SpanRecord]:
    """Spans in an order in which each comes after those below it."""
    parents = {record.span_id: record.parent_id for record in records}

    def depth(span_id: str | None) -> int:
        steps = 0
        while span_id in parents and steps <= len(parents):
            span_id, steps = parents[span_id], steps + 1
        return steps

    return sorted(records, key=lambda record: (-depth(record.span_id), record.end_ns))


# Held by their recorder's `before_close`, so an intake lives as long as its recorder.
_intakes: weakref.WeakValueDictionary[int, SpanIntake] = weakref.WeakValueDictionary()
_registry = threading.Lock()


def intake_of(recorder: Recorder) -> SpanIntake:
    """The one intake of a recorder; flushed before the recorder closes."""
    with _registry:
        intake = _intakes.get(id(recorder))
        if intake is None or intake.recorder is not recorder:
            intake = _intakes[id(recorder)] = SpanIntake(recorder)
            recorder.before_close.append(intake.flush)
        return intake


def _after_fork() -> None:
    """In a forked child: the parent's open and waiting spans are the parent's."""
    global _registry
    _registry = threading.Lock()
    for intake in list(_intakes.values()):
        intake._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
