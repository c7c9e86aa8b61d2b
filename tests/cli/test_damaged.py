# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile bundles on the command line: every verb ends with a line or a few, never with a traceback."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sftrace_otel.fork import ForkPoint, OverrideSpec, fork_trace

from .conftest import VECTORS, Cli

TESTS = Path(__file__).resolve().parents[1]


def _corruption() -> ModuleType:
    """The operations of the rows, from the tests of the bundle room."""
    spec = importlib.util.spec_from_file_location("cli_corruption", TESTS / "bundle" / "corruption.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


corruption = _corruption()
ROWS = [
    pytest.param(row, id=row["id"], marks=[pytest.mark.full] if row["id"] == "cor-030" else [])
    for row in map(json.loads, (TESTS / "data/cases/corrupt_bundles.jsonl").read_text().splitlines()[1:])
    if row["format"] == "both" and not any(op.get("pointer") == "@manifest_event_path" for op in row["ops"])
]


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run with the texts that the rows look for."""
    path = tmp_path_factory.mktemp("good") / "good.sftrace"
    marked = OverrideSpec(step=2, output={"more": "MARKER-é", "text": "MARKER-ORIG"})
    fork_trace(VECTORS / "completed.sftrace", ForkPoint(step=9), overrides=[marked], output_path=path)
    return path


@pytest.fixture
def path(good: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    import shutil

    return Path(shutil.copytree(good, tmp_path / "bundle.sftrace"))


@pytest.mark.parametrize("row", ROWS)
def test_row(cli: Cli, path: Path, row: dict[str, Any]) -> None:
    corruption.damage(path, row["ops"])
    expect = row["expect"]
    legacy = row["id"] == "cor-017"  # the format page wins: without integrity.json a bundle is legacy
    done = cli("verify", path)
    said = done.out + done.err
    assert "Traceback" not in said
    if expect["verify"] in ("fail", "fail_if_hashed"):
        assert done.code in ((3,) if legacy else (1, 2)), said
    for word in expect["mentions"]:
        assert corruption.FILES.get(word, word) in said, said
    checked = cli("validate", path)
    assert checked.code in (0, 1, 2)
    if expect["validate"] == "fail" and not legacy:
        assert checked.code != 0
    replayed = cli("replay", path, "--entrypoint", "nowhere:main")
    assert replayed.code == 2
    started = "cannot import nowhere" in replayed.line
    if expect["replay"] != "any":
        assert started is (expect["replay"] == "ok" or legacy), replayed.line
    for verb in (("inspect", path), ("inspect", path, "--events"), ("ls", path.parent), ("fork", path, "--at-step", 2)):
        done = cli(*verb)
        assert done.code in (0, 1, 2)
        assert "Traceback" not in done.out + done.err
        assert "unexpected" not in done.err
