# SPDX-License-Identifier: Apache-2.0
"""Cases of the public collection on JSONL and log storage that go through the recorder: F01 to F03, F08, F10, F12."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sftrace_otel import ReplaySession, record, recorder, trace_tool
from sftrace_otel.bundle import read
from sftrace_otel.cli import app
from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.formats.sftrace import is_inner_name
from sftrace_otel.instrumentation import replaying
from sftrace_otel.recorder import Recorder
from sftrace_otel.settings import Settings


@pytest.fixture(autouse=True)
def _released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    replaying.deactivate()
    recorder.release()


def test_f02_sixteen_threads_with_large_records(tmp_path: Path) -> None:
    @trace_tool
    def large(number: int) -> str:
        return "x" * 200_000

    with record("agent", output=tmp_path / "run.sftrace"), ThreadPoolExecutor(16) as pool:
        list(pool.map(large, range(200)))
    lines = (tmp_path / "run.sftrace" / "events.jsonl").read_bytes().split(b"\n")
    assert lines.pop() == b""
    events = [json.loads(line) for line in lines]
    assert [event["step"] for event in events] == list(range(402))
    assert sum(event["type"] == "tool_result" and len(event["output"]) == 200_000 for event in events) == 200
    assert read.validate_bundle(tmp_path / "run.sftrace", verify_integrity=True).exit_code == 0


def test_f03_separators_of_unicode_end_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(map(chr, [0x0B, 0x0C, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029, 0x0D])) + "end"
    ran = []

    @trace_tool(name="echo")
    def echo(x: str) -> str:
        ran.append(x)
        return x

    path = tmp_path / "run.sftrace"
    with record("agent", output=path):
        assert echo(text) == text
    assert (path / "events.jsonl").read_bytes().count(b"\n") == len(list(read.iter_events(path))) == 4
    assert app.main(["verify", str(path)]) == app.main(["inspect", str(path), "--events"]) == 0
    assert not re.search("[\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r]", capsys.readouterr().out)
    with ReplaySession.from_trace(path):
        assert echo(text) == text
    assert ran == [text]


NAMES = [
    "run 2026-01-01T10:00:00", "a/b", "..", "CON", "nul.txt", "x" * 400, "e\u0301", "tr\u00e4ce\U0001f600", 'q?*<>|"',
    "end. ", " ", "-rf", "A", "a", "COM1.log", "lpt9", "\\\\server\\x", "con .x",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_f08_default_names_fit_every_system(name: str, tmp_path: Path) -> None:
    made = Recorder(Settings(dir=tmp_path, agent=name, quiet=True), RedactionPolicy.default({}))
    path = made.process_run().target
    assert path.parent == tmp_path and len(path.name.encode()) <= 255
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.sftrace", path.name)
    assert is_inner_name(path.name) and path.name.split(".")[0].upper() not in {"CON", "NUL", "COM1", "LPT9"}


def test_f08_names_differ_without_regard_to_case_and_the_manifest_keeps_them(tmp_path: Path) -> None:
    targets = set()
    for name in ("A", "a"):
        recorder.acquire(Settings(dir=tmp_path, agent=name, quiet=True))
        with record(name) as session:
            pass
        assert session.path is not None
        targets.add(session.path.name.lower())
        assert read.open_bundle(session.path).manifest.agent_name == name
        recorder.release()
    assert len(targets) == 2


@pytest.mark.parametrize("where", ["proc", "file", "long", "dangling"])
def test_f10_an_unwritable_place_is_one_line_and_the_program_goes_on(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "none" / "none")
    bad = {
        "proc": Path("/proc/x.sftrace"),
        "file": tmp_path / "file" / "x.sftrace",
        "long": tmp_path / ("n" * 300 + ".sftrace"),
        "dangling": tmp_path / "dangling" / "x.sftrace",
    }[where]

    @trace_tool
    def seven() -> int:
        return 7

    with record("agent", output=bad) as session:
        assert seven() == seven() == 7
    assert session.path is None
    (line,) = caplog.messages
    assert str(bad) in line and "nothing is recorded" in line


def test_f12_foreign_files_are_named_fail_where_strict_is_typed_and_are_not_copied(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (".DS_Store", "events.jsonl~", "notes.txt", "sub/x.json"):
        (bundle / name).parent.mkdir(exist_ok=True)
        (bundle / name).write_bytes(b"x")
    assert app.main(["verify", str(bundle)]) == app.main(["validate", str(bundle)]) == 0
    assert "notes.txt" in capsys.readouterr().err
    for verb in ("verify", "validate"):
        assert app.main([verb, "--strict", str(bundle)]) == 1
        said = capsys.readouterr().err
        assert "notes.txt is not part of the bundle" in said and ".DS_Store" in said
    assert app.main(["fork", str(bundle), "--at-step", "4", "-o", str(tmp_path / "fork.sftrace")]) == 0
    assert not {path.name for path in (tmp_path / "fork.sftrace").rglob("*")} & {".DS_Store", "notes.txt", "x.json"}
    assert app.main(["verify", "--strict", str(tmp_path / "fork.sftrace")]) == 0


def test_f01_an_unfinished_recording_is_recognised_and_nothing_is_appended_to_it(tmp_path: Path) -> None:
    folder = tmp_path / ".run.sftrace.journal"
    folder.mkdir()
    (folder / "journal.jsonl").write_bytes(b'{"k":"h","run":"torn')
    said: list[str] = []
    made = recorder.acquire(Settings(dir=tmp_path))
    made.notify = said.append
    with record("agent", output=tmp_path / "run.sftrace") as session:
        pass
    assert session.path == tmp_path / "run.sftrace"
    assert (folder / "journal.jsonl").read_bytes() == b'{"k":"h","run":"torn'
    assert [line for line in said if "did not end" in line and "sftrace recover" in line]
