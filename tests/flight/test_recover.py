# SPDX-License-Identifier: Apache-2.0
"""What killed writers leave: every prefix of a record, torn lines, lost blobs, and processes killed mid-write."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.bundle.flight_recover import RECOVERED, find_chains, recover_chain
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.flight import FlightWriter, open_flight, verify_flight


@pytest.fixture
def cut_off(good: Path) -> Path:
    """The journal of the good bundle, as its writer left it when it was killed before the manifest."""
    journal = good.with_name(".good.flight.journal")
    good.rename(journal)
    (journal / "manifest.json").unlink()
    return journal


def test_a_chain_without_a_manifest(cut_off: Path, cli: Any, oracle: Any) -> None:
    before = (cut_off / "events.jsonl").read_bytes()
    done = cli("recover", cut_off, "--json")
    bundle = cut_off.with_name("good.flight")
    assert done.code == 0 and not cut_off.exists()
    assert done.json["recovered"] == [
        {"journal": str(cut_off), "bundle": str(bundle), "whole": True, "events": 11, "left_out_bytes": 0, "why": "",
         "left_out_in": None}
    ]  # fmt: skip
    assert (bundle / "events.jsonl").read_bytes() == before
    assert verify_flight(bundle).valid and not verify_flight(bundle).warnings and oracle(bundle) is None
    manifest = open_flight(bundle).manifest
    assert manifest.extra == {RECOVERED: {"left_out_bytes": 0}}
    assert manifest.capabilities == ["blobs", "redaction-refs", "nondeterminism"]


def test_a_torn_line_is_left_out_and_its_bytes_are_counted(cut_off: Path, cli: Any, oracle: Any) -> None:
    events = cut_off / "events.jsonl"
    lines = events.read_bytes().splitlines(keepends=True)
    events.write_bytes(b"".join(lines[:10]) + lines[10][:40])
    done = cli("recover", cut_off.parent)
    bundle = cut_off.with_name("good.flight")
    assert done.code == 0 and "10 events, 40 bytes behind them left out" in done.out and "cut off" in done.out
    assert (bundle / "events.jsonl").read_bytes() == b"".join(lines[:10])
    assert verify_flight(bundle).valid and oracle(bundle) is None
    assert open_flight(bundle).manifest.extra == {RECOVERED: {"left_out_bytes": 40}}
    assert [path.name for path in bundle.parent.iterdir()] == ["good.flight"]


def test_every_prefix_of_a_record_is_recovered(cut_off: Path, oracle: Any) -> None:
    data = (cut_off / "events.jsonl").read_bytes()
    draw = random.Random(4)
    ends = [at + 1 for at, byte in enumerate(data) if byte == 10]
    for size in sorted({*ends, *(end - 1 for end in ends), *draw.sample(range(1, len(data)), 20)}):
        copy = cut_off.with_name(f".p{size}.flight.journal")
        shutil.copytree(cut_off, copy)
        os.truncate(copy / "events.jsonl", size)
        done = recover_chain(copy, fsync=False)
        whole = [end for end in ends if end <= size]
        assert (done.events, done.left_out, done.aside) == (len(whole), size - max(whole, default=0), None)
        if done.path is None:
            assert not whole
        else:
            assert (done.path / "events.jsonl").read_bytes() == data[: whole[-1]]
            result = verify_flight(done.path)
            assert result.valid and not result.warnings and oracle(done.path) is None


def test_what_is_more_than_a_torn_line_is_put_aside(cut_off: Path, cli: Any) -> None:
    events = cut_off / "events.jsonl"
    lines = events.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b"MARKER-ORIG", b"MARKER-EVIL")
    events.write_bytes(b"".join(lines))
    done = cli("recover", cut_off)
    aside = cut_off.with_name("good.flight.left-out")
    assert done.code == 1 and "4 events" in done.out and "body_hash" in done.out and str(aside) in done.out
    assert aside.read_bytes() == b"".join(lines[4:]) and aside.stat().st_mode & 0o777 == 0o600
    assert verify_flight(cut_off.with_name("good.flight")).valid


def test_lines_whose_blob_was_lost_are_left_out(cut_off: Path) -> None:
    shutil.rmtree(cut_off / "blobs")
    done = recover_chain(cut_off)
    assert done.events == 4 and "missing" in done.why and done.path is not None
    assert verify_flight(done.path).valid


def test_blobs_without_a_line_and_scratch_files_go(cut_off: Path) -> None:
    blob = next(path for path in (cut_off / "blobs").rglob("*") if path.is_file())
    (blob.parent / "x.7f.part").write_bytes(b"half")
    (cut_off / ".manifest.json.part").write_bytes(b"{")
    stray = cut_off / "blobs" / "00" / "00" / ("0" * 64)
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"stray")
    path = recover_chain(cut_off).path
    assert path is not None and not verify_flight(path).warnings and blob.name in {one.name for one in path.rglob("*")}


def test_a_bundle_whose_rename_is_missing(good: Path, cli: Any) -> None:
    journal = good.with_name(".good.flight.journal")
    manifest = (good / "manifest.json").read_bytes()
    good.rename(journal)
    assert cli("recover", good).code == 0
    assert (good / "manifest.json").read_bytes() == manifest and verify_flight(good).valid


def test_a_folder_of_the_final_name_without_a_manifest(good: Path, cli: Any) -> None:
    (good / "manifest.json").unlink()
    assert cli("recover", good).code == 0 and verify_flight(good).valid
    assert "nothing to recover" in cli("recover", good).err
    (good / "events.jsonl").write_bytes((good / "events.jsonl").read_bytes()[:-5])
    assert "nothing to recover" in cli("recover", good).err and not verify_flight(good).valid


def test_a_bundle_that_is_there_stays(cut_off: Path) -> None:
    with FlightWriter(cut_off.with_name("good.flight"), run_id="other") as chain:
        assert chain.earlier == cut_off
    done = recover_chain(cut_off)
    assert done.path == cut_off.with_name("good-good.flight")
    assert open_flight(cut_off.with_name("good.flight")).manifest.run_id == "other"


def test_a_living_writer_is_left_alone(tmp_path: Path, cli: Any) -> None:
    chain = FlightWriter(tmp_path / "live.flight", run_id="r")
    chain.append("run.start", {})
    done = cli("recover", tmp_path)
    assert done.code == 2 and "living process" in done.err
    with pytest.raises(TraceStorageError, match="another writer") as caught:
        FlightWriter(tmp_path / "live.flight", run_id="r2")
    assert caught.value.code == "journal_in_use"
    chain.append("run.end", {})
    assert verify_flight(chain.close()).event_count == 2


def test_nothing_had_been_recorded(tmp_path: Path, cli: Any) -> None:
    FlightWriter(tmp_path / "a.flight", run_id="r").abandon()
    assert "nothing had been recorded" in cli("recover", tmp_path).out
    assert list(tmp_path.iterdir()) == []


def test_a_record_of_which_no_line_holds_is_not_touched(cut_off: Path, cli: Any) -> None:
    (cut_off / "events.jsonl").write_bytes(b"{}\n{}\n")
    done = cli("recover", cut_off)
    assert done.code == 2 and "nothing was changed" in done.err
    assert (cut_off / "events.jsonl").read_bytes() == b"{}\n{}\n"


def test_links_and_pipes_are_refused(cut_off: Path, tmp_path: Path) -> None:
    alias = tmp_path / ".alias.flight.journal"
    alias.symlink_to(cut_off)
    assert alias not in find_chains(tmp_path)
    (cut_off / "events.jsonl").rename(tmp_path / "events.jsonl")
    (cut_off / "events.jsonl").symlink_to(tmp_path / "events.jsonl")
    with pytest.raises(TraceStorageError):
        recover_chain(cut_off)
    (cut_off / "events.jsonl").unlink()
    os.mkfifo(cut_off / "events.jsonl")
    with pytest.raises(TraceStorageError):
        recover_chain(cut_off)


WRITING = """
import sys, threading
from sftrace_otel.flight import FlightWriter
chain = FlightWriter(sys.argv[1], run_id="run_killed", spill_bytes=400, fsync="never")
print(chain.append("run.start", {"pid": 1}), flush=True)
def work(name):
    for number in range(1_000_000):
        text = f"{number} " * (number % 200)
        chain.append("tool.call", {"name": name, "input": {"n": number, "text": text}}, parents=[0])
