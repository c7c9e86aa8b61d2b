# SPDX-License-Identifier: Apache-2.0
"""What stays on disk: KEEP, keep(), MAX_DISK_MB, MAX_RUN_MB, ON_CLOSE, and who may read it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel import keep, record, recorder, trace_tool
from sftrace_otel.bundle import disk, read
from sftrace_otel.bundle.disk import Budget
from sftrace_otel.errors import SettingsError
from sftrace_otel.recorder import Recorder
from sftrace_otel.settings import Settings

TOLD: list[Path] = []


@trace_tool
def work(x: Any) -> Any:
    if x == "fail":
        raise LookupError("no such thing")
    return x


@pytest.fixture(autouse=True)
def _released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    TOLD.clear()
    yield
    recorder.release()


def recording(tmp_path: Path, **settings: Any) -> Recorder:
    return recorder.acquire(Settings.from_environ({}, dir=tmp_path / "out", quiet=True, **settings))


def bundles(tmp_path: Path) -> list[read.Bundle]:
    found = [read.open_bundle(path) for path in (tmp_path / "out").glob("*.sftrace")]
    for one in found:
        assert read.validate_bundle(one.path, verify_integrity=True).exit_code == 0
    return sorted(found, key=lambda one: one.manifest.created_at)


# KEEP and keep()


@pytest.mark.parametrize(
    ("setting", "what", "kept"),
    [
        ("all", "fine", True),
        ("failed", "fine", False),
        ("failed", "call", True),
        ("failed", "run", True),
        ("failed", "flag", True),
        ("flagged", "fine", False),
        ("flagged", "call", False),
        ("flagged", "run", False),
        ("flagged", "flag", True),
    ],
)
def test_keep(setting: str, what: str, kept: bool, tmp_path: Path) -> None:
    recording(tmp_path, keep=setting)
    try:
        with record("agent") as session:
            work(1)
            if what == "call":
                with pytest.raises(LookupError):
                    work("fail")
            elif what == "flag":
                keep("odd answer, token sk-proj-abcdefghijklmnopqrstuvwxyz0123456789ABCD")
            elif what == "run":
                raise ValueError("the run failed")
    except ValueError:
        assert what == "run"
    found = bundles(tmp_path)
    assert len(found) == kept
    assert (session.path is not None) == kept
    assert [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == []
    if what == "flag":
        assert found[0].run["kept"] == "odd answer, token [REDACTED]"  # type: ignore[typeddict-item]


def test_a_path_that_the_program_names_is_always_kept(tmp_path: Path) -> None:
    recording(tmp_path, keep="flagged")
    with record("agent", output=tmp_path / "mine.sftrace") as session:
        work(1)
    assert session.path == tmp_path / "mine.sftrace" and session.path.exists()


def test_the_process_says_that_nothing_was_kept(tmp_path: Path) -> None:
    code = "from sftrace_otel import recorder, trace_tool; from sftrace_otel.settings import Settings; import os\n"
    code += "recorder.acquire(Settings.from_environ(os.environ)); trace_tool(lambda: 1)()"
    environ = {**os.environ, "OTEL_SFTRACE_KEEP": "failed", "OTEL_SFTRACE_DIR": str(tmp_path / "out")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert "nothing is kept (OTEL_SFTRACE_KEEP=failed)" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_keep_without_a_run_does_nothing() -> None:
    keep("nothing records")


# MAX_DISK_MB


def fill(tmp_path: Path, *runs: str, size: int = 100_000) -> list[str]:
    """Record a run for each word: `ok`, `failed`, `flagged`; the names of their bundles."""
    names = []
    for number, kind in enumerate(runs):
        try:
            with record(f"agent{number}") as session:
                work("x" * size)
                if kind == "flagged":
                    session.keep("look at this")
                if kind == "failed":
                    raise ValueError
        except ValueError:
            pass
        assert session.path is not None
        names.append(session.path.name)
    return names


def left(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "out").iterdir()}


def test_completed_bundles_go_before_others_oldest_first(tmp_path: Path) -> None:
    recording(tmp_path, max_disk_mb=1)
    names = fill(tmp_path, "failed", "ok", "flagged", "ok", "ok", "ok", "ok", size=120_000)
    assert left(tmp_path) == {names[0], names[2], names[5], names[6]}
    for one in bundles(tmp_path):
        assert one.integrity().state == "verified"


def test_failed_bundles_go_when_no_completed_one_is_left_and_never_the_newest(tmp_path: Path) -> None:
    recording(tmp_path, max_disk_mb=1)
    names = fill(tmp_path, *["failed"] * 8, size=120_000)
    assert left(tmp_path) == set(names[-4:])
    names = fill(tmp_path, "ok", size=1_000_000)
    assert left(tmp_path) == set(names)


def test_nothing_that_is_not_ours_is_removed(tmp_path: Path, bundle: Path) -> None:
    made = recording(tmp_path, max_disk_mb=1)
    (first,) = fill(tmp_path, "ok", size=300_000)
    out = tmp_path / "out"
    auto = first
    chosen = out / "chosen.sftrace"
    shutil.copytree(out / auto, chosen)
    foreign = out / auto.replace("agent0", "foreign")
    shutil.copytree(bundle, foreign)
    linked = out / auto.replace("agent0", "linked")
    linked.symlink_to(chosen)
    forked = out / auto.replace("agent0", "forked")
    shutil.copytree(out / auto, forked)
    (forked / "provenance.json").write_text('{"schema_version":"1","origin":"forked"}')
    (out / "notes.txt").write_text("mine")
    open_run = made.new_run("record")
    with open_run.lock:
        open_run.opened()
    assert open_run.journal is not None
    fill(tmp_path, *["ok"] * 4, size=300_000)
    assert auto not in left(tmp_path)
    kept = {chosen.name, foreign.name, linked.name, forked.name, "notes.txt", open_run.journal.folder.name}
    assert kept <= left(tmp_path)
    made.close_run(open_run)


def test_the_folder_is_not_looked_through_at_each_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []
    real = disk.ours
    monkeypatch.setattr(disk, "ours", lambda folder: looks.append(folder) or real(folder))  # type: ignore[func-returns-value]
    recording(tmp_path, max_disk_mb=1)
    fill(tmp_path, *["ok"] * 20, size=100)
    assert len(looks) == 1


def test_a_budget_counts_files_and_not_links(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "a").write_bytes(b"12345")
    (folder / "link").symlink_to("/etc/passwd")
    assert disk.size_of(folder) == 5
    assert Budget(tmp_path, 10**6).spent(folder) == []


# MAX_RUN_MB


def test_a_full_run_closes_and_a_linked_one_goes_on(tmp_path: Path) -> None:
    made = recording(tmp_path, max_run_mb=1)
    for number in range(35):
        work({"n": number, "pad": "x" * 50_000})
    made.close()
    parts = bundles(tmp_path)
    assert len(parts) >= 3
    for earlier, later in itertools.pairwise(parts):
        assert later.run["origin"] == {"continues": earlier.manifest.run_id}
    inputs = [event.input["x"]["n"] for one in parts for event in one.events if event.type == "tool_call"]
    assert inputs == list(range(35))
    assert all(disk.size_of(one.path) < 1.4 * 2**20 for one in parts)


def test_an_open_call_of_a_full_run_ends_in_it(tmp_path: Path) -> None:
    made = recording(tmp_path, max_run_mb=1)

    @trace_tool
    def outer() -> int:
        for number in range(12):
            work({"n": number, "pad": "x" * 100_000})
        return 7

    assert outer() == 7
    made.close()
    first, second = bundles(tmp_path)
    assert first.events[1].name == "outer" and [row["end"] for row in first.calls if row["call"] == 1] == ["finished"]
    assert {row["end"] for one in (first, second) for row in one.calls} == {"finished"}
    assert len(first.calls) + len(second.calls) == 13
    assert first.run["verdict"]["offline"] is True and first.run["losses"]["open_calls"] == 0


def test_a_span_that_ends_after_its_full_run_is_kept_or_counted(tmp_path: Path) -> None:
    made = recording(tmp_path, max_run_mb=1)
    work("first")
    first = made.process_run()
    for _ in range(12):
        work("x" * 100_000)
    for closer in list(made._closers):
        closer.join()
    assert first.closed
    made.span_row(first, {"span_id": "late", "name": "cache"})
    made.close()
    alone = made.new_run("trace")
    alone.open()
    made.close_run(alone)
    made.span_row(alone, {"span_id": "later"})
    parts = bundles(tmp_path)
    files = [one.path / "spans.jsonl" for one in parts]
    rows = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    assert [row["span_id"] for row in rows[1:]] == ["late"]
    assert alone.losses == {"spans that came after their run was over": 1}


def test_parts_of_a_recorded_block(tmp_path: Path) -> None:
    recording(tmp_path, max_run_mb=1)
    (tmp_path / "run-2.sftrace").mkdir()
    with pytest.raises(KeyError), record("agent", output=tmp_path / "run.sftrace") as session:
        for _ in range(9):
            work("x" * 100_000)
        session.record_state_change(key="late", after=1)
        raise KeyError("at the end")
    assert session.path == tmp_path / "run.sftrace"
    first, second = (read.open_bundle(tmp_path / f"{name}.sftrace") for name in ("run", "run-3"))
    assert first.manifest.status == "completed" and second.manifest.status == "failed"
    assert second.manifest.agent_name == "agent" and second.run["origin"] == {"continues": first.manifest.run_id}
    assert "state_change" in {event.type for event in second.events}
    assert first.manifest.totals.tool_calls + second.manifest.totals.tool_calls == 9
    for one in (first, second):
        assert read.validate_bundle(one.path, verify_integrity=True).exit_code == 0


def test_full_runs_under_threads_lose_no_call(tmp_path: Path) -> None:
    made = recording(tmp_path, max_run_mb=1, fsync="never")

    def many(worker: int) -> None:
        for number in range(60):
            work({"id": f"{worker}.{number}", "pad": "x" * 20_000})

    threads = [threading.Thread(target=many, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.close()
    calls = [event for one in bundles(tmp_path) for event in one.events if event.type == "tool_result"]
    assert sorted(event.output["id"] for event in calls) == sorted(f"{w}.{n}" for w in range(4) for n in range(60))


# ON_CLOSE


def hook(path: Path) -> None:
    TOLD.append(path)
    work("inside the hook")
    with record("inside"):
        work("again")


def test_on_close_is_told_of_every_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_hooks", sys.modules[__name__])
    recording(tmp_path, on_close="my_hooks:hook")
    with record("agent") as session:
        work(1)
    assert [session.path] == TOLD


@pytest.mark.parametrize("name", ["no_such_module_xyz:f", "json:no_such", "json:loads", "sys:version"])
def test_a_hook_that_fails_is_one_line(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recording(tmp_path, on_close=name)
    for _ in range(2):
        with record("agent"):
            work(1)
    assert len(bundles(tmp_path)) == 2
    assert [f"OTEL_SFTRACE_ON_CLOSE={name}" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("wrong", ["module", "module:", ":f", "a b:c", "m:f()", "m:f:g"])
def test_a_hook_is_a_module_and_a_callable(wrong: str) -> None:
    with pytest.raises(SettingsError, match="module:callable"):
        Settings.from_environ({"OTEL_SFTRACE_ON_CLOSE": wrong})


@pytest.mark.parametrize("name", ["keep", "max_disk_mb", "max_run_mb"])
def test_wrong_values_name_the_setting(name: str) -> None:
    with pytest.raises(SettingsError, match=name.upper()):
        Settings.from_environ({f"OTEL_SFTRACE_{name.upper()}": "none"})


# Modes


def test_nobody_else_can_read_while_recording_and_after(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = recording(tmp_path, max_run_mb=1)
        work("x" * 100)
        run = made.process_run()
        assert run.journal is not None
        run.journal.row("wire", {"event_id": "evt"})
        run.journal.blob(b"b" * 100)
        _private(tmp_path / "out")
        made.close()
        _private(tmp_path / "out")
    finally:
        os.umask(before)


def _private(folder: Path) -> None:
    paths = [folder, *folder.rglob("*")]
    assert len(paths) > 5
    for path in paths:
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path
