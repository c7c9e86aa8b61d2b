# SPDX-License-Identifier: Apache-2.0
"""Replay: run the program again with every answer from a bundle, and say whether it did the same.

Three ways in, one session: `with ReplaySession.from_trace(…)` in a program or test; `activate_from_settings`, which the
distro calls in a process started with `OTEL_SFTRACE_REPLAY`; `replay_entrypoint` and `replay_command` for the command
line. Everything that can be refused is refused before the program runs: a bundle whose checksums do not match, and a
frozen replay in which functions would have to run for real because nothing recorded their results.

Decision: a command runs as a child that activates its own session and hands its report back through a folder, one file
per process, so that a helper process never overwrites the agent's. Rejected: exec (nobody is left to compare and to set
the exit code), runpy in this process (not the program as it was recorded: other argv, other main module, our imports
loaded already), one report file (the helper that exits last would win).
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, cast
from urllib.parse import unquote

from sftrace_otel import recorder
from sftrace_otel.bundle.read import Bundle, gc_paused, list_bundles, open_bundle, read_verified
from sftrace_otel.core.draws import Draws
from sftrace_otel.core.mapping import dialects
from sftrace_otel.core.match import Normaliser, Rule
from sftrace_otel.core.miss import printable
from sftrace_otel.core.plan import RecordedCall, extract_calls
from sftrace_otel.core.prepare import Prepared, prepare
from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.core.report import ReplayReport, RunOutcome
from sftrace_otel.core.resume import Policies, Stub, placeholders
from sftrace_otel.core.session import LiveCall, Manual, Session
from sftrace_otel.core.trajectory import Step, Trajectory
from sftrace_otel.errors import (
    RecordedDependencyError,
    ReplayError,
    ReplayExhaustedError,
    ReplayMismatchError,
    ReplayPolicyError,
    SettingsError,
    SftraceError,
    TraceStorageError,
)
from sftrace_otel.formats import Json, canonical
from sftrace_otel.formats.sftrace import EVENTS_FILE, EventBase, Manifest, RunEnd, RunStart, dump_event
from sftrace_otel.formats.sidecars import NONDETERMINISM_FILE, CallRow, begun
from sftrace_otel.instrumentation import asgi_client as asgi
from sftrace_otel.instrumentation import asking, install, replaying, tracing
from sftrace_otel.instrumentation.rerecording import Rerecording
from sftrace_otel.settings import PREFIX, Settings
from sftrace_otel.trace import Trace

__all__ = [
    "RecordedDependencyError",
    "ReplayError",
    "ReplayExhaustedError",
    "ReplayMismatchError",
    "ReplayPolicyError",
    "ReplayReport",
    "ReplaySession",
    "Result",
    "Step",
    "Stub",
    "Trajectory",
    "activate_from_settings",
    "refuse_production_of",
    "replay_asgi",
    "replay_command",
    "replay_entrypoint",
    "reuse_of",
    "trajectory_of",
    "untraced_tools",
    "write_report",
]

CHILD = "SFTRACE_REPLAY_CHILD"
"""Variable that hands a child what has no setting or no room in one: JSON with `map_hosts`, `ignore` and `policies`
(pointers and answers may hold commas) and `run_untraced_tools`."""

DIVERGED = 1
REFUSED = 2


# --- what was recorded ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recording:
    """What a replay needs of a bundle or of a trace in memory."""

    source: str
    calls: tuple[RecordedCall, ...]
    expected: RunOutcome
    run_input: Json
    read_blob: Callable[[Mapping[str, Any]], bytes]
    agent: str = "agent"
    tools: tuple[str, ...] = ()
    is_block: bool = True
    has_content: bool = True
    notes: tuple[str, ...] = ()
    path: Path | None = None
    run_id: str = ""
    events: Sequence[EventBase] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    draws: Draws | None = None


def _recording_of(source: str | Path | Trace) -> _Recording:
    """Read `source`. Raises TraceStorageError for a bundle that is invalid, changed or unreadable."""
    if isinstance(source, Trace):
        made = _recording("the trace", source.manifest, source.events, source.source, stale=source.stale)
        return replace(made, provenance=source.provenance)
    path = Path(source).expanduser()
    with gc_paused():
        bundle, notes = _checked(path)
        made = _recording(str(path), bundle.manifest, bundle.events, bundle, notes=notes)
    return replace(made, path=bundle.path, provenance=bundle.provenance)


def _recording(
    name: str,
    manifest: Manifest,
    events: Sequence[EventBase],
    bundle: Bundle | None,
    *,
    stale: frozenset[str] = frozenset(),
    notes: tuple[str, ...] = (),
) -> _Recording:
    """The recording of these events; `bundle` has their sidecars, whose rows about `stale` events do not hold."""

    def read_blob(reference: Mapping[str, Any]) -> bytes:
        if bundle is None:
            raise TraceStorageError(f"{reference.get('$blob')} is not in the trace", code="missing_file")
        return bundle.blob(str(reference.get("$blob")))

    rows = [] if bundle is None else list(_rows(bundle, stale, stale.difference(event.id for event in events)))
    wire_rows = [row for row in bundle.wire() if row.get("event_id") not in stale] if bundle is not None else []
    return _Recording(
        source=name,
        calls=tuple(extract_calls(events, rows, wire_rows, read_blob)),
        expected=_expected(manifest, events),
        run_input=next((event.input for event in events if isinstance(event, RunStart)), None),
        read_blob=read_blob,
        agent=manifest.agent_name,
        tools=_tools(bundle) if bundle is not None else (),
        is_block=bundle is None or (bundle.run or {}).get("kind", "record") == "record",
        has_content=bundle is None or not _without_content(bundle),
        notes=notes,
        run_id=manifest.run_id,
        events=events,
        draws=_draws(bundle) if bundle is not None and bundle.has(NONDETERMINISM_FILE) else None,
    )


def _rows(bundle: Bundle, stale: frozenset[str], cut: frozenset[str]) -> Iterator[CallRow]:
    """The rows of `calls.jsonl` as a fork in memory would have them when it is saved."""
    for row in bundle.calls:
        if not stale & {*_event_ids(row)}:
            yield row
        elif row.get("request") not in cut:
            yield cast(CallRow, begun(row, cut))


def _draws(bundle: Bundle) -> Draws:
    return Draws(bundle.draws(), of_block=(bundle.run or {}).get("kind") == "record")


def _without_content(bundle: Bundle) -> bool:
    settings = (bundle.run or {}).get("settings")
    return isinstance(settings, Mapping) and settings.get("capture") == "metadata"


def _event_ids(row: CallRow) -> Iterator[str | None]:
    yield row.get("request")
    yield row.get("response")
    yield row.get("error")


def _checked(path: Path) -> tuple[Bundle, tuple[str, ...]]:
    """Integrity first: refuse what is invalid or changed; say what could not be verified."""
    result, bundle = read_verified(path)
    if bundle is None:
        first = next(issue for issue in result.issues if issue.code != "integrity_unverified")
        place = f"{path}: {first.location}" if first.location else str(path)
        raise TraceStorageError(f"{first.message}; it cannot be replayed", where=place, code=first.code)
    if result.integrity == "unverified_legacy":
        return bundle, ("nothing vouches that this bundle was not changed (unverified_legacy)",)
    return bundle, ()


def _expected(manifest: Manifest, events: Sequence[EventBase]) -> RunOutcome:
    """How the recording ended; "partial" where its end is not in it (a fork, a killed process)."""
    end = next((event for event in reversed(events) if isinstance(event, RunEnd)), None)
    if end is None:
        return RunOutcome(status="partial")
    if end.run_status == "failed":
        failure = manifest.failure
        return RunOutcome(
            status="failed",
            error_type=failure.type if failure else None,
            message=failure.message if failure else None,
        )
    return RunOutcome(status="completed", output=end.output)


def _tools(bundle: Bundle) -> tuple[str, ...]:
    """The `tools` setting of the recording: patterns for modules that the program imports itself, never an import."""
    tools = bundle.run.get("settings", {}).get("tools")
    return tuple(one for one in tools if isinstance(one, str)) if isinstance(tools, list) else ()


def trajectory_of(source: str | Path | Trace) -> Trajectory:
    """The steps of a recording: its calls but those inside another one. Raises TraceStorageError for a bundle that is
    invalid, changed or unreadable."""
    return Trajectory(_step(call) for call in _recording_of(source).calls if call.parent is None)


def _step(call: RecordedCall | LiveCall) -> Step:
    payload = call.payload if isinstance(call, LiveCall) else call.input
    return Step(call.kind, call.name, call.provider, payload)


def untraced_tools(calls: Sequence[RecordedCall]) -> list[str]:
    """Functions whose results went back to the model although no tool event holds them (`design.md`, "Frozen")."""
    answered = recorder.Answered()
    for call in calls:
        if call.kind == "llm":
            request = call.input.get("request") if isinstance(call.input, dict) else None
            for call_id, name, content in dialects.tool_answers(call.method, request):
                answered.answer(call_id, name, map(canonical.digest, dialects.results_of(content)))
            for call_id, name in dialects.tool_calls(call.method, call.outcome.output):
                answered.called(call_id, name)
    if not answered.any:  # nothing went back to the model: no need to read what the tools gave
        return []
    for call in calls:
        if call.kind == "tool":
            results = map(canonical.digest, dialects.results_of(call.outcome.output))
            answered.tool(call.name, results, call.tool_call_ids)
    return answered.untraced()


# --- the session ------------------------------------------------------------------------------------------------------


class ReplaySession:
    """A replay of one recording; active inside its `with` or `async with` block, in every thread and task.

    A divergence that the program caught is raised again at the end of the block. Recorded calls that were never made
    are left to `verify_complete`. Use `from_trace` to make one.
    """

    def __init__(
        self,
        recording: _Recording,
        session: Session,
        *,
        policy: RedactionPolicy,
        settings: Settings,
        allow: Sequence[str],
        record: Path | None = None,
        force: bool = False,
        policies: Policies | None = None,
        reused: _Recording | None = None,
    ) -> None:
        self._policies = policies
        self._reused = reused
        self._recording = recording
        self._session = session
        self._policy = policy
        self._allow = tuple(allow)
        self._active: replaying.Active | None = None
        self._entered = False
        self._outcome: RunOutcome | None = None
        self._made: Sequence[RecordedCall | LiveCall] = ()
        self._is_child = False
        self.recorded: Path | None = None
        """The bundle that the replay was recorded into, once it has ended."""
        self._output: Prepared | None = None
        self.settings = settings
        self._record = record
        self._force = force
        self._rerecording: Rerecording | None = None

    @classmethod
    def from_trace(
        cls,
        source: str | Path | Trace,
        *,
        mode: str = "frozen",
        order: str = "causal",
        ignore: Sequence[Rule] = (),
        normalize: Sequence[Normaliser] = (),
        map_hosts: Mapping[str, str] | None = None,
        live_llms: Iterable[str] | None = None,
        allow_live_tools: Iterable[str] | None = None,
        manual: Manual | None = None,
        allow: Sequence[str] = (),
        run_untraced_tools: bool = False,
        record: str | Path | None = None,
        force: bool = False,
        policies: Iterable[str] | Mapping[str, str | Stub] = (),
        ask: Callable[[LiveCall], bool] | None = None,
        reuse: bool | str | Path | Trace = False,
        allow_redacted: bool = False,
    ) -> Self:
        """Prepare the replay of a bundle (by its path) or of a loaded trace.

        Args:
            source: A bundle, checked first: structure, payload hashes, file checksums. Or a Trace, taken as it is.
            mode: "frozen": everything recorded is served, everything else stops the replay. "hybrid": `live_llms` are
                asked again and their answers go on, the rest is served or stops. "live": LLMs are asked again and
                `allow_live_tools` run, nothing is served. "resume": what is recorded is served, and after its end the
                program goes on under `policies`; it is recorded, beside `source` where `record` names no path.
            order: "causal", "strict" or "any".
            ignore: JSON Pointers, or functions of (kind, name, view): what to leave out when calls are compared.
            normalize: "iso_time", "uuid", "path", compiled patterns, or functions from text to text: what is changed in
                every text on both sides before they are compared.
            map_hosts: Recorded host or host:port → the one that stands for it now.
            live_llms: `provider/model` as recorded, for hybrid mode; `*` stands for anything. In resume mode a policy
                `live` of each, and the same for
            allow_live_tools: Names of tools, and of HTTP exchanges as their events have them, for live mode; likewise.
            manual: Called with (recorded call, live call) where the recorded policy is `manual`: "frozen" or True
                serves it, "live" lets it out (not in frozen mode), "derived" runs and compares it, "forbidden", False
                or None stops.
            allow: `host:port` pairs that may be connected to outside the boundaries.
            run_untraced_tools: Go on although results of some tools are missing; their functions run for real.
            record: A bundle to record the replay into; without it nothing is written.
            force: Also where `deployment.environment.name` is `production`.
            policies: For resume mode: `"KIND:NAME=POLICY"`, or a dict `{"KIND:NAME": POLICY}`; KIND is `tool`, `llm` or
                `http`, POLICY `live`, `block`, `ask`, `stub`, `stub:JSON` or, in a dict, a `Stub`. The last that fits
                counts; else LLM calls go out, and tools and exchanges are blocked.
            ask: Decides on calls whose policy is `ask`; left out, the terminal is asked, and without one they are
                blocked.
            reuse: For resume mode: True, or the parent of the fork: its calls answer those with the same input.
            allow_redacted: For resume mode: tools and exchanges go out although a placeholder of a redacted value is in
                their input.

        Raises:
            TraceStorageError: The bundle is invalid, changed or unreadable, or it is the parent that is.
            ReplayPolicyError: Functions would have to run for real (see `run_untraced_tools`).
            SettingsError: An unknown mode or order; a rule, normaliser or name that cannot be used.
        """
        recording = _recording_of(source)
        if not recording.has_content and mode != "live":
            raise ReplayPolicyError(
                f"{recording.source}: it was recorded without payloads, so there is nothing to answer with; record "
                "again with OTEL_SFTRACE_CAPTURE=full",
                code="no_content",
            )
        missing = [] if run_untraced_tools else untraced_tools(recording.calls)
        if missing:
            names = ", ".join(missing)
            raise ReplayPolicyError(
                f"{recording.source}: the results of {names} went back to the model and no tool event holds them, so "
                "frozen replay would run these functions for real; record again with @trace_tool on them or with "
                "OTEL_SFTRACE_TOOLS naming them, or replay with --run-untraced-tools (run_untraced_tools=True)",
                code="untraced_tools",
            )
        settings = Settings.from_environ(os.environ)
        policy = recorder.load_policy(settings)
        resumes = mode == "resume"
        if not resumes and (policies or reuse or ask is not None or allow_redacted):
            raise SettingsError(f"policies, ask, reuse and allow_redacted are for resume mode, not for {mode} mode")
        parent = _parent_recording(recording, reuse) if resumes and reuse is not False else None
        rules = Policies(policies, allow_live_tools or (), live_llms or ()) if resumes else None
        session = Session(
            recording.calls,
            mode=mode,
            order=order,
            ignore=ignore,
            normalize=normalize,
            map_hosts=map_hosts or {},
            live_llms=live_llms or (),
            live_tools=allow_live_tools or (),
            manual=manual,
            redact=lambda value: policy.redact(value)[0],
            policies=rules,
            ask=(ask or asking.on_terminal()) if resumes else None,
            reuse=() if parent is None else _unanswered(parent, recording),
            allow_redacted=allow_redacted,
        )
        if record is None and resumes:
            record = _beside(recording)
        session.draws = recording.draws
        target = None if record is None else _free(Path(record).expanduser().absolute())
        return cls(
            recording, session, policy=policy, settings=settings, allow=allow, record=target, force=force,
            policies=rules, reused=parent,
        )  # fmt: skip

    @property
    def run_input(self) -> Json:
        """The recorded run input, None where there is none."""
        return self._recording.run_input

    @property
    def expected(self) -> RunOutcome:
        """How the recording ended."""
        return self._recording.expected

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader of a result should know, for instance that the bundle could not be verified."""
        return self._recording.notes

    @property
    def tools(self) -> tuple[str, ...]:
        """Patterns of functions to trace: those of the environment, else those of the recording."""
        return Settings.from_environ(os.environ).tools or self._recording.tools

    @property
    def target(self) -> Path | None:
        """The bundle that the replay will be recorded into, None where it is not."""
        return self._record

    @functools.cached_property
    def redacted(self) -> int:
        """Placeholders of redacted values in what a resumed run is served; live calls would carry them."""
        if self._policies is None:
            return 0
        served = (call.outcome.output for call in self._recording.calls if call.parent is None)
        return sum(map(placeholders, served)) + placeholders(self.run_input)

    def announcement(self) -> list[str]:
        """What is to be said before a resumed run begins; nothing in other modes."""
        if self._policies is None:
            return []
        count, told = self.redacted, ", ".join(self._policies.described())
        lines = [
            f"sftrace: {len(self._recording.calls)} recorded calls are served, then calls are made: LLM calls go out, "
            f"tools and HTTP exchanges are blocked{f', but for {told}' if told else ''}; recorded into {self._record}"
        ]
        if self._reused is not None:
            lines.append(f"sftrace: calls that {self._reused.source} holds with the same input are answered from it")
        if count:
            values = "1 value is" if count == 1 else f"{count} values are"
            lines.append(
                f"sftrace: {values} [REDACTED] in what is served, and the program has the placeholder: an LLM call "
                "goes out with it and is counted, a tool or exchange with it stops unless --allow-redacted"
            )
        return lines

    @property
    def latched(self) -> ReplayError | None:
        """The error that stopped this replay, None while it goes on."""
        return self._session.latched

    @property
    def trajectory(self) -> Trajectory:
        """What the program did so far: its calls in order, with assertions about them."""
        return Trajectory(map(_step, self._made))

    def start(self, *, guarded: Callable[[str, int], bool] | None = None) -> None:
        """Serve every boundary of this process from now on.

        `guarded(host, port)`: whether a connection outside the boundaries, made here and now, is stopped; by default
        each is.

        Raises:
            ReplayPolicyError: This is production, and nobody forced it.
            ReplayError: A replay is active already, or this session was used before.
            TraceStorageError: The bundle to record into cannot be opened.
        """
        if self._entered:
            raise ReplayError("this session was used before; make another one with from_trace")
        self.refuse_production(os.environ, _resource_of(tracing.provider()))
        if CHILD not in os.environ and not self.settings.quiet:
            _say(self.announcement())
        install(self.tools)
        try:
            self._active = replaying.activate(
                self._session,
                self._policy,
                self._recording.read_blob,
                guard_process=True,
                allow=self._allow,
                applies=guarded,
            )
        except RuntimeError as fault:
            raise ReplayError(str(fault), code="active") from None
        self._made = self._active.made
        self._entered = True
        if self._record is not None:
            self._rerecord(self._active, self._record)

    def _rerecord(self, active: replaying.Active, path: Path) -> None:
        settings = replace(self.settings, dir=path.parent, keep="all", capture="full", formats=("sftrace",))
        try:
            rerecording = Rerecording(
                path,
                settings,
                self._policy,
                agent=self._recording.agent,
                run_input=self._recording.run_input,
                lazy=self._is_child,
                origin={} if self._policies is None else {"resumes": self._recording.run_id},
            )
        except OSError:
            replaying.deactivate()
            self._active = None
            raise TraceStorageError(f"{path}: the replay cannot be recorded there", code="unwritable") from None
        self._rerecording = rerecording
        if self._policies is not None:
            rerecording.went_live = lambda: self._session.went_live
        active.keep = lambda prepared, live, decision: rerecording.served(
            prepared, live, decision, self._recording.read_blob
        )

    def refuse_production(self, environ: Mapping[str, str], resource: Mapping[str, object]) -> None:
        """Raise ReplayPolicyError where the environment or a provider's resource says that this is production."""
        where = _production(environ, resource)
        if where is not None and not (self._force or self.settings.replay_force):
            raise ReplayPolicyError(
                f"{where} says production: replay would answer real requests from a recording; if that is what you "
                "want, force it (force=True, --force or OTEL_SFTRACE_REPLAY_FORCE=true)",
                code="production",
            )

    def stop(self, outcome: RunOutcome) -> None:
        """End the replay; `outcome` is how the program ended. Boundaries let calls out again."""
        if self._active is not None:
            self._outcome = self._with_output(outcome)
            replaying.deactivate()
            self._active = None
            self._close_record(self._outcome)

    def ended_with(self, outcome: RunOutcome) -> None:
        """How the program would end now, for a report before `stop`."""
        self._outcome = self._with_output(outcome)

    def _close_record(self, outcome: RunOutcome) -> None:
        rerecording, self._rerecording = self._rerecording, None
        if rerecording is not None:
            failed = outcome.status == "failed"
            error = self.latched if self.latched is not None else None
            failure = (outcome.error_type or "Exception", outcome.message or "") if failed else None
            if error is not None and failure is None:
                failure = (type(error).__name__, self._policy.redact_text(str(error))[0])
            self.recorded = rerecording.close(
                output=self._output, failure=failure, provenance=None if self._policies is None else self._provenance()
            )

    def _provenance(self) -> dict[str, Any]:
        """How a resumed run came to be; what only its recording knows is put in there."""
        assert self._policies is not None
        recording = self._recording
        last = recording.events[-1] if recording.events else None
        parents = [_as_parent(one) for one in (recording, self._reused) if one is not None]
        return {
            "origin": "resumed",
            "created_at": datetime.now(UTC).isoformat(),
            "parents": parents,
            **({} if last is None else {"fork_point": {"step": last.step, "event_id": last.id}}),
            "resumed": {"policies": self._policies.described()},
        }

    def uncompared(self) -> bool:
        """Whether an output was recorded and the program gave none that could be compared with it."""
        return self._recording.expected.output is not None and self._output is None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(self.failed(error) if error is not None else RunOutcome(status="completed"))
        latched = self.latched
        if latched is not None and not isinstance(error, ReplayError):
            raise latched

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def verify_complete(self) -> None:
        """Raise what stopped the replay, or a ReplayMismatchError when recorded calls were never made."""
        self._session.verify_complete()

    def report(self) -> ReplayReport:
        """What happened so far; after the block also whether the program ended as it did.

        The recorded output is compared where the program gave one (`set_output`, an entrypoint's result).
        """
        outcome = self._outcome or self._with_output(RunOutcome(status="completed"))
        expected = self._recording.expected
        found = self._session.report(
            outcome=outcome, expected=replace(expected, output=None) if self.uncompared() else expected
        )
        return replace(found, redacted=self.redacted)

    def completed(self, output: object) -> RunOutcome:
        """The outcome of a program whose result is `output`, prepared as a recorded output is."""
        self._output = prepare(output, self._policy)
        return RunOutcome(status="completed", output=self._output.value)

    def failed(self, error: BaseException) -> RunOutcome:
        """The outcome of a program that ended with `error`.

        `SystemExit` is a failure only where the recording has it as one: what records a whole process cannot see it.
        """
        if isinstance(error, SystemExit) and self._recording.expected.error_type != "SystemExit":
            return RunOutcome(status="completed")
        message = self._policy.redact_text(str(error))[0]
        return RunOutcome(status="failed", error_type=type(error).__name__, message=message)

    def exited(self) -> RunOutcome:
        """The outcome of this process, asked at its exit: the interpreter keeps the exception that nobody caught."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            return self.failed(error)
        if self._recording.expected.error_type == "SystemExit":
            return self.failed(SystemExit())
        return RunOutcome(status="completed")

    def _with_output(self, outcome: RunOutcome) -> RunOutcome:
        """`outcome` as a recording would hold it: with what `set_output` was given, and failed where a recorded
        `record()` block was left by an error that the program caught outside."""
        active = self._active
        if outcome.status != "completed" or active is None:
            return outcome
        if active.failure is not None and self._recording.is_block:
            return self.failed(active.failure)
        given = active.output
        if given is None:
            return outcome
        self._output = given
        return RunOutcome(status="completed", output=given.value)


def _say(lines: Iterable[str]) -> None:
    sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))
    sys.stderr.flush()


# --- resuming ---------------------------------------------------------------------------------------------------------


def _beside(recording: _Recording) -> Path:
    """Where a resumed run is recorded that names no path: beside its fork. Raises SettingsError where that has none."""
    if recording.path is None:
        raise SettingsError("a resumed run is recorded, and a trace in memory has no place to do it: give record=PATH")
    path = recording.path.absolute()
    stem = path.name.removesuffix(".zip").removesuffix(".sftrace")
    names = (f"{stem}-resumed{'' if number == 1 else f'-{number}'}.sftrace" for number in itertools.count(1))
    return next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))


def _as_parent(recording: _Recording) -> dict[str, Any]:
    name = None if recording.path is None else recording.path.name
    return {"run_id": recording.run_id, "name": name, "events_sha256": _digest(recording)}


def _digest(recording: _Recording) -> str:
    """SHA-256 of the bundle's `events.jsonl`, or of what that would be of a trace in memory."""
    digest = hashlib.sha256()
    if recording.path is None:
        lines: Iterable[bytes] = (dump_event(event) + b"\n" for event in recording.events)
    else:
        lines = open_bundle(recording.path).lines(EVENTS_FILE, ends=True)
    for line in lines:
        digest.update(line)
    return digest.hexdigest()


