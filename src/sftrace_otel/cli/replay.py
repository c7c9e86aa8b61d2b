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

    from sftrace_otel.formats import Json
    from sftrace_otel.replay import Result

USAGE = "PATH (--entrypoint M:F | --asgi M:app | -- CMD …) [options]"
EXITS = (
    "Exit code: 0 the same; 1 it diverged; 2 it could not be replayed (bundle changed or unreadable, nothing to run); "
    "4 the recording ended and all matched until there (a fork). Of a resumed run: 0 it ran to its end; 1 it left the "
    "recording before that ended, or failed; 4 a call behind its end was blocked."
)
TAKES_COMMAND = True


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `replay`."""
    add_path(parser)
    add_program(parser)
    parser.add_argument(
        "--mode",
        choices=("frozen", "hybrid", "live", "resume"),
        default="frozen",
        help="frozen (default: everything is served, nothing goes out), hybrid (the LLMs of --live-llm are asked "
        "again, the rest is served), live (LLMs are asked again and the tools of --allow-live-tool run; nothing is "
        "served), or resume (what is recorded is served, and then the program goes on: LLM calls go out, tools "
        "and HTTP exchanges are blocked, but for --policy; it is recorded)",
    )
    add_resume(parser)
    add_options(parser)
    add_json(parser)


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what to run."""
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that every replay has."""
    parser.add_argument(
        "--live-llm",
        action="append",
        default=[],
        metavar="P/M",
        help="provider/model, as recorded, that hybrid mode asks again (resume mode: llm:P/M=live); * stands for "
        "anything; may be repeated",
    )
    parser.add_argument(
        "--allow-live-tool",
        action="append",
        default=[],
        metavar="N",
        help="tool that live mode runs (resume mode: tool:N=live), or HTTP exchange by the name of its event; * stands "
        "for anything; may be repeated",
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
        "--record",
        metavar="OUT",
        help="record the replay as a new bundle; without it nothing is written, but of a resumed run "
        "{stem}-resumed.sftrace beside PATH",
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


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that resume mode has beside those of every replay."""
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="KIND:NAME=POLICY",
        help="what becomes of calls after the end of the recording in resume mode: tool:NAME, llm:PROVIDER/MODEL or "
        "http:HOST (also http:'METHOD scheme://host/path'), * stands for anything, and live, block, ask (on the "
        "terminal; without one it blocks), stub (a neutral answer), stub:JSON or stub:@FILE; the last that fits wins; "
        "may be repeated",
    )
    parser.add_argument(
        "--reuse",
        nargs="?",
        const=True,
        default=False,
        metavar="PARENT",
        help="resume mode: answer calls after the end from the fork's parent where their input is the same; PARENT "
        "where it is not beside the fork",
    )
    parser.add_argument(
        "--allow-redacted",
        action="store_true",
        help="resume mode: make tool calls and HTTP exchanges although their input holds the placeholder of a redacted "
        "value",
    )


def _policies(given: list[str]) -> list[str]:
    """Policies with the answers of stubs read from their files. Raises OSError."""
    from pathlib import Path as File

    read = []
    for text in given:
        head, mark, name = text.partition("=stub:@")
        read.append(f"{head}=stub:{File(name).expanduser().read_text('utf-8')}" if mark else text)
    return read


def run(arguments: argparse.Namespace) -> int:
    """Replay and print the report."""
    if lacks_program(arguments, "replay"):
        return 2
    path = locate(arguments)
    return answer(arguments, path, {"bundle": str(path)})


def lacks_program(arguments: argparse.Namespace, verb: str) -> bool:
    """Whether there is not one thing to run, which is said."""
    if sum(map(bool, (arguments.entrypoint, arguments.asgi, arguments.rest))) == 1:
        return False
    note(
        f"sftrace {verb}: give what to run: one of --entrypoint module:function, --asgi module:app, or a command "
        f"after '--', as in: sftrace {verb} latest -- python agent.py"
    )
    return True


def answer(arguments: argparse.Namespace, path: Path, known: dict[str, Json]) -> int:
    """Replay `path` as the arguments say and print the report, in JSON with what is `known`; gives the exit code."""
    hosts = _hosts(arguments.map_host)
    if hosts is None:
        note("sftrace replay: --map-host: write it as recorded=now, for instance api.example.com=127.0.0.1:8000")
        return 2
    result = _replay(arguments, path, hosts)
    if arguments.json:
        say_json({**known, **result.document})
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
        "policies": _policies(arguments.policy),
        "reuse": arguments.reuse,
        "allow_redacted": arguments.allow_redacted,
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
