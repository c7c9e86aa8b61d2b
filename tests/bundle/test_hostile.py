# SPDX-License-Identifier: Apache-2.0
"""Bundles from people who mean harm: refused or read, one clear line, bounded time and memory, nothing followed."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sftrace_otel.bundle import read
from sftrace_otel.cli import app
from sftrace_otel.errors import FormatError, TraceStorageError
from sftrace_otel.fork import ForkPoint, fork_trace
from sftrace_otel.formats import canonical

MEASURED = """
import re, sys, time
from pathlib import Path
from sftrace_otel.bundle import read
import sftrace_otel.formats.sftrace
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak()
began = time.monotonic()
result = read.validate_bundle(sys.argv[1], verify_integrity=True)
print(result.exit_code, peak() - before, time.monotonic() - began)
print(*[issue.message for issue in result.issues[:3]], sep="\\n")
"""


def measured(bundle: Path) -> tuple[int, int, float, str]:
    """Validate in a process of its own: exit code, memory in MiB on top, seconds, what was said."""
    command = [sys.executable, "-c", MEASURED, str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    head, _, said = done.stdout.partition("\n")
    code, kib, seconds = head.split()
    return int(code), int(kib) // 1024, float(seconds), said


def seal(bundle: Path, *names: str) -> None:
    """Write the integrity record anew, as somebody with write access would."""
    record = json.loads((bundle / "integrity.json").read_bytes())
    for name in names:
        record["files"][name] = hashlib.sha256((bundle / name).read_bytes()).hexdigest()
    (bundle / "integrity.json").write_text(json.dumps(record))


def grow(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.truncate(size)


@pytest.mark.parametrize("size", [pytest.param(1 << 30, marks=pytest.mark.full), 1 << 40], ids=["GiB", "TiB"])
@pytest.mark.parametrize("name", ["events.jsonl", "manifest.json", "redactions.json", "integrity.json", "wire.jsonl"])
def test_a_sparse_file_of_a_gigabyte_or_more_is_one_line_and_refused(name: str, size: int, bundle: Path) -> None:
    grow(bundle / name, size)
    code, memory, seconds, said = measured(bundle)
    assert code in (1, 2) and memory < 400 and seconds < 20
    assert "MiB, more than this reads" in said or "does not have the SHA-256" in said


def test_a_line_of_a_gigabyte_is_refused_in_bounded_memory(bundle: Path) -> None:
    with (bundle / "events.jsonl").open("r+b") as file:
        file.seek(0, 2)
        file.write(b'{"id":"evt_big","pad":"')
        file.truncate(1 << 30)
    code, memory, seconds, said = measured(bundle)
    assert code == 2 and memory < 400 and seconds < 20 and "line 9 is longer than 128 MiB" in said


@pytest.mark.parametrize("unit", [b"[],", b'{"":{}},', b"1,", b'"",'])
def test_a_small_text_of_very_many_values_is_refused(unit: bytes, bundle: Path) -> None:
    lines = (bundle / "events.jsonl").read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"MARKER-ORIG"', b"[" + unit * (100_000_000 // len(unit)) + b"0]")
    (bundle / "events.jsonl").write_bytes(b"\n".join(lines))
    code, memory, seconds, said = measured(bundle)
    assert code == 2 and memory < 700 and seconds < 20 and "more than 10000000 values" in said


@pytest.mark.parametrize(
    "data",
    [b'"' + b'\\"' * 300_000, b'"' + b'\\"' * 300_000 + b"\\", b'{"a":"' + b"\\" * 600_001, b'"\\' * 200_000],
    ids=["quotes", "torn-escape", "backslashes", "strings"],
)
def test_texts_made_to_be_slow_take_linear_time(data: bytes) -> None:
    deep = b"[" * 300 + data
    began = time.monotonic()
    with pytest.raises(FormatError):
        canonical.loads(deep)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("name", ["events.jsonl", "manifest.json", "integrity.json", "run.json", "wire.jsonl"])
@pytest.mark.parametrize("make", ["fifo", "socket", "folder", "link", "loop", "device"])
def test_what_is_no_file_is_refused_at_once(make: str, name: str, bundle: Path) -> None:
    path = bundle / name
    path.unlink()
    if make == "fifo":
        os.mkfifo(path)
    elif make == "socket":
        here = Path.cwd()
        os.chdir(bundle)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
        os.chdir(here)
    elif make == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link": "/etc/passwd", "loop": name, "device": "/dev/zero"}[make])
    began = time.monotonic()
    result = read.validate_bundle(bundle, verify_integrity=True)
    assert result.exit_code == 2 and time.monotonic() - began < 5
    assert any("regular file" in issue.message or "symlink" in issue.message for issue in result.issues)
    assert all(issue.message.isprintable() for issue in result.issues)
    assert not any("root:" in issue.message for issue in result.issues)


@pytest.mark.parametrize("name", ["blobs", "manifest.json"])
def test_a_folder_that_links_to_itself_ends(name: str, bundle: Path) -> None:
    (bundle / "deep").symlink_to(bundle)
    inner = bundle
    for _ in range(30):
        inner = inner / "d"
        inner.mkdir()
    result = read.validate_bundle(bundle, verify_integrity=True)
    assert result.exit_code == 0 and any("deep" in line for line in result.warnings)


def test_very_many_foreign_files_are_named_in_bounded_lines(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2000):
        (bundle / f"foreign{number}").touch()
    assert app.main(["verify", str(bundle)]) == 0
    assert "foreign1: not in integrity.json; not read" in capsys.readouterr().err


def test_names_with_control_characters_reach_no_terminal(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (bundle / "\x1b[2Jred\r\n\u202ename").touch()
    app.main(["verify", str(bundle)])
    said = capfd.readouterr()
    assert "\x1b" not in said.out + said.err and "\r" not in said.err and "\u202e" not in said.err
    assert "\\x1b" in said.err or "\\u001b" in said.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", "blank"),
        (b"   ", "blank"),
        (b"null", "JSON object"),
        (b"[]", "JSON object"),
        (b'{"a":1,"a":2}', "duplicate key"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"\xff\xfe{\0}\0", "UTF-8"),
        (b'{"a":"\xed\xa0\x80"}', "UTF-8"),
        (b"\0" * 100, "malformed"),
        (b"[" * 100_000, "deep"),
        (b'{"a":' * 100_000, "deep"),
        (b'{"type":"tool_call","step":1e999}', "range"),
        (b'{"type":"tool_call","step":NaN}', "NaN"),
        (b'{"type":"tool_call","step":' + b"9" * 5000 + b"}", "digits"),
        (b'{"type":"__class__"}', "unknown event type"),
        (b'{"type":"tool_call","\xe2\x80\xaekey":1}', "no 'id'"),
    ],
)
def test_lines_that_are_no_events_are_said_with_their_number(line: bytes, words: str, bundle: Path) -> None:
    lines = (bundle / "events.jsonl").read_bytes().split(b"\n")
    lines.insert(3, line)
    (bundle / "events.jsonl").write_bytes(b"\n".join(lines))
    seal(bundle, "events.jsonl")
    result = read.validate_bundle(bundle, verify_integrity=True)
    (found,) = [issue for issue in result.issues if issue.code in ("invalid_json", "invalid_event")]
    assert result.exit_code == 2 and found.location == "events.jsonl:4" and words in found.message
    assert found.message.isprintable() and len(found.message) < 500
    with pytest.raises(TraceStorageError, match=r"events\.jsonl:4"):
        read.load(bundle)


def test_nothing_of_a_bundle_is_imported_or_evaluated(bundle: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "evil_module_xyz.py").write_text(f"open({str(marker)!r}, 'w')")
    rows = [
        {"schema_version": "1", "sidecar": "calls"},
        {"call": 0, "kind": "tool", "request": "evt_1", "response": "evt_2", "end": "failed",
         "exception": {"module": "evil_module_xyz", "qualname": "X", "args": []},
         "tags": {"/output": "evil_module_xyz:X", "/input": "__import__('os')"}},
    ]  # fmt: skip
    (bundle / "calls.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    seal(bundle, "calls.jsonl")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from sftrace_otel.cli.app import main; "
    code += "[main([verb, sys.argv[2]]) for verb in ('verify', 'inspect')]; "
    code += "import sftrace_otel.replay as r; r.ReplaySession.from_trace(sys.argv[2]); "
    code += "assert 'evil_module_xyz' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(bundle)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


# Changed while it is read


def replacing(path: Path, contents: list[bytes]) -> Callable[[], None]:
    """Write the contents to a file in turn, by rename, until the function that is given back is called."""
    stop = threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            scratch = path.with_name(".scratch")
            scratch.write_bytes(contents[number % len(contents)])
            scratch.replace(path)
            number += 1

    thread = threading.Thread(target=work)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return end


def test_a_file_that_changes_while_it_is_read_is_judged_by_what_was_read(bundle: Path) -> None:
    good = (bundle / "events.jsonl").read_bytes()
    bad = good.replace(b"MARKER-ORIG", b"MARKER-EVIL")
    end = replacing(bundle / "events.jsonl", [good, bad])
    codes = set()
    try:
        for _ in range(150):
            codes.add(read.validate_bundle(bundle, verify_integrity=True).exit_code)
    finally:
        end()
    assert codes <= {0, 1} and len(codes) == 2


def test_a_fork_of_a_bundle_that_changes_is_intact_or_refused(bundle: Path, tmp_path: Path) -> None:
    good = (bundle / "events.jsonl").read_bytes()
    bad = good.replace(b"MARKER-ORIG", b"MARKER-EVIL")
    end = replacing(bundle / "events.jsonl", [good, bad])
    outcomes = {"forked": 0, "refused": 0}
    try:
        for number in range(80):
            target = tmp_path / f"fork{number}.sftrace"
            try:
                fork_trace(bundle, ForkPoint(step=4), output_path=target)
                assert b"MARKER-EVIL" not in (target / "events.jsonl").read_bytes()
                outcomes["forked"] += 1
            except TraceStorageError as error:
                assert error.code == "integrity_mismatch" and not target.exists()
                outcomes["refused"] += 1
    finally:
        end()
    assert all(outcomes.values()), outcomes
