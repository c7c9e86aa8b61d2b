# SPDX-License-Identifier: Apache-2.0
"""`ReplaySpanProcessor`: a replay for as long as a tracer provider lives, and a report from what its spans say.

Decision: the replay begins with the constructor, since the SDK tells a processor nothing when it is added, and a call
made before the first span must not go out. What the constructor cannot know is the resource of the provider: where the
first span says production, the replay ends at once and the program goes on as without it. Nothing is raised from
`on_start` and `on_end`, which the SDK calls unguarded in the program's threads.

The guard stops connections inside runs only: where a span is current, or in a `record()` block. What a server does
beside them (pools, probes, exporters) is its own, and so are connections to sockets that this process listens on.
Rejected: guarding the whole process (a staging server could not start), and waiting for the first span with the replay
(calls before it would be made for real).

Source: `design.md`, "Replay"; `facts/otel.md` §4.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from sftrace_otel.core.match import Normaliser, Rule
from sftrace_otel.core.miss import printable
from sftrace_otel.core.report import ReplayReport, RunOutcome
from sftrace_otel.core.resume import Stub
from sftrace_otel.core.session import Manual
from sftrace_otel.errors import ReplayPolicyError
from sftrace_otel.instrumentation import replaying
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.settings import Settings

if TYPE_CHECKING:
    from sftrace_otel.bundle.trace import Trace

__all__ = ["ReplaySpanProcessor"]

_log = logging.getLogger("sftrace_otel")

_CALLS = frozenset({"chat", "text_completion", "generate_content", "embeddings", "execute_tool"})
"""Operations whose span stands for a call that a replay answers (GenAI conventions)."""
_OPENINFERENCE_CALLS = frozenset({"LLM", "TOOL", "EMBEDDING"})
_ANSWERED = ("sftrace.replay.served", "sftrace.replay.live", "sftrace.replay.derived")


class ReplaySpanProcessor(SpanProcessor):
    """Answers the calls of this process from `bundle` until the provider shuts down.

    `bundle`: a bundle's path, or a loaded Trace. The other arguments are those of `ReplaySession.from_trace`; what is
    not given comes from the `OTEL_SFTRACE_REPLAY_…` settings. `report`: a file for the report, as JSON, at shutdown.
    Every boundary is put on, as `instrument()` does, and nothing is recorded meanwhile.

    Raises:
        TraceStorageError: The bundle is invalid, changed or unreadable.
        ReplayPolicyError: The environment says production and nobody forced it; or functions would run for real.
        SettingsError: A setting, rule or name that cannot be used.
        ReplayError: A replay is active in this process already.
    """

    def __init__(
        self,
        bundle: str | Path | Trace,
        *,
        mode: str | None = None,
        order: str | None = None,
        ignore: Sequence[Rule] | None = None,
        normalize: Sequence[Normaliser] | None = None,
        map_hosts: Mapping[str, str] | None = None,
        live_llms: Iterable[str] | None = None,
        allow_live_tools: Iterable[str] | None = None,
        manual: Manual | None = None,
        policies: Iterable[str] | Mapping[str, str | Stub] | None = None,
        reuse: bool | str | Path | Trace | None = None,
        allow: Sequence[str] | None = None,
        run_untraced_tools: bool = False,
        record: str | Path | None = None,
        force: bool = False,
        report: str | Path | None = None,
    ) -> None:
        settings = Settings.from_environ(
            os.environ,
            replay_mode=mode,
            replay_order=order,
            replay_allow=allow,
            replay_report=report,
            replay_record=record,
        )
        # By name: the replay stands above this room, and only a process that replays needs it.
        self._facade: Any = importlib.import_module("sftrace_otel.replay")
        self.session = self._facade.ReplaySession.from_trace(
            bundle,
            mode=settings.replay_mode,
            order=settings.replay_order,
            ignore=settings.replay_ignore if ignore is None else ignore,
            normalize=settings.replay_normalize if normalize is None else normalize,
            map_hosts=map_hosts,
            live_llms=settings.replay_live_llms if live_llms is None else live_llms,
            allow_live_tools=settings.replay_live_tools if allow_live_tools is None else allow_live_tools,
            manual=manual,
            policies=settings.replay_policies if policies is None else policies,
            reuse=self._facade.reuse_of(settings.replay_reuse) if reuse is None else reuse,
            allow_redacted=settings.replay_allow_redacted,
            allow=settings.replay_allow,
            run_untraced_tools=run_untraced_tools,
            record=settings.replay_record,
            force=force,
        )
        self._settings = settings
        self._lock = threading.Lock()
        self._checked: set[int] = set()
        self._covered: set[int] = set()
        self._spans = 0
        self._outside: Counter[str] = Counter()
        self._outcome = RunOutcome(status="completed")
        self._listening: set[int] = set()
        self._open = True
        self.refused: ReplayPolicyError | None = None
        """Why the replay ended when the first span came; None where it did not."""
        self.session.start(guarded=self._guards)
        where = self.session.target
        told = "nothing is recorded" if where is None else f"recorded into {where}"
        self._say(f"sftrace: replaying {_name_of(bundle)}; {told}")

    # -- spans

    @fails_open("following a replayed span", None, replay_too=True)
    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Mark the span: what is done in it is a replay."""
        if not self._open:
            return
        self._check(span.resource)
        if self._open:
            span.set_attribute("sftrace.replay.active", True)

    @fails_open("following a replayed span", None, replay_too=True)
    def on_end(self, span: ReadableSpan) -> None:
        """Count the span; see whether a call that it stands for was answered, and how the run ended."""
        if not self._open:
            return
        attributes = span.attributes or {}
        own, parent = span.get_span_context(), span.parent
        with self._lock:
            self._spans += 1
            number = 0 if own is None else own.span_id
            answered = number in self._covered or any(attributes.get(name) for name in _ANSWERED)
            self._covered.discard(number)
            if answered and parent is not None:
                self._covered.add(parent.span_id)
            if not answered and _is_call(span, attributes):
                scope = span.instrumentation_scope
                self._outside[scope.name if scope is not None else "?"] += 1
            if parent is None or parent.is_remote:
                self._outcome = _outcome_of(span, attributes)

    def _check(self, resource: Any) -> None:
        """End the replay where the provider is one of production."""
        if id(resource) in self._checked:
            return
        self._checked.add(id(resource))
        try:
            self.session.refuse_production({}, resource.attributes)
        except ReplayPolicyError as error:
            self.refused = error
            self._end(RunOutcome(status="partial"))
            _log.error("sftrace: the replay ended: %s", error)

    # -- guard

    def _guards(self, host: str, port: int) -> bool:
        """Whether a connection that is made here and now is one of a run, to somewhere else."""
        if not (trace.get_current_span().get_span_context().is_valid or replaying.in_block.get()):
            return False
        return not self._listens(port)

    def _listens(self, port: int) -> bool:
        """Whether this process listens on `port`; looked up where a connection would be refused, which is rare."""
        if port not in self._listening:
            self._listening = set(_listening_ports())
        return port in self._listening

    # -- end

    def report(self) -> ReplayReport:
        """What happened so far: how calls matched, what went out, where it diverged, what was never reached."""
        with self._lock:
            spans, outside, outcome = self._spans, dict(self._outside), self._outcome
        if self._open:
            self.session.ended_with(outcome)
        found: ReplayReport = self.session.report()
        return replace(found, spans=spans, outside=outside)

    @fails_open("ending the replay", None, replay_too=True)
    def shutdown(self) -> None:
        """End the replay and give its report; the program goes on, and its calls go out. Twice is once."""
        if not self._open:
            return
        with self._lock:
            outcome = self._outcome
        self._end(outcome)
        report = self.report()
        if self._settings.replay_report is not None:
            self._facade.write_report(self._settings, {**report.to_dict(), "text": report.text()})
        self._say(report.text())

    def _end(self, outcome: RunOutcome) -> None:
        self._open = False
        self.session.stop(outcome)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """True: nothing is queued."""
        return True

    def _say(self, text: str) -> None:
        if not self._settings.quiet:
            sys.stderr.write("".join(f"{printable(line)}\n" for line in text.split("\n")))
            sys.stderr.flush()


