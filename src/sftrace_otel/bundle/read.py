# SPDX-License-Identifier: Apache-2.0
"""Reading bundles. A bundle is data from a stranger: opened without following links, within bounds, never executed.

Decision: files are opened by a store (`bundle.store`), so a folder and a packed file are read alike. Validation reads
each file once and takes its checksum from the same bytes that it parses, so a file that changes meanwhile cannot pass
with one content and be judged by another. Garbage collection is paused while a trace loads: events cannot form cycles,
and walking them over and over costs more than reading them. Rejected: reading the names that a bundle gives (only known
names, and those of `integrity.json` for their checksums, are opened).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from sftrace_otel.bundle.store import PACK_SUFFIX, Store, open_store, unfinished, unreadable
from sftrace_otel.errors import FormatError, TraceStorageError
from sftrace_otel.formats import Json, canonical, sftrace
from sftrace_otel.formats.sftrace import (
    EVENTS_FILE,
    INTEGRITY_FILE,
    MANIFEST_FILE,
    REDACTIONS_FILE,
    REQUIRED_FILES,
    SIGNATURE_FILE,
    Checker,
    Event,
    Integrity,
    Issue,
    Manifest,
    TraceData,
)

_LINE_ENDINGS = (
    "its lines end in CRLF: git or an editor rewrote the line endings; "
    "restore the file and put '*.sftrace/** -text' into .gitattributes"
)

if TYPE_CHECKING:
    from sftrace_otel.formats.sidecars import CallRow, DrawRow, Provenance, RunInfo, WireRow

T = TypeVar("T")


class IntegrityReport(Struct, frozen=True):
    """How the files of a bundle compare with `integrity.json`.

    Attributes:
        state: `verified`, `mismatch`, or `unverified_legacy` (there is no record). A checksum is no signature.
        issues: What does not match.
        covered: The files that match.
        unlisted: Files and links that the record does not name; they were not read.
    """

    state: str
    issues: tuple[Issue, ...]
    covered: tuple[str, ...]
    unlisted: tuple[str, ...]


class Validation(Struct, frozen=True):
    """The outcome of `validate_bundle`.

    Attributes:
        issues: All findings; none means valid.
        exit_code: 0 valid, 1 invalid, 2 unreadable, 3 valid but not verifiable.
        profile: Hash profile that the payload hashes follow: `stepfork-json-v0.1` or `rfc8785`.
        integrity: `verified`, `mismatch`, `unverified_legacy`, or `not_checked`.
        covered_files: Files whose checksum matched.
        warnings: What is odd but breaks nothing: files the bundle does not list, rewritten line endings.
        unlisted: The files and links that no record names; they were not read.
    """

    issues: tuple[Issue, ...]
    exit_code: int
    profile: str
    integrity: str
    covered_files: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether nothing was found."""
        return not self.issues


class Summary(Struct, frozen=True):
    """One bundle of a folder. An unreadable one has status `unreadable` and says why in `failure`."""

    path: Path
    run_id: str
    agent: str
    status: str
    created_at: str
    duration_ms: int | None
    llm_calls: int
    tool_calls: int
    trace_ids: tuple[str, ...]
    failure: str | None


