# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile bundles: rows of the public case collection that concern `.sftrace`, and random damage."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.bundle import read
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats import canonical, sftrace

HERE = Path(__file__).parent
VECTORS = HERE.parent / "data" / "vectors" / "sftrace"


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"bundle_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


corruption = _load("corruption")
ROWS = [
    json.loads(line)
    for line in (HERE.parent / "data/cases/corrupt_bundles.jsonl").read_bytes().split(b"\n")[1:]
    if line
]
OURS = [
    pytest.param(row, id=row["id"])
    for row in ROWS
    if row["format"] == "both"
    and row["id"] != "cor-017"  # the format page wins: a bundle without integrity.json is legacy, not broken
    and not any(op.get("pointer") == "@manifest_event_path" for op in row["ops"])  # .sftrace names no files there
]


def said(result: read.Validation) -> str:
    issues = [f"{issue.location}: {issue.code}: {issue.message}" for issue in result.issues]
    return "\n".join([*issues, *result.warnings])


def as_expected(expected: str, result: read.Validation) -> bool:
    return {
        "fail": result.exit_code in (1, 2),
        "fail_if_hashed": result.exit_code in (1, 2),
        "fail_or_warn": bool(result.issues or result.warnings),
        "pass_or_warn": result.exit_code == 0,
    }.get(expected, True)


@pytest.mark.parametrize("row", OURS)
def test_row(row: dict[str, Any], bundle: Path) -> None:
    corruption.damage(bundle, row["ops"])
    began = time.monotonic()
    plain = read.validate_bundle(bundle)
    verified = read.validate_bundle(bundle, verify_integrity=True)
    assert time.monotonic() - began < row["expect"]["max_seconds"]
    expect = row["expect"]
    assert as_expected(expect["validate"], plain), said(plain)
    assert as_expected(expect["verify"], verified), said(verified)
    for word in expect["mentions"]:
        assert corruption.FILES.get(word, word) in said(verified), said(verified)
    for issue in verified.issues:
        assert issue.message.isprintable() and str(bundle.parent) not in str(issue.location)
    assert _refuses_to_load(bundle) or plain.exit_code in (0, 1)


def test_cor_017_without_integrity_json_a_bundle_is_legacy(bundle: Path) -> None:
    (bundle / "integrity.json").unlink()
    plain, verified = (read.validate_bundle(bundle, verify_integrity=verify) for verify in (False, True))
    assert (plain.exit_code, verified.exit_code, verified.integrity) == (0, 3, "unverified_legacy")
    assert "integrity.json" in said(verified)


def _refuses_to_load(bundle: Path) -> bool:
    try:
        trace = read.load(bundle)
        for event in trace.events:
            for name in event.__payloads__:
                getattr(event, name)
    except ValueError as error:
        assert str(error).isprintable()
        return True
    return False


