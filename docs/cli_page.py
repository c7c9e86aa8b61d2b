# SPDX-License-Identifier: Apache-2.0
"""Write `docs/cli.md` from the program's own help texts: `python docs/cli_page.py`.

The page is committed, so that it can be read where the repository is; `tests/docs` holds that it is what the program
says.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sftrace_otel.cli.app import VERBS

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# Command line

`sftrace VERB`, the same as `python -m sftrace_otel VERB`. Errors go to standard error as one line that says where,
why and what next; `--debug` adds the traceback; `--json` prints one JSON document and nothing else.
"""


def help_text(*verb: str) -> str:
    """What `sftrace VERB --help` prints at 100 columns, without colour."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    command = [sys.executable, "-m", "sftrace_otel", *verb, "--help"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.rstrip()


def page() -> str:
    """The whole page."""
    parts = [HEAD, f"```text\n{help_text()}\n```\n"]
    parts += [f"## {verb}\n\n```text\n{help_text(verb)}\n```\n" for verb in VERBS]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
