# SPDX-License-Identifier: Apache-2.0
"""`schema [NAME]`: the JSON Schema of a file of the format, or the names of all."""

from __future__ import annotations

import argparse

from sftrace_otel.cli.text import clean, note, say

USAGE = "[NAME]"
EXITS = "Exit code: 0; 2 when there is no schema of this name."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `schema`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="manifest, event, wire, …; all names when left out")


def run(arguments: argparse.Namespace) -> int:
    """Print a schema, or the names."""
    from sftrace_otel.formats.schema import NAMES, schema

    if arguments.name is None:
        say(*NAMES)
        return 0
    if arguments.name not in NAMES:
        note(f"sftrace schema: {clean(arguments.name)}: no such schema; there are {', '.join(NAMES)}")
        return 2
    say(schema(arguments.name).rstrip("\n"))
    return 0
