# SPDX-License-Identifier: Apache-2.0
"""The argument PATH, the same for every verb: a bundle, a trace id, a run id, or `latest`."""

from __future__ import annotations

import argparse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path


def add_path(parser: argparse.ArgumentParser) -> None:
    """Add PATH and `--dir`, the folder in which ids and `latest` are looked up."""
    parser.add_argument("path", metavar="PATH", help="a bundle, a trace id, a run id, or 'latest'")
    parser.add_argument("--dir", metavar="DIR", help="where to look up ids and 'latest' (default: sftraces)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def folder(given: str | None) -> Path:
    """The folder of bundles: as given, else `OTEL_SFTRACE_DIR`, else `sftraces`."""
    import os
    from pathlib import Path

    return Path(given or os.environ.get("OTEL_SFTRACE_DIR", "").strip() or "sftraces").expanduser()


def locate(arguments: argparse.Namespace) -> Path:
    """The bundle that PATH means. Raises TraceStorageError when there is none."""
    from sftrace_otel.bundle.read import resolve

    return resolve(arguments.path, dir=folder(arguments.dir))
