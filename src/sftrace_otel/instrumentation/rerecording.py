# SPDX-License-Identifier: Apache-2.0
"""A replay that is recorded itself: served calls go into a new bundle as if they had been made.

Decision: the whole process is one run of a recorder of its own. What runs or goes out is recorded by its boundary as
ever; what is served is written here, the live input with the recorded end, exchanges and types, so that the new bundle
replays. Calls inside a served one did not happen and are not in it. Of a resumed run the provenance says where it went
live, and which answers a stub or the parent gave: to a reader they look like any other. Rejected: copying the old
bundle's events and exchanging some (its inputs are not what the program asked now).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec

from sftrace_otel import recorder as recording
from sftrace_otel.core.plan import Deferred, Outcome, RecordedCall
from sftrace_otel.core.prepare import Prepared
from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.core.session import Decision, LiveCall
from sftrace_otel.recorder import Call, Recorder, Run, current_scope
from sftrace_otel.settings import Settings

__all__ = ["Rerecording"]

ReadBlob: TypeAlias = Callable[[Mapping[str, Any]], bytes]
"""Reads a body by its reference."""


class _Noting(Recorder):
    """Notes the event of the first call that a resumed run made: the session knows that call by its lineage only."""

    went_live: Callable[[], LiveCall | None] | None = None
    first_live: str | None = None

    def begin(self, kind: str, name: str, prepared: Prepared, **more: Any) -> Call | None:
        """As `Recorder.begin`."""
        call = super().begin(kind, name, prepared, **more)
        if call is not None and self.first_live is None and self.went_live is not None:
            first = self.went_live()
            if first is not None and first.lineage in (None, more.get("lineage")):
                self.first_live = call.id
        return call

    def begin_served(self, kind: str, name: str, prepared: Prepared, **more: Any) -> Call | None:
        """The same for a call that was served."""
        return super().begin(kind, name, prepared, **more)


class Rerecording:
    """Records into `path` from its making on, until `close`. Raises OSError where the bundle cannot be opened.

    `lazy`: the bundle is opened with the first call, and without one there is none.
    """

    def __init__(
        self,
        path: Path,
        settings: Settings,
        policy: RedactionPolicy,
        *,
        agent: str,
        run_input: object,
        lazy: bool,
        origin: Mapping[str, object],
    ) -> None:
        self.recorder = _Noting(settings, policy)
        self.run: Run = self.recorder.new_run("record", target=path, origin=origin)
        self._served: dict[str, list[str]] = {"reused": [], "stub": []}
        self.run.agent = agent
        if run_input is not None:
            self.run.input = self.recorder.prepare(run_input)
        self.recorder.adopt(self.run)
        self._lazy = lazy
        self._owner = os.getpid()
        if not lazy:
            self.run.open()
        self._before = recording.use(self.recorder)

    def close(
        self,
        *,
        output: Prepared | None,
        failure: tuple[str, str] | None,
        provenance: dict[str, Any] | None = None,
    ) -> Path | None:
        """Put the bundle in place; gives its path, None where nothing was recorded.

        `provenance`: of a resumed run, to which what is known here is added.
        """
        recording.use(self._before)
        if os.getpid() != self._owner or (self._lazy and self.run.journal is None):
            return None
        self.run.output = output
        if provenance is not None:
            first = self.recorder.first_live
            resumed = {
                **provenance["resumed"],
                **({} if first is None else {"went_live": first}),
                **{
                    name: ids
                    for name, ids in (("stubbed", self._served["stub"]), ("reused", self._served["reused"]))
                    if ids
                },
            }
            self.run.provenance = {**provenance, "resumed": resumed}
        path = self.recorder.close_run(self.run, failure=failure)
        self.recorder.close()
        return path

    def served(self, prepared: Prepared, live: LiveCall, decision: Decision, blob: ReadBlob) -> None:
        """A call was answered from the recording. A forked child has none of the parent's."""
        if os.getpid() != self._owner:
            return
        recorded = decision.call
        assert recorded is not None
        try:
            event_id = self._write(recorded, prepared, live, blob)
            if event_id is not None and decision.rung in self._served:
                self._served[decision.rung].append(event_id)
        except Exception as error:
            self.recorder.fault("recording a served call", error, self.run)

    def _write(
        self,
        recorded: RecordedCall,
        prepared: Prepared,
        live: LiveCall,
        blob: ReadBlob,
    ) -> str | None:
        """Its event id."""
        recorder, outcome = self.recorder, recorded.outcome
        alike = recorded.kind == live.kind
        call = recorder.begin_served(
            recorded.kind,
            live.name if alike else recorded.name,
            prepared if alike else recorder.prepare(recorded.input),
            scope=current_scope(),
            lineage=live.lineage,
            provider=recorded.provider,
            model=recorded.model,
            policy=recorded.policy,
        )
        for row in outcome.wire:
            self._exchange(call, row, cast("ReadBlob", outcome.read_blob or blob))
        event = outcome.held.event if isinstance(outcome.held, Deferred) else None
        recorder.end(
            call,
            None if outcome.held is None and outcome.status != "ok" else self._output(outcome),
            end=outcome.end or ("failed" if outcome.status == "error" else "finished"),
            status="error" if outcome.status == "error" else "ok",
            error=_error(outcome),
            model=getattr(event, "model", None) or recorded.model,
            tokens=tuple(getattr(event, f"{kind}_tokens", None) for kind in ("prompt", "completion", "total")),  # type: ignore[arg-type]
            extra=_extra(outcome),
        )
        return None if call is None else call.id

    @property
    def went_live(self) -> Callable[[], LiveCall | None] | None:
        """Gives the first call that a resumed run made, None while there is none."""
        return self.recorder.went_live

    @went_live.setter
    def went_live(self, ask: Callable[[], LiveCall | None]) -> None:
        self.recorder.went_live = ask

    def _output(self, outcome: Outcome) -> Prepared:
        prepared = self.recorder.prepare(outcome.output)
        return msgspec.structs.replace(prepared, tags=outcome.output_tags)

    def _exchange(self, call: Call | None, row: Mapping[str, Any], blob: ReadBlob) -> None:
        kept = {name: value for name, value in row.items() if name not in ("event_id", "call", "attempt")}
        sent = dict(kept.get("request") or {"headers": [], "body": None})
        kept["request"] = sent
        media = next((value for name, value in row.get("headers") or () if name == "content-type"), None)
        self.recorder.wire(call, kept, _bytes(sent.get("body"), blob), _bytes(row.get("body"), blob), media)


def _bytes(body: object, blob: ReadBlob) -> bytes | None:
    if isinstance(body, Mapping):
        return blob(body)
    return None if body is None else str(body).encode("utf-8")


def _error(outcome: Outcome) -> dict[str, Any] | None:
    if outcome.error_type is None:
        return None
    described: dict[str, Any] = dict(outcome.exception or {})
    described.setdefault("module", "")
    described.setdefault("qualname", outcome.error_type)
    message = outcome.error_message or outcome.error_type
    return {**described, "type": outcome.error_type, "message": message, "findings": []}


def _extra(outcome: Outcome) -> dict[str, object] | None:
    extra: dict[str, object] = {}
    if outcome.awaitable is not None:
        extra["awaitable"] = outcome.awaitable
    if outcome.returned is not None:
        extra["returned"] = outcome.returned
    return extra or None
