# SPDX-License-Identifier: Apache-2.0
"""Forks as users type them: `fork_trace`, `ForkEngine` and their models.

A thin façade over `core.fork`: it loads the parent, draws the new run's id, takes the time, and saves. A fork's
`provenance.json` names the parent by run id, name and the digest of its events, the fork point, and the overrides by
digests. A parent whose files do not have their checksums is refused: a fork of it would look untouched. A bundle is
forked as a stream, and the bytes that go into the fork are those that were checked, whatever happens to the files
meanwhile.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sftrace_otel.bundle import read, write
from sftrace_otel.bundle.carry import carry, intact
from sftrace_otel.bundle.trace import Trace, cleaner, default_policy, new_run_id
from sftrace_otel.core.fork import ForkInfo, ForkPoint, Outline, Overridden, OverrideSpec, fork, outline, plan
from sftrace_otel.errors import ForkError, TraceStorageError
from sftrace_otel.formats import sftrace, sidecars
from sftrace_otel.formats.sidecars import Provenance
from sftrace_otel.version import __version__

if TYPE_CHECKING:
    from sftrace_otel.core.prices import Prices
    from sftrace_otel.core.redact import RedactionPolicy

__all__ = ["ForkEngine", "ForkError", "ForkInfo", "ForkPoint", "ForkResult", "OverrideSpec", "fork_trace"]


@dataclass(frozen=True)
class ForkResult:
    """What a fork came to. A fork that fails raises ForkError, so `success` is True.

    `trace` is the fork itself; of one that was saved it is read from its bundle when first asked for.
    """

    success: bool
    forked_trace_path: str | None
    original_event_count: int
    forked_event_count: int
    fork_point_step: int
    fork_point_event_id: str
    overrides_applied: int
    error_message: str | None = None
    _trace: Trace | None = field(default=None, repr=False, compare=False)

    @property
    def trace(self) -> Trace:
        """The forked trace. Raises TraceStorageError where its bundle is not there any more."""
        if self._trace is None:
            object.__setattr__(self, "_trace", Trace.load(self.forked_trace_path or ""))
        assert self._trace is not None
        return self._trace


class ForkEngine:
    """Forks one trace in memory.

    Args:
        trace: The parent; it is not changed.
        fork_point: The last event to keep.
        overrides: Outputs to replace.
        parent_trace_path: Where the parent is stored, for the provenance; where it was loaded from if left out.
        policy: Redacts the new outputs; the default policy if left out.
        prices: What tokens cost, for answers that are given others; without it these have no cost.
    """

    def __init__(
        self,
        trace: Trace,
        fork_point: ForkPoint,
        *,
        overrides: Sequence[OverrideSpec] | None = None,
        parent_trace_path: str | Path | None = None,
        policy: RedactionPolicy | None = None,
        prices: Prices | None = None,
    ) -> None:
        self.trace = trace
        self.fork_point = fork_point
        self.overrides = tuple(overrides or ())
        if parent_trace_path is None and trace.source is not None:
            parent_trace_path = trace.source.path
        self.parent_trace_path = None if parent_trace_path is None else str(parent_trace_path)
        self.policy = policy
        self.prices = prices

    def fork(self) -> tuple[Trace, ForkInfo]:
        """Make the fork.

        Returns:
            The new trace, which `Trace.save` writes with its provenance, and where it came from.

        Raises:
            ForkError: The fork point or an override does not fit the trace.
        """
        policy = self.policy or default_policy()
        forked = fork(
            self.trace.data, self.fork_point, self.overrides,
            run_id=new_run_id(), clean=cleaner(policy), prices=self.prices,
        )  # fmt: skip
        info = ForkInfo(
            parent_trace_path=self.parent_trace_path,
            parent_run_id=self.trace.run_id,
            fork_point_event_id=forked.event_id,
            fork_point_step=forked.step,
            fork_timestamp=datetime.now(UTC),
            overrides_applied=len(forked.overridden),
        )
        trace = Trace.of(
            forked.data,
            source=self.trace.source,
            stale=forked.stale | self.trace.stale,
            provenance=_provenance(info, forked.event_id, forked.step, forked.overridden, _digest(self.trace.events)),
            policy=policy,
        )
        return trace, info


def fork_trace(
    trace: Trace | Path | str,
    fork_point: ForkPoint,
    *,
    overrides: Sequence[OverrideSpec] | None = None,
    output_path: Path | str | None = None,
    overwrite: bool = False,
    policy: RedactionPolicy | None = None,
    prices: Prices | None = None,
) -> ForkResult:
    """Fork a trace at a step or event, replace outputs, and save the result.

    Args:
        trace: A trace, or the path of its bundle.
        fork_point: The last event to keep.
        overrides: Outputs to replace.
        output_path: Where to save the fork, `NAME.sftrace` or `NAME.flight`; it is not saved if left out.
        overwrite: Replace a bundle that is there.
        policy: Redacts the new outputs; the default policy if left out.
        prices: What tokens cost, for answers that are given others; without it these have no cost.

    Raises:
        ForkError: The fork point or an override does not fit the trace.
        TraceStorageError: The bundle cannot be read or does not have its checksums, or the fork cannot be saved.
    """
    if output_path is not None and Path(output_path).suffix == ".flight":
        return _fork_chain(trace, fork_point, overrides, Path(output_path), overwrite, policy, prices)
    if not isinstance(trace, Trace) and output_path is not None:
        return _fork_stream(trace, fork_point, overrides or (), Path(output_path), overwrite, policy, prices)
    if output_path is not None:
        write.require_free(Path(output_path).expanduser(), overwrite=overwrite)
    parent = trace if isinstance(trace, Trace) else _load_intact(trace)
    path = None if isinstance(trace, Trace) else str(trace)
    forked, info = ForkEngine(
        parent, fork_point, overrides=overrides, parent_trace_path=path, policy=policy, prices=prices
    ).fork()
    saved = None if output_path is None else str(forked.save(output_path, overwrite=overwrite))
    return _result(info, saved, len(parent.events), len(forked.events), forked)


def _result(info: ForkInfo, saved: str | None, before: int, after: int, trace: Trace | None = None) -> ForkResult:
    return ForkResult(
        success=True,
        forked_trace_path=saved,
        original_event_count=before,
        forked_event_count=after,
        fork_point_step=info.fork_point_step,
        fork_point_event_id=info.fork_point_event_id,
        overrides_applied=info.overrides_applied,
        _trace=trace,
    )


def _fork_chain(
    trace: Trace | Path | str,
    point: ForkPoint,
    overrides: Sequence[OverrideSpec] | None,
    output: Path,
    overwrite: bool,
    policy: RedactionPolicy | None,
    prices: Prices | None,
) -> ForkResult:
    """Fork into a `.flight`: into a folder beside it first, then over into the other format."""
    from sftrace_otel.bundle.convert import to_flight

    target = output.expanduser()
    write.require_free(target, overwrite=overwrite, suffix=".flight")
    with tempfile.TemporaryDirectory(prefix=".sftrace-fork-", dir=target.parent) as folder:
        made = Path(folder) / f"{target.stem}.sftrace"
        result = fork_trace(trace, point, overrides=overrides, output_path=made, policy=policy, prices=prices)
        result.trace  # noqa: B018 (read while the folder is there)
        saved = to_flight(made, target, overwrite=overwrite)
    return replace(result, forked_trace_path=str(saved.path))


def _fork_stream(
    path: Path | str,
    point: ForkPoint,
    overrides: Sequence[OverrideSpec],
    output: Path,
    overwrite: bool,
    policy: RedactionPolicy | None,
    prices: Prices | None,
) -> ForkResult:
    """Fork a bundle into another one, in memory that does not grow with the payloads."""
    target = output.expanduser()
    write.require_free(target, overwrite=overwrite)
    bundle = read.open_bundle(path)
    digest = hashlib.sha256()
    made = _outlined(bundle, digest)
    redactions = sftrace.parse_redactions(bundle.read(sftrace.REDACTIONS_FILE)).entries
    decided = plan(
        bundle.manifest, redactions, made, point, overrides,
        run_id=new_run_id(), clean=cleaner(policy or default_policy()), prices=prices,
    )  # fmt: skip
    carried = carry(bundle, stale=decided.stale, cut=decided.cut)
    name = sftrace.EVENTS_FILE
    kept = decided.take_lines(intact(bundle, name, bundle.lines(name, ends=True), digest.hexdigest()), made)
    created = datetime.now(UTC)
    info = ForkInfo(
        parent_trace_path=str(path),
        parent_run_id=bundle.manifest.run_id,
        fork_point_event_id=decided.event_id,
        fork_point_step=decided.step,
        fork_timestamp=created,
        overrides_applied=0,
    )

    def provenance() -> Iterator[bytes]:
        yield sidecars.dump_object(
            _provenance(info, decided.event_id, decided.step, decided.overridden, digest.hexdigest())
        )

    saved = write.save_lines(
        kept,
        lambda: (decided.manifest, decided.redactions),
        target,
        overwrite=overwrite,
        sidecars={**carried.sidecars, sidecars.PROVENANCE_FILE: provenance()},
        blobs=carried.blobs,
    )
    info = replace(info, overrides_applied=len(decided.overridden))
    return _result(info, str(saved), len(made), decided.manifest.totals.events)


def _outlined(bundle: read.Bundle, digest: hashlib._Hash) -> Outline:
    """The outline of a bundle whose files all have their checksums; `digest` is updated with `events.jsonl`.

    The events are hashed as they are parsed, so that these bytes are the ones that were checked.

    Raises:
        TraceStorageError: A file does not have its checksum, which goes before what is found in it.
    """

    def noted() -> Iterator[bytes]:
        for line in bundle.lines(sftrace.EVENTS_FILE, ends=True):
            digest.update(line)
            yield line

    try:
        made = outline(read.parse_lines(bundle.store, noted()), bundle.manifest.run_id)
    except TraceStorageError:
        _require_intact(bundle)
        raise
    _require_intact(bundle, {sftrace.EVENTS_FILE: digest.hexdigest()})
    return made


def _load_intact(path: Path | str) -> Trace:
    bundle = _intact(path)
    return Trace.of(bundle.trace, source=bundle)


def _intact(path: Path | str) -> read.Bundle:
    """The bundle at `path`, all of its files as their checksums say. Raises TraceStorageError."""
    bundle = read.open_bundle(path)
    _require_intact(bundle)
    return bundle


def _require_intact(bundle: read.Bundle, known: Mapping[str, str] | None = None) -> None:
    report = bundle.integrity(known)
    if report.state == "mismatch":
        issue = report.issues[0]
        text = f"{issue.message}; a changed bundle is not forked"
        raise TraceStorageError(text, where=str(bundle.path), code=issue.code)


def _provenance(
    info: ForkInfo, event_id: str, step: int, overridden: Iterable[Overridden], events_sha256: str
) -> Provenance:
    name = None if info.parent_trace_path is None else Path(info.parent_trace_path).name
    return Provenance(
        schema_version=sidecars.VERSION,
        origin="forked",
        tool=f"sftrace-otel {__version__}",
        created_at=info.fork_timestamp.isoformat(),
        parents=[{"run_id": info.parent_run_id, "name": name, "events_sha256": events_sha256}],
        fork_point={"step": step, "event_id": event_id},
        overrides=[{"step": one.step, "event_id": one.event_id, "was": one.was, "now": one.now} for one in overridden],
    )


def _digest(events: Iterable[sftrace.EventBase]) -> str:
    """SHA-256 of the parent's `events.jsonl`."""
    digest = hashlib.sha256()
    for event in events:
        digest.update(sftrace.dump_event(event) + b"\n")
    return digest.hexdigest()
