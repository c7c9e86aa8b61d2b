# SPDX-License-Identifier: Apache-2.0
"""Servers and workers as their users start them: `opentelemetry-instrument COMMAND`, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.bundle.read import validate_bundle

BIN = Path(sys.executable).parent
PATIENCE = 90.0
"""Seconds after which a server is taken for hung; nothing waits that long where it works."""

APPLICATIONS = """
import asyncio, json, os, threading, time
from pathlib import Path
from sftrace_otel import trace_tool

@trace_tool
def double(x):
    return {"twice": 2 * x, "pid": os.getpid()}

@trace_tool
def hang(x):
    Path(f"hanging-{x}").write_text(str(os.getpid()))
    threading.Event().wait()

@trace_tool
async def ahang(x):
    Path(f"hanging-{x}").write_text(str(os.getpid()))
    await asyncio.Event().wait()

@trace_tool
async def slow(x):
    Path(f"slow-{x}").touch()
    while not Path("go-on").exists():
        await asyncio.sleep(0.01)
    return x

async def asgi(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    n = json.loads((await receive())["body"])["n"]
    if scope["path"] == "/hang":
        double(n)
        await ahang(n)
    if scope["path"] == "/slow":
        await slow(n)
    answer = json.dumps(double(n)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": answer})

def wsgi(environ, start_response):
    n = json.loads(environ["wsgi.input"].read())["n"]
    if environ["PATH_INFO"] == "/hang":
        double(n)
        hang(n)
    answer = json.dumps(double(n)).encode()
    start_response("200 OK", [("content-length", str(len(answer)))])
    yield answer
"""


class Workplace:
    """A folder in which programs run, and the bundles that they leave there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bundles = folder / "sftraces"
        self.running: list[subprocess.Popen[str]] = []
        (folder / "apps.py").write_text(APPLICATIONS)

    def start(self, *command: str, instrumented: bool = True, **environ: str) -> subprocess.Popen[str]:
        """Start `command` (its first word is a script of this environment) in a process group of its own."""
        keep = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
        words = [str(BIN / command[0]), *command[1:]]
        if instrumented:
            words.insert(0, str(BIN / "opentelemetry-instrument"))
        with (self.folder / f"log-{len(self.running)}").open("w") as log:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env={**keep, "PYTHONPATH": str(self.folder), "OTEL_SFTRACE_FSYNC": "never", **environ},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def log(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("log-*")))

    def until(self, what: Callable[[], Any]) -> Any:
        """Wait until `what()` is true; gives it."""
        deadline = time.monotonic() + PATIENCE
        while not (found := what()):
            assert time.monotonic() < deadline, self.log()
            assert all(process.poll() is None for process in self.running[-1:]) or what(), self.log()
            time.sleep(0.02)
        return found

    def stop(self, process: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; gives the exit code."""
        process.send_signal(number)
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log()) from None

    def end(self) -> None:
        for process in self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # -- what they left

    def paths(self) -> list[Path]:
        paths = sorted(self.bundles.glob("*.sftrace"))
        for path in paths:
            result = validate_bundle(path, verify_integrity=True)
            assert result.valid, result.issues
        return paths

    def journals(self) -> list[Path]:
        return sorted(self.bundles.glob(".*.journal"))

    def inputs(self, kind: str = "request") -> list[int]:
        """The numbers that requests (or tasks) gave, one for each run, each with just the calls for its own."""
        numbers = []
        for path in self.paths():
            if run(path)["kind"] != kind:
                continue
            given = events(path, "run_start")[0]["input"]
            number = given["body"]["n"] if kind == "request" else given["args"][0]
            calls = [event["input"]["x"] for event in events(path, "tool_call")]
            assert calls and set(calls) == {number}
            numbers.append(number)
        return sorted(numbers)


def events(path: Path, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (path / "events.jsonl").read_bytes().splitlines()]
    return [event for event in found if event["type"] in kinds]


def run(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / "run.json").read_bytes())
    return document


def fetch(url: str, n: int, path: str = "/ask") -> dict[str, Any]:
    request = urllib.request.Request(url + path, json.dumps({"n": n}).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def fetch_many(url: str, numbers: range) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda n: fetch(url, n), numbers))


def answers(url: str) -> bool:
    """Whether somebody listens there."""
    host, port = url.removeprefix("http://").split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
        return True
    return False


def fetch_aside(url: str, n: int, path: str) -> threading.Thread:
    """Ask and do not wait for an answer, which may never come."""

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError):
            fetch(url, n, path)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    workplace = Workplace(tmp_path)
    yield workplace
    workplace.end()


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
    return number
