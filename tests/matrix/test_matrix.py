# SPDX-License-Identifier: Apache-2.0
"""The behaviours with the oldest and the newest versions that we claim, and with one HTTP client or both.

A cell is a set of clients (httpx, httpx2, both) and a version, oldest or newest, of openai, wrapt and OpenTelemetry.
Oldest is the lower bound of `pyproject.toml` (for openai: the first 1.x that goes with httpx 0.28), newest the pin of
`constraints.txt`, which also pins all else; one cell more has an openai 2. pip decides which cells there are: openai
before 3 needs httpx, from 3 on httpx2; a cell that it cannot resolve is skipped with its reason. Each other one gets a
venv in `.matrix/`, kept for the next time, two at once, and in it run the behaviours, misses under retries, the HTTP
boundary and the LLM boundary.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.full

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = ROOT / ".matrix"
TESTS = tuple(f"tests/instrumentation/test_{name}.py" for name in ("behaviours", "retries", "http", "llm"))

CLIENTS = {"httpx": ("httpx",), "httpx2": ("httpx2",), "both": ("httpx", "httpx2")}
OLDEST = {
    "openai": {"openai": "1.55.3"},
    "wrapt": {"wrapt": "2.4.0"},
    "otel": {
        "opentelemetry-api": "1.44.0",
        "opentelemetry-sdk": "1.44.0",
        "opentelemetry-semantic-conventions": "0.65b0",
        "opentelemetry-instrumentation": "0.65b0",
        "opentelemetry-instrumentation-httpx": "0.65b0",
        "opentelemetry-util-http": "0.65b0",
    },
}
MIDDLE = {"openai": "2.54.0"}
ALWAYS = ("msgspec", "orjson", "rfc8785", "h2", "pytest", "pytest-asyncio")


class Cell(NamedTuple):
    clients: str
    openai: str
    wrapt: str
    otel: str

    @property
    def name(self) -> str:
        return f"{self.clients}-openai_{self.openai}-wrapt_{self.wrapt}-otel_{self.otel}"


class Outcome(NamedTuple):
    """What came of a cell: why there is none, or the exit code and output of its tests."""

    reason: str
    code: int
    text: str


AGES = ("oldest", "newest")
CELLS = [
    *(Cell(*values) for values in itertools.product(CLIENTS, AGES, AGES, AGES)),
    Cell("both", "middle", "newest", "newest"),
]


def newest() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    return dict(line.split("==") for line in lines)


def wanted(cell: Cell) -> tuple[list[str], list[str]]:
    """Requirements and constraints of a cell. A client that is not in it is constrained away."""
    pins = newest()
    names = [*CLIENTS[cell.clients], *ALWAYS]
    for part in ("openai", "wrapt", "otel"):
        names += [name for name in OLDEST[part] if name in pins]
        if getattr(cell, part) == "oldest":
            pins.update(OLDEST[part])
    if cell.openai == "middle":
        pins.update(MIDDLE)
    absent = {"httpx", "httpx2"} - set(CLIENTS[cell.clients])
    pins.update(dict.fromkeys(absent, "0"))
    return names, [f"{name}=={version}" for name, version in sorted(pins.items())]


def pip(*arguments: str) -> str:
    """Run pip; its reason where it fails, else nothing."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    return (lines or ["pip failed"])[0].removeprefix("ERROR: ")[:200]


def python(cell: Cell) -> tuple[Path, str]:
    """The interpreter of the cell's venv, or why there can be none."""
    folder = CACHE / cell.name
    found = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    names, constraints = wanted(cell)
    stamp, ready = "\n".join([sys.version, *names, *constraints]), folder / "ready"
    if not ready.exists() or ready.read_text() != stamp:
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        (folder / "constraints.txt").write_text("\n".join(constraints))
        reason = pip("--python", str(found), "install", "-c", str(folder / "constraints.txt"), *names)
        if reason:
            return found, reason
        ready.write_text(stamp)
    return found, ""


def run(cell: Cell) -> Outcome:
    interpreter, reason = python(cell)
    if reason:
        return Outcome(reason, 0, "")
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        [interpreter, "-m", "pytest", "-q", "--tb=short", "-p", "sftrace_matrix", "-p", "no:cacheprovider",
         "-o", "filterwarnings=", *TESTS],
        cwd=ROOT, env={**keep, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(HERE)])},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    return Outcome("", done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[Cell, Future[Outcome]]]:
    """All cells, two at a time."""
    CACHE.mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        yield {cell: pool.submit(run, cell) for cell in CELLS}


def passed(text: str) -> int:
    found = re.search(r"(\d+) passed", text)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_behaviours_in_a_cell(cell: Cell, outcomes: Any) -> None:
    outcome = outcomes[cell].result()
    if outcome.reason:
        pytest.skip(outcome.reason)
    assert outcome.code == 0, outcome.text[-6000:]
    assert passed(outcome.text) > 40, outcome.text[-500:]


def test_both_ends_of_every_range_have_a_cell(outcomes: Any) -> None:
    there = [cell for cell in CELLS if not outcomes[cell].result().reason]
    if not there:
        pytest.skip("pip resolved no cell: " + outcomes[CELLS[0]].result().reason)
    for part in Cell._fields:
        assert {getattr(cell, part) for cell in there} == {getattr(cell, part) for cell in CELLS}