def _parent_recording(recording: _Recording, given: bool | str | Path | Trace) -> _Recording:
    """The recording that a fork was made of. Raises ReplayError where it is not known or not there."""
    told = recording.provenance.get("parents", [])
    parents = {str(one.get("run_id")): one for one in told if isinstance(one, dict)}
    if not parents:
        raise ReplayError(f"{recording.source}: it names no parent whose calls could be reused", code="no_parent")
    parent = _recording_of(_near(recording, parents) if isinstance(given, bool) else given)
    known = parents.get(parent.run_id)
    if known is None:
        raise ReplayError(f"{parent.source}: {recording.source} was not made of it (another run)", code="not_parent")
    if known.get("events_sha256") != _digest(parent):
        raise ReplayError(f"{parent.source}: it is not as it was when {recording.source} was made", code="not_parent")
    return parent


def _near(recording: _Recording, parents: Mapping[str, Mapping[str, Any]]) -> Path:
    """The bundle of one of `parents` in the folder of a fork, by its run id; of several the one with its name."""
    near = [] if recording.path is None else list_bundles(recording.path.absolute().parent)
    found = [one.path for one in near if one.run_id in parents]
    names = [str(one.get("name") or run) for run, one in parents.items()]
    if not found:
        raise ReplayError(
            f"{recording.source}: its parent ({', '.join(names)}) is not beside it; name it: --reuse PARENT",
            code="no_parent",
        )
    return next((path for path in found if path.name in names), found[0])


