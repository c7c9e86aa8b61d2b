# SPDX-License-Identifier: Apache-2.0
"""`ls`: newest first, filters, folders that are not there or hold something else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from .conftest import VECTORS, Cli

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two bundles, one of them of a trace, and things that are none."""
    folder = tmp_path / "runs"
    for name in ("completed", "failed_tool"):
        shutil.copytree(VECTORS / f"{name}.sftrace", folder / f"{name}.sftrace")
    (folder / "completed.sftrace" / "run.json").write_text(json.dumps({"schema_version": "1", "trace_ids": [TRACE]}))
    (folder / "notes.txt").write_text("no bundle")
    (folder / "empty.sftrace").mkdir()
    return folder


def names(text: str) -> list[str]:
    """The last column without its header."""
    return [line.split()[-1] for line in text.splitlines()[1:]]


def test_lists_bundles_newest_first_and_unreadable_ones_last(cli: Cli, folder: Path) -> None:
    done = cli("ls", folder)
    assert done.code == 0
    assert names(done.out) == ["failed_tool.sftrace", "completed.sftrace", "empty.sftrace"]
    assert "sample-agent" in done.out
    assert "unreadable" in done.out


def test_filters(cli: Cli, folder: Path) -> None:
    assert names(cli("ls", folder, "--failed").out) == ["failed_tool.sftrace"]
    assert names(cli("ls", folder, "--trace", TRACE).out) == ["completed.sftrace"]
    assert names(cli("ls", folder, "--trace", TRACE[:8].upper()).out) == ["completed.sftrace"]
    done = cli("ls", folder, "--trace", "0" * 32)
    assert (done.code, done.out) == (0, "")
    assert "no bundle that matches" in done.line


def test_json(cli: Cli, folder: Path) -> None:
    document = cli("ls", folder, "--json").json
    assert [Path(one["path"]).name for one in document["bundles"]][:2] == ["failed_tool.sftrace", "completed.sftrace"]
    assert document["bundles"][1]["trace_ids"] == [TRACE]
    assert cli("ls", folder, "--trace", "0" * 32, "--json").json["bundles"] == []


def test_the_folder_is_an_argument_a_variable_or_the_default(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_DIR", str(folder))
    assert len(names(cli("ls").out)) == 3
    monkeypatch.delenv("OTEL_SFTRACE_DIR")
    monkeypatch.chdir(folder)
    done = cli("ls")
    assert (done.code, done.out) == (2, "")
    assert "sftraces: no such folder" in done.line


def test_a_trace_id_finds_its_bundle_in_every_verb(cli: Cli, folder: Path) -> None:
    for where in (TRACE, TRACE[:8], "run_023a34d2c9934966b36802d11191c971", "completed.sftrace"):
        done = cli("validate", where, "--dir", folder)
        assert done.code == 0
        assert "completed.sftrace" in done.out
    assert "failed_tool.sftrace" in cli("validate", "latest", "--dir", folder).out


def test_nothing_of_a_bundle_moves_the_cursor(cli: Cli, folder: Path) -> None:
    manifest = folder / "completed.sftrace" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("sample-agent", r"evil\u001b[2Jagent"))
    out = cli("ls", folder).out
    assert r"evil\x1b[2Jagent" in out
    assert "\x1b" not in out
