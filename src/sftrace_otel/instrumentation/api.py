# SPDX-License-Identifier: Apache-2.0
"""What a program may say itself: `record()`, LLM calls through any client, the run's input, output and state.

Decision: everything here is inert under replay and harmless with nothing active, so that the calls can stay in the
program for ever. `record()` puts the HTTP and openai boundaries on, since a recording without the model's answers
replays nothing; an exporter never does. Rejected: raising from these functions for a fault of ours (only wrong
arguments raise).

Source: `design.md`, "Names that users type" and "Runs".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from contextvars import Token
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from sftrace_otel import recorder as recording
from sftrace_otel.core.prepare import Prepared
from sftrace_otel.core.session import Decision
from sftrace_otel.errors import SettingsError, TraceStorageError
from sftrace_otel.instrumentation import boundaries, replaying, tracing
from sftrace_otel.instrumentation.failopen import afails_open, fails_open
from sftrace_otel.instrumentation.opencall import OpenCall, Replayed
from sftrace_otel.instrumentation.outcomes import give_back
from sftrace_otel.instrumentation.running import Running
from sftrace_otel.instrumentation.tools import POLICIES, Serializer
from sftrace_otel.recorder import Recorder, Run, Scope, current_scope, enter, leave
from sftrace_otel.settings import Settings

__all__ = [
    "RecordingSession", "allm_request", "keep", "llm_request", "record", "record_state_change", "set_input",
    "set_output",
]  # fmt: skip

_log = logging.getLogger("sftrace_otel")
_SCOPE = "sftrace_otel.llm"
_LONGEST_WAIT, _GLANCE = 1.0, 0.01
"""Seconds that an `async with record()` waits for open calls at its end, and between two looks at them."""
T = TypeVar("T")


# --- record() ---------------------------------------------------------------------------------------------------------


class RecordingSession:
    """A run of its own around a block of code; `with` and `async with`. See `record`."""

    def __init__(
        self,
        agent_name: str,
        *,
        output: str | Path | None = None,
        overwrite: bool = False,
        serializer: Serializer | None = None,
        run_input: Any = None,
    ) -> None:
        if not agent_name:
            raise ValueError("record() needs the agent's name")
        self.agent_name = agent_name
        self.output_path = None if output is None else _bundle_path(output)
        self.path: Path | None = None
        self._overwrite = overwrite
        self._serializer = serializer
        self._run_input = run_input
        self._run: Run | None = None
        self._joined = False
        self._token: Any = None
        self._block: Token[bool] | None = None
        self._entered = False

    @property
    def run_id(self) -> str | None:
        """The run's id; None where nothing is recorded (replay, or a setting that cannot be used)."""
        return None if self._run is None else self._run.id

    def __enter__(self) -> RecordingSession:
        if self._entered:
            raise RuntimeError("a record() block cannot be entered twice")
        self._entered = True
        if replaying._active is not None:
            self._token = enter(_own_scope())
            self._block = replaying.in_block.set(True)
        else:
            self._begin()
        return self

    @fails_open("opening a run", None)
    def _begin(self) -> None:
        recorder = _own_recorder()
        if recorder is not None:
            self._open(recorder)

    def _open(self, recorder: Recorder) -> None:
        outer = recorder.joinable(tracing.current_ids()[1]) if self.output_path is None else None
        if outer is not None:
            self._run, self._joined = outer, True
            self._join(outer)
            if current_scope().run is not outer:
                self._token = enter(Scope(run=outer))
            return
        run = recorder.new_run("record", target=self._free_path(recorder), origin=recorder.parent_origin())
        run.agent = self.agent_name
        run.overwrite = self._overwrite
        if self._run_input is not None:
            run.input = recorder.prepare(self._run_input, self._serializer)
        self._run = run
        self._token = enter(_own_scope(run))
        try:
            run.open()
        except OSError as error:
            recorder.fault("opening the journal", error, run)

    def _join(self, run: Run) -> None:
        """A run that a request began has neither name nor input of its own: those of the first block in it are its."""
        if run.agent is None:
            run.agent = self.agent_name
        if run.input is None and run.journal is None and self._run_input is not None:
            run.input = run.recorder.prepare(self._run_input, self._serializer)

    def _free_path(self, recorder: Recorder) -> Path | None:
        path = self.output_path
        if path is None or self._overwrite:
            return path
        places = {path, path.with_suffix(".flight")} if "flight" in recorder.settings.formats else {path}
        if not any(map(os.path.lexists, places)):
            return path
        free = path.with_name(f"{path.stem}-{os.urandom(4).hex()}{path.suffix}")
        recorder.say(f"sftrace: {path} exists; recording to {free} (overwrite=True replaces a bundle)")
        return free

    @fails_open("closing a run", False, replay_too=True)
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        token, self._token = self._token, None
        if token is not None:
            _left(token)
        if self._block is not None:
            with contextlib.suppress(ValueError):  # left in another context
                replaying.in_block.reset(self._block)
        replay = replaying._active
        if replay is not None:
            replay.failure = error
        self._end(error)
        return False

    @fails_open("closing a run", None)
    def _end(self, error: BaseException | None) -> None:
        if self._run is not None and not self._joined:
            recorder = self._run.recorder
            failure = None
            if error is not None:
                described = recorder.describe_error(error)
                failure = (described["type"], described["message"])
            recorder.wait_for(self._run)
            self.path = recorder.close_run(self._run, failure=failure)

    async def __aenter__(self) -> RecordingSession:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if self._run is not None and not self._joined:
                await _calls_over(self._run)
        finally:
            self.__exit__(kind, error, trace)
        return False

    @fails_open("recording an input", None)
    def set_input(self, value: Any) -> None:
        """What the run was given; stored in `run_start` if said before the first call."""
        if self._run is not None and self._run.journal is None:
            self._run.input = self._run.recorder.prepare(value, self._serializer)

    @fails_open("recording an output", None)
    def set_output(self, value: Any) -> None:
        """What the run gave; stored in `run_end`, and compared under replay. The last one counts."""
        replay = replaying.active()
        if replay is not None:
            replay.output = replay.prepare(value, self._serializer)
        elif self._run is not None:
            self._run.output = self._run.recorder.prepare(value, self._serializer)

    @fails_open("keeping a run", None)
    def keep(self, reason: str = "") -> None:
        """Keep this run's bundle whatever OTEL_SFTRACE_KEEP says; `reason` goes into its `run.json`."""
        if self._run is not None:
            self._run.recorder.keep(self._run, reason)

    @fails_open("recording an event", None)
    def record_state_change(self, *, key: str | None = None, before: Any = None, after: Any = None) -> None:
        """A change of the agent's own state, as a `state_change` event."""
        if self._run is not None:
            _state_change(self._run, key, before, after, self._serializer)