class Bundle:
    """An open bundle: its parts, each read when it is asked for and then kept. Made by `open_bundle`.

    What knows the sidecars is imported with the first of them, so that validation starts without it.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.path = store.path
        self.manifest = manifest

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events, in order. Raises TraceStorageError with file and line."""
        with gc_paused():
            return tuple(_events(self.store))

    @cached_property
    def trace(self) -> TraceData:
        """Manifest, events and redactions in one. Raises TraceStorageError."""
        redactions = _parse_file(self.store, REDACTIONS_FILE, sftrace.parse_redactions)
        return TraceData(manifest=self.manifest, events=self.events, redactions=redactions.entries)

    @cached_property
    def calls(self) -> tuple[CallRow, ...]:
        """The rows of `calls.jsonl`; none where the bundle has no such file. Raises TraceStorageError."""
        from sftrace_otel.formats import sidecars

        return tuple(self._rows(sidecars.CALLS_FILE, sidecars.parse_calls))

    @cached_property
    def run(self) -> RunInfo:
        """`run.json`; empty where the bundle has none. Raises TraceStorageError."""
        from sftrace_otel.formats import sidecars

        return self._object(sidecars.RUN_FILE, sidecars.parse_run) or {}

    @cached_property
    def provenance(self) -> Provenance:
        """`provenance.json`; empty where the bundle has none. Raises TraceStorageError."""
        from sftrace_otel.formats import sidecars

        return self._object(sidecars.PROVENANCE_FILE, sidecars.parse_provenance) or {}

    def wire(self) -> Iterator[WireRow]:
        """The rows of `wire.jsonl`, one after the other. Raises TraceStorageError."""
        from sftrace_otel.formats import sidecars

        return self._rows(sidecars.WIRE_FILE, sidecars.parse_wire)

    def draws(self) -> Iterator[DrawRow]:
        """The rows of `nondeterminism.jsonl`, one after the other. Raises TraceStorageError."""
        from sftrace_otel.formats import sidecars

        return self._rows(sidecars.NONDETERMINISM_FILE, sidecars.parse_draws)

    def spans(self) -> Iterator[dict[str, Json]]:
        """The rows of `spans.jsonl`, one after the other. Raises TraceStorageError."""
        from sftrace_otel.formats import sidecars

        return self._rows(sidecars.SPANS_FILE, sidecars.parse_spans)

    def blob(self, ref: str) -> bytes:
        """The body that `ref` (`sha256:<hex>`) names.

        Raises:
            TraceStorageError: Not such a name, not there, or its bytes do not have that digest.
        """
        digest = ref.removeprefix("sha256:")
        if not ref.startswith("sha256:") or not sftrace.is_digest(digest):
            raise TraceStorageError(f"{canonical.printable(ref)} names no blob", code="invalid_sidecar")
        from sftrace_otel.formats import sidecars

        name = f"{sidecars.BLOBS_FOLDER}/{digest[:2]}/{digest[2:4]}/{digest}"
        data = self.store.read(name)
        if canonical.sha256(data) != digest:
            raise TraceStorageError("does not have the digest in its name", where=name, code="integrity_mismatch")
        return data

    def integrity(self, known: Mapping[str, str] | None = None) -> IntegrityReport:
        """Compare every file that `integrity.json` names with it. Reads all of them but those whose SHA-256 is `known`
        by name."""
        try:
            return _compare(self.store, _read_integrity(self.store), dict(known or {}))
        except FormatError as error:
            return IntegrityReport("mismatch", (_issue_of(error, INTEGRITY_FILE),), (), ())

    def listed(self) -> dict[str, str | None]:
        """The files that belong to the bundle, with their SHA-256; without one where there is no `integrity.json`.

        Raises:
            TraceStorageError: The record cannot be read.
        """
        record = _read_integrity(self.store)
        if record is not None:
            return dict(record.files)
        from sftrace_otel.formats import sidecars

        return {name: None for name in (*REQUIRED_FILES, *sidecars.FILES) if self.has(name)}

    def read(self, name: str) -> bytes:
        """The bytes of a file of the bundle. Raises TraceStorageError."""
        return self.store.read(name)

    def lines(self, name: str, *, ends: bool = False) -> Iterator[bytes]:
        """The lines of a file of the bundle, with their newlines if `ends`. Raises TraceStorageError."""
        lines = self.store.lines(name)
        return lines if ends else (line.removesuffix(b"\n") for line in lines)

    def digest(self, name: str) -> str:
        """SHA-256 of a file of the bundle. Raises TraceStorageError."""
        return self.store.digest(name)

    def has(self, name: str) -> bool:
        """Whether the bundle has a file of this name."""
        return self.store.has(name)

    def _rows(self, name: str, parse: Callable[[Iterator[bytes]], Iterator[T]]) -> Iterator[T]:
        if not self.has(name):
            return
        try:
            yield from parse(self.lines(name))
        except TraceStorageError as error:
            raise _placed(error, self.store, name) from None

    def _object(self, name: str, parse: Callable[[bytes], T]) -> T | None:
        return _parse_file(self.store, name, parse) if self.has(name) else None


