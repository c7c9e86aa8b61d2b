# SPDX-License-Identifier: Apache-2.0
"""Files of `.flight` bundles: the writer that appends to a live chain, and the reader that verifies one.

Decision: the chain is written where it will be read, in `.<name>.flight.journal/`, and the folder is renamed at close.
Each event is one `write` to a file opened for appending, blobs are there before the line that names them, and the
manifest comes last; so what was appended survives the death of the process at any moment, and no line is ever written
again. A lock on `events.jsonl` keeps a second writer out, and `recover` away from a living one. Reading is one pass in
constant memory; blobs are looked at when a line names them. Rejected: a journal of another form that is turned into a
chain at the end (a kill would leave nothing that verifies), and a buffer of lines (lost with the process).
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from sftrace_otel.bundle.build import timestamp
from sftrace_otel.bundle.journal import append_to, hold
from sftrace_otel.bundle.records import JOURNAL_SUFFIX
from sftrace_otel.bundle.store import FolderStore, open_store
from sftrace_otel.bundle.write import is_flight, not_writable, publish, reporting, require_free, sync_folder, write_file
from sftrace_otel.errors import FormatError, PayloadError, TraceStorageError
from sftrace_otel.formats import Json, canonical, flight
from sftrace_otel.formats.flight import (
    EVENTS_FILE,
    GENESIS,
    MANIFEST_FILE,
    SUFFIX,
    BlobSink,
    ChainChecker,
    Finding,
    FlightEvent,
    FlightManifest,
)
from sftrace_otel.formats.sftrace import SIGNATURE_FILE

__all__ = ["FlightBundle", "FlightValidation", "FlightWriter", "is_flight", "open_flight", "verify_flight"]

SPILL_BYTES = 16384
"""Canonical bytes of a body above which its biggest members go to blobs."""
KNOWN_FILES = frozenset({MANIFEST_FILE, EVENTS_FILE, SIGNATURE_FILE})
"""What may be in a bundle besides its blobs."""
MAX_FINDINGS = 1000
"""Findings that a verification keeps; of the others it says how many there were."""
_SMALLEST_SPILL = 256  # a reference takes about as much
_NEW = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)

_forks = 0
"""How often this process is a fork of the one that imported this module."""


def _forked() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class FlightWriter:
    """Writes one `.flight` bundle, event by event. Any thread may append; there is one chain.

    Args:
        path: Where the bundle will be; its name ends in `.flight`. Until `close` it is `.<name>.flight.journal` beside.
        run_id: The run of every event.
        overwrite: Replace a `.flight` bundle that is there, at `close`.
        fsync: What is flushed to the disk: `never`, at `close`, or each `event`. A killed process loses nothing either
            way; a power cut loses what was not flushed.
        spill_bytes: Canonical bytes of a body above which its biggest members are put into blobs.
        scrub: Redacts the `repr` of values that JSON cannot hold. All else is redacted before it is appended (§7).
        capabilities: Names to list in the manifest besides those that the writer sees being used.
        clock: ns since the epoch and ns on a clock that never steps back, for events appended without times.

    Attributes:
        target: Where the bundle will be.
        folder: Where the chain is until then.
        earlier: The journal of a writer that died, at the place where this one would have been; None if there is none.
        size: Bytes written so far.
        head, count: `hash` of the last event, and how many there are.
        overwrite: May be changed until `close`.

    Raises:
        TraceStorageError: `path` is no place for a bundle (`bad_target`, `exists`), another writer is at it
            (`journal_in_use`), or the folder cannot be written (`not_writable`).
    """

    def __init__(
        self,
        path: Path | str,
        *,
        run_id: str,
        overwrite: bool = False,
        fsync: str = "close",
        spill_bytes: int = SPILL_BYTES,
        scrub: Callable[[str], str] = str,
        capabilities: Iterable[str] = (),
        clock: tuple[Callable[[], int], Callable[[], int]] = (time.time_ns, time.monotonic_ns),
    ) -> None:
        if fsync not in ("never", "close", "event"):
            raise ValueError("fsync is never, close or event")
        self.target = Path(path).expanduser()
        self.run_id = run_id
        self.earlier: Path | None = None
        self.size = 0
        self.head = GENESIS
        self.count = 0
        self.overwrite = overwrite
        self._fsync = fsync
        self._sync = fsync == "event"
        self._spill = spill_bytes
        self._scrub = scrub
        self._used = set(capabilities)
        self._wall, self._mono = clock
        self._lock = threading.Lock()
        self._forks = _forks
        self._file = -1
        require_free(self.target, overwrite=overwrite, suffix=SUFFIX)
        with reporting(self.target):
            self.folder = self._make_folder()
            self._file = os.open(self.folder / EVENTS_FILE, _NEW, 0o600)
            hold(self._file)
        self._origin = self._mono()

    def _make_folder(self) -> Path:
        """Never into what another writer left: that stays, for `recover`."""
        folder = self.target.with_name(f".{self.target.name}{JOURNAL_SUFFIX}")
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            if is_written(folder):
                text = "another writer is at this bundle; choose another name"
                raise TraceStorageError(text, where=str(self.target), code="journal_in_use") from None
            self.earlier = folder
            name = f".{self.target.stem}.{secrets.token_hex(4)}{SUFFIX}{JOURNAL_SUFFIX}"
            folder = self.target.with_name(name)
            folder.mkdir(mode=0o700)
        return folder

    def append(
        self,
        type: str,  # noqa: A002 (the field's name)
        body: Mapping[str, Any],
        *,
        parents: Sequence[int] = (),
        t_mono_ns: int | None = None,
        t_wall: str | None = None,
        v: int = 1,
        extra: Mapping[str, Json] | None = None,
    ) -> int:
        """Append one event; it is in the file when this returns.

        Args:
            type: Event type, dotted.
            body: Values of the program, redacted already; stored as `flight.encode_value` says, big members in blobs.
                What `blob`, `flight.redacted` and `flight.unrepr` give is stored as it is.
            parents: seq of the events that this one hangs on.
            t_mono_ns: ns since run.start; by default since the writer was made.
            t_wall: RFC 3339 in UTC; by default now.
            v: Version of the event's schema.
            extra: Fields of the envelope that v0.1.0 does not know.

        Returns:
            The seq of the event.

        Raises:
            TraceStorageError: The writer is closed or of another process, or the file cannot be written; a line that
                did not fit is taken back.
            PayloadError: A member of the body has a name that means something else (`flight.RESERVED`) or is not NFC.
            CanonicalizationError: The body has no canonical form.
        """
        stored, content, kept = self._stored(body)
        mono = self._mono() - self._origin if t_mono_ns is None else t_mono_ns
        wall = timestamp(self._wall()) if t_wall is None else t_wall
        with self._lock:
            if self._file < 0 or self._forks != _forks:
                self._require_open()
            seq = self.count
            if parents and not (min(parents) >= 0 and max(parents) < seq):
                raise TraceStorageError(f"parents of the event {seq} are not before it", code="invalid_parent")
            if extra:
                sealed = flight.seal(
                    seq=seq, run_id=self.run_id, type=type, body=kept, prev_hash=self.head, t_wall=wall,
                    t_mono_ns=mono, parents=parents, v=v, extra=extra,
                )  # fmt: skip
            else:
                sealed = flight.seal_canonical(
                    stored, content, seq, self.run_id, type, self.head, wall, mono, parents, v
                )
            try:
                self.size += append_to(self._file, sealed.line)
                if self._sync:
                    os.fsync(self._file)
            except OSError as error:
                raise not_writable(error, self.target) from error
            self.head = sealed.hash
            self.count = seq + 1
            if type not in _PLAIN_TYPES or b'"$' in stored:
                self._used.update(capabilities_of(sealed.line))
        return seq

    def blob(self, data: bytes, media_type: str = flight.BYTES_MEDIA) -> dict[str, Json]:
        """Store bytes, redacted already, and give the object that stands for them in a body.

        Raises:
            TraceStorageError: As `append`.
        """
        digest = "sha256:" + sha256(data).hexdigest()
        self._require_open()
        with reporting(self.target):
            self._put(self.folder / flight.blob_name(digest), data)
        return flight.blob_ref(digest, media_type, len(data))

    def close(
        self, *, capabilities: Iterable[str] = (), extra: Mapping[str, Json] | None = None, target: Path | None = None
    ) -> Path:
        """Write the manifest and put the bundle in its place. A second call gives the same answer.

        Args:
            capabilities: More names for the manifest.
            extra: More members for the manifest.
            target: Another place than the one that the writer was made with.

        Raises:
            TraceStorageError: The bundle cannot be put there; what was written stays in the journal, whole.
        """
        with self._lock:
            if self._file < 0:
                return self.target
            self._require_open()
            self.target = target or self.target
            self._used.update(capabilities)
            names = [name for name in flight.CAPABILITIES if name in self._used]
            manifest = FlightManifest(
                run_id=self.run_id,
                head_hash=self.head,
                event_count=self.count,
                capabilities=[*names, *sorted(self._used.difference(flight.CAPABILITIES))],
                extra=dict(extra or {}),
            )
            try:
                with reporting(self.folder):
                    finish_flight(self.folder, manifest, fsync=self._fsync != "never")
                return publish(self.folder, self.target, overwrite=self.overwrite, suffix=SUFFIX)
            finally:
                self._abandon()

    def abandon(self) -> None:
        """Close the file and leave the journal as it is, for `recover`; a forked child does this with its parent's."""
        with self._lock:
            self._abandon()

    def let_go(self) -> None:
        """As `abandon`, without waiting for the lock: in a forked child nobody may be there to give it back."""
        self._abandon()

    def discard(self) -> None:
        """Remove the journal and everything in it."""
        self.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _abandon(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _require_open(self) -> None:
        if self._file < 0:
            raise TraceStorageError("the writer is closed", where=str(self.target), code="closed")
        if self._forks != _forks:
            text = "the chain belongs to the process that began it; a forked one begins its own"
            raise TraceStorageError(text, where=str(self.target), code="closed")

    def _stored(self, body: Mapping[str, Any]) -> tuple[bytes, bytes, Mapping[str, Any]]:
        """The body's canonical bytes, those without its volatile members, and its stored form."""
        kept: Mapping[str, Any] = body
        data = flight.stored_bytes(body) if type(body) is dict else None
        if data is None:
            kept = _encoded(body, self.blob, self._scrub)
            data = canonical.rfc8785_nfc(dict(kept))
        if len(data) > self._spill:
            kept, _ = self._spilled(dict(kept), len(data) - self._spill)
            data = canonical.rfc8785_nfc(dict(kept))
        return data, flight.content_bytes(kept, data), kept

    def _spilled(self, value: Any, excess: int) -> tuple[Any, int]:
        """A body, or a part of one, with its biggest parts in blobs, and how much of `excess` bytes is left.

        What names a blob stays in the line, since the chain commits to the blobs that lines name; its parts may go.
        """
        spilled = dict(value) if isinstance(value, dict) else list(value)
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        written = sorted(((canonical.rfc8785_nfc(item), at, item) for at, item in parts), key=lambda one: -len(one[0]))
        for data, at, item in written:
            if excess <= 0 or len(data) < _SMALLEST_SPILL:
                break
            if isinstance(item, str):
                spilled[at] = dict(self.blob(item.encode(), flight.TEXT_MEDIA))
            elif b'"$blob":' not in data:
                spilled[at] = dict(self.blob(data, flight.VALUE_MEDIA))
            elif not isinstance(item, dict) or flight.RESERVED.isdisjoint(item):
                spilled[at], excess = self._spilled(item, excess)
                continue
            else:
                continue  # stands for something already
            excess -= len(data)
        return spilled, excess

    def _put(self, path: Path, data: bytes) -> None:
        if path.exists():
            return
        for folder in (path.parents[2], path.parents[1], path.parent):
            folder.mkdir(exist_ok=True, mode=0o700)
        scratch = path.with_suffix(f".{threading.get_ident():x}.part")
        write_file(scratch, [data], fsync=self._sync)
        scratch.replace(path)
        self.size += len(data)


_PLAIN_TYPES = frozenset(flight.EVENT_TYPES) - {"clock.read", "rng.draw"}


def capabilities_of(line: bytes) -> Iterator[str]:
    """What a canonical line uses, in the words of the manifest."""
    if b'"type":"clock.read"' in line or b'"type":"rng.draw"' in line:
        yield "nondeterminism"
    if b'"type":"x-sftrace.' in line:
        yield "x-sftrace"
    if b'"$blob":"sha256:' in line:
        yield "blobs"
    if b'"ref":"hmac-sha256:' in line:
        yield "redaction-refs"


def _encoded(body: Mapping[str, Any], blob: BlobSink, scrub: Callable[[str], str]) -> dict[str, Any]:
    """A body's members in their stored form. Their names are the type's, so none may look like ours."""
    if isinstance(body, flight.Stored):
        return dict(body)
    for name in body:
        if name in flight.RESERVED or not unicodedata.is_normalized("NFC", name):
            raise PayloadError(f"a member of a body cannot be named {canonical.printable(name)}")
    return {name: flight.encode_value(item, blob, scrub=scrub) for name, item in body.items()}


def finish_flight(folder: Path, manifest: FlightManifest, *, fsync: bool) -> None:
    """Make a folder with a chain and its blobs a complete bundle: the manifest is written last. Raises OSError."""
    for inner, _, names in os.walk(folder):
        Path(inner).chmod(0o700)
        for name in names if fsync else ():
            handle = os.open(Path(inner, name), os.O_RDONLY | _NO_FOLLOW)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        if fsync:
            sync_folder(Path(inner))
    scratch = folder / f".{MANIFEST_FILE}.part"
    write_file(scratch, [flight.dump_manifest(manifest)], fsync=fsync)
    scratch.replace(folder / MANIFEST_FILE)
    if fsync:
        sync_folder(folder)


def is_written(folder: Path) -> bool:
    """Whether a living writer holds the chain in `folder`."""
    try:
        handle = os.open(folder / EVENTS_FILE, os.O_RDWR | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return False
    try:
        return not hold(handle)
    finally:
        os.close(handle)


class FlightBundle:
    """An open `.flight` bundle. Made by `open_flight`."""

    def __init__(self, store: FolderStore) -> None:
        self.store = store
        self.path = store.path

    @cached_property
    def manifest(self) -> FlightManifest:
        """`manifest.json`. Raises TraceStorageError."""
        with self._reading(MANIFEST_FILE):
            return flight.parse_manifest(self.store.read(MANIFEST_FILE))

    def lines(self) -> Iterator[bytes]:
        """The lines of `events.jsonl`, each with its newline if it has one. Raises TraceStorageError."""
        return self.store.lines(EVENTS_FILE)

    def events(self) -> Iterator[FlightEvent]:
        """The events in order, one at a time; digests are not looked at (`verify` does). Raises TraceStorageError."""
        for number, line in enumerate(self.lines(), start=1):
            with self._reading(f"{EVENTS_FILE}:{number}"):
                if not line.endswith(b"\n"):
                    raise FormatError("the last line has no newline: it was cut", code="torn_line")
                event = flight.parse_event(line)
            yield event

    def blob(self, digest: str) -> bytes:
        """The bytes of the blob `sha256:<hex>`.

        Raises:
            TraceStorageError: Not such a name (`invalid_blob`), not there (`blob_missing`), or its bytes do not have
                that digest (`blob_mismatch`).
        """
        name = self._blob_file(digest)
        data = self.store.read(name)
        if "sha256:" + sha256(data).hexdigest() != digest:
            raise self.store.fault(name, "does not have the digest in its name", code="blob_mismatch")
        return data

    def value(self, stored: Json) -> Any:
        """The program's value of what a body holds (`flight.decode_value`). Raises FormatError."""
        return flight.decode_value(stored, self.blob)

    def verify(self, *, strict: bool = False) -> FlightValidation:
        """Check everything (§6), in one pass and constant memory. Faults are in the answer, never raised.

        Args:
            strict: A file that is no part of the format is a finding, not a warning.
        """
        return _verify(self, strict)

    def _blob_file(self, digest: str) -> str:
        try:
            name = flight.blob_name(digest)
        except FormatError as error:
            raise TraceStorageError(str(error), where=str(self.path), code=error.code) from None
        if not self.store.has(name):
            raise self.store.fault(name, "the blob is missing", code="blob_missing")
        return name

    def look_at(self, digest: str) -> tuple[int, str]:
        """Size and digest of a blob, without holding it in memory."""
        name, found, size = self._blob_file(digest), sha256(), 0
        for chunk in self.store.chunks(name):
            found.update(chunk)
            size += len(chunk)
        return size, f"sha256:{found.hexdigest()}"

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except TraceStorageError:
            raise
        except FormatError as error:
            raise TraceStorageError(str(error), where=self.store.where(name), code=error.code) from None


class FlightValidation(Struct, frozen=True):
    """The outcome of `verify_flight`.

    Attributes:
        findings: What is wrong, in order; after `MAX_FINDINGS` one that says how many more there were.
        exit_code: 0 valid, 1 invalid, 2 unreadable.
        run_id, head_hash, event_count: What the events say; to be noted elsewhere, since a chain alone cannot show
            that all of it was written anew.
        canonical: Whether every line is spelled canonically.
        warnings: What is odd but breaks nothing.
    """

    findings: tuple[Finding, ...]
    exit_code: int
    run_id: str | None = None
    head_hash: str | None = None
    event_count: int = 0
    canonical: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def open_flight(path: Path | str) -> FlightBundle:
    """The `.flight` bundle at `path`; its parts are read when they are asked for.

    Raises:
        TraceStorageError: There is no folder (`missing_file`).
    """
    place = Path(path).expanduser()
    store = None if place.is_file() else open_store(place)
    if not isinstance(store, FolderStore):
        text = "is not a folder; a .flight bundle is one"
        raise TraceStorageError(text, where=str(path), code="missing_file")
    return FlightBundle(store)


def verify_flight(path: Path | str, *, strict: bool = False) -> FlightValidation:
    """Check a `.flight` bundle (§6), as `FlightBundle.verify`. Faults are in the answer, never raised."""
    try:
        return open_flight(path).verify(strict=strict)
    except TraceStorageError as error:
        finding = Finding(error.code, str(error), location=str(path))
        return FlightValidation((finding,), 2)


def _verify(bundle: FlightBundle, strict: bool) -> FlightValidation:
    findings = _Findings()
    manifest: FlightManifest | None = None
    try:
        manifest = flight.parse_manifest(bundle.store.read(MANIFEST_FILE))
    except FormatError as error:
        findings.add(_finding_of(error, MANIFEST_FILE))
    checker = ChainChecker(manifest.run_id if manifest else None, bundle.look_at)
    try:
        for line in bundle.lines():
            for finding in checker.line(line):
                findings.add(finding)
    except TraceStorageError as error:
        findings.add(_finding_of(error, EVENTS_FILE))
    else:
        if manifest is not None:
            for finding in checker.end(manifest):
                findings.add(finding)
    unlisted = list(_unlisted(bundle, checker))
    if strict:
        for name, text in unlisted:
            findings.add(Finding("unlisted_file", text, location=name))
    warnings = [*_spelling(checker), *(() if strict else (text for _, text in unlisted))]
    return FlightValidation(
        findings=findings.all(),
        exit_code=findings.exit_code,
        run_id=checker.run_id,
        head_hash=checker.head,
        event_count=checker.count,
        canonical=not checker.odd,
        warnings=tuple(warnings),
    )


class _Findings:
    """The first findings, and a count of the rest: a record of a million bad lines must not fill the memory."""

    def __init__(self) -> None:
        self._kept: list[Finding] = []
        self._more = 0
        self.exit_code = 0

    def add(self, finding: Finding) -> None:
        self.exit_code = max(self.exit_code, flight.exit_code([finding]))
        if len(self._kept) < MAX_FINDINGS:
            self._kept.append(finding)
        else:
            self._more += 1

    def all(self) -> tuple[Finding, ...]:
        if not self._more:
            return tuple(self._kept)
        return (*self._kept, Finding("more_findings", f"and {self._more} more"))


def _finding_of(error: FormatError, name: str) -> Finding:
    if isinstance(error, TraceStorageError):
        return Finding(error.code, error.reason, location=name)
    return Finding(error.code, str(error), field=error.where or None, location=name)


def _spelling(checker: ChainChecker) -> Iterator[str]:
    if checker.odd:
        text = f"{EVENTS_FILE}: line {checker.odd} is not canonical JSON: its values are right, but respelled"
        if checker.crlf:
            text += "; it ends in CRLF: git or an editor rewrote the line endings (.gitattributes: '*.flight/** -text')"
        yield text


def _unlisted(bundle: FlightBundle, checker: ChainChecker) -> Iterator[tuple[str, str]]:
    """What is in the folder and no part of the bundle, with what to say of it; links are named, not followed."""
    loose = 0
    try:
        for name in bundle.store.names():
            parts = name.split("/")
            if name in KNOWN_FILES:
                continue
            if parts[0] == flight.BLOBS_FOLDER and name == _blob_place(parts[-1]):
                loose += checker.has_seen_all and not checker.has_seen(f"sha256:{parts[-1]}")
            else:
                yield name, f"{name} is no part of the bundle, and was not read"
    except TraceStorageError as error:
        yield str(error.where), str(error)
    if loose:
        yield flight.BLOBS_FOLDER, f"{loose} blobs are named by no event, and were not read"


def _blob_place(name: str) -> str:
    try:
        return flight.blob_name(f"sha256:{name}")
    except FormatError:
        return ""
