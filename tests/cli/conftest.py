# SPDX-License-Identifier: Apache-2.0
"""Running the command line: in this process where that is enough, as a process of its own where it is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.cli.app import main

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors" / "sftrace"


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as the one JSON document that it has to be."""
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """Standard error as the one line that it has to be."""
        assert self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        return self.err.strip()


Cli = Callable[..., Done]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run a verb in this process."""

    def run(*arguments: object) -> Done:
        capfd.readouterr()
        try:
            code = main([str(one) for one in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capfd.readouterr()
        return Done(code=code, out=out, err=err)

    return run


@pytest.fixture(scope="session")
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which the processes of these tests compile each module once, whatever the shell says."""
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("bytecode"))}


@pytest.fixture
def shell(tmp_path: Path, bytecode: dict[str, str]) -> Cli:
    """Run a verb as `python -m sftrace_otel` in an empty folder; keywords are variables."""

    def run(*arguments: object, **variables: str) -> Done:
        command = [sys.executable, "-m", "sftrace_otel", *map(str, arguments)]
        environment = {**os.environ, **bytecode, **variables}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        return Done(code=done.returncode, out=done.stdout, err=done.stderr)

    return run


@pytest.fixture
def bundle(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a vector by its name, to read or to spoil."""

    def copy(name: str) -> Path:
        target = tmp_path / f"{name}.sftrace"
        if not target.exists():
            shutil.copytree(VECTORS / f"{name}.sftrace", target)
        return target

    return copy