def open_bundle(path: Path | str) -> Bundle:
    """Open the bundle at `path`; reads its manifest only.

    Raises:
        TraceStorageError: It is no bundle, or its manifest cannot be read. `code` is an issue code of the format page.
    """
    store = readable_store(path)
    for name in REQUIRED_FILES:
        store.require(name)
    return Bundle(store, _parse_file(store, MANIFEST_FILE, sftrace.parse_manifest))


def readable_store(path: Path | str) -> Store:
    """The files of the bundle at `path`; of a `.flight`, those of the `.sftrace` that it amounts to.

    Raises:
        TraceStorageError: It cannot be read, or a `.flight` does not verify.
    """
    store = open_store(path)
    if not _is_chain(store):
        return store
    from sftrace_otel.bundle.convert import ConvertedStore

    return ConvertedStore(store.path)


def load(path: Path | str) -> TraceData:
    """Read the trace of a bundle. Raises TraceStorageError with file, line and reason."""
    return open_bundle(path).trace


def iter_events(path: Path | str) -> Iterator[Event]:
    """The events of a bundle one after the other, in memory that does not grow with their number.

    Raises:
        TraceStorageError: At the first line that is no event, with file, line and reason.
    """
    return _events(readable_store(path))


def _events(store: Store) -> Iterator[Event]:
    return parse_lines(store, store.lines(EVENTS_FILE))


def parse_lines(store: Store, lines: Iterable[bytes]) -> Iterator[Event]:
    """The events of the lines of `events.jsonl`, newlines included. Raises TraceStorageError with file and line."""
    for number, line in enumerate(lines, start=1):
        try:
            yield sftrace.parse_event(_whole(line))
        except FormatError as error:
            raise _placed(error, store, EVENTS_FILE, number) from None


def validate_bundle(path: Path | str, *, strict: bool = True, verify_integrity: bool = False) -> Validation:
    """Check a bundle against the format page; all findings at once, never an exception for a bad bundle.

    A `.flight` is verified as a chain (`bundle.flight.verify_flight`, which tells more), whatever is asked for.

    Args:
        path: The bundle.
        strict: Ask for a whole run; else a part of one is enough.
        verify_integrity: Also compare payload hashes and the checksums of the files.
    """
    try:
        store = open_store(path)
    except TraceStorageError as error:
        return _validation([Issue(error.code, error.reason, location=error.where)], Checker(None), _UNCHECKED, ())
    if _is_chain(store):
        return _chain_validation(store.path)
    return _Validator(store, strict, verify_integrity).run()


def read_verified(path: Path | str) -> tuple[Validation, Bundle | None]:
    """Read the events of a bundle while it is checked as by `validate_bundle(strict=False, verify_integrity=True)`.

    The bundle is None where something is wrong with it; one that nothing vouches for (exit code 3) is read.
    """
    try:
        store = open_store(path)
    except TraceStorageError as error:
        return _validation([Issue(error.code, error.reason, location=error.where)], Checker(None), _UNCHECKED, ()), None
    if _is_chain(store):
        verdict = _chain_validation(store.path)
        return verdict, open_bundle(store.path) if verdict.valid else None
    validator = _Validator(store, strict=False, verify=True, keeps=True)
    with gc_paused():
        result = validator.run()
    if validator.manifest is None or result.exit_code not in (0, 3):
        return result, None
    bundle = Bundle(store, validator.manifest)
    vars(bundle)["events"] = tuple(validator.kept)
    return result, bundle


def list_bundles(folder: Path | str) -> list[Summary]:
    """The bundles of a folder, newest first; unreadable ones are listed last, with the reason.

    Raises:
        TraceStorageError: The folder cannot be read.
    """
    folder = Path(folder)
    try:
        with os.scandir(folder) as found:
            names = [entry.name for entry in found if _looks_like_bundle(entry)]
    except OSError as error:
        raise unreadable(error, folder) from error
    summaries = [_summary(folder / name) for name in names]
    return sorted(summaries, key=_age, reverse=True)


