# SPDX-License-Identifier: Apache-2.0
"""The program that `export --verifier` puts beside a bundle: the standard library alone, the package's verdicts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.analysis import verifier
from sftrace_otel.bundle.read import validate_bundle
from sftrace_otel.flight import verify_flight
from sftrace_otel.formats import canonical

DATA = Path(__file__).parents[1] / "data"
VECTORS = DATA / "vectors" / "flight"
EXPECTED = json.loads((VECTORS / "expected.json").read_text())
SFTRACE = sorted((DATA / "vectors" / "sftrace").glob("*.sftrace"))


def run(*arguments: object, isolated: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-I", "-S"] if isolated else []), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", EXPECTED)
def test_vector(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = verify_flight(VECTORS / name)
    assert verifier.main([str(VECTORS / name)]) == result.exit_code
    out, err = capsys.readouterr()
    if result.valid:
        assert str(result.head_hash) in out and f"{result.event_count} events" in out and not err
    else:
        first = result.findings[0]
        assert not out and (first.seq is None or f"(seq {first.seq})" in err)
        assert first.field is None or first.field == "body" or first.field in err


@pytest.mark.parametrize("path", SFTRACE, ids=lambda path: path.name)
def test_sftrace_vector(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = validate_bundle(path, strict=False, verify_integrity=True).integrity
    if path.stem == "hashless":  # its checksums match; the hashes of payloads, which it lacks, are not this program's
        state = "verified"
    assert verifier.main([str(path)]) == {"verified": 0, "mismatch": 1, "unverified_legacy": 3}[state]


def test_it_runs_alone_beside_its_bundle(good: Path, cli: Callable[..., Any]) -> None:
    done = cli("export", good, "--verifier")
    program = good.with_name("good.flight.verify.py")
    assert done.code == 0 and str(program) in done.out
    alone = run(program)
    assert (alone.returncode, alone.stderr) == (0, "") and "11 events" in alone.stdout
    assert run(program, VECTORS / "body_edited.flight").returncode == 1
    lines = (good / "events.jsonl").read_bytes().replace(b"MARKER-ORIG", b"MARKER-EVIL")
    (good / "events.jsonl").write_bytes(lines)
    alone = run(program)
    assert (alone.returncode, alone.stdout) == (1, "") and "line 5 (seq 4): body_hash: expected sha256:" in alone.stderr
    shutil.rmtree(good)
    assert run(program).returncode == 2
    other = shutil.copy(program, good.with_name("other.py"))
    assert run(other).returncode == 2 and "usage" in run(other).stderr


def test_it_imports_nothing_but_the_standard_library(good: Path) -> None:
    code = f"import runpy, sys; sys.argv = ['v', {str(good)!r}]\n"
    code += f"try: runpy.run_path({verifier.__file__!r}, run_name='__main__')\n"
    code += "except SystemExit as ended: assert ended.code == 0\n"
    code += "assert not [n for n in sys.modules if n.partition('.')[0] not in {*sys.stdlib_module_names, '__main__'}]"
    assert run("-c", code).returncode == 0


def test_export_replaces_nothing_by_itself(good: Path, cli: Callable[..., Any]) -> None:
    place = good.with_name("good.flight.verify.py")
    place.write_text("mine")
    refused = cli("export", good, "--verifier")
    assert refused.code == 2 and "already exists" in refused.err and place.read_text() == "mine"
    assert cli("export", good, "--verifier", "--overwrite", "--json").json == {
        "bundle": str(good),
        "verifier": str(place),
    }
    assert cli("export", good, "--verifier").code == 0
    out = good.with_name("x.py")
    assert str(good) in cli("export", good, "--verifier", "-o", out).out
    assert out.read_bytes() == place.read_bytes() == Path(verifier.__file__).read_bytes()
    assert cli("export", good).code == 2
    assert cli("export", VECTORS / "expected.json", "--verifier").code == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "manifest.json").write_bytes(b"\xff"),
        lambda path: (path / "manifest.json").write_bytes(b"[]"),
        lambda path: (path / "events.jsonl").write_bytes(b"[" * 100_000 + b"\n"),
        lambda path: (path / "events.jsonl").write_bytes(b'{"v":NaN}\n'),
        lambda path: (path / "events.jsonl").write_bytes(b'{"v":1e999}\n'),
        lambda path: (path / "events.jsonl").unlink(),
        lambda path: (path / "events.jsonl").rename(path / "x") and (path / "events.jsonl").symlink_to(path / "x"),
    ],
)
def test_what_cannot_be_read_is_one_line(good: Path, damage: Callable[[Path], object]) -> None:
    damage(good)
    done = run(verifier.__file__, good)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert not verify_flight(good).valid


def test_its_canonical_text_is_rfc_8785() -> None:
    rows = (DATA / "cases" / "canonical_bulk_inputs.jsonl").read_bytes().split(b"\n")
    for row in filter(None, rows):
        value = verifier.loads(row)
        assert verifier.canonical(value).encode() == canonical.rfc8785_nfc(value)
