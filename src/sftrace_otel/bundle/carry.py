# SPDX-License-Identifier: Apache-2.0
"""What a bundle made of another one takes along: sidecars without the rows that no longer hold, and their blobs.

Decision: only files that `integrity.json` lists go along, and only if their checksum still holds: sealing a changed
file again would make it look untouched. Blobs go along where something that stays names them, so that what a fork cut
off is not carried in its folder. Rejected: copying the folder (foreign files, stale rows, bodies from after the fork).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

from sftrace_otel.bundle.read import Bundle
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats import sidecars
from sftrace_otel.formats.sftrace import INTEGRITY_FILE, REQUIRED_FILES

_ROWS = {
    sidecars.CALLS_FILE: "calls",
    sidecars.WIRE_FILE: "wire",
}
_BLOB = re.compile(rb"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Carried:
    """Sidecars by name, and blobs by the name that they have in both bundles."""

    sidecars: dict[str, bytes]
    blobs: dict[str, Path]


def carry(bundle: Bundle, *, stale: Set[str] = frozenset()) -> Carried:
    """The sidecars of `bundle` for another one, without rows about events in `stale` and without `provenance.json`.

    Raises:
        TraceStorageError: A sidecar cannot be read, or does not have its checksum.
    """
    kept: dict[str, bytes] = {}
    listed = bundle.listed()
    for name in sorted(listed):
        if name in REQUIRED_FILES or name in (INTEGRITY_FILE, sidecars.PROVENANCE_FILE):
            continue
        if not name.startswith(f"{sidecars.BLOBS_FOLDER}/"):
            data = _verified(bundle, name, listed[name])
            kept[name] = _filtered(data, _ROWS[name], stale) if name in _ROWS and stale else data
    return Carried(kept, _blobs(bundle, kept.values(), listed))


def _verified(bundle: Bundle, name: str, digest: str | None) -> bytes:
    data = bundle.read(name)
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        text = f"does not have the SHA-256 hash that {INTEGRITY_FILE} says"
        raise TraceStorageError(text, where=str(bundle.path / name), code="integrity_mismatch")
    return data


def _filtered(data: bytes, sidecar: str, stale: Set[str]) -> bytes:
    lines = data.removesuffix(b"\n").split(b"\n")
    return b"".join(line + b"\n" for line in sidecars.without_events(sidecar, lines, stale))


def _blobs(bundle: Bundle, contents: Iterable[bytes], listed: dict[str, str | None]) -> dict[str, Path]:
    blobs: dict[str, Path] = {}
    for digest in sorted({found.decode() for data in contents for found in _BLOB.findall(data)}):
        name = f"{sidecars.BLOBS_FOLDER}/{digest[:2]}/{digest[2:4]}/{digest}"
        if name in listed:
            bundle.blob(f"sha256:{digest}")  # checks it
            blobs[name] = bundle.path / name
    return blobs
