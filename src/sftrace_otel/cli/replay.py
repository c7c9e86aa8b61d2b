# SPDX-License-Identifier: Apache-2.0
"""`replay PATH`: run the program again with every answer from the bundle, and compare.

A command runs as a child under auto-instrumentation and writes its report into a folder of ours; an entrypoint or an
ASGI application runs in this process.

The program's standard output stays its own: what we say goes to standard error, and with `--json` the
program's output goes there too, so that standard output holds one JSON document.
"""

from __future__ import annotations

import argparse
from contextlib import contextmanager

from sftrace_otel.cli.places import add_json, add_path, locate
from sftrace_otel.cli.text import clean_lines, note, say_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sftrace_otel.replay import Result

USAGE = "PATH (--entrypoint M:F | --asgi M:app | -- CMD …) [options]"
EXITS = (
    "Exit code: 0 the same; 1 it diverged; 2 it could not be replayed (bundle changed or unreadable, nothing to run); "
    "4 the recording ended and all matched until there (a fork)."
)
TAKES_COMMAND = True


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `replay`."""
    add_path(parser)
    parser.add_argument(
        "--entrypoint",
        metavar="M:F",
        help="function F of module M, imported from the current folder; called with the recorded run input where it "
        "takes an argument, awaited where it is a coroutine",
    )
    parser.add_argument(
        "--asgi",
        metavar="M:app",
        help="ASGI application app of module M, likewise; the recorded inbound request is sent to it in this process",
    )
    parser.add_argument(
        "--mode",
        choices=("frozen", "hybrid", "live"),
        default="frozen",
        help="frozen (default: everything is served, nothing goes out), hybrid (the LLMs of --live-llm are asked "
        "again, the rest is served), or live (LLMs are asked again and the tools of --allow-live-tool run; nothing is "
        "served)",
    )
    parser.add_argument(
        "--live-llm",
        action="append",
        default=[],
        metavar="P/M",
        help="provider/model, as recorded, that hybrid mode asks again; * stands for anything; may be repeated",
    )
    parser.add_argument(
        "--allow-live-tool",
        action="append",
        default=[],
        metavar="N",
        help="tool that live mode runs, or HTTP exchange by the name of its event; * stands for anything; may be "
        "repeated",
    )
    parser.add_argument(
        "--order",
        choices=("causal", "strict", "any"),
        default="causal",
        help="which order of calls is the same: causal (default: what had to come first), strict (the exact sequence), "
        "or any",
    )
    parser.add_argument(
        "--map-host",
        action="append",
        default=[],
        metavar="A=B",
        help="the recorded host[:port] A is B in this run; may be repeated",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="POINTER",
        help="a JSON Pointer into the input to leave out when calls are compared, as a divergence names it; may be "
        "repeated",
    )
    parser.add_argument(
        "--normalize",
        action="append",
        default=[],
        choices=("iso_time", "uuid", "path"),
        help="what changes in every run, left out of every text when calls are compared; may be repeated",
    )
    parser.add_argument(
        "--record", metavar="OUT", help="record the replay as a new bundle; without it nothing is written"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replay although deployment.environment.name says production",
    )
    parser.add_argument(
        "--run-untraced-tools",
        action="store_true",
        help="start although the recording lacks the results of some tools: their functions run for real",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replay and print the report."""
    if sum(map(bool, (arguments.entrypoint, arguments.asgi, arguments.rest))) != 1:
        note(
            "sftrace replay: give what to run: one of --entrypoint module:function, --asgi module:app, or a command "
            "after '--', as in: sftrace replay latest -- python agent.py"
        )
        return 2
    path = locate(arguments)
    hosts = _hosts(arguments.map_host)
    if hosts is None:
        note("sftrace replay: --map-host: write it as recorded=now, for instance api.example.com=127.0.0.1:8000")
        return 2
    result = _replay(arguments, path, hosts)
    if arguments.json:
        say_json({"bundle": str(path), **result.document})
    else:
        note(*(clean_lines(line) for line in result.lines()))
    return result.exit_code


def _replay(arguments: argparse.Namespace, path: Path, hosts: dict[str, str]) -> Result:
    from sftrace_otel.replay import replay_asgi, replay_command, replay_entrypoint

    options = {
        "mode": arguments.mode,
        "live_llms": arguments.live_llm,
        "allow_live_tools": arguments.allow_live_tool,
        "normalize": arguments.normalize,
        "record": arguments.record,
        "force": arguments.force,
        "order": arguments.order,
        "map_hosts": hosts,
        "ignore": arguments.ignore,
        "run_untraced_tools": arguments.run_untraced_tools,
    }
    if arguments.rest:
        return replay_command(path, arguments.rest, stdout=2 if arguments.json else None, **options)
    with _stdout_to_stderr(arguments.json):
        if arguments.asgi:
            return replay_asgi(path, arguments.asgi, **options)
        return replay_entrypoint(path, arguments.entrypoint, **options)


def _hosts(pairs: list[str]) -> dict[str, str] | None:
    split = [pair.partition("=") for pair in pairs]
    if not all(recorded and now for recorded, _, now in split):
        return None
    return {recorded: now for recorded, _, now in split}


@contextmanager
def _stdout_to_stderr(wanted: bool) -> Iterator[None]:
    """What this process and its children write to standard output goes to standard error meanwhile."""
    import os
    import sys
    from contextlib import redirect_stdout

    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