def resolve(where: str, *, dir: Path | str) -> Path:  # noqa: A002
    """The bundle that a person means.

    Args:
        where: A path, a trace id (32 hex digits, or at least the first 8), a run id, the name of a bundle in `dir`, or
            `latest`.
        dir: The folder where ids, names and `latest` are looked up.

    Raises:
        TraceStorageError: Nothing fits (code `missing_file`); the text says what to do.
    """
    if where and _exists(Path(where).expanduser()):
        return Path(where).expanduser()
    known = [one for one in list_bundles(dir) if one.status != "unreadable"] if _exists(Path(dir)) else []
    for fits in (_is_latest, _is_run, _is_trace, _is_name):
        for one in known:
            if fits(one, where):
                return one.path
    what = "there is no bundle" if where == "latest" else "no bundle, run id, trace id or name fits"
    open_one = unfinished(Path(where).expanduser()) if where else ""
    if open_one:
        text = f"there is no such bundle{open_one}"
        raise TraceStorageError(text, where=canonical.printable(where, quote=False), code="missing_file")
    text = f"{what} in {canonical.printable(str(dir))}; list what is there with: sftrace ls DIR"
    raise TraceStorageError(text, where=canonical.printable(where, quote=False), code="missing_file")


def _is_chain(store: Store) -> bool:
    """Whether this is a `.flight`: by its name, unless it holds what only a `.sftrace` has."""
    return store.path.suffix == ".flight" and not store.has(REDACTIONS_FILE)


def _chain_validation(path: Path) -> Validation:
    """What the verification of a chain comes to in the terms of this module."""
    from sftrace_otel.bundle.flight import verify_flight

    result = verify_flight(path)
    issues = [Issue(found.code, found.message, location=found.location) for found in result.findings]
    files = () if issues else (EVENTS_FILE, MANIFEST_FILE)
    state = "verified" if not issues else "mismatch"
    return Validation(tuple(issues), result.exit_code, sftrace.RFC8785, state, files, result.warnings)