def _unanswered(parent: _Recording, fork: _Recording) -> Iterator[RecordedCall]:
    """The parent's calls that the fork has no answer of its own for; event ids are kept in forks."""
    answered = {call.request_id for call in fork.calls if call.outcome.status != "missing"}
    return (call for call in parent.calls if call.request_id not in answered)


def _free(path: Path) -> Path:
    """`path` as one to record into. Raises TraceStorageError for one that exists or is no bundle's."""
    if path.suffix != ".sftrace":
        raise TraceStorageError(f"{path}: the path of a bundle ends in .sftrace", code="invalid_path")
    if os.path.lexists(path):
        raise TraceStorageError(f"{path} exists; record the replay to another path", code="exists")
    return path


# --- production -------------------------------------------------------------------------------------------------------

_ENVIRONMENT = ("deployment.environment.name", "deployment.environment")
"""The resource attribute of the deployment, and its name before semantic conventions 1.27."""


def _production(environ: Mapping[str, str], resource: Mapping[str, object]) -> str | None:
    """What says that this is production, None if nothing does."""
    named = {}
    for pair in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        name, _, value = pair.partition("=")
        named[name.strip()] = unquote(value.strip())
    for where, attributes in (("OTEL_RESOURCE_ATTRIBUTES", named), ("the resource of the tracer provider", resource)):
        for name in _ENVIRONMENT:
            if str(attributes.get(name, "")).lower() == "production":
                return f"{name} in {where}"
    return None


