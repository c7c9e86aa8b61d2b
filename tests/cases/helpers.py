# SPDX-License-Identifier: Apache-2.0
"""The verbs of the case snippets in terms of our public API: record, replay, look into a bundle, ask a model.

`rec(p)` records into `p` and closes it at exit; `frozen(p)` replays it with nothing let out and checks that every
recorded call was used; `check(p)` validates and verifies; `blob(p)` is every byte of a bundle, names included.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from sftrace_otel import (
    RecordingSession,
    ReplayMismatchError,
    ReplaySession,
    Trace,
    instrumentation,
    record,
    trace_tool,
)
from sftrace_otel.bundle.read import open_bundle, validate_bundle
from sftrace_otel.cli.app import main
from sftrace_otel.fork import ForkPoint, OverrideSpec, fork_trace

Divergence = ReplayMismatchError

# Made-up secrets, in pieces so that scanners of this repository stay quiet.
KEY = "sk-" + "proj-" + "Zm9vYmFyYmF6cXV4" * 3
KEY2 = "sk-" + "proj-" + "cXV4YmF6YmFyZm9v" * 3
TOKEN = "ghp_" + "a1B2c3D4e5F6" * 3
PW = "hunter" + "-2-&-Correct-Horse"


# --- record and replay ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def rec(path: Path | str) -> Iterator[RecordingSession]:
    """Record the block into the bundle at `path`."""
    instrumentation.install()
    with record("agent", output=path, overwrite=True) as session:
        yield session


@contextlib.contextmanager
def frozen(path: Path | str, *, all_used: bool = True, **options: Any) -> Iterator[ReplaySession]:
    """Run the block under frozen replay. `all_used`: every recorded call has to be made."""
    with ReplaySession.from_trace(path, **options) as session, record("agent"):
        yield session
    if all_used:
        session.verify_complete()


@contextlib.contextmanager
def diverging(path: Path | str, **options: Any) -> Iterator[ReplaySession]:
    """Run the block, which diverges, under frozen replay: it is said again at the end, though the block caught it."""
    session = ReplaySession.from_trace(path, **options)
    with pytest.raises(Divergence), session, record("agent"):
        yield session
    assert session.report().exit_code == 1


def tool(function: Callable[..., Any], name: str | None = None) -> Any:
    """`run.tool(f, name=…)` of the snippets. A lambda is a tool named `tool`, as two of them have to be the same."""
    return trace_tool(name=name or ("tool" if function.__name__ == "<lambda>" else None))(function)


def forked(path: Path, step: int, to: Path, override: dict[int, Any] | None = None) -> Path:
    """A fork of the bundle at `path`, with new outputs by step."""
    specs = [OverrideSpec(step=at, output=value) for at, value in (override or {}).items()]
    fork_trace(path, ForkPoint(step=step), overrides=specs, output_path=to)
    return to


def reexport(path: Path, to: Path) -> Path:
    """The bundle loaded and saved again."""
    Trace.load(path).save(to)
    return to


# --- bundles ----------------------------------------------------------------------------------------------------------


def events(path: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events as plain JSON, of all kinds or of these."""
    found = [json.loads(line) for line in (path / "events.jsonl").read_bytes().split(b"\n") if line]
    return [event for event in found if not kinds or event["type"] in kinds]


def calls(path: Path, kind: str | None = None) -> list[Any]:
    """The rows of `calls.jsonl`, in the order in which the calls began."""
    rows = [row for row in open_bundle(path).calls if kind is None or row["kind"] == kind]
    return sorted(rows, key=lambda row: int(row["call"]))


def ends(path: Path, kind: str | None = None) -> list[str]:
    """How each call ended."""
    return [row["end"] for row in calls(path, kind)]


def wire(path: Path) -> list[Any]:
    """The rows of `wire.jsonl`."""
    return list(open_bundle(path).wire())


def body_of(path: Path, body: Any) -> bytes:
    """The bytes that a `body` member of `wire.jsonl` stands for."""
    if isinstance(body, dict):
        return bytes(open_bundle(path).blob(body["$blob"]))
    return b"" if body is None else str(body).encode()


