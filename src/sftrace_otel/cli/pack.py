# SPDX-License-Identifier: Apache-2.0
"""`pack PATH`: a bundle as one `.sftrace.zip`, which every verb reads in place."""

from __future__ import annotations

import argparse

from sftrace_otel.cli.places import add_json, add_path, locate
from sftrace_otel.cli.text import clean, note, say, say_json

USAGE = "PATH [-o OUT] [--overwrite] [--json]"
EXITS = "Exit code: 0; 2 the bundle cannot be read, or OUT cannot be written."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pack`."""
    add_path(parser)
    parser.add_argument("-o", "--output", metavar="OUT", help="the pack, NAME.sftrace.zip (default: beside PATH)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a pack")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Pack and say how large it became."""
    from pathlib import Path

    from sftrace_otel.bundle.pack import pack

    path = locate(arguments)
    out = Path(arguments.output) if arguments.output else None
    done = pack(path, out, overwrite=arguments.overwrite)
    if arguments.json:
        say_json({"bundle": str(path), "pack": str(done.path), "bytes": done.size, "unpacked_bytes": done.unpacked,
                  "left_out": list(done.left_out)})  # fmt: skip
        return 0
    note(*(f"sftrace pack: {clean(name)} is not part of the bundle; left out" for name in done.left_out))
    say(f"{clean(done.path)}: {done.size} bytes, {done.unpacked} unpacked")
    return 0
