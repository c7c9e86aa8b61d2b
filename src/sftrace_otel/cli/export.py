# SPDX-License-Identifier: Apache-2.0
"""`export PATH --verifier`: what a bundle is given as to people who do not have this package."""

from __future__ import annotations

import argparse

from sftrace_otel.cli.places import add_json, add_path, locate
from sftrace_otel.cli.text import clean, say, say_json

USAGE = "PATH --verifier [-o OUT] [--overwrite] [--json]"
EXITS = "Exit code: 0; 2 there is no such bundle, or OUT cannot be written."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`."""
    add_path(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--verifier",
        action="store_true",
        help="a Python program that verifies the bundle with the standard library alone",
    )
    parser.add_argument("-o", "--output", metavar="OUT", help="the file (default: beside PATH, NAME.flight.verify.py)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Export and say where it is."""
    from pathlib import Path

    from sftrace_otel.analysis.export import VERIFIER_SUFFIX, export_verifier

    bundle = locate(arguments)
    out = Path(arguments.output).expanduser() if arguments.output else None
    place = export_verifier(bundle, out, overwrite=arguments.overwrite)
    if arguments.json:
        say_json({"bundle": str(bundle), "verifier": str(place)})
        return 0
    own = place.name == bundle.name + VERIFIER_SUFFIX and place.parent == bundle.parent
    say(f"{clean(place)}: run it with: python3 {clean(place)}{'' if own else f' {clean(bundle)}'}")
    return 0
