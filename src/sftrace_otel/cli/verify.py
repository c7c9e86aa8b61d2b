# SPDX-License-Identifier: Apache-2.0
"""`verify PATH`: the same as `validate --verify-integrity PATH`."""

from __future__ import annotations

import argparse

from sftrace_otel.cli import validate

USAGE = "PATH [--strict | --partial] [--json]"
EXITS = validate.EXITS


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `validate` without `--verify-integrity`, which is on."""
    validate.configure(parser, verifying=True)


run = validate.run
