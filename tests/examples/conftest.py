# SPDX-License-Identifier: Apache-2.0
"""The examples run as a user runs them: real processes, the example's own server, no setting of sftrace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BIN = Path(sys.executable).parent
API_KEY = "sk-quickstart-" + "0123456789abcdef" * 2


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What a test looks at in a bundle, read with nothing but `json`."""

    path: Path

    @property
    def manifest(self) -> dict[str, Any]:
        """`manifest.json`."""
        return dict(json.loads((self.path / "manifest.json").read_text()))

    @property
    def events(self) -> list[dict[str, Any]]:
        """`events.jsonl`."""
        return [json.loads(line) for line in (self.path / "events.jsonl").read_text().splitlines()]

    @property
    def everything(self) -> bytes:
        """The bytes of all files and file names."""
        files = sorted(path for path in self.path.rglob("*") if path.is_file())
        return b"\n".join(str(path).encode() + b"\n" + path.read_bytes() for path in files)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A working folder and the environment in which commands run."""

    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment under test to its end."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "OPENAI_"))}
        environment = {
            **kept,
            "PATH": os.pathsep.join((str(BIN), kept.get("PATH", ""))),
            "OPENAI_API_KEY": API_KEY,
            "COLUMNS": "200",
            **self.variables,
            **variables,
        }
        return subprocess.run(
            command, cwd=cwd or self.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    def sftrace(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Our command line."""
        return self.run("python", "-m", "sftrace_otel", *arguments, **variables)

    def instrumented(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """`opentelemetry-instrument …`."""
        return self.run("opentelemetry-instrument", *command, **variables)

    @property
    def bundles(self) -> list[Bundle]:
        """The bundles under `sftraces/`."""
        return [Bundle(path=path) for path in sorted(self.folder.glob("sftraces/*.sftrace"))]

    @property
    def bundle(self) -> Bundle:
        """The only bundle."""
        found = self.bundles
        assert len(found) == 1, found
        return found[0]

    def copy_agent(self, name: str, changes: Sequence[tuple[str, str]] = ()) -> Path:
        """The files of `examples/<name>` in this folder, texts replaced in `agent.py`."""
        for source in (EXAMPLES / name).glob("*.py"):
            shutil.copy(source, self.folder)
        agent = self.folder / "agent.py"
        text = agent.read_text()
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        agent.write_text(text)
        return agent


@contextmanager
def quickstart_server() -> Iterator[dict[str, str]]:
    """The example's server; yields the variables that it says to export."""
    command = [sys.executable, str(EXAMPLES / "quickstart" / "server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield dict(word.split("=", 1) for word in process.stdout.readline().split()[1:])
        finally:
            process.terminate()


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The quickstart agent and its undecorated variant, each recorded once against the same server, now stopped."""

    decorated: Place
    undecorated: Place
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Record both once for all tests that only read."""
    with quickstart_server() as addresses:
        decorated = Place(folder=tmp_path_factory.mktemp("quickstart"), variables=addresses)
        decorated.copy_agent("quickstart")
        first = decorated.instrumented("python", "agent.py")
        assert first.returncode == 0, first.stderr
        undecorated = Place(folder=tmp_path_factory.mktemp("undecorated"), variables=addresses)
        undecorated.copy_agent("quickstart_undecorated")
        second = undecorated.instrumented("python", "agent.py", OTEL_SFTRACE_TOOLS="shop:find_order,shop:refund")
        assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout
    return Recorded(decorated=decorated, undecorated=undecorated, stdout=first.stdout, stderr=first.stderr)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """An empty folder to run in, without a server."""
    return Place(folder=tmp_path)