def wire_bodies(path: Path) -> list[bytes]:
    """The answers' bodies, in order."""
    return [body_of(path, row.get("body")) for row in wire(path)]


def n_llm(path: Path) -> int:
    return len(events(path, "llm_request"))


def n_http(path: Path) -> int:
    return sum(event["name"].startswith("http ") for event in events(path, "tool_call"))


def n_redactions(path: Path) -> int:
    return len(json.loads((path / "redactions.json").read_bytes())["entries"])


def recorded_messages(path: Path) -> list[Any]:
    """The messages of each LLM request."""
    return [event["input"]["request"]["messages"] for event in events(path, "llm_request")]


def outputs(path: Path) -> list[Any]:
    """The output of each LLM response."""
    return [event["output"] for event in events(path, "llm_response")]


def tool_results(path: Path) -> list[Any]:
    return [event["output"] for event in events(path, "tool_result")]


def tool_inputs(path: Path) -> list[Any]:
    return [event["input"] for event in events(path, "tool_call")]


def blob(path: Path) -> bytes:
    """All bytes of all files below `path` and their names; entries of packs and base64 texts also as they unpack."""
    parts: list[bytes] = []
    for file in sorted([path] if path.is_file() else path.rglob("*")):
        parts.append(os.fsencode(file.name))
        if file.is_file():
            parts += _contents(file.read_bytes())
    return b"\n".join(parts)


def _contents(data: bytes) -> Iterator[bytes]:
    yield data
    if data[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(io.BytesIO(data)) as pack:
            for entry in pack.infolist():
                yield entry.filename.encode()
                yield pack.read(entry)
    for found in re.findall(rb"[A-Za-z0-9+/]{16,}={0,2}", data):
        with contextlib.suppress(ValueError):
            yield base64.b64decode(found + b"=" * (-len(found) % 4))


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


def cli(*arguments: object) -> Done:
    """Run a verb of the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(one) for one in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Done(code=code, out=out.getvalue(), err=err.getvalue())


def check(path: Path) -> None:
    """Validate and verify, without a complaint; every line is JSON as other readers take it."""
    found = validate_bundle(path, verify_integrity=True)
    assert (found.exit_code, found.integrity, found.warnings) == (0, "verified", ()), found
    for name in ("events.jsonl", "calls.jsonl", "wire.jsonl", "spans.jsonl"):
        if (path / name).exists():
            for line in (path / name).read_bytes().split(b"\n"):
                if line:
                    json.loads(line.decode("utf-8"), parse_constant=_no_constant)


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def child(folder: Path, program: str, *arguments: str, code: int | None = 0, **environ: str) -> Any:
    """Run `program` (source text) in a process of its own in `folder`; check its exit code (None: any)."""
    script = folder / "agent.py"
    script.write_text(program, encoding="utf-8")
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=folder, env={**keep, **environ}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


# --- models -----------------------------------------------------------------------------------------------------------

_open: list[Any] = []


def oa(url: str, **options: Any) -> openai.OpenAI:
    """A sync client of the model at `url`; closed after the test."""
    made = openai.OpenAI(**{"api_key": "k", "base_url": f"{url}/v1", "max_retries": 0, **options})
    _open.append(made)
    return made


def aoa(url: str, **options: Any) -> openai.AsyncOpenAI:
    """An async one, for `async with`."""
    return openai.AsyncOpenAI(**{"api_key": "k", "base_url": f"{url}/v1", "max_retries": 0, **options})


def close_clients() -> None:
    """Close what `oa` made."""
    while _open:
        _open.pop().close()


def U(text: str) -> Any:
    """A user message."""
    return {"role": "user", "content": text}


def ask(client: openai.OpenAI, messages: Any = None, **options: Any) -> str | None:
    """One chat call; the answer's text."""
    done = client.chat.completions.create(model="m", messages=messages or [U("x")], **options)
    return done.choices[0].message.content


def run(make: Callable[[], Any]) -> Any:
    """Run a coroutine in a loop of its own."""
    return asyncio.run(make())
