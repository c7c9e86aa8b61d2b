# SPDX-License-Identifier: Apache-2.0
"""`merge OUT BUNDLE…`: the bundles of the processes of one run as one; `merge OUT DIR --run ID` finds them."""

from __future__ import annotations

import argparse

from sftrace_otel.cli.places import add_json
from sftrace_otel.cli.text import clean, note, say, say_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sftrace_otel.analysis.merge import Merged

USAGE = "OUT (BUNDLE … | DIR --run ID) [--overwrite] [--json]"
EXITS = "Exit code: 0; 1 the bundles are not of one run; 2 one cannot be read or was changed, or OUT cannot be written."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `merge`."""
    parser.add_argument("out", metavar="OUT", help="the new bundle, NAME.sftrace")
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="BUNDLE",
        help="the bundles of a run and of the processes that it started, in any order; with --run the folder of them",
    )
    parser.add_argument(
        "--run",
        dest="of_run",
        metavar="ID",
        help="run id, trace id or name of the run; what belongs to it is looked for in DIR",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a bundle")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Merge, and say what is in it and what is not."""
    from pathlib import Path

    from sftrace_otel.analysis.merge import UNRELATED, merge
    from sftrace_otel.errors import TraceStorageError

    if arguments.of_run and len(arguments.sources) != 1:
        note("sftrace merge: with --run give one folder: sftrace merge OUT DIR --run ID")
        return 2
    bundles, missing = _sources(arguments)
    try:
        done = merge(Path(arguments.out).expanduser(), bundles, missing=missing, overwrite=arguments.overwrite)
    except TraceStorageError as fault:
        if fault.code != UNRELATED or arguments.debug:
            raise
        note(f"sftrace merge: {clean(fault)}")
        return 1
    if arguments.json:
        say_json(_document(done))
        return 0
    note(*(f"sftrace merge: {clean(line)}" for line in done.notes))
    count = len(done.parents)
    say(
        f"{clean(done.path)}: {count} {'process' if count == 1 else 'processes'}, {done.events} events, "
        f"{done.llm_calls} LLM and {done.tool_calls} tool and HTTP calls",
        *(f"  {clean(run_id)}  {clean(name)}" for run_id, name in done.parents),
    )
    return 0


def _sources(arguments: argparse.Namespace) -> tuple[Sequence[Path], Sequence[str]]:
    """The bundles to merge, and what is known to be missing."""
    from pathlib import Path

    if not arguments.of_run:
        return [Path(one).expanduser() for one in arguments.sources], ()
    from sftrace_otel.analysis.merge import family
    from sftrace_otel.bundle.read import open_bundle, resolve

    folder = Path(arguments.sources[0]).expanduser()
    found = family(folder, open_bundle(resolve(arguments.of_run, dir=folder)).manifest.run_id)
    return found.bundles, found.missing


def _document(done: Merged) -> dict[str, object]:
    return {
        "bundle": str(done.path),
        "run_id": done.run_id,
        "merged": [{"run_id": run_id, "name": name} for run_id, name in done.parents],
        "events": done.events,
        "llm_calls": done.llm_calls,
        "tool_calls": done.tool_calls,
        "notes": list(done.notes),
    }
