# SPDX-License-Identifier: Apache-2.0
"""`convert PATH OUT`: a bundle in the other format."""

from __future__ import annotations

import argparse

from sftrace_otel.cli.places import add_json, add_path, locate
from sftrace_otel.cli.text import clean, note, say, say_json

USAGE = "PATH OUT [--overwrite] [--json]"
EXITS = "Exit code: 0; 2 PATH cannot be read or does not verify, or OUT cannot be written."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `convert`."""
    add_path(parser)
    parser.add_argument("output", metavar="OUT", help="the new bundle: NAME.flight, or NAME.sftrace")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a bundle of its format")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Convert, and say what the other format has no room for."""
    from pathlib import Path

    from sftrace_otel.bundle import convert
    from sftrace_otel.errors import TraceStorageError

    path, out = locate(arguments), Path(arguments.output)
    is_chain = path.suffix == ".flight"
    if out.suffix not in (".flight", ".sftrace") or (out.suffix == ".flight") == is_chain:
        wanted = ".sftrace" if is_chain else ".flight"
        text = f"the name of what a {path.suffix or 'bundle'} is converted into ends in {wanted}"
        raise TraceStorageError(text, where=str(out), code="bad_target")
    made = (convert.to_sftrace if is_chain else convert.to_flight)(path, out, overwrite=arguments.overwrite)
    if arguments.json:
        say_json({"from": str(path), "bundle": str(made.path), "events": made.events, "not_carried": made.left})
        return 0
    note(*(f"sftrace convert: not carried: {clean(what)} ({count})" for what, count in made.left.items()))
    say(f"{clean(made.path)}: {made.events} events")
    return 0
