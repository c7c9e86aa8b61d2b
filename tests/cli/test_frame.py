# SPDX-License-Identifier: Apache-2.0
"""What every verb has in common: help, version, one-line errors, escaping, closed pipes, start-up cost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sftrace_otel.cli import app, ls, text
from sftrace_otel.version import __version__

from .conftest import Cli


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"sftrace-otel {__version__}\n"


def test_help_names_every_verb(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    help_text = cli("--help").out
    assert [line.split()[0] for line in help_text.splitlines() if line.startswith("  ") and line[2] != "-"] == [
        *app.VERBS
    ]


@pytest.mark.parametrize("verb", app.VERBS)
def test_help_of_a_verb_has_usage_purpose_and_exit_codes(cli: Cli, verb: str) -> None:
    done = cli(verb, "--help")
    assert done.code == 0
    assert done.out.startswith(f"usage: sftrace {verb} ")
    assert "Exit code:" in done.out
    assert "--debug" in done.out


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("ls", "--nonsense"),
        ("validate",),
        ("fork", "latest"),
        ("fork", "latest", "--at-step", "x"),
        ("fork", "latest", "--at-step", "1", "--at-event", "evt_1"),
        ("replay", "latest", "--order", "sideways"),
        ("inspect", "latest", "--step", "first"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_help(cli: Cli, arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert "--help'" in done.line


@pytest.mark.parametrize("verb", ["validate", "verify", "inspect", "fork", "replay"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [("nowhere.sftrace", "nowhere.sftrace"), ("latest", "latest"), ("0" * 32, "0" * 32), ("run_x", "run_x")],
)
def test_a_bundle_that_is_not_there(cli: Cli, tmp_path: Path, verb: str, path: str, expected: str) -> None:
    more = {"fork": ["--at-step", "0"], "replay": ["--entrypoint", "a:b"]}.get(verb, [])
    done = cli(verb, path, "--dir", tmp_path, *more)
    assert (done.code, done.out) == (2, "")
    assert expected in done.line


@pytest.mark.parametrize("verb", ["inspect", "fork", "replay"])
@pytest.mark.parametrize("name", ["manifest.json", "events.jsonl"])
def test_an_unreadable_bundle(cli: Cli, bundle: Callable[[str], Path], verb: str, name: str) -> None:
    path = bundle("completed")
    (path / name).write_bytes(b"\x00" * 64)
    more = {"fork": ["--at-step", "0"], "replay": ["--entrypoint", "a:b"]}.get(verb, [])
    done = cli(verb, path, *more)
    assert (done.code, done.out) == (2, "")
    assert name in done.line


def test_an_error_nobody_foresaw_is_one_line_and_a_traceback_with_debug(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: object) -> int:
        raise RuntimeError("first\nsecond \x1b[31m")

    monkeypatch.setattr(ls, "run", fail)
    done = cli("ls")
    assert done.code == 2
    assert r"RuntimeError: first\nsecond \x1b[31m" in done.line
    for arguments in (("--debug", "ls"), ("ls", "--debug")):
        with pytest.raises(RuntimeError):
            cli(*arguments)


def test_an_interrupt_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(ls, "run", interrupt)
    done = cli("ls")
    assert (done.code, done.line) == (130, "sftrace ls: interrupted")


def test_a_closed_pipe_is_quiet(bundle: Callable[[str], Path]) -> None:
    path = bundle("numbers")
    command = [sys.executable, "-m", "sftrace_otel", "inspect", str(path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        process.wait(20)
    assert process.returncode == 141
    assert said == b""


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x1b]0;owned\x07", r"\x1b]0;owned\a"),
        ("\x9b31m\x7f\x00", r"\x9b31m\x7f\x00"),
        ("left\u202eright\u2066\u200b\u2028", r"left\u202eright\u2066\u200b\u2028"),
        ("\udc80", r"\udc80"),
        ("née ☕ 𝒳", "née ☕ 𝒳"),
        (7, "7"),
    ],
)
def test_clean_spells_out_what_could_move_the_cursor_or_hide_text(raw: object, shown: str) -> None:
    assert text.clean(raw) == shown


def test_json_output_is_ascii(cli: Cli) -> None:
    text.say_json({"é\x1b\x7f": ["\u202e", 10**30, 1.5]})
    assert cli("--version").code == 0


def test_a_table_aligns_its_columns() -> None:
    assert text.table([("a", 5, "x"), ("bcd", 10, "")], ["N", "COUNT", "Z"]) == [
        "N    COUNT  Z",
        "a        5  x",
        "bcd     10",
    ]
    assert text.table([]) == []


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom sftrace_otel.cli.app import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('json', 'orjson', 'msgspec', 'opentelemetry', 'dataclasses', 'pathlib')"
        " if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
