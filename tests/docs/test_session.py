# SPDX-License-Identifier: Apache-2.0
"""The session in the README is what the program prints: its commands run again, in order, in a folder of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def session() -> list[tuple[str, str]]:
    """The commands of the README's section "A session", each with the output that is shown."""
    section = re.search(r"^## A session\n(.*?)^## ", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert section is not None
    text = "".join(re.findall(r"^```console\n(.*?)^```$", section[1], flags=re.M | re.S))
    return [(command, output) for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, flags=re.M)]


def steady(text: str) -> str:
    """Without what differs from run to run: ids, times, the port, and the widths of columns that follow from them."""
    text = re.sub(r"agent-\d{8}T\d{6}Z-[0-9a-f]{8}-[0-9a-f]{8}", "BUNDLE", text)
    text = re.sub(r"\b(?:run_|evt_)?[0-9a-f]{32}\b|evt_[0-9a-f]+", "ID", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME", text)
    text = re.sub(r"127\.0\.0\.1:\d+", "HOST", text)
    text = re.sub(r"\d+(?:\.\d+)? m?s\b", "SPAN", text)
    return re.sub(r"[ ─]+", " ", text)


def as_shown(shown: str) -> re.Pattern[str]:
    """The shown output as a pattern; a line `…` stands for any lines."""
    parts = [re.escape(steady(part)) for part in re.split(r"^…\n", shown, flags=re.M)]
    return re.compile("(?:.*\n)*?".join(parts) + r"\Z")


def test_the_session_is_what_the_program_prints(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "examples/quickstart/server.py"]
    path = os.pathsep.join((str(BIN), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "OPENAI_API_KEY": "none", "COLUMNS": "100"}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        environment |= dict(word.split("=", 1) for word in server.stdout.readline().split()[1:])
        steps = session()
        outputs = [run(steps[0][0], tmp_path, environment)]
        server.terminate()
    outputs += [run(command, tmp_path, environment) for command, _ in steps[1:]]
    for (command, shown), printed in zip(steps, outputs, strict=True):
        assert as_shown(shown).match(steady(printed)), f"{command} printed:\n{printed}"


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    """What a shell shows for one command, both streams in order."""
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


@pytest.mark.parametrize("change", [("4990.00", "49.90"), ("9 of 9", "8 of 9"), ("tool 'refund'", "tool 'other'")])
def test_a_changed_session_would_be_noticed(change: tuple[str, str]) -> None:
    for _, shown in session():
        if change[0] in shown and "…" not in shown:
            assert as_shown(shown).match(steady(shown))
            assert not as_shown(shown).match(steady(shown.replace(*change)))
