# SPDX-License-Identifier: Apache-2.0
"""The frame of the command line: parsers, dispatch, and what every verb has in common when something is wrong.

A verb module has `USAGE`, `EXITS`, `configure(parser)` and `run(arguments) -> int`; only the module of the verb that
was typed is imported, and only its parser is built (subparsers of argparse build them all: a third of the start-up).
Faults leave a verb as exceptions; here, and only here, they become one line on standard error and exit code 2.
126, 127, 130 and 141 mean what they mean in a shell.
"""

from __future__ import annotations

import argparse
import os
import sys

from sftrace_otel.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any, NoReturn

__all__ = ["main"]

VERBS = {
    "record": "run a Python command under OpenTelemetry auto-instrumentation and record it",
    "ls": "list recorded bundles, newest first",
    "validate": "check a bundle's structure; with --verify-integrity its payload hashes and file checksums too",
    "verify": "the same as validate --verify-integrity",
    "inspect": "show what happened in a run, and what was lost or redacted",
    "replay": "run the program again, offline, every answer from the bundle, and compare",
    "fork": "write a new bundle up to a step, outputs changed where asked",
    "lineage": "show which bundle came from which, and which parents are missing or were changed",
    "merge": "join the bundles of the processes of one run into one",
    "convert": "make a .flight of a .sftrace, or the other way",
    "pack": "put a bundle into one file, which every verb reads in place",
    "unpack": "put a packed bundle back into a folder",
    "export": "put a program beside a bundle that verifies it without this package",
    "sign": "sign a bundle, or check its signature",
    "recover": "make bundles of what killed processes left",
    "schema": "print the JSON Schema of a file of the format",
    "doctor": "say what is installed, what would be recorded and where, and what cannot be",
}
_PATH = "PATH is a bundle, a trace id, a run id, or 'latest'. 'sftrace VERB --help' tells more about one verb."
UNUSABLE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line that name the next step."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{self.prog}: {message}; see '{self.prog} --help'")
        raise SystemExit(UNUSABLE)


def _width() -> int:
    """Columns for help texts. argparse would import shutil for it, each time that an argument is added."""
    try:
        return int(os.environ.get("COLUMNS", "")) - 2
    except ValueError:
        pass
    try:
        return os.get_terminal_size(sys.__stdout__.fileno() if sys.__stdout__ else 1).columns - 2
    except (OSError, ValueError, AttributeError):
        return 78


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"width": _width(), **options})


class _TopFormatter(_Formatter, argparse.RawDescriptionHelpFormatter):
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb with `argv` (default: the process's arguments); return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        _complain(f"sftrace {arguments.verb}: interrupted")
        return INTERRUPTED
    except Exception as fault:
        if arguments.debug:
            raise
        _complain(f"sftrace {arguments.verb}: {_describe(fault)}")
        return UNUSABLE
    return code


def verb_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one verb."""
    verb = _verb(name)
    parser = _Parser(
        prog=f"sftrace {name}",
        usage=f"sftrace {name} {verb.USAGE}",
        description=f"{VERBS[name][0].upper()}{VERBS[name][1:]}.",
        epilog=verb.EXITS,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    verb.configure(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(verb=name, run=verb.run, rest=None)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    if argv and argv[0] in VERBS:  # the usual case needs no second parser
        top = argparse.Namespace(verb=argv[0], arguments=list(argv[1:]), debug=False)
    else:
        top = _top().parse_args(argv)
    head, command = _split(top.arguments) if getattr(_verb(top.verb), "TAKES_COMMAND", False) else (top.arguments, None)
    arguments = verb_parser(top.verb).parse_args(head)
    arguments.rest = command
    arguments.debug |= top.debug
    return arguments


def _top() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<9} {text}" for name, text in VERBS.items())
    parser = _Parser(
        prog="sftrace",
        usage="sftrace [-h] [--version] [--debug] VERB …",
        description="Record a run of an AI agent as a redacted, tamper-evident bundle; replay and fork it offline.",
        epilog=f"verbs:\n{listed}\n\n{_PATH}",
        formatter_class=_TopFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sftrace-otel {__version__}", help="show the version")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("verb", metavar="VERB", choices=VERBS, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _verb(name: str) -> ModuleType:
    from importlib import import_module

    return import_module(f"sftrace_otel.cli.{name}")


def _split(words: list[str]) -> tuple[list[str], list[str] | None]:
    """What is before and after the first ``--``: argparse would let the command swallow the options before it."""
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _complain(line: str) -> None:
    from sftrace_otel.cli.text import clean, note

    note(clean(line))


def _describe(fault: Exception) -> str:
    from sftrace_otel.errors import SftraceError

    if isinstance(fault, SftraceError):
        return str(fault)
    if isinstance(fault, OSError) and fault.strerror:
        where = f"{fault.filename}: " if fault.filename else ""
        return f"{where}{fault.strerror}; check the path and its permissions"
    return f"unexpected {type(fault).__name__}: {fault}; '--debug' shows where, please report it"


def _silence_stdout() -> None:
    # The interpreter flushes stdout once more at exit; without this it would complain there.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
