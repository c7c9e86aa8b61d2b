# SPDX-License-Identifier: Apache-2.0
"""Verification: every vector with its fault located, rows of the case collection, and what is said of a fault."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.bundle.flight import FlightValidation
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.flight import GENESIS, open_flight, verify_flight

HERE = Path(__file__).parent
VECTORS = HERE.parent / "data" / "vectors" / "flight"
EXPECTED = json.loads((VECTORS / "expected.json").read_text())
corruption = sys.modules["flight_corruption"]

# The first finding of each vector: code, seq, field.
FAULTS: dict[str, tuple[str, int | None, str | None]] = {
    "body_edited": ("body_hash_mismatch", 2, "body_hash"),
    "body_edited_rehashed": ("chain_broken", 3, "prev_hash"),
    "last_edited_rehashed": ("head_hash_mismatch", None, "head_hash"),
    "latency_edited": ("hash_mismatch", 2, "hash"),
    "wall_clock_edited": ("hash_mismatch", 4, "hash"),
    "unknown_type_edited": ("body_hash_mismatch", 7, "body_hash"),
    "event_dropped": ("seq_mismatch", 5, "seq"),
    "tail_dropped": ("event_count_mismatch", None, "event_count"),
    "swapped": ("seq_mismatch", 3, "seq"),
    "truncated": ("torn_line", 9, None),
    "wrong_count": ("event_count_mismatch", None, "event_count"),
    "wrong_head": ("head_hash_mismatch", None, "head_hash"),
    "no_head": ("invalid_manifest", None, "head_hash"),
    "other_alg": ("unsupported_schema", None, "hash_alg"),
    "other_canonicalization": ("unsupported_schema", None, "canonicalization"),
    "major_version": ("unsupported_schema", None, "spec_version"),
    "blob_changed": ("blob_mismatch", 4, "body"),
    "blob_missing": ("blob_missing", 4, "body"),
    "duplicate_key": ("invalid_json", 3, None),
}


def said(result: FlightValidation) -> str:
    return "\n".join([*(f"{one.location}: {one.code}: {one.message}" for one in result.findings), *result.warnings])


@pytest.mark.parametrize("name", EXPECTED)
def test_vector(name: str, oracle: Any, cli: Any) -> None:
    result = verify_flight(VECTORS / name)
    assert result.valid == EXPECTED[name]["valid"] == (oracle(VECTORS / name) is None), said(result)
    stem = name.removesuffix(".flight")
    for verb in ("validate", "verify"):
        done = cli(verb, VECTORS / name, "--json")
        assert done.code == result.exit_code and done.json["valid"] == result.valid
        if result.valid:
            assert stem not in FAULTS and done.json["issues"] == []
            assert done.json["head_hash"] == open_flight(VECTORS / name).manifest.head_hash
        else:
            first = done.json["issues"][0]
            assert (first["code"], first["seq"], first["field"]) == FAULTS[stem]
    if result.valid:
        assert result.warnings == ("events.jsonl: line 1 is not canonical JSON: its values are right, but respelled",)


@pytest.mark.parametrize("stem", FAULTS)
def test_a_fault_says_what_should_be_there_and_what_is(stem: str) -> None:
    first = verify_flight(VECTORS / f"{stem}.flight").findings[0]
    if first.code in ("body_hash_mismatch", "hash_mismatch", "chain_broken", "head_hash_mismatch"):
        for digest in (first.expected, first.found):
            assert isinstance(digest, str) and digest.startswith("sha256:") and len(digest) == 71
        assert first.expected != first.found
    elif first.code in ("seq_mismatch", "event_count_mismatch"):
        assert isinstance(first.expected, int) and isinstance(first.found, int) and first.expected != first.found


def test_the_digests_of_a_finding_are_the_right_ones() -> None:
    good = list(open_flight(VECTORS / "valid.flight").events())
    broken = verify_flight(VECTORS / "body_edited.flight").findings[0]
    assert broken.found == good[2].body_hash != broken.expected
    chain = verify_flight(VECTORS / "event_dropped.flight").findings[1]
    assert (chain.code, chain.expected, chain.found) == ("chain_broken", good[4].hash, good[5].hash)
    count = verify_flight(VECTORS / "tail_dropped.flight").findings[1]
    assert (count.expected, count.found) == (good[9].hash, good[8].hash)


def test_one_edit_gives_one_place(good: Path) -> None:
    lines = (good / "events.jsonl").read_bytes().split(b"\n")
    lines[4] = lines[4].replace(b"MARKER-ORIG", b"MARKER-EVIL")
    lines[7] = lines[7].replace(b"random.random", b"random.rindom")
    (good / "events.jsonl").write_bytes(b"\n".join(lines))
    found = [(one.code, one.seq) for one in verify_flight(good).findings]
    assert found == [(code, seq) for seq in (4, 7) for code in ("body_hash_mismatch", "hash_mismatch")]


def test_a_good_bundle(good: Path, oracle: Any, cli: Any) -> None:
    result = verify_flight(good)
    assert (result.findings, result.warnings, result.exit_code, result.canonical) == ((), (), 0, True)
    assert oracle(good) is None
    done = cli("verify", good)
    manifest = json.loads((good / "manifest.json").read_bytes())
    assert done.code == 0 and done.err == ""
    assert "11 records" in done.out and manifest["head_hash"] in done.out and result.head_hash == manifest["head_hash"]


ROWS = [
    json.loads(line)
    for line in (HERE.parent / "data/cases/corrupt_bundles.jsonl").read_bytes().split(b"\n")[1:]
    if line
]
OURS = [
    pytest.param(row, id=row["id"], marks=[pytest.mark.full] if row["id"] == "cor-030" else [])  # a line of 60 MB
    for row in ROWS
    if row["format"] in ("both", "flight")
    and not any(op.get("file") in ("@integrity", "@redactions") for op in row["ops"])  # .flight has no such file
    and not any(op.get("pointer") == "@manifest_event_path" for op in row["ops"])  # nor a file name in its manifest
]
RESPELLED = {"cor-009", "cor-010", "cor-052"}  # the values are right: they verify, and it is said


def rehash(bundle: Path) -> None:
    """Seal every line that can be read, as somebody with write access would."""
    module = sys.modules["flight_oracle"]
    prev, lines = GENESIS, []
    for raw in (bundle / "events.jsonl").read_bytes().split(b"\n")[:-1]:
        event = json.loads(raw)
        event["prev_hash"] = prev
        try:
            event["body_hash"] = module.body_hash(event)
            event["hash"] = module.event_hash(event)
            lines.append(json.dumps(event, ensure_ascii=False).encode())
        except (ValueError, AttributeError):
            lines.append(raw)
        prev = event["hash"]
    (bundle / "events.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    manifest["head_hash"] = prev
    (bundle / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("row", OURS)
def test_row(row: dict[str, Any], good: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(corruption.POINTERS, "@format_version", "/spec_version")
    monkeypatch.setitem(corruption.POINTERS, "@parent_id", "/parents")
    monkeypatch.setitem(corruption.POINTERS, "@hash_field", "/hash")
    duplicate = row["id"] == "cor-027"  # sealing would remove what it is about
    for operation in row["ops"]:
        if operation["op"] == "rehash":
            if not duplicate:
                rehash(good)
        elif operation["op"] == "relax_lines":
            relaxed = [json.dumps(json.loads(line)) for line in (good / "events.jsonl").read_bytes().splitlines()]
            (good / "events.jsonl").write_text("".join(f"{line}\n" for line in relaxed))
        else:
            corruption.damage(good, [operation])
    done = cli("verify", good)
    result = verify_flight(good)
    assert done.code == result.exit_code
    expect = row["expect"]["verify"]
    if row["id"] in RESPELLED or expect in ("pass_or_warn", "fail_if_hashed"):
        assert result.valid
    elif expect == "fail":
        assert result.exit_code in (1, 2)
    elif expect == "fail_or_warn":
        assert result.findings or result.warnings
    for word in row["expect"]["mentions"]:
        assert corruption.FILES.get(word, word) in done.out + done.err, (word, done.out + done.err)


def test_every_row_of_the_collection_is_asked() -> None:
    assert {"cor-021", "cor-022", "cor-023", "cor-024", "cor-052", "cor-027", "cor-031"} <= {row.id for row in OURS}
    assert len(OURS) > 30


def test_nothing_outside_the_bundle_is_opened(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = good.parent / "canary.txt"
    canary.write_text("CANARY")
    blob = next(path for path in (good / "blobs").rglob("*") if path.is_file())
    for name in ("manifest.json", "events.jsonl", str(blob.relative_to(good))):
        copy = good.parent / f"{Path(name).name}.flight"
        shutil.copytree(good, copy)
        (copy / name).unlink()
        (copy / name).symlink_to(canary)
        opened: list[str] = []
        real = os.open
        monkeypatch.setattr(
            os, "open", lambda path, *rest, real=real, seen=opened: seen.append(str(path)) or real(path, *rest)
        )
        result = verify_flight(copy)
        monkeypatch.undo()
        assert not result.valid and "symlink" in said(result) and "CANARY" not in said(result)
        assert str(copy / name) not in opened


def test_folders_of_blobs_and_the_bundle_itself_behind_links(good: Path, tmp_path: Path) -> None:
    alias = good.parent / "alias.flight"
    alias.symlink_to(good)
    assert verify_flight(alias).valid
    (good / "blobs").rename(tmp_path / "elsewhere")
    (good / "blobs").symlink_to(tmp_path / "elsewhere")
    assert "symlink" in said(verify_flight(good))


@pytest.mark.parametrize(
    "digest",
    ["sha256:../../../etc/passwd", "sha256:" + "A" * 64, "sha256:" + "0" * 63, "0" * 64, "md5:" + "0" * 64, 7, None],
)
def test_a_reference_that_names_no_blob(good: Path, digest: object) -> None:
    def point_elsewhere(event: dict[str, Any]) -> None:
        event["body"]["output"] = {"$blob": digest, "media_type": "x", "size": 1}

    edit(good, 9, point_elsewhere)
    (finding,) = verify_flight(good).findings
    assert (finding.code, finding.seq) == ("invalid_blob", 9)


@pytest.mark.parametrize("size", [0, None, "1", True, 45001.5])
def test_the_size_of_a_blob_is_checked(good: Path, size: object) -> None:
    edit(good, 5, lambda event: event["body"]["output"].update(size=size))
    (finding,) = verify_flight(good).findings
    assert (finding.code, finding.seq, finding.found) == ("blob_mismatch", 5, 45000)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda event: event.update(run_id="other", id=f"other/{event['seq']}"), "run_id_mismatch"),
        (lambda event: event.update(id="run_good/99"), "id_mismatch"),
        (lambda event: event.update(parents=[9]), "invalid_parent"),
        (lambda event: event.update(parents=[-1]), "invalid_parent"),
        (lambda event: event.update(parents=["0"]), "invalid_event"),
        (lambda event: event.update(v=0), "invalid_event"),
        (lambda event: event.update(v=True), "invalid_event"),
        (lambda event: event.update(t_mono_ns=-1), "invalid_event"),
        (lambda event: event.update(t_mono_ns=1.5), "invalid_event"),
        (lambda event: event.update(body=[]), "invalid_event"),
        (lambda event: event.pop("t_wall"), "invalid_event"),
        (lambda event: event.update(x={"a\u0301": 1, "á": 2}), "invalid_json"),
        (lambda event: event["body"].update(z={"$literal": {}}), "invalid_value"),
    ],
)
def test_fields(good: Path, change: Callable[[dict[str, Any]], object], code: str) -> None:
    edit(good, 9, change)
    assert [(one.code, one.seq) for one in verify_flight(good).findings] == [(code, 9)]


def edit(bundle: Path, index: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change an event and seal the whole bundle again."""
    lines = (bundle / "events.jsonl").read_bytes().split(b"\n")
    event = json.loads(lines[index])
    change(event)
    lines[index] = json.dumps(event, ensure_ascii=False).encode()
    (bundle / "events.jsonl").write_bytes(b"\n".join(lines))
    rehash(bundle)


