# SPDX-License-Identifier: Apache-2.0
"""The replay that boundaries ask before they let a call out: one per process while active.

Decision: a plain module variable, seen from every thread, task and executor. A context variable alone is not seen in a
thread that somebody else started, and then the real tool runs (`facts/peers.md` §2).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import orjson
from opentelemetry import context as otel_context
from opentelemetry import trace

from sftrace_otel import recorder
from sftrace_otel.core.mapping import dialects
from sftrace_otel.core.plan import RecordedCall
from sftrace_otel.core.prepare import Prepared, prepare
from sftrace_otel.core.session import Decision, LiveCall, Session
from sftrace_otel.errors import ReplayError, ReplayExhaustedError
from sftrace_otel.instrumentation import guard

if TYPE_CHECKING:
    from sftrace_otel.core.plan import RecordedCall
    from sftrace_otel.core.redact import RedactionPolicy

__all__ = ["Active", "ReplayStop", "activate", "active", "deactivate", "in_block", "in_sdk", "read_beyond"]

in_sdk: ContextVar[bool] = ContextVar("sftrace_in_sdk", default=False)
"""Whether an SDK that may catch a replay error and try again is around: then `ReplayStop` carries it through."""


in_block: ContextVar[bool] = ContextVar("sftrace_replayed_block", default=False)
"""Whether a `record()` block of the program is around, which is inert under replay."""


class ReplayStop(BaseException):
    """Carries a replay error through an SDK that catches Exception and retries; our own boundary turns it back."""

    def __init__(self, error: ReplayError) -> None:
        super().__init__(str(error))
        self.error = error


class Active:
    """A replay in progress."""

    def __init__(self, session: Session, policy: RedactionPolicy, blob: Callable[[Mapping[str, Any]], bytes]) -> None:
        self.session = session
        self.policy = policy
        self.blob = blob
        self.keep: Callable[[Prepared, LiveCall, Decision], None] | None = None
        """Told of each served call: records it where the replay is recorded."""
        self.lets_go = False
        """Whether a call that its end overtakes is made; else it is served or stopped as before."""
        self.output: Prepared | None = None
        self.failure: BaseException | None = None
        self.made: list[RecordedCall | LiveCall] = []
        """What the program called so far, in order: the recorded calls that answered, and calls that have none."""
        self._holds_bare: bool | None = None

    @property
    def holds_bare(self) -> bool:
        """Whether an HTTP call of the recording has the URL of an LLM endpoint: so versions before this one recorded
        what bare HTTP clients asked of one."""
        if self._holds_bare is None:
            self._holds_bare = any(
                call.kind == "http" and dialects.endpoint_of(*call.name.split(" ", 2)[1:]) is not None
                for call in self.session.calls
            )
        return self._holds_bare

    def prepare(self, value: object, serializer: Callable[[object], object] | None = None) -> Prepared:
        """A live payload as the recorder would have prepared it."""
        return prepare(value, self.policy, serializer=serializer)

    def same(self, name: str, arguments: dict[str, Any], lineage: str | None) -> Decision | None:
        """The recorded call of tool `name` that has exactly these arguments at this place; None where that takes
        `decide`: what is served so needs no redaction, for the recording holds it as it is.

        Raises what stopped the replay.
        """
        if self.keep is not None or lineage is None or (self.lets_go and self is not _active):
            return None
        if not _FLAT.issuperset(map(type, arguments.values())):
            return None
        try:
            data = orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS)  # canonical without floats
        except TypeError:
            return None
        digest = hashlib.sha256(data).hexdigest()
        decision = self.session.same(LiveCall("tool", name, lineage=lineage, digest=digest))
        if decision is not None:
            assert decision.call is not None
            self.made.append(decision.call)
            _mark_around(decision)
        return decision

    def decide(
        self,
        kind: str,
        name: str,
        prepared: Prepared,
        *,
        lineage: str | None,
        provider: str | None = None,
        model: str | None = None,
        method: str | None = None,
        otherwise: LiveCall | None = None,
        approve: Callable[[RecordedCall], bool] | None = None,
        runs: bool = False,
        own: bool = False,
    ) -> Decision:
        """Ask the session; `runs` and `own` as `Session.decide`.

        Raises a ReplayError, latched, for a call that the recording has in neither form.
        """
        live = LiveCall(
            kind=kind,
            name=name,
            provider=provider,
            model=model,
            method=method,
            payload=prepared.value,
            lineage=lineage,
            digest=prepared.digest,
        )
        if self.lets_go and self is not _active:  # ended meanwhile: the program goes on without it
            return _GONE
        resumes: dict[str, Any] = {}
        if self.session.mode == "resume":
            redacted = [finding.pointer for finding in prepared.findings]
            resumes = {"inside_live": recorder.current_scope().live, "redacted": redacted, "own": own}
        decision = self.session.decide(live, otherwise, approve, runs=runs, **resumes)
        self.made.append(decision.call or live)
        if decision.action == "serve":
            _mark_around(decision)
            if self.keep is not None:
                self.keep(prepared, live, decision)
        return decision


_GONE: Final = Decision("live", None, None)
"""For a call that the end of the replay overtook: the program goes on as it does without one."""

_FLAT: Final = frozenset({str, int, bool, type(None)})
_ABOUT_A_CALL: Final = frozenset({"gen_ai.operation.name", "http.request.method", "http.method"})
_NO_CALLS: Final = frozenset({"invoke_agent", "create_agent", "invoke_workflow"})


def _mark_around(decision: Decision) -> None:
    """Mark the span of another instrumentation that is around a served call: nothing was executed there either."""
    try:
        if not otel_context.get_current():
            return
        span = trace.get_current_span()
        attributes = getattr(span, "attributes", None)
        if not attributes or not span.is_recording() or _ABOUT_A_CALL.isdisjoint(attributes):
            return
        of_server = getattr(span, "kind", None) is trace.SpanKind.SERVER
        if not of_server and attributes.get("gen_ai.operation.name") not in _NO_CALLS:
            span.set_attributes(marks(decision))
    except Exception as error:
        recorder.fault("marking a span", error)


_active: Active | None = None
watchers: list[Callable[[], None]] = []
"""Told when a replay begins; they raise nothing."""
_lock = threading.Lock()


def active() -> Active | None:
    """The replay in progress, None when there is none."""
    return _active


def activate(
    session: Session,
    policy: RedactionPolicy,
    blob: Callable[[Mapping[str, Any]], bytes],
    *,
    guard_process: bool = False,
    allow: Sequence[str] = (),
    applies: Callable[[str, int], bool] | None = None,
) -> Active:
    """Answer every boundary from `session` from now on.

    `blob` reads a body by its reference. `guard_process` stops connections outside the boundaries, but for `allow`
    (`host:port`) and for those to which `applies(host, port)` says no: then the program is to live on after the
    replay, and calls that its end overtakes are made. Raises RuntimeError if a replay is active already.
    """
    global _active
    with _lock:
        if _active is not None:
            raise RuntimeError("a replay is active in this process already; end it first")
        _active = Active(session, policy, blob)
        _active.lets_go = applies is not None
    recorder.restart_lineage()
    if guard_process:
        guard.stop_connections(session, allow, applies)
    for watcher in list(watchers):
        watcher()
    return _active


def deactivate() -> None:
    """End the replay; calls go out again."""
    global _active
    guard.let_connections()
    with _lock:
        _active = None


def read_beyond(name: str) -> ReplayExhaustedError:
    """The error for a program that reads on where the recorded one had left the answer to `name`; latched."""
    error = ReplayExhaustedError(
        f"the answer to {name} was left before its end when it was recorded, and the program reads on; what comes next "
        "was never recorded"
    )
    if _active is not None:
        _active.session.latch(error)
    return error


def marks(decision: Decision) -> dict[str, Any]:
    """Span attributes of a call under replay: a replay never reports an effect as newly executed."""
    if decision is _GONE:
        return {}
    found: dict[str, Any] = {"sftrace.replay.active": True, "sftrace.replay.served": decision.action == "serve"}
    if decision.action != "serve":
        found[f"sftrace.replay.{decision.action}"] = True
    if decision.rung is not None:
        found["sftrace.replay.rung"] = decision.rung
    if decision.call is not None and decision.call.request_id:
        found["sftrace.replay.event.id"] = decision.call.request_id
    return found
