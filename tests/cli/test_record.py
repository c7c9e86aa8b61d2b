# SPDX-License-Identifier: Apache-2.0
"""`record -- CMD`: exit code and output of the command, settings as options, commands that cannot be run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .conftest import Cli

PYTHON = sys.executable
SHOW = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('OTEL_SFTRACE')}))"


def test_exit_code_and_output_are_the_command_s(shell: Cli) -> None:
    done = shell("record", "--quiet", "--", PYTHON, "-c", "import sys; print('out'); sys.exit(3)")
    assert (done.code, done.out) == (3, "out\n")


def test_options_are_settings(shell: Cli) -> None:
    done = shell(
        "record", "--dir", "runs", "--agent", "desk", "--scope", "process", "--tools", "a:b,c:*", "--quiet", "--fsync",
        "never", "--max-payload-bytes", "4096", "--", PYTHON, "-c", SHOW,
    )  # fmt: skip
    assert done.json == {
        "OTEL_SFTRACE_DIR": "runs",
        "OTEL_SFTRACE_AGENT": "desk",
        "OTEL_SFTRACE_SCOPE": "process",
        "OTEL_SFTRACE_TOOLS": "a:b,c:*",
        "OTEL_SFTRACE_QUIET": "true",
        "OTEL_SFTRACE_FSYNC": "never",
        "OTEL_SFTRACE_MAX_PAYLOAD_BYTES": "4096",
    }


def test_options_win_over_variables_and_those_left_out_do_not(shell: Cli) -> None:
    done = shell(
        "record", "--agent", "desk", "--", PYTHON, "-c", SHOW, OTEL_SFTRACE_AGENT="other", OTEL_SFTRACE_QUIET="true"
    )
    assert done.json == {"OTEL_SFTRACE_AGENT": "desk", "OTEL_SFTRACE_QUIET": "true"}


def test_arguments_of_the_command_are_its_own(shell: Cli) -> None:
    show = "import sys; print(sys.argv[1:])"
    done = shell("record", "--quiet", "--", PYTHON, "-c", show, "--dir", "x", "--", "--help", "--json")
    assert done.out == "['--dir', 'x', '--', '--help', '--json']\n"
    assert shell("record", "--quiet", PYTHON, "-c", show, "--dir", "x").out == "['--dir', 'x']\n"


def test_the_program_runs_under_auto_instrumentation(shell: Cli) -> None:
    program = "import sys; print('opentelemetry.instrumentation.auto_instrumentation' in sys.modules)"
    assert shell("record", "--quiet", "--", PYTHON, "-c", program).out == "True\n"


def test_an_unknown_command(cli: Cli) -> None:
    done = cli("record", "--", "no-such-command-of-ours", "x")
    assert (done.code, done.out) == (127, "")
    assert "no-such-command-of-ours: command not found" in done.line


def test_a_file_that_cannot_be_executed(cli: Cli, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("print('hello')\n")
    done = cli("record", "--", agent)
    assert (done.code, done.out) == (126, "")
    assert f"-- python {agent}" in done.line


@pytest.mark.parametrize("arguments", [(), ("--",), ("--quiet",)])
def test_no_command(cli: Cli, arguments: tuple[str, ...]) -> None:
    done = cli("record", *arguments)
    assert (done.code, done.out) == (2, "")
    assert "after '--'" in done.line


@pytest.mark.parametrize(
    ("option", "value"), [("--scope", "galaxy"), ("--capture", "some"), ("--max-payload-bytes", "-1")]
)
def test_a_wrong_option_starts_nothing(cli: Cli, option: str, value: str) -> None:
    done = cli("record", option, value, "--", PYTHON, "-c", "print('ran')")
    assert (done.code, done.out) == (2, "")
    assert value in done.line
