# SPDX-License-Identifier: Apache-2.0
"""The venv of the agent frameworks, apart from `.venv`, and agents run in it as processes of their own.

Decision: one venv for all frameworks, `.frameworks/`, built once from the pins of `constraints.txt`, which are all of
it: pip resolves nothing. The package under test is installed there from this tree, so that `opentelemetry-instrument`
finds its entry points. Rejected: the frameworks in `.venv`, whose versions of shared libraries and pytest plugins the
other tests would then run with.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = ROOT / ".frameworks"
PINS = HERE / "constraints.txt"
AGENTS = HERE / "agents"
SECONDS = 120
"""After that an agent counts as hanging."""


def pip(python: Path, *arguments: str) -> None:
    """Run pip for the venv; a machine without an index of packages skips."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python", str(python), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        pytest.skip(f"pip could not get what the frameworks need: {(lines or ['?'])[-1][:200]}")


def built() -> Path:
    """The folder of the venv's programs, built as far as it is missing or its pins are others."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _built()


def _built() -> Path:
    folder = CACHE / "venv"
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    with _step("pins", PINS.read_text() + sys.version) as missing:
        if missing:
            subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
            (CACHE / "package").unlink(missing_ok=True)
            pip(programs / "python", "install", "--no-deps", "-r", str(PINS))
    with _step("package", (ROOT / "pyproject.toml").read_text()) as missing:  # entry points
        if missing:
            pip(programs / "python", "install", "--no-deps", "-e", str(ROOT))
    return programs


@contextlib.contextmanager
def _step(name: str, stamp: str) -> Iterator[bool]:
    """Whether a step of building is to be done; it is remembered as done with the block."""
    file = CACHE / name
    missing = not file.exists() or file.read_text() != stamp
    yield missing
    file.write_text(stamp)


@dataclass(frozen=True)
class Frameworks:
    """Runs the agents of `agents/` with the programs of the venv, in a folder of the test's own."""

    programs: Path
    folder: Path

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A program of the venv, with an environment that holds nothing of the developer's shell."""
        keep = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        keep["PATH"] = os.pathsep.join([str(self.programs), os.environ.get("PATH", os.defpath)])
        return subprocess.run(
            [str(self.programs / command[0]), *command[1:]],
            cwd=self.folder, env={**keep, **env}, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip

    def record(self, agent: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The agent under `opentelemetry-instrument`, without a line of ours in it."""
        return self.run("opentelemetry-instrument", "python", str(AGENTS / agent), *arguments, **env)

    def replay(self, bundle: Path, agent: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The agent under frozen replay."""
        agent_command = ("python", str(AGENTS / agent), *arguments)
        return self.run("python", "-m", "sftrace_otel", "replay", str(bundle), "--", *agent_command, **env)

    def bundle(self) -> Path:
        """The only bundle that the run left."""
        [found] = [path for path in (self.folder / "sftraces").iterdir() if not path.name.startswith(".")]
        return found


def events(bundle: Path) -> list[dict[str, Any]]:
    """The events of a bundle, in order."""
    file = bundle / "trace.sftrace" if bundle.is_dir() else bundle
    with contextlib.closing(file.open()) as lines:
        document = json.load(lines)
    return list(document["events"])


@pytest.fixture(scope="session")
def programs() -> Iterator[Path]:
    """The programs of the venv."""
    yield built()
