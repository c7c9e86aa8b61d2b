# SPDX-License-Identifier: Apache-2.0
"""An independent verifier of `.flight`, bundles to try things on, and the verbs."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from sftrace_otel.cli.app import main
from sftrace_otel.flight import FlightWriter, redacted

HERE = Path(__file__).parent
VECTORS = HERE.parent / "data" / "vectors" / "flight"


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


oracle_module = _load("flight_oracle", HERE / "oracle.py")
corruption_module = _load("flight_corruption", HERE.parent / "bundle" / "corruption.py")
corruption_module.FILES["@flight_events"] = "events.jsonl"


class Done(NamedTuple):
    """A verb that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as the one JSON document that it has to be."""
        return json.loads(self.out)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a verb in this process."""

    def run(*arguments: object) -> Done:
        capfd.readouterr()
        try:
            code = main([str(one) for one in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Done(code, out, err)

    return run


@pytest.fixture
def oracle() -> Callable[[Path], str | None]:
    """The first fault that the independent verifier finds, or None."""
    return oracle_module.verify  # type: ignore[no-any-return]


def write_good(path: Path) -> Path:
    """A bundle with every event type, blobs, a redacted value, and the markers of the case collection."""
    with FlightWriter(path, run_id="run_good", fsync="never") as chain:
        start = chain.append("run.start", {"agent": "cases", "argv": ["agent.py"], "mono_origin_ns": 7})
        asked = chain.append(
            "http.request",
            {"method": "POST", "url": "https://api.example.test/v1/chat", "body": '{"model":"m","temperature":1.0}',
             "headers": {"authorization": redacted("authorization", "hmac-sha256:0123456789abcdef")}},
            parents=[start],
        )  # fmt: skip
        chain.append("http.response", {"status": 200, "body": '{"ok":true}', "latency_ns": 12}, parents=[asked])
        call = chain.append(
            "tool.call", {"name": "search", "input": {"q": "x", "n": 2**70, "\ue000": 1, "😀": 2}}, parents=[start]
        )
        output = {
            "text": "MARKER-ORIG",
            "accent": "MARKER-é",
            "$literal": "mine",
            "odd": "Cafe\u0301",
            "raw": b"\x00\xff",
            "nan": float("nan"),
        }
        chain.append("tool.result", {"name": "search", "output": output, "duration_ns": 3}, parents=[call])
        chain.append("tool.result", {"name": "big", "output": "long " * 9000}, parents=[start])
        chain.append("clock.read", {"source": "time.time", "value": 1767225600.25}, parents=[start])
        chain.append("rng.draw", {"source": "random.random", "value": 1e-7}, parents=[start])
        chain.append(
            "x-acme.note",
            {"anything": [None, True, {"deep": {"$blob": "not ours"}}, 1e16, 1e21, -0.0]},
            parents=[start],
        )
        chain.append("error", {"error_type": "ValueError", "message": "bad"}, parents=[start])
        chain.append("run.end", {"status": "failed"}, parents=[start])
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A good bundle in a folder of its own."""
    return write_good(tmp_path / "home" / "good.flight")