for name in "ab":
    threading.Thread(target=work, args=(name,), daemon=True).start()
print("writing", flush=True)
work("main")
"""


def kill_while_writing(folder: Path, after: int) -> Path:
    """Start a process with three writing threads, and kill it once the file has `after` bytes."""
    command = [sys.executable, "-c", WRITING, str(folder / "killed.flight")]
    journal = folder / ".killed.flight.journal"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "0\n"
        process.stdout.readline()
        while (journal / "events.jsonl").stat().st_size < after:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    return journal


def check_killed(journal: Path, oracle: Any) -> None:
    data = (journal / "events.jsonl").read_bytes()
    done = recover_chain(journal, fsync=False)
    assert done.path is not None and done.aside is None and not done.whole
    kept = (done.path / "events.jsonl").read_bytes()
    assert data.startswith(kept) and len(data) - len(kept) == done.left_out and b"\n" not in data[len(kept) :]
    result = verify_flight(done.path)
    assert result.valid and not result.warnings and oracle(done.path) is None
    assert result.event_count == kept.count(b"\n") > 1


def test_a_killed_process_leaves_a_chain(tmp_path: Path, oracle: Any) -> None:
    check_killed(kill_while_writing(tmp_path, 30_000), oracle)


@pytest.mark.full
def test_killed_at_many_moments(tmp_path: Path, oracle: Any) -> None:
    draw = random.Random(9)
    for number in range(40 if os.environ.get("SFTRACE_AT_LENGTH") else 10):
        folder = tmp_path / str(number)
        folder.mkdir()
        check_killed(kill_while_writing(folder, draw.randrange(1, 300_000)), oracle)


def test_the_manifest_of_a_recovery_says_so(cut_off: Path) -> None:
    path = recover_chain(cut_off).path
    assert path is not None
    assert json.loads((path / "manifest.json").read_bytes())[RECOVERED] == {"left_out_bytes": 0}