def _resource_of(provider: object) -> Mapping[str, object]:
    """The attributes of a provider's resource; none where it has no resource."""
    attributes = getattr(getattr(provider, "resource", None), "attributes", None)
    return attributes if isinstance(attributes, Mapping) else {}


# --- in a process started with OTEL_SFTRACE_REPLAY --------------------------------------------------------------------


def activate_from_settings(settings: Settings) -> ReplaySession:
    """Start the replay that `settings.replay` asks for, for the rest of this process; the report is written at exit.

    The report goes to `settings.replay_report` (a file, or a folder in which each process writes `<pid>.json`), else to
    standard error. Where the replay cannot start the process ends here with exit code 2: an agent that runs without its
    recording would make real calls, and what calls us swallows exceptions.
    """
    global _of_process
    target = _report_file(settings)
    try:
        session = _of_process = _session_of(settings)
        session.start()
    except Exception as fault:
        _refuse(fault, target)
    _write(target, {"exit_code": DIVERGED, "unfinished": True})
    owner = os.getpid()

    def finish() -> None:
        if os.getpid() == owner:
            _finish(session, target)

    atexit.register(finish)
    return session


_of_process: ReplaySession | None = None
"""The replay that `activate_from_settings` began."""


def refuse_production_of(provider: object) -> None:
    """End this process with exit code 2 where it replays, unforced, with a tracer provider of production."""
    if _of_process is not None:
        try:
            _of_process.refuse_production({}, _resource_of(provider))
        except ReplayPolicyError as fault:
            _refuse(fault, _report_file(_of_process.settings))


