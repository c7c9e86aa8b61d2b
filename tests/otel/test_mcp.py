# SPDX-License-Identifier: Apache-2.0
"""MCP under `opentelemetry-instrument`: the spans of others fold into the call, a server's runs are its client's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.bundle.read import validate_bundle

pytestmark = pytest.mark.full

INSTRUMENT = str(Path(sys.executable).with_name("opentelemetry-instrument"))
ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".frameworks"

AGENT = """
import asyncio, sys
from mcp import ClientSession, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

async def main():
    if sys.argv[1] == "http":
        server = streamable_http_client(sys.argv[2])
    else:
        server = stdio_client(StdioServerParameters(command=sys.argv[2], args=sys.argv[3:]))
    async with server as streams, ClientSession(*streams[:2]) as session:
        await session.initialize()
        await session.list_tools()
        print((await session.call_tool("add", {"a": 2, "b": 3})).content[0].text)

asyncio.run(main())
"""

SERVER = """
import sys
from pathlib import Path
from sftrace_otel import trace_tool
try:
    from mcp.server.mcpserver import MCPServer
except ImportError:
    from mcp.server.fastmcp import FastMCP as MCPServer

Path(sys.argv[1]).touch()
server = MCPServer("adding")

@trace_tool
def plus(a: int, b: int) -> int:
    return a + b

@server.tool()
def add(a: int, b: int) -> int:
    return plus(a, b)

server.run()
"""


def read(path: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def calls(path: Path) -> list[str]:
    return [event["name"] for event in read(path, "events.jsonl") if event["type"] == "tool_call"]


def described(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((path / "run.json").read_text())
    return loaded


class Place:
    """A folder with the agent in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agent = folder / "agent.py"
        self.agent.write_text(AGENT)
        self.output = folder / "out"

    def run(self, *command: str | Path) -> str:
        keep = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        environ = {**keep, "OTEL_SFTRACE_DIR": str(self.output), "OTEL_SFTRACE_QUIET": "true"}
        done = subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def bundle(self, agent: str) -> Path:
        [path] = self.output.glob(f"{agent}-*.sftrace")
        assert validate_bundle(path, strict=True, verify_integrity=True).issues == ()
        return path


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def serving() -> Any:
    spec = importlib.util.spec_from_file_location("mcp_server", ROOT / "tests" / "servers" / "mcp_server.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.serving()


REPLAY = (sys.executable, "-m", "sftrace_otel", "replay")


def test_spans_of_the_sdk_and_of_http_clients_are_no_calls(place: Place) -> None:
    with serving() as url:
        assert place.run(INSTRUMENT, sys.executable, place.agent, "http", url) == "5\n"
    path = place.bundle("agent")
    assert calls(path) == ["mcp initialize", "mcp tools/list", "add"]
    assert [row["span"] for row in read(path, "calls.jsonl")[1:]] == ["recorded"] * 3
    assert (described(path)["verdict"]["offline"], described(path)["connections"]) == (True, [])
    assert "5\n" in place.run(*REPLAY, path, "--", sys.executable, place.agent, "http", url)


def test_a_server_records_runs_of_its_own_below_its_clients(place: Place) -> None:
    script, started = place.folder / "server.py", place.folder / "started"
    script.write_text(SERVER)
    program = (sys.executable, place.agent, "stdio", INSTRUMENT, sys.executable, script, started)
    assert place.run(INSTRUMENT, *program) == "5\n"
    client, server = place.bundle("agent"), place.bundle("server")
    assert (calls(client), calls(server)) == (["mcp initialize", "mcp tools/list", "add"], ["plus"])
    manifest = json.loads((client / "manifest.json").read_text())
    origin = described(server)["origin"]
    assert origin["parent_run"] == manifest["run_id"]
    start, *_, end = read(server, "events.jsonl")
    assert start["input"]["params"] == {"name": "add", "arguments": {"a": 2, "b": 3}} and start["input"]["method"]
    assert end["output"]["structuredContent"] == {"result": 5}
    mine = {row["trace_id"] for row in read(client, "calls.jsonl")[1:]}
    assert {row["trace_id"] for row in read(server, "calls.jsonl")[1:]} == {origin["remote_parent"]["trace_id"]} < mine
    started.unlink()
    assert "5\n" in place.run(*REPLAY, client, "--", *program)
    assert not started.exists()


def test_a_server_that_is_not_instrumented_is_told_nothing_else(place: Place) -> None:
    script, told = place.folder / "server.py", place.folder / "told"
    script.write_text(SERVER.replace("touch()", "write_text(__import__('json').dumps(dict(__import__('os').environ)))"))
    place.run(INSTRUMENT, sys.executable, place.agent, "stdio", sys.executable, script, told)
    names = set(json.loads(told.read_text()))
    assert {name for name in names if name.startswith("OTEL_")} <= {
        "OTEL_SFTRACE_DIR", "OTEL_SFTRACE_PARENT", "OTEL_SFTRACE_QUIET",
    }  # fmt: skip
    assert "PYTHONPATH" not in names


# --- mcp 1.x ----------------------------------------------------------------------------------------------------------


def test_all_of_it_with_the_newest_mcp_1() -> None:
    """A venv in `.frameworks/`, kept for the next time, with the pins of `constraints.txt` but for mcp."""
    folder = CACHE / "mcp-1"
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pins = [line for line in (ROOT / "constraints.txt").read_text().split() if not line.startswith(("mcp==", "mcp-"))]
    stamp, ready = "\n".join([sys.version, *pins]), folder / "ready"
    if not ready.exists() or ready.read_text() != stamp:
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        (folder / "constraints.txt").write_text("\n".join(pins))
        pip = [sys.executable, "-m", "pip", "-q", "--python", python, "install", "-c", folder / "constraints.txt"]
        needs = ["mcp<2", "pytest", "pytest-asyncio", "stepfork", "-e", str(ROOT)]
        done = subprocess.run([*pip, *needs], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"pip cannot install mcp 1.x: {done.stderr[-300:]}")
        ready.write_text(stamp)
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "tests/instrumentation/test_mcp.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
