# SPDX-License-Identifier: Apache-2.0
"""How much room the bundles of a folder may take, and which of them go when it is too much.

Decision: only what this package recorded by itself goes: a folder with a name that the recorder gives, the manifest of
our writer in it, recorded or recovered. Completed runs go before all others (failed, cut off, kept for a reason), the
oldest first, and never the newest bundle. A bundle goes by a rename and then file by file, so none is ever half there.
Journals of open runs, forks, bundles at paths that somebody chose, packed bundles and foreign files are never touched
and do not count. The folder is looked through when what was added may have filled it, not at each close.
Rejected: a file that keeps the sum (several processes share a folder, and people delete by hand).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sftrace_otel.bundle.read import open_bundle
from sftrace_otel.errors import TraceStorageError

_NAME = re.compile(r".+-\d{8}T\d{6}Z-[0-9a-f]{8}-[0-9a-f]{8}\.(sftrace|flight)")
_WRITER = "sftrace-otel "
_ORIGINS = ("recorded", "recovered")


@dataclass(frozen=True, slots=True)
class _Ours:
    """One of our bundles; sorted by who goes first."""

    path: Path
    completed: bool
    age: str
    size: int

    @property
    def rank(self) -> tuple[bool, str, str]:
        return (not self.completed, self.age, self.path.name)


class Budget:
    """The room that bundles in `folder` may take, in bytes. One for each recorder; not thread-safe."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._left = 0

    def spent(self, path: Path) -> list[Path]:
        """The bundle `path` is there now: remove others until all fit. Gives what was removed. Raises OSError."""
        self._left -= size_of(path)
        if self._left > 0:
            return []
        return list(self._trim(path))

    def _trim(self, newest: Path) -> Iterator[Path]:
        found = sorted(ours(self.folder), key=lambda one: one.rank)
        total = sum(one.size for one in found)
        for one in found:
            if total <= self.limit:
                break
            if one.path.name != newest.name and _remove(one.path):
                total -= one.size
                yield one.path
        # Other processes add too: look again after a tenth of the room, or when it is full.
        self._left = min(self.limit - total, self.limit // 10)


def ours(folder: Path) -> Iterator[_Ours]:
    """The bundles in `folder` that the recorder made and named."""
    with os.scandir(folder) as found:
        names = [entry.name for entry in found if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
    for name in names:
        path = folder / name
        try:
            if path.suffix == ".flight":
                yield from _our_chain(path)
                continue
            bundle = open_bundle(path)
            manifest, run = bundle.manifest, bundle.run
            mine = (manifest.environment.stepfork_version or "").startswith(_WRITER)
            if mine and bundle.provenance.get("origin") in _ORIGINS:
                completed = manifest.status == "completed" and "kept" not in run
                yield _Ours(path, completed, manifest.created_at, size_of(path))
        except (TraceStorageError, OSError):
            continue


def _our_chain(path: Path) -> Iterator[_Ours]:
    from sftrace_otel.bundle.flight import open_flight

    manifest = open_flight(path).manifest
    told = manifest.extra.get("x-sftrace")
    if isinstance(told, dict) and str(told.get("tool")).startswith(_WRITER) and told.get("origin") in _ORIGINS:
        completed = told.get("status") == "completed" and told.get("kept") is not True
        yield _Ours(path, completed, str(told.get("created_at")), size_of(path))


def size_of(folder: Path) -> int:
    """Bytes of the files below `folder`; links count as nothing. What vanishes meanwhile too."""
    total = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(inner, name))  # noqa: PTH118
            except OSError:
                continue
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _remove(path: Path) -> bool:
    """Take a bundle away; False if it could not be, or another process did."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    try:
        path.rename(aside)
    except OSError:
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True