class _Validator:
    """One validation: each file is read once, its checksum taken from the bytes that were parsed."""

    def __init__(self, store: Store, strict: bool, verify: bool, *, keeps: bool = False) -> None:
        self.store = store
        self.strict = strict
        self.verify = verify
        self.keeps = keeps
        self.kept: list[Event] = []
        self.manifest: Manifest | None = None
        self.issues: list[Issue] = []
        self.digests: dict[str, str | None] = {}
        self.warnings: list[str] = []

    def run(self) -> Validation:
        manifest = self.manifest = self._document(MANIFEST_FILE, sftrace.parse_manifest)
        self._document(REDACTIONS_FILE, sftrace.parse_redactions)
        check = Checker(manifest, self.strict, self.verify)
        if self._events(check):
            self.issues += check.finish()
        report = self._integrity()
        if self.verify:
            self.issues += report.issues
            if report.state == "verified" and check.unhashed and not check.hashed:
                report = IntegrityReport("unverified_legacy", report.issues, report.covered, report.unlisted)
        return _validation(self.issues, check, report, self.warnings)

    def _document(self, name: str, parse: Callable[[bytes], T]) -> T | None:
        try:
            data = self.store.read(name)
            if self.verify:
                self.digests[name] = canonical.sha256(data)
            if b"\r\n" in data:
                self.warnings.append(f"{name}: {_LINE_ENDINGS}")
            return parse(data)
        except FormatError as error:
            self.issues.append(_issue_of(error, name))
            return None

    def _events(self, check: Checker) -> bool:
        """Check the events; whether the file could be read."""
        rewritten = False
        lines = self.store.lines(EVENTS_FILE)
        try:
            for number, line in enumerate(self._hashed(lines) if self.verify else lines, start=1):
                rewritten = rewritten or line.endswith(b"\r\n")
                try:
                    event = sftrace.parse_event(_whole(line))
                    check.add(event, f"{EVENTS_FILE}:{number}")
                    if self.keeps:
                        self.kept.append(event)
                except FormatError as error:
                    check.unreadable(error, number)
        except FormatError as error:
            self.issues.append(_issue_of(error, EVENTS_FILE))
            return False
        if rewritten:
            self.warnings.append(f"{EVENTS_FILE}: {_LINE_ENDINGS}")
        return True

    def _hashed(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        """The lines of the events; when all were taken, their checksum is known."""
        import hashlib

        digest = hashlib.sha256()
        for line in lines:
            digest.update(line)
            yield line
        self.digests[EVENTS_FILE] = digest.hexdigest()

    def _integrity(self) -> IntegrityReport:
        try:
            record = _read_integrity(self.store)
            report = _compare(self.store, record, self.digests, read=self.verify)
        except FormatError as error:
            self.issues.append(_issue_of(error, INTEGRITY_FILE))
            return IntegrityReport("mismatch", (), (), ())
        noun = "not in integrity.json" if record is not None else "not part of a bundle"
        self.warnings += [f"{name}: {noun}; not read" for name in report.unlisted]
        return report if self.verify or record is None else IntegrityReport("not_checked", (), (), report.unlisted)


_UNCHECKED = IntegrityReport("not_checked", (), (), ())


def _validation(
    issues: list[Issue], check: Checker, report: IntegrityReport, warnings: list[str] | tuple[str, ...]
) -> Validation:
    found = tuple(issues)
    return Validation(
        found, sftrace.exit_code(found), check.profile, report.state, report.covered, tuple(warnings), report.unlisted
    )


def _read_integrity(store: Store) -> Integrity | None:
    if not store.has(INTEGRITY_FILE):
        return None
    return _parse_file(store, INTEGRITY_FILE, sftrace.parse_integrity)


def _compare(
    store: Store, record: Integrity | None, known: Mapping[str, str | None], *, read: bool = True
) -> IntegrityReport:
    """Compare the files with the record; digests in `known` are taken as they are, others are read if `read`."""
    there = [name for name in store.names() if name != SIGNATURE_FILE]
    if record is None:
        text = (
            f"there is no {INTEGRITY_FILE}: nothing says whether the bundle was changed (a bundle of an older writer)"
        )
        unlisted = tuple(name for name in there if name not in REQUIRED_FILES)
        issue = Issue("integrity_unverified", text, location=INTEGRITY_FILE)
        return IntegrityReport("unverified_legacy", (issue,), (), unlisted)
    unlisted = tuple(name for name in there if name != INTEGRITY_FILE and name not in record.files)
    if not read:
        return IntegrityReport("not_checked", (), (), unlisted)
    issues: list[Issue] = []
    digests: dict[str, str | None] = {}
    for name in record.files:
        try:
            digests[name] = known.get(name) or store.digest(name)
        except FormatError as error:
            issues.append(_issue_of(error, name))
    compared = list(sftrace.check_integrity(record, digests))
    issues += [issue for issue in compared if issue.location in digests]
    faulty = {issue.location for issue in issues}
    covered = tuple(name for name in record.files if name not in faulty)
    return IntegrityReport("mismatch" if issues else "verified", tuple(_hinted(store, issues)), covered, unlisted)


def _hinted(store: Store, issues: list[Issue]) -> Iterator[Issue]:
    """The issues, those that rewritten line endings explain with this explanation."""
    for issue in issues:
        if issue.code == "integrity_mismatch" and issue.location and _has_crlf(store, issue.location):
            yield Issue(issue.code, f"{issue.message}; {_LINE_ENDINGS}", location=issue.location)
        else:
            yield issue


def _has_crlf(store: Store, name: str) -> bool:
    try:
        return b"\r\n" in next(store.chunks(name), b"")
    except FormatError:
        return False


# One file


def _whole(line: bytes) -> bytes:
    """A line without its newline; refuses the last line of a file that was cut."""
    if not line.endswith(b"\n"):
        raise FormatError("the last line has no newline at its end, so the file was cut off", code="invalid_json")
    return line[:-1]


def _parse_file(store: Store, name: str, parse: Callable[[bytes], T]) -> T:
    try:
        return parse(store.read(name))
    except FormatError as error:
        raise _placed(error, store, name) from None


def _placed(error: FormatError, store: Store, name: str, line: int | None = None) -> TraceStorageError:
    """`error` as one about a file of the bundle."""
    path = store.where(name)
    if error.where.startswith(str(store.path)):
        return TraceStorageError(error.reason, where=error.where, code=error.code)
    inside = f":{line}" if line is not None else ""
    inner = error.where if error.where.startswith(":") else f": {error.where}" if error.where else ""
    return TraceStorageError(error.reason, where=f"{path}{inside}{inner}", code=error.code)


def _issue_of(error: FormatError, name: str) -> Issue:
    """The issue that an error about a whole file is; its place is the file's name, not its path."""
    return Issue(error.code, f"{name}: {error.reason}", location=name)


def _exists(path: Path) -> bool:
    """Whether something is at `path`, a broken link included."""
    try:
        path.lstat()
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def gc_paused() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# Folders of bundles


def _looks_like_bundle(entry: os.DirEntry[str]) -> bool:
    if entry.name.startswith("."):
        return False
    if entry.name.endswith(".flight"):  # beside a `.sftrace` of this name it is the same run
        return entry.is_dir() and not _exists(Path(entry.path).with_suffix(".sftrace"))
    return entry.is_dir() if entry.name.endswith(".sftrace") else entry.name.endswith(PACK_SUFFIX) and entry.is_file()


def _summary(path: Path) -> Summary:
    if path.suffix == ".flight":
        return chain_summary(path)
    try:
        bundle = open_bundle(path)
    except TraceStorageError as error:
        return Summary(path, "", "", "unreadable", "", None, 0, 0, (), error.reason)
    manifest, failure = bundle.manifest, bundle.manifest.failure
    return Summary(
        path=path,
        run_id=manifest.run_id,
        agent=manifest.agent_name,
        status=manifest.status,
        created_at=manifest.created_at,
        duration_ms=manifest.totals.duration_ms,
        llm_calls=manifest.totals.llm_calls,
        tool_calls=manifest.totals.tool_calls,
        trace_ids=_trace_ids(bundle),
        failure=None if failure is None else f"{failure.type}: {failure.message}",
    )


def chain_summary(path: Path) -> Summary:
    """A `.flight` in a list: what its manifest says, where our writer wrote it; else what its first event says."""
    from sftrace_otel.bundle.flight import open_flight

    try:
        chain = open_flight(path)
        told = chain.manifest.extra.get("x-sftrace")
        said: dict[str, Json] = told if isinstance(told, dict) else {}
        first = next(chain.events(), None)
    except TraceStorageError as error:
        return Summary(path, "", "", "unreadable", "", None, 0, 0, (), error.reason)
    agent = said.get("agent") or (first.body.get("agent") if first is not None else None)
    created, traces = said.get("created_at") or (first.t_wall if first is not None else ""), said.get("trace_ids")
    return Summary(
        path=path,
        run_id=chain.manifest.run_id,
        agent=str(agent or "unknown"),
        status=str(said.get("status", "unknown")),
        created_at=str(created) if _is_time(created) else "",
        duration_ms=_count(said.get("duration_ms")),
        llm_calls=_count(said.get("llm_calls")) or 0,
        tool_calls=_count(said.get("tool_calls")) or 0,
        trace_ids=tuple(str(one) for one in traces) if isinstance(traces, list) else (),
        failure=None if said.get("failure") is None else str(said["failure"]),
    )


def _count(value: Json) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_time(text: Json) -> bool:
    try:
        sftrace.parse_time(str(text))
    except (FormatError, ValueError):
        return False
    return True


def _trace_ids(bundle: Bundle) -> tuple[str, ...]:
    try:
        return tuple(bundle.run.get("trace_ids", ()))
    except TraceStorageError:
        return ()


def _age(one: Summary) -> tuple[float, str]:
    if not one.created_at:
        return (float("-inf"), one.path.name)
    return (sftrace.parse_time(one.created_at).timestamp(), one.path.name)


def _is_latest(one: Summary, where: str) -> bool:
    return where == "latest"


def _is_run(one: Summary, where: str) -> bool:
    return one.run_id == where


def _is_trace(one: Summary, where: str) -> bool:
    wanted = where.lower()
    return len(wanted) >= 8 and any(known.startswith(wanted) for known in one.trace_ids)


def _is_name(one: Summary, where: str) -> bool:
    name = one.path.name
    stem = name.removesuffix(".zip").removesuffix(".sftrace").removesuffix(".flight")
    return where in (name, name.removesuffix(".zip"), stem)
