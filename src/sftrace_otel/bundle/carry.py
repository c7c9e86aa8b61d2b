# SPDX-License-Identifier: Apache-2.0
"""What a bundle made of another one takes along: sidecars without the rows that no longer hold, and their blobs.

Decision: only files that `integrity.json` lists go along, and only if their checksum still holds: sealing a changed
file again would make it look untouched. Blobs go along where something that stays names them, so that what a fork cut
off is not carried in its folder. Rejected: copying the folder (foreign files, stale rows, bodies from after the fork).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from sftrace_otel.bundle.read import Bundle
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats import sidecars
from sftrace_otel.formats.sftrace import INTEGRITY_FILE, REQUIRED_FILES, SIGNATURE_FILE

_ROWS = {sidecars.CALLS_FILE: "calls", sidecars.WIRE_FILE: "wire"}
_BLOB = re.compile(rb"sha256:([0-9a-f]{64})")
_LONGEST = len("sha256:") + 64


@dataclass(frozen=True, slots=True)
class Carried:
    """Sidecars by name, and blobs by the name they have in both bundles; contents in pieces that can be read once."""

    sidecars: dict[str, Iterable[bytes]]
    blobs: dict[str, Iterable[bytes]]


def carry(bundle: Bundle, *, stale: Set[str] = frozenset(), cut: Set[str] | None = None) -> Carried:
    """The sidecars of `bundle` for another one, without rows about events in `stale` and without `provenance.json`.

    `cut`: those of `stale` that the other one does not have, as `sidecars.without_events` wants them.

    Raises:
        TraceStorageError: A sidecar cannot be read, or does not have its checksum.
    """
    listed = bundle.listed()
    own = {*REQUIRED_FILES, INTEGRITY_FILE, SIGNATURE_FILE, sidecars.PROVENANCE_FILE}
    names = [name for name in sorted(listed) if name not in own and not name.startswith(f"{sidecars.BLOBS_FOLDER}/")]
    digests: set[str] = set()
    for name in names:
        rest = b""
        for piece in _pieces(bundle, name, stale, cut, listed[name]):
            digests.update(found.decode() for found in _BLOB.findall(rest + piece))
            rest = (rest + piece)[-_LONGEST:]  # a name may begin in one piece and end in the next
    return Carried(
        {name: _pieces(bundle, name, stale, cut, listed[name]) for name in names}, _blobs(bundle, digests, listed)
    )


def intact(bundle: Bundle, name: str, pieces: Iterable[bytes], expected: str | None) -> Iterator[bytes]:
    """`pieces`, all of a file, which in the end must have had the digest that is expected (None: any).

    Raises:
        TraceStorageError: They had not (code `integrity_mismatch`).
    """
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        yield piece
    if expected is not None and digest.hexdigest() != expected:
        text = f"does not have the SHA-256 hash that {INTEGRITY_FILE} says"
        raise TraceStorageError(text, where=bundle.store.where(name), code="integrity_mismatch")


def _pieces(bundle: Bundle, name: str, stale: Set[str], cut: Set[str] | None, digest: str | None) -> Iterator[bytes]:
    """The lines of a sidecar, each with its newline if it has one, without stale rows; checked as they are read."""
    if name not in _ROWS or not stale:
        yield from intact(bundle, name, bundle.store.chunks(name), digest)
        return
    yield sidecars.header(_ROWS[name]) + b"\n"
    lines = intact(bundle, name, bundle.lines(name, ends=True), digest)
    for line in sidecars.without_events(_ROWS[name], (line.removesuffix(b"\n") for line in lines), stale, cut):
        yield line + b"\n"


def _blobs(bundle: Bundle, digests: Set[str], listed: dict[str, str | None]) -> dict[str, Iterable[bytes]]:
    blobs: dict[str, Iterable[bytes]] = {}
    for digest in sorted(digests):
        name = f"{sidecars.BLOBS_FOLDER}/{digest[:2]}/{digest[2:4]}/{digest}"
        if name in listed:
            blobs[name] = intact(bundle, name, bundle.store.chunks(name), digest)
    return blobs