def test_what_nobody_knows_is_verified_like_the_rest(good: Path, oracle: Any) -> None:
    edit(good, 8, lambda event: event.update({"x-new": {"é": [1.0, "e\u0301"]}, "type": "x-later.thing", "v": 3}))
    assert verify_flight(good).valid and oracle(good) is None
    event = list(open_flight(good).events())[8]
    assert (event.v, event.type, event.extra) == (3, "x-later.thing", {"x-new": {"é": [1.0, "e\u0301"]}})
    text = (good / "events.jsonl").read_text().replace('"x-new"', '"x-old"')
    (good / "events.jsonl").write_text(text)
    assert [(one.code, one.seq) for one in verify_flight(good).findings] == [("hash_mismatch", 8)]


def test_files_that_are_no_part_of_it(good: Path, cli: Any) -> None:
    (good / "notes.txt").write_text("hello")
    stray = good / "blobs" / "00" / "00" / ("0" * 64)
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"stray")
    result = verify_flight(good)
    assert result.valid and "notes.txt" in said(result) and "1 blobs are named by no event" in said(result)
    done = cli("validate", good, "--strict")
    assert done.code == 1 and "unlisted_file" in done.err and "notes.txt" in done.err


def test_a_million_faults_are_a_thousand_findings(good: Path) -> None:
    with (good / "events.jsonl").open("ab") as file:
        file.write(b"{}\n" * 3000)
    result = verify_flight(good)
    assert len(result.findings) == 1001 and result.findings[-1].message == "and 2001 more"
    assert result.exit_code == 2


def test_no_bundle_at_all(tmp_path: Path, cli: Any) -> None:
    (tmp_path / "empty.flight").mkdir()
    (tmp_path / "file.flight").write_text("x")
    for name in ("empty.flight", "file.flight", "none.flight"):
        assert verify_flight(tmp_path / name).exit_code == 2
        done = cli("verify", tmp_path / name)
        assert done.code == 2 and name in done.out + done.err


def test_an_empty_chain(tmp_path: Path, oracle: Any) -> None:
    from sftrace_otel.flight import FlightWriter

    with FlightWriter(tmp_path / "none.flight", run_id="r"):
        pass
    assert verify_flight(tmp_path / "none.flight").valid and oracle(tmp_path / "none.flight") is None


def test_f11_archives_of_chains_are_not_read(good: Path) -> None:
    """A chain is read in a folder only, so no name or link in an archive can lead out of one."""
    archive = Path(shutil.make_archive(str(good), "zip", good))
    for name in (archive.name, "x.sftrace.zip"):
        place = archive.rename(archive.with_name(name))
        with pytest.raises(TraceStorageError, match="is not a folder") as caught:
            open_flight(place)
        assert caught.value.code == "missing_file" and verify_flight(place).exit_code == 2
        archive = place
