# SPDX-License-Identifier: Apache-2.0
"""Asks on the terminal whether a call of a resumed run may go out.

Decision: standard input and standard error have to be terminals, and the question goes to standard error: a program
whose input comes from elsewhere, or a pipeline, is never held up by a question that nobody sees, and its calls are
blocked. One question at a time, whatever threads ask; an event loop that asks stands still meanwhile. Rejected: the
controlling terminal (it may belong to somebody who is not watching), and a default of yes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from sftrace_otel.core.lookup import LiveCall
from sftrace_otel.core.miss import excerpt, printable, title

__all__ = ["on_terminal"]


def on_terminal() -> Callable[[LiveCall], bool] | None:
    """Asks about a call; None where there is no terminal to ask on."""
    for stream in (sys.stdin, sys.stderr):
        try:
            if stream is None or not stream.isatty():
                return None
        except ValueError:  # closed
            return None
    always: set[str] = set()

    def ask(live: LiveCall) -> bool:
        name = title(live.kind, live.name, live.provider, live.model, live.method)
        if name in always:
            return True
        sys.stderr.write(
            f"sftrace: {printable(name)} comes after the recording; its input (redacted): {excerpt(live.payload)}\n"
            "sftrace: make this call? [y]es, [a]lways, [N]o: "
        )
        sys.stderr.flush()
        said = sys.stdin.readline().strip().lower()
        if said in ("a", "always"):
            always.add(name)
        return said in ("y", "yes", "a", "always")

    return ask
