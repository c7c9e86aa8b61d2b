# SPDX-License-Identifier: Apache-2.0
"""Packs: one file, the same bytes for the same bundle, read in place, and no trick of the zip format gets through."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.bundle import pack as packing
from sftrace_otel.bundle import packed as packs
from sftrace_otel.bundle import read, write
from sftrace_otel.bundle.pack import pack, unpack
from sftrace_otel.cli import app
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.fork import ForkPoint, fork_trace
from sftrace_otel.formats import sftrace
from sftrace_otel.formats.sftrace import LLMRequest, LLMResponse, Manifest, RunStart, TraceData
from sftrace_otel.replay import ReplaySession
from sftrace_otel.trace import Trace

VECTORS = Path(__file__).parents[1] / "data" / "vectors" / "sftrace"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def history(target: Path, turns: int = 60, size: int = 1500) -> tuple[Path, int]:
    """A bundle of an agent that resends its history, and how many characters of it were new."""
    draw = random.Random(7)
    messages: list[dict[str, str]] = []
    events: list[Any] = [RunStart(id="evt_0", input=None)]
    unique = 0
    for turn in range(turns):
        question, answer = (draw.randbytes(size // 2).hex() for _ in range(2))
        unique += len(question) + len(answer)
        messages.append({"role": "user", "content": question})
        body = {"model": "m", "messages": list(messages)}
        request = {"method": "chat.completions.create", "request": body}
        events.append(LLMRequest(id=f"evt_q{turn}", parent_id="evt_0", provider="openai", model="m", input=request))
        messages.append({"role": "assistant", "content": answer})
        output = {"choices": [{"message": messages[-1]}]}
        events.append(LLMResponse(id=f"evt_a{turn}", parent_id=f"evt_q{turn}", model="m", output=output))
    sealed = tuple(sftrace.with_hashes(event.replace(run_id="run_1", step=step)) for step, event in enumerate(events))
    manifest = Manifest(run_id="run_1", agent_name="a", created_at="2026-01-01T00:00:00Z", status="running")
    return write.save(TraceData(manifest=manifest, events=sealed), target, fsync=False), unique


def test_every_file_comes_back_byte_for_byte(bundle: Path, tmp_path: Path) -> None:
    done = pack(bundle)
    assert done.path == tmp_path / "good.sftrace.zip" and done.size == done.path.stat().st_size
    assert stat.S_IMODE(done.path.stat().st_mode) == 0o600
    back = unpack(done.path, tmp_path / "back.sftrace")
    assert back.integrity == "verified" and contents(back.path) == contents(bundle)
    for path in [back.path, *back.path.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_the_same_bundle_gives_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    first = pack(bundle, tmp_path / "a.sftrace.zip").path.read_bytes()
    moved = tmp_path / "elsewhere" / "moved.sftrace"
    shutil.copytree(bundle, moved)
    for path in moved.rglob("*"):
        os.utime(path, (1, 1))
    assert pack(moved, tmp_path / "b.sftrace.zip").path.read_bytes() == first
    unpack(tmp_path / "a.sftrace.zip", tmp_path / "c.sftrace")
    assert pack(tmp_path / "c.sftrace").path.read_bytes() == first
    with zipfile.ZipFile(tmp_path / "a.sftrace.zip") as packed:
        names = packed.namelist()
    assert names[:4] == ["manifest.json", "events.jsonl", "redactions.json", "integrity.json"]
    assert names[4:] == sorted(names[4:])


@pytest.mark.parametrize("name", sorted(json.loads((VECTORS / "expected.json").read_bytes())))
def test_bundles_of_the_reference_pack(name: str, tmp_path: Path) -> None:
    packed = pack(VECTORS / name, tmp_path / f"{name}.zip").path
    for strict in (True, False):
        folder, file = (
            read.validate_bundle(path, strict=strict, verify_integrity=True) for path in (VECTORS / name, packed)
        )
        assert (folder.exit_code, folder.integrity, folder.issues) == (file.exit_code, file.integrity, file.issues)
    assert contents(unpack(packed, tmp_path / "x.sftrace").path) == contents(VECTORS / name)


def test_a_history_that_is_sent_again_is_stored_once(tmp_path: Path) -> None:
    bundle, unique = history(tmp_path / "h.sftrace")
    done = pack(bundle)
    assert done.unpacked > 20 * unique and done.size <= unique
    assert contents(unpack(done.path, tmp_path / "back.sftrace").path) == contents(bundle)
    assert read.load(done.path).events == read.load(bundle).events
    with zipfile.ZipFile(done.path) as packed:
        assert {".pack/pieces", ".pack/refs/events.jsonl", "manifest.json"} <= set(packed.namelist())
    assert pack(bundle, tmp_path / "again.sftrace.zip").path.read_bytes() == done.path.read_bytes()


def test_too_many_pieces_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, _ = history(tmp_path / "h.sftrace")
    monkeypatch.setattr(packing, "MAX_PIECES_BYTES", 10_000)
    with zipfile.ZipFile(pack(bundle).path) as packed:
        assert "events.jsonl" in packed.namelist() and ".pack/pieces" not in packed.namelist()


def test_pieces_do_not_depend_on_how_a_file_is_read(tmp_path: Path) -> None:
    data = (history(tmp_path / "h.sftrace", turns=8)[0] / "events.jsonl").read_bytes()
    whole = list(packing._cut([data]))
    assert b"".join(whole) == data and max(map(len, whole)) <= 5000
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(packing, "_BLOCK", 6000)
        assert list(packing._cut([data[at : at + 777] for at in range(0, len(data), 777)])) == whole


# Read in place


def test_every_verb_reads_a_pack(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = pack(bundle).path
    plain = {}
    for verb in (["validate"], ["verify"], ["inspect"], ["inspect", "--events"]):
        said = []
        for path in (bundle, packed):
            assert app.main([*verb, str(path)]) == 0
            said.append(capsys.readouterr().out.replace(str(path), "PATH"))
        assert said[0] == said[1]
        plain[tuple(verb)] = said[0]
    assert app.main(["ls", str(tmp_path)]) == 0
    assert "good.sftrace.zip" in capsys.readouterr().out
    assert app.main(["fork", str(packed), "--at-step", "2"]) == 0
    assert read.validate_bundle(tmp_path / "good-forked.sftrace", verify_integrity=True).exit_code == 0
    shutil.rmtree(bundle)
    for name in ("good", "good.sftrace", "good.sftrace.zip", "run_1", "latest"):
        assert read.resolve(name, dir=tmp_path) in (packed, tmp_path / "good-forked.sftrace")


def test_traces_forks_and_replay_read_a_pack(bundle: Path, tmp_path: Path) -> None:
    packed = pack(bundle).path
    trace = Trace.load(packed)
    assert [event.id for event in read.iter_events(packed)] == [event.id for event in trace.events]
    opened = read.open_bundle(packed)
    assert opened.blob(list(opened.wire())[1]["body"]["$blob"]) == b"\x00binary body\xff"  # type: ignore[index]
    assert opened.integrity().state == "verified" and len(opened.calls) == 3
    result = fork_trace(packed, ForkPoint(step=6), output_path=tmp_path / "fork.sftrace")
    assert result.forked_event_count == 7
    forked = read.open_bundle(tmp_path / "fork.sftrace")
    assert forked.blob(list(forked.wire())[1]["body"]["$blob"]) == b"\x00binary body\xff"  # type: ignore[index]
    with ReplaySession.from_trace(packed) as session:
        assert session is not None
    trace.save(tmp_path / "saved.sftrace")
    assert read.validate_bundle(tmp_path / "saved.sftrace", verify_integrity=True).exit_code == 0


def test_foreign_files_stay_behind_and_are_named(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "notes.txt").write_text("mine")
    (bundle / "link").symlink_to("/etc/passwd")
    assert app.main(["pack", str(bundle)]) == 0
    said = capsys.readouterr().err
    assert "notes.txt is not part of the bundle; left out" in said and "link is not part" in said
    with zipfile.ZipFile(f"{bundle}.zip") as packed:
        assert "notes.txt" not in packed.namelist()


def test_targets_that_are_no_place_for_a_pack(bundle: Path, tmp_path: Path) -> None:
    packed = pack(bundle).path
    (tmp_path / "other.sftrace.zip").write_bytes(b"mine")
    (tmp_path / "link.sftrace.zip").symlink_to(packed)
    for target, overwrite in (
        (packed, False),
        (tmp_path / "wrong.zip", True),
        (tmp_path / "other.sftrace.zip", True),
        (tmp_path / "link.sftrace.zip", True),
        (tmp_path / "none" / "x.sftrace.zip", False),
    ):
        with pytest.raises(TraceStorageError):
            pack(bundle, target, overwrite=overwrite)
    assert (tmp_path / "other.sftrace.zip").read_bytes() == b"mine"
    assert pack(bundle, packed, overwrite=True).path == packed
    with pytest.raises(TraceStorageError, match="packed already"):
        pack(packed)
    with pytest.raises(TraceStorageError, match="folder already"):
        unpack(bundle)
    with pytest.raises(TraceStorageError, match="already exists"):
        unpack(packed, bundle)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_full_disk_leaves_no_half_pack(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing, "_add", full)
    with pytest.raises(TraceStorageError, match="No space left"):
        pack(bundle)
    assert [path.name for path in tmp_path.iterdir()] == ["good.sftrace"]


# Tricks


def tampered(bundle: Path, change: Callable[[zipfile.ZipFile], None]) -> Path:
    """A pack of `bundle` with what `change` adds to it."""
    path = pack(bundle).path
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as packed:
        warnings.simplefilter("ignore")
        change(packed)
    return path


def entry(name: str, **attributes: Any) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("x")
    info.filename = name
    for key, value in attributes.items():
        setattr(info, key, value)
    return info


def refused(path: Path, *words: str) -> None:
    """No verb reads the pack; each says why in one line, and nothing is written anywhere."""
    before = sorted(path.parent.rglob("*"))
    result = read.validate_bundle(path, verify_integrity=True)
    assert result.exit_code == 2
    with pytest.raises(TraceStorageError) as caught:
        read.load(path)
    with pytest.raises(TraceStorageError):
        unpack(path, path.parent / "out.sftrace")
    for text in (str(caught.value), result.issues[0].message):
        assert text.isprintable()
        assert any(word in text or word in str(caught.value) for word in words), text
    assert sorted(path.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "name",
    ["../evil.txt", "/abs/evil.txt", "a/../../evil.txt", "C:/evil.txt", "a\\evil.txt", "CON", "a//b", "./a", "a/",
     "x. ", ".pack/refs/../evil", "new\nline", ".pack/refs//etc/passwd"],
)  # fmt: skip
def test_names_that_lead_out_are_refused(name: str, bundle: Path) -> None:
    refused(tampered(bundle, lambda packed: packed.writestr(entry(name), b"E")), "not a path inside a bundle")


@pytest.mark.parametrize("name", ["events.jsonl", "EVENTS.jsonl", ".pack/refs/events.jsonl"])
def test_names_that_come_twice_are_refused(name: str, bundle: Path) -> None:
    refused(tampered(bundle, lambda packed: packed.writestr(entry(name), b"E")), "is there twice")


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK])
def test_links_and_devices_are_refused(kind: int, bundle: Path) -> None:
    info = entry("link", external_attr=(kind | 0o777) << 16, create_system=3)
    refused(tampered(bundle, lambda packed: packed.writestr(info, b"/etc")), "symlink", "regular file")


def test_zips_inside_are_refused(bundle: Path) -> None:
    refused(tampered(bundle, lambda packed: packed.writestr("inner.sftrace.zip", b"PK")), "zip file inside")


def test_other_compressions_are_refused(bundle: Path) -> None:
    change = lambda packed: packed.writestr(entry("x", compress_type=zipfile.ZIP_LZMA), b"E" * 1000)  # noqa: E731
    refused(tampered(bundle, change), "deflate")


def patched(path: Path, name: bytes, offset: int, value: bytes) -> Path:
    """Write `value` into the table entry of `name`, at `offset` from its start."""
    data = bytearray(path.read_bytes())
    at = data.rfind(name) - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    data[at + offset : at + offset + len(value)] = value
    path.write_bytes(data)
    return path


def test_encrypted_entries_are_refused(bundle: Path) -> None:
    refused(patched(pack(bundle).path, b"events.jsonl", 8, b"\x01\x00"), "encrypted")


def test_a_bomb_is_refused_by_what_it_says_and_by_what_it_holds(bundle: Path, tmp_path: Path) -> None:
    path = tampered(bundle, lambda packed: packed.writestr("zeros", bytes(5_000_000), zipfile.ZIP_DEFLATED))
    assert read.validate_bundle(path).exit_code == 0
    refused(patched(path, b"zeros", 24, struct.pack("<L", 2**32 - 2)), "larger than it can be")
    path.unlink()
    short = patched(pack(bundle).path, b"events.jsonl", 24, struct.pack("<L", 10))
    assert read.validate_bundle(short).exit_code == 2
    with pytest.raises(TraceStorageError, match="cannot be read"):
        read.load(short)


def test_a_pack_that_says_it_is_huge_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tampered(bundle, lambda packed: packed.writestr("zeros", bytes(5_000_000), zipfile.ZIP_DEFLATED))
    monkeypatch.setattr(packs, "MAX_PACK_BYTES", 4 << 20)
    refused(path, "more than the 4 MiB that this reads")


def test_entries_that_share_bytes_are_refused(bundle: Path) -> None:
    refused(patched(pack(bundle).path, b"redactions.json", 42, struct.pack("<L", 0)), "overlaps")


def test_too_many_entries_are_refused_before_they_are_read(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pack(bundle).path
    monkeypatch.setattr(packs, "MAX_PACK_ENTRIES", 5)
    monkeypatch.setattr(zipfile, "ZipFile", None)
    with pytest.raises(TraceStorageError, match="table of contents is larger"):
        read.open_bundle(path)


@pytest.mark.parametrize("data", [b"", b"not a zip", b"PK\x05\x06" + bytes(17), b"PK\x05\x06" + bytes(18), bytes(4096)])
def test_what_is_no_zip_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.sftrace.zip"
    path.write_bytes(data)
    refused(path, "zip file", "missing")


def test_a_fifo_and_a_device_are_no_packs(tmp_path: Path) -> None:
    path = tmp_path / "x.sftrace.zip"
    os.mkfifo(path)
    assert read.validate_bundle(path).exit_code == 2


@pytest.mark.parametrize(
    "text",
    [b"", b"x\n", b"-1\n", b"5\n0 5 1\n", b"5\n0 6\n", b"9999999999999\n0 5\n", b"5\n-1 5\n", b"5\n999999999 5\n",
     b"7\n0 5\n", b"5\n0 0\n", b"5\n0 5\n0 5\n"],
)  # fmt: skip
def test_references_that_do_not_fit_are_refused(text: bytes, bundle: Path) -> None:
    (bundle / "calls.jsonl").unlink()
    path = _with_references(bundle, text)
    result = read.validate_bundle(path, verify_integrity=True)
    assert result.exit_code in (1, 2) and all(issue.message.isprintable() for issue in result.issues)
    with pytest.raises(TraceStorageError):
        list(read.open_bundle(path).lines("calls.jsonl"))


def _with_references(bundle: Path, text: bytes) -> Path:
    def change(packed: zipfile.ZipFile) -> None:
        packed.writestr(".pack/refs/calls.jsonl", text)
        packed.writestr(".pack/pieces", b"01234")

    return tampered(bundle, change)


def test_a_pack_without_its_pieces_is_refused(tmp_path: Path) -> None:
    packed = pack(history(tmp_path / "h.sftrace")[0]).path
    with zipfile.ZipFile(packed) as old, zipfile.ZipFile(tmp_path / "x.sftrace.zip", "w") as new:
        for info in old.infolist():
            if info.filename != ".pack/pieces":
                new.writestr(info, old.read(info))
    with pytest.raises(TraceStorageError, match="no pieces"):
        read.load(tmp_path / "x.sftrace.zip")


def _flips(path: Path, record: dict[str, Any], count: int, seed: int) -> None:
    """Change one random byte of a pack: found, or every file of it is the same."""
    good = path.read_bytes()
    whole = dict(record["files"])
    draw = random.Random(seed)
    for _ in range(count):
        at, mask = draw.randrange(len(good)), draw.randrange(1, 256)
        path.write_bytes(good[:at] + bytes([good[at] ^ mask]) + good[at + 1 :])
        result = read.validate_bundle(path, verify_integrity=True)
        if result.exit_code == 0:
            opened = read.open_bundle(path)
            assert {name: opened.digest(name) for name in whole} == whole, (at, mask)
    path.write_bytes(good)


def test_any_changed_byte_of_a_pack_is_found(bundle: Path) -> None:
    _flips(pack(bundle).path, json.loads((bundle / "integrity.json").read_bytes()), 300, seed=1)


@pytest.mark.full
def test_any_changed_byte_of_a_pack_is_found_3_000_times(bundle: Path, tmp_path: Path) -> None:
    _flips(pack(bundle).path, json.loads((bundle / "integrity.json").read_bytes()), 3000, seed=2)
    pieced = history(tmp_path / "h.sftrace")[0]
    _flips(pack(pieced).path, json.loads((pieced / "integrity.json").read_bytes()), 100, seed=3)


# The verbs


def test_pack_and_unpack_on_the_command_line(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["pack", str(bundle), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["pack"] == f"{bundle}.zip" and document["left_out"] == []
    assert app.main(["unpack", f"{bundle}.zip", "-o", str(tmp_path / "back.sftrace"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["integrity"] == "verified"
    assert app.main(["pack", str(bundle)]) == 2 and "already exists" in capsys.readouterr().err
    assert app.main(["unpack", f"{bundle}.zip"]) == 2 and "already exists" in capsys.readouterr().err


def test_a_changed_bundle_comes_back_changed_and_that_is_said(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = bundle / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b"MARKER-ORIG", b"MARKER-EVIL"))
    assert app.main(["pack", str(bundle)]) == 0
    assert app.main(["unpack", f"{bundle}.zip", "-o", str(tmp_path / "back.sftrace")]) == 1
    assert "mismatch" in capsys.readouterr().err
    assert (tmp_path / "back.sftrace" / "events.jsonl").read_bytes() == events.read_bytes()
