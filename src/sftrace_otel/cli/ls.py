# SPDX-License-Identifier: Apache-2.0
"""`ls [DIR]`: the bundles there, newest first."""

from __future__ import annotations

import argparse

from sftrace_otel.cli.places import add_json, folder
from sftrace_otel.cli.text import note, say, say_json, shorten, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sftrace_otel.bundle.read import Summary

USAGE = "[DIR] [--trace ID] [--failed] [--json]"
EXITS = "Exit code: 0; 2 when there is no such folder."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ls`."""
    parser.add_argument("dir", nargs="?", metavar="DIR", help="folder of bundles (default: sftraces)")
    parser.add_argument(
        "--trace", metavar="ID", help="only bundles of this trace id (or its beginning, 8 characters up)"
    )
    parser.add_argument("--failed", action="store_true", help="only failed runs")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the bundles of a folder."""
    from sftrace_otel.bundle.read import list_bundles

    where = folder(arguments.dir)
    if not where.is_dir():
        note(
            f"sftrace ls: {shorten(where, 200)}: no such folder; record a run first, or name the folder of the bundles"
        )
        return 2
    left = sum(1 for path in where.glob(".*.sftrace.journal") if path.is_dir())
    found = [one for one in list_bundles(where) if _wanted(one, arguments.trace, arguments.failed)]
    if arguments.json:
        say_json({"dir": str(where), "bundles": [_document(one) for one in found], "unfinished": left})
    elif found:
        say(*table([_row(one) for one in found], ["CREATED", "STATUS", "AGENT", "LLM", "TOOLS", "MS", "BUNDLE"]))
    if left and not arguments.json:
        noun = "recording is" if left == 1 else "recordings are"
        note(f"{left} {noun} open or cut off; of those that were cut off, bundles are made by: sftrace recover DIR")
    if not found and not arguments.json:
        note(f"no bundle {'that matches ' if arguments.trace or arguments.failed else ''}in {shorten(where, 200)}")
    return 0


def _wanted(one: Summary, trace: str | None, failed: bool) -> bool:
    if failed and one.status != "failed":
        return False
    return trace is None or any(known.startswith(trace.lower()) for known in one.trace_ids)


def _row(one: Summary) -> list[object]:
    created = str(one.created_at or "")[:19].replace("T", " ")
    took = "" if one.duration_ms is None else one.duration_ms
    return [created, one.status, shorten(one.agent, 32), one.llm_calls, one.tool_calls, str(took), one.path.name]


def _document(one: Summary) -> dict[str, object]:
    return {name: _plain(getattr(one, name)) for name in one.__struct_fields__}


def _plain(value: object) -> object:
    from pathlib import Path

    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