def _refuse(fault: Exception, target: Path | None) -> NoReturn:
    expected = isinstance(fault, SftraceError)
    reason = str(fault) if expected else f"unexpected {type(fault).__name__}: {fault}"
    _write(target, {"exit_code": REFUSED, "refused": reason, "reason": getattr(fault, "code", "error")})
    if target is None:
        sys.stderr.write(f"sftrace: replay refused: {printable(reason)}\n")
        sys.stderr.flush()
    os._exit(REFUSED)


def _session_of(settings: Settings) -> ReplaySession:
    options = json.loads(os.environ.get(CHILD, "{}"))
    record = settings.replay_record
    if record is not None and os.path.lexists(record):  # another process of this command was first
        record = record.with_name(f"{record.stem}-{os.getpid()}{record.suffix}")
    session = ReplaySession.from_trace(
        settings.replay or "",
        mode=settings.replay_mode,
        order=settings.replay_order,
        allow=settings.replay_allow,
        map_hosts=options.get("map_hosts"),
        ignore=options.get("ignore") or settings.replay_ignore,
        normalize=settings.replay_normalize,
        live_llms=settings.replay_live_llms,
        allow_live_tools=settings.replay_live_tools,
        policies=options.get("policies") or settings.replay_policies,
        reuse=reuse_of(settings.replay_reuse),
        allow_redacted=settings.replay_allow_redacted,
        run_untraced_tools=bool(options.get("run_untraced_tools")),
        record=record,
        force=settings.replay_force,
    )
    session._is_child = True
    return session