def _name_of(bundle: object) -> str:
    """How a bundle is called in a notice."""
    return str(bundle) if isinstance(bundle, (str, Path)) else "a trace"


def _is_call(span: ReadableSpan, attributes: Mapping[str, Any]) -> bool:
    """Whether a span stands for a call that a replay answers."""
    if attributes.get("gen_ai.operation.name") in _CALLS:
        return True
    if attributes.get("openinference.span.kind") in _OPENINFERENCE_CALLS:
        return True
    is_http = "http.request.method" in attributes or "http.method" in attributes
    return is_http and span.kind is SpanKind.CLIENT


def _outcome_of(span: ReadableSpan, attributes: Mapping[str, Any]) -> RunOutcome:
    """How a run ended, by its local root."""
    if span.status.status_code is not StatusCode.ERROR:
        return RunOutcome(status="completed")
    kind = attributes.get("error.type")
    for event in span.events:
        if event.name == "exception" and event.attributes:
            kind = event.attributes.get("exception.type", kind)
    return RunOutcome(status="failed", error_type=None if kind is None else str(kind))


def _listening_ports() -> Iterable[int]:
    """Ports of the sockets in this process that accept connections."""
    option = getattr(socket, "SO_ACCEPTCONN", None)
    for found in gc.get_objects():
        if option is None or not isinstance(found, socket.socket):
            continue
        try:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockopt(socket.SOL_SOCKET, option):
                yield int(found.getsockname()[1])
        except OSError:
            continue
