# SPDX-License-Identifier: Apache-2.0
"""Providers of one's own, a recorder that is forgotten afterwards, and bundles read as plain JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Sampler

from sftrace_otel import recorder

CHAT = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "gpt-5",
    "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]),
    "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "ho"}]}]),
}
TOOL = {
    "gen_ai.operation.name": "execute_tool",
    "gen_ai.tool.name": "weather",
    "gen_ai.tool.call.arguments": '{"city": "Oslo"}',
    "gen_ai.tool.call.result": "7",
}


class Bundles:
    """The bundles in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.sftrace"))

    def one(self) -> Path:
        [path] = self.paths()
        return path

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Rows of `name` in all bundles, without headers."""
        rows = []
        for path in self.paths():
            file = path / name
            if file.exists():
                rows += [json.loads(line) for line in file.read_bytes().splitlines()]
        return [row for row in rows if "sidecar" not in row]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.lines("events.jsonl") if not kinds or event["type"] in kinds]

    def spans(self) -> list[str]:
        return [row["name"] for row in self.lines("spans.jsonl")]

    def run(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.one() / "run.json").read_bytes())
        return document


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OTEL_SFTRACE_QUIET", "true")
    yield
    recorder.release()


@pytest.fixture
def bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundles:
    monkeypatch.setenv("OTEL_SFTRACE_DIR", str(tmp_path / "traces"))
    return Bundles(tmp_path / "traces")


@pytest.fixture
def make_provider() -> Iterator[Callable[..., TracerProvider]]:
    made: list[TracerProvider] = []

    def make(*processors: Any, sampler: Sampler | None = None) -> TracerProvider:
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        for processor in processors:
            provider.add_span_processor(processor)
        made.append(provider)
        return provider

    yield make
    for provider in made:
        provider.shutdown()


class Child:
    """A Python program in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bundles = Bundles(folder / "sftraces")

    def run(
        self, program: str, *, command: tuple[str, ...] = (), code: int = 0, timeout: float = 60, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `program` (source text), behind `command` if given, and check the exit code."""
        script = self.folder / "agent.py"
        script.write_text(program, encoding="utf-8")
        keep = {name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT", "TMPDIR") if name in os.environ}
        done = subprocess.run(
            [*command, sys.executable, str(script)],
            cwd=self.folder,
            env={**keep, **environ},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture
def child(tmp_path: Path) -> Child:
    return Child(tmp_path)


INSTRUMENT = (str(Path(sys.executable).with_name("opentelemetry-instrument")),)