def test_nothing_outside_the_bundle_is_opened(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = bundle.parent / "canary.txt"
    canary.write_text("CANARY")
    for name in ("manifest.json", "events.jsonl", "calls.jsonl", "integrity.json"):
        copy = bundle.parent / f"{name}.sftrace"
        shutil.copytree(bundle, copy)
        (copy / name).unlink()
        (copy / name).symlink_to(canary)
        opened: list[str] = []
        real = os.open
        monkeypatch.setattr(
            os, "open", lambda path, *rest, real=real, seen=opened: seen.append(str(path)) or real(path, *rest)
        )
        result = read.validate_bundle(copy, verify_integrity=True)
        monkeypatch.undo()
        assert result.exit_code == 2 and "symlink" in said(result) and "CANARY" not in said(result)
        assert str(copy / name) not in opened
    with pytest.raises(TraceStorageError, match="symlink"):
        _ = read.open_bundle(bundle.parent / "calls.jsonl.sftrace").calls


def test_a_folder_of_blobs_that_is_a_link_is_refused(bundle: Path, tmp_path: Path) -> None:
    (bundle / "blobs").rename(tmp_path / "elsewhere")
    (bundle / "blobs").symlink_to(tmp_path / "elsewhere")
    result = read.validate_bundle(bundle, verify_integrity=True)
    assert result.exit_code == 2 and "symlink" in said(result)


def test_the_bundle_itself_may_be_reached_through_a_link(bundle: Path) -> None:
    alias = bundle.parent / "alias.sftrace"
    alias.symlink_to(bundle)
    assert read.validate_bundle(alias, verify_integrity=True).exit_code == 0


def test_a_sealed_bundle_with_names_outside_is_refused(bundle: Path) -> None:
    for name in ("../outside", "/etc/passwd", "a\0b", "CON"):
        record = json.loads((bundle / "integrity.json").read_bytes())
        record["files"][name] = "0" * 64
        (bundle / "integrity.json").write_text(json.dumps(record))
        result = read.validate_bundle(bundle, verify_integrity=True)
        assert result.exit_code == 2 and "path" in said(result)


def test_a_device_and_a_missing_folder_are_no_bundles(tmp_path: Path) -> None:
    for path in (tmp_path / "none.sftrace", Path("/dev/null"), tmp_path / "a\0b.sftrace"):
        result = read.validate_bundle(path)
        assert result.exit_code == 2 and result.issues[0].code == "missing_file"
        with pytest.raises(TraceStorageError) as caught:
            read.open_bundle(path)
        assert caught.value.code == "missing_file"


def test_findings_in_all_files_come_at_once(bundle: Path) -> None:
    corruption.damage(
        bundle,
        [
            {"op": "line_set", "file": "@events", "line": 2, "pointer": "@parent_id", "value": "gone"},
            {"op": "split_line", "file": "@events", "line": 4},
            {"op": "json_set", "file": "@redactions", "pointer": "@format_version", "value": "9"},
            {"op": "delete", "file": "calls.jsonl"},
        ],
    )
    found = [issue.code for issue in read.validate_bundle(bundle, verify_integrity=True).issues]
    assert {"unsupported_schema", "invalid_parent", "invalid_json", "missing_file", "integrity_mismatch"} <= set(found)
    assert found.count("invalid_json") == 2


def test_a_changed_sidecar_is_found_though_the_reference_ignores_it(bundle: Path) -> None:
    (bundle / "of_a_later_version.bin").write_bytes(b"\x01\x03\r\n")
    result = read.validate_bundle(bundle, verify_integrity=True)
    assert [issue.location for issue in result.issues] == ["of_a_later_version.bin"]
    assert "of_a_later_version.bin" not in result.covered_files and "events.jsonl" in result.covered_files


def _flips(bundle: Path, count: int, seed: int) -> None:
    """Change one random byte of one random file, `count` times: found, or the same in meaning."""
    names = sorted(str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file())
    draw = random.Random(seed)
    record = canonical.loads((bundle / "integrity.json").read_bytes())
    for _ in range(count):
        path = bundle / draw.choice(names)
        good = path.read_bytes()
        at, mask = draw.randrange(len(good)), draw.randrange(1, 256)
        bad = good[:at] + bytes([good[at] ^ mask]) + good[at + 1 :]
        path.write_bytes(bad)
        result = read.validate_bundle(bundle, verify_integrity=True)
        if result.exit_code == 0:
            assert path.name == "integrity.json" and _same_files(bad, record), (path.name, at, mask)
        path.write_bytes(good)
    assert read.validate_bundle(bundle, verify_integrity=True).exit_code == 0


def _same_files(data: bytes, record: Any) -> bool:
    """Whether a changed record still asks for every file, by the digests it had; or spells the same in other bytes."""
    found = sftrace.parse_integrity(data).files
    return all(found.get(name) == digest for name, digest in record["files"].items())


def test_any_changed_byte_is_found(bundle: Path) -> None:
    _flips(bundle, 150, seed=1)


@pytest.mark.full
def test_any_changed_byte_is_found_10_000_times(bundle: Path) -> None:
    _flips(bundle, 10_000, seed=2)


@pytest.mark.full
def test_any_changed_byte_of_the_reference_is_found(tmp_path: Path) -> None:
    for name in ("completed", "secrets", "numbers"):
        shutil.copytree(VECTORS / f"{name}.sftrace", tmp_path / f"{name}.sftrace")
        _flips(tmp_path / f"{name}.sftrace", 1000, seed=3)
