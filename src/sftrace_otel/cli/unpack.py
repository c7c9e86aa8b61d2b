# SPDX-License-Identifier: Apache-2.0
"""`unpack PATH`: the folder that a pack was made of, byte for byte."""

from __future__ import annotations

import argparse

from sftrace_otel.cli.places import add_json, add_path, locate
from sftrace_otel.cli.text import clean, note, say, say_json

USAGE = "PATH [-o OUT] [--overwrite] [--json]"
EXITS = "Exit code: 0; 1 the files are not what their checksums say; 2 no pack, refused, or OUT cannot be written."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `unpack`."""
    add_path(parser)
    parser.add_argument("-o", "--output", metavar="OUT", help="the bundle, NAME.sftrace (default: beside PATH)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a bundle")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Unpack and say whether the files have their checksums."""
    from pathlib import Path

    from sftrace_otel.bundle.pack import unpack

    path = locate(arguments)
    out = Path(arguments.output) if arguments.output else None
    done = unpack(path, out, overwrite=arguments.overwrite)
    if arguments.json:
        say_json({"pack": str(path), "bundle": str(done.path), "integrity": done.integrity})
    else:
        say(str(clean(done.path)))
        if done.integrity != "verified":
            note(f"sftrace unpack: {done.integrity}: see what with: sftrace verify {clean(done.path)}")
    return 1 if done.integrity == "mismatch" else 0
