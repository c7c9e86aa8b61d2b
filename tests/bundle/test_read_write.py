# SPDX-License-Identifier: Apache-2.0
"""Bundles on disk: the reference's vectors, atomic writing, sidecars and blobs, folders of bundles."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.bundle import read, write
from sftrace_otel.bundle.carry import carry
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats import sftrace, sidecars
from sftrace_otel.formats.sftrace import REQUIRED_FILES, Manifest, RunStart, TraceData

VECTORS = Path(__file__).parents[1] / "data" / "vectors" / "sftrace"
EXPECTED = json.loads((VECTORS / "expected.json").read_bytes())


@pytest.mark.parametrize("name", EXPECTED)
def test_vector(name: str) -> None:
    expected, path = EXPECTED[name], VECTORS / name
    strict, partial = (read.validate_bundle(path, strict=mode) for mode in (True, False))
    verified = read.validate_bundle(path, verify_integrity=True)
    assert expected["loads"] and len(read.load(path).events) == len(list(read.iter_events(path)))
    assert strict.valid == expected["strict_valid"]
    assert partial.valid == expected["partial_valid"]
    assert verified.integrity == expected["integrity"]
    assert strict.exit_code == (0 if expected["strict_valid"] else 1)
    if expected["integrity"] == "unverified_legacy":
        assert verified.exit_code == 3
    elif expected["strict_valid"]:
        assert verified.exit_code == 0
    assert verified.profile == "stepfork-json-v0.1"


@pytest.mark.parametrize("name", EXPECTED)
def test_a_vector_saved_again_has_the_same_bytes_and_an_integrity_record(name: str, tmp_path: Path) -> None:
    saved = write.save(read.load(VECTORS / name), tmp_path / "again.sftrace", fsync=False)
    for file in REQUIRED_FILES:
        assert (saved / file).read_bytes() == (VECTORS / name / file).read_bytes()
    assert read.open_bundle(saved).integrity().state == "verified"


def test_all_parts_of_a_bundle_come_back(bundle: Path) -> None:
    opened = read.open_bundle(bundle)
    assert opened.manifest.totals == sftrace.Totals(events=8, llm_calls=1, tool_calls=2)
    assert [row["request"] for row in opened.calls] == ["evt_1", "evt_3", "evt_5"]
    rows = list(opened.wire())
    assert rows[0]["body"] == "{}"
    body: Any = rows[1]["body"]
    assert opened.blob(body["$blob"]) == b"\x00binary body\xff"
    assert opened.run["verdict"]["offline"] is True
    assert list(opened.spans()) == [] and opened.provenance == {}
    assert opened.integrity().unlisted == ()
    assert opened.trace.redactions[0].path == "/input/api_key"
    assert opened.trace.events == opened.events


def test_files_are_private_sorted_and_all_listed(bundle: Path) -> None:
    record = json.loads((bundle / "integrity.json").read_bytes())
    there = sorted(str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file())
    assert list(record["files"]) == [name for name in there if name != "integrity.json"]
    for name, digest in record["files"].items():
        assert hashlib.sha256((bundle / name).read_bytes()).hexdigest() == digest
    for path in [bundle, *bundle.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_blob_is_checked_when_it_is_read(bundle: Path) -> None:
    opened = read.open_bundle(bundle)
    ref = "sha256:" + hashlib.sha256(b"\x00binary body\xff").hexdigest()
    name = next(path for path in (bundle / "blobs").rglob("*") if path.is_file())
    name.chmod(0o600)
    name.write_bytes(b"other")
    with pytest.raises(TraceStorageError, match="digest"):
        opened.blob(ref)
    for wrong in ("sha256:zz", "md5:00", "../../etc/passwd", "sha256:" + "0" * 64):
        with pytest.raises(TraceStorageError):
            opened.blob(wrong)


def test_broken_sidecars_do_not_break_the_bundle(bundle: Path) -> None:
    (bundle / "calls.jsonl").write_bytes(b'{"schema_version":"1","sidecar":"calls"}\n{"call":"x"}\n')
    (bundle / "run.json").write_bytes(b"[]")
    opened = read.open_bundle(bundle)
    assert len(opened.events) == 8
    with pytest.raises(TraceStorageError, match=r"calls\.jsonl:2: "):
        _ = opened.calls
    with pytest.raises(TraceStorageError, match=r"run\.json: "):
        _ = opened.run


def test_loading_leaves_the_garbage_collector_as_it_was(bundle: Path) -> None:
    assert gc.isenabled()
    read.load(bundle)
    assert gc.isenabled()
    gc.disable()
    try:
        read.load(bundle)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_iter_events_stops_at_the_first_bad_line_and_names_it(bundle: Path) -> None:
    lines = (bundle / "events.jsonl").read_bytes().split(b"\n")
    lines[3] = b"{"
    (bundle / "events.jsonl").write_bytes(b"\n".join(lines))
    events = read.iter_events(bundle)
    assert [next(events).id for _ in range(3)] == ["evt_0", "evt_1", "evt_2"]
    with pytest.raises(TraceStorageError, match=r"events\.jsonl:4: malformed JSON") as caught:
        next(events)
    assert caught.value.code == "invalid_json"


def test_line_separators_of_unicode_do_not_split_lines(tmp_path: Path) -> None:
    odd = "".join(map(chr, [0x0B, 0x0C, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029, 0x0D])) + "end"
    event = sftrace.with_hashes(RunStart(id="e", run_id="r", input=odd))
    manifest = Manifest(run_id="r", agent_name="a", created_at="2026-01-01T00:00:00Z", status="running")
    saved = write.save(TraceData(manifest=manifest, events=(event,)), tmp_path / "x.sftrace", fsync=False)
    assert read.load(saved).events[0].input == odd  # type: ignore[attr-defined]
    assert read.validate_bundle(saved, verify_integrity=True).exit_code == 0


# Writing


def folder_at(tmp_path: Path, run_id: str = "run_new") -> Path:
    """A complete folder under a hidden name, as a journal leaves it."""
    folder = tmp_path / f".{run_id}.journal"
    folder.mkdir()
    event = sftrace.with_hashes(RunStart(id="evt_0", run_id=run_id, input=None))
    (folder / "events.jsonl").write_bytes(sftrace.dump_event(event) + b"\n")
    manifest = Manifest(
        run_id=run_id, agent_name="a", created_at="2026-02-01T00:00:00Z", status="running",
        totals=sftrace.Totals(events=1),
    )  # fmt: skip
    write.finish_folder(folder, manifest=manifest, redactions=[], fsync=False)
    return folder


def test_publish_is_one_rename(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    target = tmp_path / "new" / "x.sftrace"
    assert write.publish(folder, target) == target
    assert not folder.exists() and read.validate_bundle(target, verify_integrity=True).exit_code == 0


def test_publish_takes_an_empty_folder_and_overwrites_only_bundles(tmp_path: Path, bundle: Path) -> None:
    empty = tmp_path / "empty.sftrace"
    empty.mkdir()
    write.publish(folder_at(tmp_path, "run_a"), empty)
    assert read.open_bundle(empty).manifest.run_id == "run_a"
    with pytest.raises(TraceStorageError, match="already exists") as caught:
        write.publish(folder_at(tmp_path, "run_b"), bundle)
    assert caught.value.code == "exists"
    write.publish(tmp_path / ".run_b.journal", bundle, overwrite=True)
    assert read.open_bundle(bundle).manifest.run_id == "run_b"
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_nothing_but_a_bundle_is_ever_overwritten(tmp_path: Path, bundle: Path) -> None:
    folder = folder_at(tmp_path)
    precious = tmp_path / "precious.sftrace"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    file = tmp_path / "file.sftrace"
    file.write_text("mine")
    link = tmp_path / "link.sftrace"
    link.symlink_to(bundle)
    for target in (precious, file, link, tmp_path / "wrong.name"):
        with pytest.raises(TraceStorageError):
            write.publish(folder, target, overwrite=True)
    assert (precious / "thesis.txt").read_text() == file.read_text() == "mine"
    assert read.validate_bundle(bundle, verify_integrity=True).exit_code == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux exchanges two names at once")
def test_a_bundle_is_there_at_every_moment_of_an_overwrite(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_at(tmp_path)
    seen = []
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        seen.append(read.open_bundle(bundle).manifest.run_id)
        moved = real(self, target)
        seen.append(read.open_bundle(bundle).manifest.run_id)
        return moved

    monkeypatch.setattr(Path, "rename", rename)
    write.publish(folder, bundle, overwrite=True)
    assert set(seen) == {"run_new"} and read.validate_bundle(bundle, verify_integrity=True).exit_code == 0


@pytest.mark.parametrize("step", ["first", "second"])
def test_a_failed_rename_leaves_the_old_bundle(
    step: str, tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_at(tmp_path)
    real = Path.rename
    fails = {"first": bundle, "second": folder}[step]

    def rename(self: Path, target: Path) -> Path:
        if self == fails:
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(write, "_exchange", lambda *_: False)
    with pytest.raises(TraceStorageError, match="Input/output error"):
        write.publish(folder, bundle, overwrite=True)
    monkeypatch.undo()
    assert read.open_bundle(bundle).manifest.run_id == "run_1"
    assert read.validate_bundle(bundle, verify_integrity=True).exit_code == 0


def test_a_failed_save_leaves_nothing(tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = read.load(bundle)
    before = sorted(path.name for path in tmp_path.iterdir())

    def no_space(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "finish_folder", no_space)
    with pytest.raises(TraceStorageError, match="No space left") as caught:
        write.save(trace, tmp_path / "new.sftrace")
    assert caught.value.code == "not_writable"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_integrity_is_written_last_and_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_at(tmp_path)
    flushed: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(Path(f"/proc/self/fd/{fd}").readlink().name), real(fd)))
    manifest = sftrace.parse_manifest((folder / "manifest.json").read_bytes())
    write.finish_folder(folder, manifest=manifest, redactions=[], fsync=True)
    write.publish(folder, tmp_path / "x.sftrace")
    files = ["events.jsonl", "manifest.json", "redactions.json", "integrity.json"]
    assert flushed == [*files, folder.name, tmp_path.name]


def test_a_foreign_link_in_the_folder_is_not_sealed(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    (folder / "link").symlink_to("/etc/passwd")
    manifest = sftrace.parse_manifest((folder / "manifest.json").read_bytes())
    with pytest.raises(TraceStorageError, match="neither a file nor a folder"):
        write.finish_folder(folder, manifest=manifest, redactions=[], fsync=False)


def test_sidecars_cannot_be_written_outside(tmp_path: Path, bundle: Path) -> None:
    for name in ("../x", "/tmp/x", "a/../../x"):
        with pytest.raises(TraceStorageError, match="path"):
            write.save(read.load(bundle), tmp_path / "new.sftrace", sidecars={name: b""})
    assert not (tmp_path / "new.sftrace").exists()


def test_an_unwritable_place_is_one_clear_line(tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "x.sftrace", tmp_path / ("n" * 300 + ".sftrace"), Path("/proc/x.sftrace")):
        with pytest.raises(TraceStorageError) as caught:
            write.save(read.load(bundle), target)
        assert str(target) in str(caught.value) and "\n" not in str(caught.value)


# Taking sidecars along


def test_carry_takes_unknown_sidecars_and_drops_stale_rows_and_their_blobs(bundle: Path) -> None:
    opened = read.open_bundle(bundle)
    everything = carry(opened)
    for name, pieces in everything.sidecars.items():
        assert b"".join(pieces) == (bundle / name).read_bytes()
    assert sorted(everything.sidecars) == ["calls.jsonl", "of_a_later_version.bin", "run.json", "wire.jsonl"]
    assert len(everything.blobs) == 1
    less = carry(opened, stale={"evt_6", "evt_5"})
    assert [row["call"] for row in sidecars.parse_calls(less.sidecars["calls.jsonl"])] == [0, 1]
    assert [row["call"] for row in sidecars.parse_wire(less.sidecars["wire.jsonl"])] == [1]
    assert less.blobs == {}


def test_carry_leaves_foreign_files_and_refuses_changed_ones(bundle: Path) -> None:
    (bundle / "notes.txt").write_text("mine")
    assert "notes.txt" not in carry(read.open_bundle(bundle)).sidecars
    (bundle / "run.json").write_bytes((bundle / "run.json").read_bytes().replace(b"true", b"false"))
    with pytest.raises(TraceStorageError, match=r"run\.json") as caught:
        carry(read.open_bundle(bundle))
    assert caught.value.code == "integrity_mismatch"


# Folders


def test_list_bundles_newest_first_and_tolerant(tmp_path: Path, bundle: Path) -> None:
    write.publish(folder_at(tmp_path), tmp_path / "newer.sftrace")
    broken = tmp_path / "broken.sftrace"
    broken.mkdir()
    (tmp_path / ".hidden.sftrace").mkdir()
    (tmp_path / "file.sftrace").write_text("")
    found = read.list_bundles(tmp_path)
    assert [one.path.name for one in found] == ["newer.sftrace", "good.sftrace", "broken.sftrace"]
    assert found[1].trace_ids == ("ab" * 16,) and (found[1].llm_calls, found[1].tool_calls) == (1, 2)
    assert found[2].status == "unreadable" and "missing" in str(found[2].failure)
    failed = read.list_bundles(VECTORS)
    assert {one.failure for one in failed if one.status == "failed"} == {"ValueError: bad code 7"}
    with pytest.raises(TraceStorageError):
        read.list_bundles(tmp_path / "none")


def test_resolve_finds_what_people_type(tmp_path: Path, bundle: Path) -> None:
    newer = write.publish(folder_at(tmp_path), tmp_path / "newer.sftrace")
    assert read.resolve(str(bundle), dir=tmp_path / "none") == bundle
    assert read.resolve("latest", dir=tmp_path) == newer
    assert read.resolve("run_1", dir=tmp_path) == bundle
    assert read.resolve("good", dir=tmp_path) == read.resolve("good.sftrace", dir=tmp_path) == bundle
    assert read.resolve("ab" * 16, dir=tmp_path) == read.resolve("ABABABAB", dir=tmp_path) == bundle
    for nothing in ("cd" * 16, "nope", "a\0b", "", "abab"):
        with pytest.raises(TraceStorageError, match="sftrace ls") as caught:
            read.resolve(nothing, dir=tmp_path)
        assert caught.value.code == "missing_file"
    with pytest.raises(TraceStorageError, match="no bundle"):
        read.resolve("latest", dir=tmp_path / "none")


def test_a_bundle_without_integrity_keeps_its_known_sidecars(bundle: Path, tmp_path: Path) -> None:
    (bundle / "integrity.json").unlink()
    kept = carry(read.open_bundle(bundle)).sidecars
    assert sorted(kept) == ["calls.jsonl", "run.json", "wire.jsonl"]
    shutil.rmtree(bundle)