@afails_open("closing a run", None)
async def _calls_over(run: Run) -> None:
    """What `Recorder.wait_for` does, without blocking the event loop; a cancellation ends it."""
    recorder, waited = run.recorder, 0.0
    while waited < _LONGEST_WAIT and asyncio._get_running_loop() is not None and recorder.has_others_at_work(run):
        await asyncio.sleep(_GLANCE)
        waited += _GLANCE


def _own_scope(run: Run | None = None) -> Scope:
    """The scope of a block: of the thread and task that enter it, whoever makes the first call."""
    scope = Scope(run=run)
    scope.claim()
    return scope


def record(
    agent_name: str,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    serializer: Serializer | None = None,
    run_input: Any = None,
) -> RecordingSession:
    """Record the block as one run: `with record("agent", output="run.sftrace") as session: …`.

    `output`: the bundle's path, ending in `.sftrace`; without one the bundle goes to the default folder, or the block
    joins the run that is open around it. A path that exists is kept and another name used, unless `overwrite`.
    `serializer`: for values of one's own types. `run_input`: stored in `run_start` and given to the entrypoint on
    replay. The block's exceptions pass through and make the run a failed one. Inert under replay.
    Raises ValueError for an empty name and TraceStorageError for a path of another kind.
    """
    return RecordingSession(agent_name, output=output, overwrite=overwrite, serializer=serializer, run_input=run_input)


def _bundle_path(output: str | Path) -> Path:
    path = Path(output).expanduser()
    with contextlib.suppress(OSError):  # the working folder may be gone: opening the journal reports that
        path = path.absolute()
    if path.suffix not in (".sftrace", ".flight"):
        raise TraceStorageError(f"{output}: the path of a bundle ends in .sftrace or .flight")
    return path


