# SPDX-License-Identifier: Apache-2.0
"""Who came from whom: the bundles of folders as trees, with parents that are missing or were changed since.

A bundle names its parents by run id, name and the digest of their events (`provenance.json`), or the run that it goes
on from or that started its process (`run.json`, `origin`). Decision: a parent is found by its run id among the bundles
that are looked at, since a file can be renamed, and its events are hashed again, since a record of them can be
rewritten. A parent that is not there stands in the tree as what its child says of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sftrace_otel.bundle.read import Bundle, list_bundles, open_bundle
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats.sftrace import EVENTS_FILE

__all__ = ["Node", "lineage"]


@dataclass(kw_only=True, eq=False)
class Node:
    """A bundle, or a parent of one that was not found.

    Attributes:
        run_id: Its run.
        name: Its file's name; of a missing parent what the child says, None if nothing.
        path: Where it is; None if it is missing.
        how: How it came from its parent: "forked at step 6, 1 override", "recorded" without one.
        status: The run's status; "missing" of a parent that was not found.
        changed: Whether the events are other ones than the child was made of.
        children: What was made of it, by name.
    """

    run_id: str
    name: str | None
    path: Path | None = None
    how: str = ""
    status: str = "missing"
    changed: bool = False
    children: list[Node] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        """The node and everything below it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parent:
    run_id: str
    name: str | None
    events_sha256: str | None


def lineage(paths: Iterable[Path]) -> list[Node]:
    """The trees of the bundles in `paths`: folders, or bundles, whose folders are looked through for their kin.

    Raises TraceStorageError for a path that is neither.
    """
    wanted: set[Path] = set()
    bundles: dict[Path, Bundle] = {}
    for path in paths:
        one = _is_bundle(path)
        for found in _bundles_of(path.parent if one else path):
            bundles.setdefault(found.path.resolve(), found)
        if one:
            opened = open_bundle(path)
            bundles.setdefault(opened.path.resolve(), opened)
            wanted.add(opened.path.resolve())
        else:
            wanted.update(found.resolve() for found in bundles if found.parent == path.resolve())
    roots = _trees(bundles)
    return [root for root in roots if any(node.path and node.path.resolve() in wanted for node in root.walk())]


def _is_bundle(path: Path) -> bool:
    return not path.is_dir() or (path / "manifest.json").exists()


def _bundles_of(folder: Path) -> Iterator[Bundle]:
    for summary in list_bundles(folder):
        if summary.status != "unreadable":
            yield open_bundle(summary.path)


def _trees(bundles: Mapping[Path, Bundle]) -> list[Node]:
    nodes: dict[str, Node] = {}
    links: list[tuple[Node, _Parent]] = []
    copies: list[Node] = []
    for bundle in sorted(bundles.values(), key=lambda one: one.path.name):
        parents, how = _origin(bundle)
        node = Node(
            run_id=bundle.manifest.run_id, name=bundle.path.name, path=bundle.path, how=how,
            status=bundle.manifest.status,
        )  # fmt: skip
        if node.run_id in nodes:
            copies.append(node)
            continue
        nodes[node.run_id] = node
        links += [(node, parent) for parent in parents]
    below: set[str] = set()
    for node, parent in links:
        above = nodes.get(parent.run_id)
        if above is None:
            above = nodes[parent.run_id] = Node(run_id=parent.run_id, name=parent.name)
        if any(one is above for one in node.walk()):
            continue  # a bundle that says that it came from itself
        above.changed = above.changed or _was_changed(above, parent)
        above.children.append(node)
        below.add(node.run_id)
    return [node for node in [*nodes.values(), *copies] if node.run_id not in below]


def _origin(bundle: Bundle) -> tuple[list[_Parent], str]:
    """The parents of a bundle, and how it came from them."""
    told = bundle.provenance
    parents = [
        _Parent(run_id=str(one["run_id"]), name=_text(one.get("name")), events_sha256=_text(one.get("events_sha256")))
        for one in told.get("parents", [])
        if isinstance(one, dict) and one.get("run_id")
    ]
    how = str(told.get("origin") or "recorded")
    if parents:
        point, overrides = told.get("fork_point"), told.get("overrides") or []
        if point:
            how += f" {'after' if how == 'resumed' else 'at'} step {point.get('step')}"
        if overrides:
            how += f", {len(overrides)} override{'s' if len(overrides) > 1 else ''}"
        resumed = told.get("resumed") or {}
        for word, events in (("reused", resumed.get("reused")), ("stubbed", resumed.get("stubbed"))):
            how += f", {len(events)} {word}" if events else ""
        return parents, how
    origin: Any = bundle.run.get("origin")
    for member, words in (
        ("resumes", "a resumed run of it"), ("continues", "goes on from it"), ("parent_run", "a process of it"),
    ):  # fmt: skip
        if isinstance(origin, dict) and isinstance(origin.get(member), str):
            return [_Parent(run_id=origin[member], name=None, events_sha256=None)], f"{how}, {words}"
    return [], how


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _was_changed(above: Node, parent: _Parent) -> bool:
    if above.path is None or parent.events_sha256 is None:
        return False
    digest = hashlib.sha256()
    try:
        for line in open_bundle(above.path).lines(EVENTS_FILE, ends=True):
            digest.update(line)
    except TraceStorageError:
        return True
    return digest.hexdigest() != parent.events_sha256
