# SPDX-License-Identifier: Apache-2.0
"""`recover PATH`: bundles of what killed processes left; one line for each journal."""

from __future__ import annotations

import argparse

from sftrace_otel.cli.places import add_json, folder
from sftrace_otel.cli.text import clean, note, say, say_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sftrace_otel.bundle.flight_recover import RecoveredChain
    from sftrace_otel.bundle.recover import Recovered
    from sftrace_otel.errors import TraceStorageError

USAGE = "[PATH] [-o OUT] [--json]"
EXITS = "Exit code: 0; 1 what was recovered is damaged; 2 a journal is in use, unreadable, or cannot be written."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recover`."""
    parser.add_argument(
        "path",
        nargs="?",
        metavar="PATH",
        help="a journal (.NAME.sftrace.journal or .NAME.flight.journal), the bundle it was to be, or a folder of some "
        "(default: sftraces)",
    )
    parser.add_argument("-o", "--output", metavar="OUT", help="the bundle (default: beside the journal); one journal")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Recover every journal that PATH means and say what became of it."""
    from pathlib import Path

    from sftrace_otel.bundle.flight_recover import find_chains, is_chain, recover_chain
    from sftrace_otel.bundle.recover import find_journals, recover
    from sftrace_otel.errors import TraceStorageError

    where = folder(arguments.path)
    chains = find_chains(where) if where.is_dir() or where.suffix == ".flight" else []
    journals = [*([] if is_chain(where) or where.suffix == ".flight" else find_journals(where)), *chains]
    if arguments.output and len(journals) > 1:
        note(f"sftrace recover: {clean(where)} holds {len(journals)} journals; name one of them to use -o")
        return 2
    target = Path(arguments.output) if arguments.output else None
    done: list[Recovered | RecoveredChain] = []
    failed: list[TraceStorageError] = []
    for journal in journals:
        try:
            done.append((recover_chain if journal in chains else recover)(journal, target=target))
        except TraceStorageError as error:
            failed.append(error)
    if arguments.json:
        say_json({"recovered": [_document(one) for one in done], "failed": [str(error) for error in failed]})
    else:
        _report(where, done, failed)
    return 2 if failed else 1 if any(_is_damaged(one) for one in done) else 0


def _is_damaged(one: Recovered | RecoveredChain) -> bool:
    from sftrace_otel.bundle.flight_recover import RecoveredChain

    return one.aside is not None if isinstance(one, RecoveredChain) else bool(one.issues)


def _report(where: Path, done: Sequence[Recovered | RecoveredChain], failed: Sequence[TraceStorageError]) -> None:
    from sftrace_otel.bundle.flight_recover import RecoveredChain

    for one in done:
        if isinstance(one, RecoveredChain):
            say(_chain_line(one))
            continue
        say(_line(one))
        note(*(f"sftrace recover: {clean(issue.code)}: {clean(issue.message)}" for issue in one.issues[:5]))
    note(*(f"sftrace recover: {clean(error)}" for error in failed))
    if not done and not failed:
        note(f"nothing to recover in {clean(where)}")


def _chain_line(one: RecoveredChain) -> str:
    if one.path is None:
        return f"{clean(one.journal)}: nothing had been recorded"
    text = f"{clean(one.path)}: {one.events} events"
    if one.left_out:
        text += f", {one.left_out} bytes behind them left out ({clean(one.why)})"
    if one.aside is not None:
        text += f", which are in {clean(one.aside)}"
    return f"{text} ({'the run had ended' if one.whole else 'cut off'})"


def _line(one: Recovered) -> str:
    if one.path is None:
        return f"{clean(one.journal)}: nothing had been recorded"
    parts = [f"{one.llm_calls} LLM and {one.tool_calls} tool and HTTP calls"]
    if one.open_calls:
        parts.append(f"{one.open_calls} of them without a result")
    if one.damaged:
        noun = "line that was" if one.damaged == 1 else "lines that were"
        parts.append(f"{one.damaged} {noun} torn or damaged left out")
    kind = "the run had ended" if one.whole else "cut off"
    return f"{clean(one.path)}: {', '.join(parts)} ({kind})"


def _document(one: Recovered | RecoveredChain) -> dict[str, object]:
    from sftrace_otel.bundle.flight_recover import RecoveredChain

    if isinstance(one, RecoveredChain):
        return {
            "journal": str(one.journal),
            "bundle": None if one.path is None else str(one.path),
            "whole": one.whole,
            "events": one.events,
            "left_out_bytes": one.left_out,
            "why": one.why,
            "left_out_in": None if one.aside is None else str(one.aside),
        }
    return {
        "journal": str(one.journal),
        "bundle": None if one.path is None else str(one.path),
        "whole": one.whole,
        "llm_calls": one.llm_calls,
        "tool_calls": one.tool_calls,
        "open_calls": one.open_calls,
        "damaged_lines": one.damaged,
        "issues": [{"code": issue.code, "message": issue.message} for issue in one.issues],
    }