def _own_recorder() -> Recorder | None:
    """The active recorder, or a new one from the environment with the boundaries on; None if settings forbid it."""
    recorder = recording.active()
    if recorder is None:
        try:
            settings = Settings.from_environ(os.environ)
        except SettingsError as error:
            _log.error("sftrace: %s; nothing is recorded", error)
            return None
        if settings.capture == "off":
            return None
        recorder = recording.acquire(settings)
    for boundary in boundaries():
        try:
            boundary.install()
        except Exception as error:
            recorder.fault("putting a boundary on", error)
    return recorder


@fails_open("leaving a run", None)
def _left(token: Any) -> None:
    leave(token)


# --- the current run --------------------------------------------------------------------------------------------------


def _current_run() -> Run | None:
    recorder = recording.active()
    if recorder is None or replaying.active() is not None:
        return None
    return recorder.run_for(current_scope(), tracing.current_ids()[1])


@fails_open("recording an input", None)
def set_input(value: Any) -> None:
    """What the current run was given. Stored in `run_start` if said before the run's first call, else ignored."""
    run = _current_run()
    if run is not None and run.journal is None:
        run.input = run.recorder.prepare(value)


@fails_open("recording an output", None)
def set_output(value: Any) -> None:
    """What the current run gave. Stored in `run_end`; under replay compared with the recorded one."""
    replay = replaying.active()
    if replay is not None:
        replay.output = replay.prepare(value)
        return
    run = _current_run()
    if run is not None:
        run.output = run.recorder.prepare(value)


@fails_open("keeping a run", None)
def keep(reason: str = "") -> None:
    """Keep the bundle of the current run whatever OTEL_SFTRACE_KEEP says; `reason` goes into its `run.json`."""
    run = _current_run()
    if run is not None:
        run.recorder.keep(run, reason)


@fails_open("recording an event", None)
def record_state_change(*, key: str | None = None, before: Any = None, after: Any = None) -> None:
    """A change of the agent's own state, as a `state_change` event of the current run."""
    run = _current_run()
    if run is not None:
        _state_change(run, key, before, after, None)


def _state_change(run: Run, key: str | None, before: Any, after: Any, serializer: Serializer | None) -> None:
    recorder = run.recorder
    scope = current_scope()
    parent = scope.parent if scope.run is run else None
    values: dict[str, Prepared] = {
        "key": recorder.prepare(key or None),
        "before": recorder.prepare(before, serializer),
        "after": recorder.prepare(after, serializer),
    }
    recorder.single(run, "state_change", values, parent=parent or run.start_id, hashes=("before", "after"))


# --- LLM calls through any client -------------------------------------------------------------------------------------


class _Semantic:
    """An LLM call that the program describes itself: recorded, or answered under replay."""

    def __init__(
        self, model: str, payload: Any, provider: str | None, policy: str, serializer: Serializer | None
    ) -> None:
        if not model:
            raise ValueError("an LLM call needs a model")
        if policy not in POLICIES:
            raise ValueError(f"replay_policy {policy!r}: must be one of {', '.join(sorted(POLICIES))}")
        self.model = model
        self.payload = payload
        self.provider = provider
        self.policy = policy
        self.serializer = serializer
        self.attributes: dict[str, Any] = {"gen_ai.operation.name": "chat", "gen_ai.request.model": model}
        if provider:
            self.attributes["gen_ai.provider.name"] = provider

    def replayed(self, replay: replaying.Active) -> _Told | Running:
        """The recorded end of the call, or what stands around it where it is made. Raises a ReplayError for neither."""
        lineage = current_scope().place()
        prepared = replay.prepare(self.payload, self.serializer)
        name = f"{self.provider}/{self.model}" if self.provider else self.model
        decision = replay.decide(
            "llm", name, prepared, lineage=lineage, provider=self.provider, model=self.model, runs=True
        )
        if decision.action == "serve":
            return _Told(self, decision)
        recorder = recording._active
        marks = replaying.marks(decision)
        inside = Replayed(lineage, marks, decision.action == "live")
        return Running(
            replay,
            decision,
            lineage,
            None if recorder is None else _Described(self, recorder, inside),
            lambda value: replay.prepare(value, self.serializer),
            tracer=_SCOPE,
            span_name=f"chat {self.model}",
            span_kind=tracing.CLIENT,
            attributes=self.attributes,
        )

    @fails_open("recording an LLM call", None)
    def begin(self, recorder: Recorder) -> _Described | None:
        try:
            return _Described(self, recorder)
        except Exception as error:
            recorder.fault("recording an LLM call", error)
            return None