def reuse_of(text: str | None) -> bool | str:
    """The setting: true, false, or the path of the parent."""
    if text is None or text.lower() in ("true", "false"):
        return text is not None and text.lower() == "true"
    return text


def write_report(settings: Settings, document: Mapping[str, object]) -> None:
    """Write a report where the settings want it."""
    _write(_report_file(settings), document)


def _report_file(settings: Settings) -> Path | None:
    where = settings.replay_report
    if where is None:
        return None
    where = where.absolute()
    return where / f"{os.getpid()}.json" if where.is_dir() else where


def _finish(session: ReplaySession, target: Path | None) -> None:
    session.stop(session.exited())
    if target is None:
        sys.stderr.write("".join(f"{printable(line)}\n" for line in Result.of(session).lines()))
    else:
        _write(target, Result.of(session).document)


def _write(target: Path | None, document: Mapping[str, object]) -> None:
    if target is None:
        return
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document), encoding="utf-8")
    unfinished.replace(target)


# --- for the command line ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a replay came to.

    Attributes:
        document: JSON: the report (`ReplayReport.to_dict`) with `text` and `notes`, or why there is none.
    """

    document: dict[str, Any]

    @classmethod
    def of(cls, session: ReplaySession, *notes: str) -> Self:
        """The result of a session that has ended."""
        report = session.report()
        uncompared = "the recorded output was not compared: the program gave none (set_output)"
        said = [*session.notes, *notes, *([uncompared] if session.uncompared() else [])]
        recorded = None if session.recorded is None else str(session.recorded)
        if recorded is not None:
            said.append(f"the {'resumed run' if report.mode == 'resume' else 'replay'} was recorded to {recorded}")
        return cls(document={**report.to_dict(), "text": report.text(), "notes": said, "recorded_to": recorded})

    @property
    def exit_code(self) -> int:
        """0 the same, 1 diverged, 2 refused, 4 the recording ended."""
        code = self.document.get("exit_code")
        return code if isinstance(code, int) else DIVERGED

    def lines(self) -> list[str]:
        """For people; not yet escaped for a terminal."""
        if "refused" in self.document:
            return [f"sftrace: replay refused: {self.document['refused']}"]
        notes = [f"  note: {note}" for note in self.document.get("notes", ())]
        return [*str(self.document.get("text", "replay: no report")).split("\n"), *notes]


def replay_entrypoint(
    path: Path,
    spec: str,
    **options: Any,
) -> Result:
    """Call `spec` ("module:function", imported from the current folder) in this process under the replay of `path`.

    The recorded run input is passed where the function takes an argument; what it returns is awaited where it is
    awaitable, and compared with the recorded output. `options`: as of `ReplaySession.from_trace`.

    Raises:
        TraceStorageError, ReplayPolicyError, SettingsError: As `ReplaySession.from_trace`.
        ReplayError: The entrypoint cannot be imported or called.
    """
    return _replay_here(
        path,
        "--entrypoint",
        spec,
        options,
        lambda session, function: session.completed(_call(function, session.run_input)),
    )


def replay_asgi(path: Path, spec: str, **options: Any) -> Result:
    """Send the recorded inbound request to the ASGI application `spec` in this process, under the replay of `path`.

    Its lifespan is begun and ended around. An answer of 500 and above is a failure, as it is of a recorded request.
    Another one is compared with the recorded output, where that is one, in status and body. `options`: as of
    `ReplaySession.from_trace`.

    Raises:
        TraceStorageError, ReplayPolicyError, SettingsError: As `ReplaySession.from_trace`.
        ReplayError: There is no such application, or the recording holds no inbound request.
    """

    def send(session: ReplaySession, app: Callable[..., Any]) -> RunOutcome:
        try:
            request = asgi.InboundRequest.of(session.run_input)
        except ValueError as fault:
            raise _Unusable(str(fault)) from None
        answer = asyncio.run(asgi.exchange(app, request))
        status, recorded = answer["status_code"], session.expected.output
        if isinstance(status, int) and status >= 500:
            return RunOutcome(
                status="failed", error_type=str(status), message=f"the request was answered with {status}"
            )
        if isinstance(recorded, dict) and "status_code" in recorded:
            return session.completed({**recorded, **answer})
        return RunOutcome(status="completed")

    return _replay_here(path, "--asgi", spec, options, send)


def _replay_here(
    path: Path,
    option: str,
    spec: str,
    options: Mapping[str, Any],
    use: Callable[[ReplaySession, Callable[..., object]], RunOutcome],
) -> Result:
    module, function = _entrypoint_names(option, spec)
    session = ReplaySession.from_trace(path, **options)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    session.start()
    where = ""
    try:
        outcome = use(session, _imported(session, module, function))
    except _Unusable as fault:
        session.stop(RunOutcome(status="partial"))
        raise ReplayError(f"{option} {spec}: {fault}", code="entrypoint") from fault.__cause__
    except KeyboardInterrupt:
        session.stop(RunOutcome(status="partial"))
        raise
    except BaseException as error:
        outcome = session.failed(error)
        where = _raised_at(error)
    session.stop(outcome)
    result = Result.of(session)
    if where and result.exit_code == DIVERGED and session.latched is None:
        result.document["notes"].append(f"{outcome.error_type} was raised at {where}")
    return result


class _Unusable(Exception):
    """Why an entrypoint cannot be used."""


def _entrypoint_names(option: str, spec: str) -> tuple[str, str]:
    module, colon, function = spec.partition(":")
    if not (colon and all(part.isidentifier() for part in (*module.split("."), *function.split(".")))):
        raise ReplayError(f"{option} {spec}: write it as module:function, for instance agent:main", code="entrypoint")
    return module, function


def _imported(session: ReplaySession, module: str, function: str) -> Callable[..., object]:
    try:
        found: Any = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if session.latched is not None:
            raise
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        hint = "; start from the folder that holds it" if missing else ""
        raise _Unusable(f"cannot import {module}: {type(error).__name__}: {error}{hint}") from error
    for name in function.split("."):
        if not hasattr(found, name):
            raise _Unusable(f"{module} has no {function}; check the spelling")
        found = getattr(found, name)
    if not callable(found):
        raise _Unusable(f"{function} of {module} is not a function")
    return found  # type: ignore[no-any-return]


def _call(function: Callable[..., object], run_input: Json) -> object:
    """Call `function`, with the run input where it takes an argument, and await the result where it is awaitable."""
    result = function(*_arguments(function, run_input))
    if inspect.isawaitable(result):
        return asyncio.run(_awaited(result))
    return result


async def _awaited(result: Any) -> object:
    return await result


def _arguments(function: Callable[..., object], run_input: Json) -> tuple[Json, ...]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return ()
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if len(needed) > 1:
        raise _Unusable(f"it needs {len(needed)} arguments ({', '.join(needed)}) and a recording holds one run input")
    if needed and run_input is None:
        raise _Unusable(f"it needs {needed[0]} and the recording holds no run input")
    return (run_input,) if positional and run_input is not None else ()


def _raised_at(error: BaseException) -> str:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return ""
    return f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"


def replay_command(path: Path, command: Sequence[str], *, stdout: int | None = None, **options: Any) -> Result:
    """Run `command` as a child under auto-instrumentation and the replay of `path`; wait for it.

    Args:
        path: A bundle.
        command: Program and arguments; a Python program of an environment in which this package is installed.
        stdout: File descriptor for the program's standard output; None: this process's.
        options: As of `ReplaySession.from_trace`, as far as they are texts.

    Raises:
        TraceStorageError, ReplayPolicyError, SettingsError: As `ReplaySession.from_trace`.
        ReplayError: There is no such program, or it did not run under replay.
    """
    session = ReplaySession.from_trace(path, **options)
    session.refuse_production(os.environ, {})
    program = shutil.which(command[0])
    if program is None:
        raise ReplayError(f"{command[0]}: command not found; check the spelling and PATH", code="not_found")
    with tempfile.TemporaryDirectory(prefix="sftrace-replay-") as folder:
        told = _variables({**options, "record": session.target})
        environment = {**_child_environment(path, Path(folder), session), **told}
        _say(session.announcement())
        code = _run([program, *command[1:]], environment, stdout)
        return _collected(Path(folder), code, command[0])


_SETTING_OF = {
    "mode": "REPLAY_MODE",
    "order": "REPLAY_ORDER",
    "allow": "REPLAY_ALLOW",
    "normalize": "REPLAY_NORMALIZE",
    "live_llms": "REPLAY_LIVE_LLMS",
    "allow_live_tools": "REPLAY_LIVE_TOOLS",
}
"""Options of a session → their settings."""


def _variables(options: Mapping[str, Any]) -> dict[str, str]:
    """The variables that give a child these options."""
    told: dict[str, str] = {}
    for option, setting in _SETTING_OF.items():
        value = options.get(option)
        if value:
            told[PREFIX + setting] = value if isinstance(value, str) else ",".join(value)
    if options.get("record") is not None:
        told[PREFIX + "REPLAY_RECORD"] = str(Path(options["record"]).expanduser().absolute())
    if options.get("force"):
        told[PREFIX + "REPLAY_FORCE"] = "true"
    if options.get("allow_redacted"):
        told[PREFIX + "REPLAY_ALLOW_REDACTED"] = "true"
    if options.get("reuse"):
        reuse = options["reuse"]
        told[PREFIX + "REPLAY_REUSE"] = "true" if reuse is True else str(Path(reuse).expanduser().absolute())
    told[CHILD] = json.dumps(
        {
            "map_hosts": dict(options.get("map_hosts") or {}),
            "ignore": list(options.get("ignore") or ()),
            "policies": list(options.get("policies") or ()),
            "run_untraced_tools": bool(options.get("run_untraced_tools")),
        }
    )
    return told


def _child_environment(path: Path, reports: Path, session: ReplaySession) -> dict[str, str]:
    """The variables of `opentelemetry-instrument`, and ours; what the user set stays where it is not ours to say."""
    spec = importlib.util.find_spec("opentelemetry.instrumentation.auto_instrumentation")
    if spec is None or not spec.submodule_search_locations:
        raise ReplayError("opentelemetry-instrumentation is not installed here; run sftrace doctor", code="environment")
    site = next(iter(spec.submodule_search_locations))
    kept = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one != site]
    here = str(Path.cwd())
    if here not in kept:
        kept.insert(0, here)
    tools = ",".join(session.tools)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((site, *kept)),
        "OTEL_PYTHON_DISTRO": "sftrace",
        "OTEL_PYTHON_CONFIGURATOR": "sftrace",
        PREFIX + "REPLAY": str(path.absolute()),
        PREFIX + "REPLAY_REPORT": str(reports),
        **({PREFIX + "TOOLS": tools} if tools else {}),
    }


def _run(command: Sequence[str], environment: Mapping[str, str], stdout: int | None) -> int:
    """Run a child in the foreground. Ctrl-C reaches it by itself; SIGTERM is handed on."""
    sys.stdout.flush()
    with subprocess.Popen(command, env=environment, stdout=stdout) as child, _handing_on(child):
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue


@contextmanager
def _handing_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _collected(folder: Path, code: int, program: str) -> Result:
    """The worst report of those that the child and its Python processes left; helpers that made no call don't count."""
    found = [json.loads(one.read_text("utf-8")) for one in sorted(folder.glob("*.json"))]
    if not found:
        raise ReplayError(
            f"{program} ran, but not under replay: nothing in it is a Python program with sftrace-otel installed, or "
            "auto-instrumentation is off; start the agent's own interpreter (-- python agent.py)",
            code="not_instrumented",
        )
    made = [one for one in found if one.get("served") or one.get("diverged")]
    worst = max(made or found, key=lambda one: _SEVERITY.index(one["exit_code"]))
    if worst.get("unfinished"):
        worst["text"] = f"replay: diverged; {program} ended (exit code {code}) before its run could be compared"
    elif worst.get("mode") == "resume" and code and not worst["exit_code"]:
        worst["exit_code"], worst["verdict"] = DIVERGED, "resumed, and failed"
        worst["text"] = f"{worst['text']}\n  {program} ended with exit code {code}"
    return Result(document={**worst, "program_exit_code": code})


_SEVERITY = (0, 4, DIVERGED, REFUSED)
