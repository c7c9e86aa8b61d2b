# SPDX-License-Identifier: Apache-2.0
"""`record -- CMD`: the same as `opentelemetry-instrument CMD`, our settings as options.

The process is replaced (exec), so signals, terminal and exit code are the command's own. Rejected: a child process,
which would have to forward all of that.
"""

from __future__ import annotations

import argparse

from sftrace_otel.cli.text import clean, note

USAGE = "[options] -- CMD …"
EXITS = "Exit code: that of the command; 126 when it cannot be run, 127 when there is no such command."
TAKES_COMMAND = True

_VALUES = {
    "dir": ("DIR", "folder for bundles (default: sftraces)"),
    "agent": ("NAME", "name of the agent (default: service.name, else the script's name)"),
    "scope": ("WHAT", "what makes a run: auto, process or trace"),
    "capture": ("HOW", "full, metadata (no payloads) or off"),
    "content": ("WHERE", "reference: payloads only in the bundle; span: also on the spans, redacted"),
    "formats": ("NAMES", "sftrace, flight, or sftrace,flight"),
    "keep": ("WHICH", "bundles that stay: all, failed or flagged"),
    "max-disk-mb": ("N", "room for bundles in MiB; completed ones go first"),
    "max-run-mb": ("N", "a run of this size in MiB closes, another one goes on"),
    "on-close": ("M:F", "module:callable, called with the path of each bundle"),
    "fsync": ("WHEN", "never, close or event"),
    "max-payload-bytes": ("N", "longer payloads are cut, and marked"),
    "redaction": ("FILE", "TOML file with redaction rules of your own"),
    "nondeterminism": ("HOW", "record: also the clock and random values that the program reads; or off"),
    "tools": ("LIST", "functions to trace: module:callable,… (wildcards allowed)"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options; each is the variable `OTEL_SFTRACE_<NAME>` of the command."""
    for name, (metavar, text) in _VALUES.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    parser.add_argument("--quiet", action="store_true", help="no line at the start and end of the recording")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD …", help="the command and its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by the command under auto-instrumentation; return only when it cannot be run."""
    import os
    import shutil
    import sys

    from sftrace_otel.settings import PREFIX, Settings

    command = _command(arguments)
    if not command:
        note("sftrace record: no command; write it after '--', as in: sftrace record -- python agent.py")
        return 2
    chosen = {name.replace("-", "_"): getattr(arguments, name.replace("-", "_")) for name in _VALUES}
    Settings.from_environ({}, **chosen)
    if shutil.which(command[0]) is None:
        return cannot_run("record", command[0])
    os.environ.update({PREFIX + name.upper(): value for name, value in chosen.items() if value is not None})
    if arguments.quiet:
        os.environ[PREFIX + "QUIET"] = "true"
    from opentelemetry.instrumentation.auto_instrumentation import run as instrument

    sys.argv = ["opentelemetry-instrument", *command]
    instrument()
    return 0


def _command(arguments: argparse.Namespace) -> list[str]:
    if arguments.rest is None:
        return list(arguments.command)
    return [*arguments.command, "--", *arguments.rest] if arguments.command else arguments.rest


def cannot_run(verb: str, command: str) -> int:
    """Say why `command` cannot be started; the shell's exit codes for it."""
    import os

    if os.path.sep in command and os.path.exists(command):  # noqa: PTH110 (pathlib costs start-up time)
        note(f"sftrace {verb}: {clean(command)}: not executable; try: sftrace {verb} -- python {clean(command)}")
        return 126
    note(f"sftrace {verb}: {clean(command)}: command not found; check the spelling and PATH")
    return 127