class _Told:
    """The recorded end of a call."""

    def __init__(self, what: _Semantic, decision: Decision) -> None:
        assert decision.call is not None
        self.call = decision.call
        attributes = {**what.attributes, **replaying.marks(decision)}
        self.span = tracing.start_span(_SCOPE, f"chat {what.model}", tracing.CLIENT, attributes)

    def result(self) -> Any:
        """What it gave; raises what it raised."""
        try:
            result = give_back(self.call)
        except BaseException as error:
            tracing.end_span(self.span, error)
            raise
        tracing.end_span(self.span)
        return result


class _Described(OpenCall):
    """The recording of a `_Semantic` call."""

    __slots__ = ("what",)

    def __init__(self, what: _Semantic, recorder: Recorder, replayed: Replayed | None = None) -> None:
        self.what = what
        super().__init__(
            recorder,
            "llm",
            what.model,
            recorder.prepare(what.payload, what.serializer),
            tracer=_SCOPE,
            span_name=f"chat {what.model}",
            span_kind=tracing.CLIENT,
            attributes=what.attributes,
            policy=what.policy,
            provider=what.provider,
            model=what.model,
            replayed=replayed,
        )

    @fails_open("recording an LLM answer", None)
    def returned(self, value: Any) -> None:
        try:
            prepared = self.recorder.prepare(value, self.what.serializer)
            self.note_output(self.recorder.end(self.call, prepared, model=self.what.model))
        except Exception as error:
            self.fault("recording an LLM answer", error)
        self.end_span(None)

    @fails_open("recording an LLM error", None)
    def raised(self, error: BaseException) -> None:
        try:
            self.recorder.fail(self.call, error)
        except Exception as fault:
            self.fault("recording an LLM error", fault)
        self.end_span(error)


def llm_request(
    *,
    model: str,
    input: Any,  # noqa: A002
    call: Callable[[], T],
    provider: str | None = None,
    replay_policy: str = "frozen",
    serializer: Serializer | None = None,
) -> T:
    """Make an LLM call through any client: `call()` is recorded with `input`, and under replay not made at all.

    Gives what `call` gives; under replay the recorded JSON value (with its standard types back). Raises what `call`
    raises, ValueError for an empty model, and a ReplayError for a call that the recording does not hold.
    """
    what = _Semantic(model, input, provider, replay_policy, serializer)
    replay = replaying._active
    described: _Described | Running | None
    if replay is not None:
        replayed = what.replayed(replay)
        if isinstance(replayed, _Told):
            return replayed.result()  # type: ignore[no-any-return]
        described = replayed
    else:
        recorder = recording._active
        described = None if recorder is None else what.begin(recorder)
    if described is None:
        return call()
    tokens = described.enter()
    try:
        result = call()
    except BaseException as error:
        described.raised(error)
        raise
    finally:
        described.leave(tokens)
    described.returned(result)
    return result


async def allm_request(
    *,
    model: str,
    input: Any,  # noqa: A002
    call: Callable[[], Awaitable[T]],
    provider: str | None = None,
    replay_policy: str = "frozen",
    serializer: Serializer | None = None,
) -> T:
    """`llm_request` for a call that is awaited."""
    what = _Semantic(model, input, provider, replay_policy, serializer)
    replay = replaying._active
    described: _Described | Running | None
    if replay is not None:
        replayed = what.replayed(replay)
        if isinstance(replayed, _Told):
            return replayed.result()  # type: ignore[no-any-return]
        described = replayed
    else:
        recorder = recording._active
        described = None if recorder is None else what.begin(recorder)
    if described is None:
        return await call()
    tokens = described.enter()
    try:
        result = await call()
    except BaseException as error:
        described.raised(error)
        raise
    finally:
        described.leave(tokens)
    described.returned(result)
    return result
