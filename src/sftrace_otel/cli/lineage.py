# SPDX-License-Identifier: Apache-2.0
"""`lineage PATH|DIR…`: which bundle came from which, and which parents are missing or were changed."""

from __future__ import annotations

import argparse

from sftrace_otel.cli.places import add_json, folder
from sftrace_otel.cli.text import clean, note, say, say_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sftrace_otel.analysis.lineage import Node

USAGE = "[PATH|DIR …] [--json]"
EXITS = "Exit code: 0; 1 a parent is missing or was changed since; 2 a path cannot be read."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lineage`."""
    parser.add_argument(
        "paths", nargs="*", metavar="PATH|DIR", help="bundles, whose folders are looked through, or folders of bundles"
    )
    parser.add_argument("--dir", metavar="DIR", help="where to look up ids and 'latest' (default: sftraces)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the trees."""
    from sftrace_otel.analysis.lineage import lineage

    roots = lineage(_paths(arguments))
    nodes = list({id(node): node for root in roots for node in root.walk()}.values())
    missing = [node for node in nodes if node.path is None]
    changed = [node for node in nodes if node.changed]
    if arguments.json:
        say_json({"trees": [_document(root) for root in roots]})
    else:
        for root in roots:
            say(*_tree(root))
        for node in missing:
            note(f"the parent {clean(node.name or node.run_id)} ({clean(node.run_id)}) is not among these bundles")
        for node in changed:
            note(f"the events of {clean(node.name)} are not those that its children were made of")
        if not roots:
            note("no bundle there; record a run first, or name the folder of the bundles")
    return 1 if missing or changed else 0


def _paths(arguments: argparse.Namespace) -> list[Path]:
    from pathlib import Path as Place

    from sftrace_otel.bundle.read import resolve

    where = folder(arguments.dir)
    if not arguments.paths:
        return [where]
    return [
        Place(one).expanduser() if Place(one).expanduser().is_dir() else resolve(one, dir=where)
        for one in arguments.paths
    ]


def _tree(node: Node, first: str = "", rest: str = "") -> Iterator[str]:
    what = (
        "MISSING" if node.path is None else f"{node.how}, {node.status}" + (", CHANGED since" if node.changed else "")
    )
    yield f"{first}{clean(node.name or '?')}  {clean(node.run_id)}  {clean(what)}"
    for at, child in enumerate(node.children):
        last = at == len(node.children) - 1
        yield from _tree(child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))


def _document(node: Node) -> dict[str, object]:
    return {
        "run_id": node.run_id,
        "name": node.name,
        "path": None if node.path is None else str(node.path),
        "how": node.how,
        "status": node.status,
        "changed": node.changed,
        "children": [_document(child) for child in node.children],
    }
