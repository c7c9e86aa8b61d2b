# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed, cut off or forked while they record: what had ended is in the bundle that is recovered."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sftrace_otel import record, recorder, trace_tool
from sftrace_otel.bundle import journal as journals
from sftrace_otel.bundle import read
from sftrace_otel.bundle.journal import Begin, End, Head, Journal, Single
from sftrace_otel.bundle.recover import find_journals, recover
from sftrace_otel.cli import app
from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.recorder import Recorder, Scope
from sftrace_otel.settings import Settings

# Each `ended` number is written to a pipe after the call returned, so what the parent reads had ended.
WORK = """
import os, sys, threading
from sftrace_otel import llm_request, record, trace_tool
folder, out = sys.argv[1], int(sys.argv[2])

@trace_tool
def inner(x): return {"got": x}

@trace_tool
def outer(x): return [inner(f"{x}-inner"), "é" * 50]

def calls(session, worker):
    for number in range(12):
        name = f"{session}.{worker}.{number}"
        outer(name)
        llm_request(model="m", input=f"{name}-llm", call=lambda: {"answer": "x" * 300})
        os.write(out, f"{name}\\n".encode())

for session in range(1000):
    with record("agent", output=f"{folder}/{session}.sftrace"):
        threads = [threading.Thread(target=calls, args=(session, worker)) for worker in (1, 2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
"""


def killed(folder: Path, after: float) -> set[str]:
    """Start WORK, kill it `after` seconds from its first call; the names of the calls that had ended."""
    out, into = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", WORK, str(folder), str(into)], pass_fds=[into])
    os.close(into)
    said = os.read(out, 64)
    until = time.monotonic() + after
    while (left := until - time.monotonic()) > 0 and select.select([out], [], [], left)[0]:
        said += os.read(out, 1 << 16)
    child.kill()
    child.wait()
    while rest := os.read(out, 1 << 16):
        said += rest
    os.close(out)
    return {line.decode() for line in said.split(b"\n")[:-1]}


def survivors(folder: Path) -> set[str]:
    """The names of the calls whose results are in the bundles of a folder; every bundle is checked."""
    found: set[str] = set()
    for path in folder.glob("*.sftrace"):
        result = read.validate_bundle(path, strict=False, verify_integrity=True)
        assert result.exit_code == 0, result.issues
        assert not result.warnings
        names: dict[str, str] = {}
        for event in read.iter_events(path):
            if event.type == "tool_call" and event.name == "outer":
                names[event.id] = event.input["x"]  # type: ignore[call-overload,index]
            elif event.type == "tool_result" and event.parent_id in names:
                found.add(names[event.parent_id])
    return found


def check_kills(tmp_path: Path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    cut = 0
    for number in range(count):
        folder = tmp_path / str(number)
        folder.mkdir()
        ended = killed(folder, draw.uniform(0, 0.15))
        assert ended
        for journal in find_journals(folder):
            done = recover(journal, fsync=False)
            cut += done.path is not None and not done.whole
            assert not done.issues
        assert ended <= survivors(folder)
        assert find_journals(folder) == [] and not [path for path in folder.iterdir() if path.name[0] == "."]
        shutil.rmtree(folder)
    assert cut


def test_no_ended_call_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    check_kills(tmp_path, 20, seed=1)


@pytest.mark.full
def test_no_ended_call_is_lost_in_200_kills(tmp_path: Path) -> None:
    check_kills(tmp_path, 200, seed=2)


def run_child(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload,no-any-return]


CUT = """
import os, signal, sys
from sftrace_otel import record, trace_tool
@trace_tool
def work(x): return x
@trace_tool
def leave(how):
    if how == "exit": os._exit(7)
    os.kill(os.getpid(), getattr(signal, how))
session = record("agent", output=sys.argv[1]).__enter__()
for number in range(10): work(number)
leave(sys.argv[2])
"""


@pytest.fixture
def cut_off(tmp_path: Path) -> Path:
    """The journal of a process that left by `os._exit` inside its eleventh call."""
    run_child(CUT, str(tmp_path / "run.sftrace"), "exit")
    (found,) = find_journals(tmp_path)
    return found


def outputs(path: Path) -> list[object]:
    return [event.output for event in read.iter_events(path) if event.type == "tool_result"]


@pytest.mark.parametrize("how", ["exit", "SIGTERM", "SIGKILL", "SIGABRT"])
def test_a_process_that_leaves_at_once_can_be_recovered(how: str, tmp_path: Path) -> None:
    done = run_child(CUT, str(tmp_path / "run.sftrace"), how)
    assert done.returncode == (7 if how == "exit" else -getattr(signal, how))
    assert not (tmp_path / "run.sftrace").exists()
    (found,) = find_journals(tmp_path)
    result = recover(found)
    assert (result.path, result.whole, result.tool_calls, result.open_calls) == (tmp_path / "run.sftrace", False, 11, 1)
    assert outputs(tmp_path / "run.sftrace") == list(range(10))


def test_a_recovered_bundle_says_that_it_is_cut_off(cut_off: Path) -> None:
    path = recover(cut_off).path
    assert path is not None
    bundle = read.open_bundle(path)
    assert bundle.manifest.status == "running" and bundle.manifest.agent_name == "agent"
    assert bundle.manifest.environment.os == sys.platform
    assert bundle.run["losses"] == {"open_calls": 1, "truncated": True}
    assert bundle.run["verdict"]["offline"] is False
    assert {item["kind"] for item in bundle.run["verdict"]["obstacles"]} == {"truncated", "open_calls"}
    assert bundle.run["settings"]["fsync"] == "close" and bundle.run["policy"]["id"]
    assert bundle.provenance["origin"] == "recovered"
    assert [row["end"] for row in bundle.calls] == ["finished"] * 10 + ["open"]
    assert {path.stat().st_mode & 0o777 for path in path.iterdir()} == {0o600}
    assert path.stat().st_mode & 0o777 == 0o700


def test_recovering_twice_changes_nothing(cut_off: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["recover", str(cut_off)]) == 0
    path = cut_off.parent / "run.sftrace"
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    assert app.main(["recover", str(path)]) == app.main(["recover", str(cut_off.parent)]) == 0
    assert "nothing to recover" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize("keep", range(1, 40, 6))
def test_a_torn_last_line_is_left_out_and_said(keep: int, cut_off: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = cut_off / "journal.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-2]) + lines[-2][:keep])
    (cut_off / "wire.jsonl").write_bytes(b'{"schema_version":"1","sidecar":"wire"}\n{"event_id":"evt_1","call')
    assert app.main(["recover", str(cut_off)]) == 0
    assert "2 lines that were torn or damaged left out" in capsys.readouterr().out
    path = cut_off.parent / "run.sftrace"
    assert outputs(path) == list(range(9))
    bundle = read.open_bundle(path)
    assert bundle.run["losses"]["damaged_records"] == 2 and list(bundle.wire()) == []
    assert read.validate_bundle(path, strict=False, verify_integrity=True).exit_code == 0


def test_every_prefix_of_a_journal_recovers(cut_off: Path, tmp_path: Path) -> None:
    data = (cut_off / "journal.jsonl").read_bytes()
    draw = random.Random(3)
    for number, size in enumerate(sorted(draw.sample(range(len(data)), 60))):
        folder = tmp_path / f".{number}.sftrace.journal"
        folder.mkdir()
        (folder / "journal.jsonl").write_bytes(data[:size])
        done = recover(folder, target=tmp_path / f"{number}.sftrace", fsync=False)
        whole = data[:size].split(b"\n")[:-1]
        if len(whole) < 2:
            assert done.path is None and not folder.exists()
            continue
        assert done.path is not None and not done.issues
        assert outputs(done.path) == list(range(sum(b'"k":"e"' in line for line in whole)))


def test_damage_inside_a_journal_costs_only_the_damaged_lines(cut_off: Path) -> None:
    file = cut_off / "journal.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[0] = b"\0" * 4096 + b"\n"
    lines[3] = b"\xff{]\n"
    file.write_bytes(b"".join(lines))
    done = recover(cut_off)
    assert done.path is not None and done.damaged == 2
    assert outputs(done.path) == list(range(1, 10))
    manifest = read.open_bundle(done.path).manifest
    assert manifest.run_id.startswith("run_") and manifest.agent_name == "run"


def check_damage(cut_off: Path, tmp_path: Path, count: int) -> None:
    """Change some bytes of a journal: a bundle that validates, or one that says what is wrong; never another fault."""
    data = (cut_off / "journal.jsonl").read_bytes()
    draw = random.Random(5)
    sound = 0
    for number in range(count):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(len(data))] = draw.randrange(256)
        folder = tmp_path / f".d{number}.sftrace.journal"
        folder.mkdir()
        (folder / "journal.jsonl").write_bytes(changed)
        done = recover(folder, target=tmp_path / f"d{number}.sftrace", fsync=False)
        assert done.path is not None
        result = read.validate_bundle(done.path, strict=False, verify_integrity=True)
        assert [issue.code for issue in done.issues] == [issue.code for issue in result.issues]
        assert not {issue.code for issue in result.issues} & {"integrity_mismatch", "missing_file"}
        sound += not done.issues
        shutil.rmtree(done.path)
    assert 0 < sound < count


def test_random_damage_to_a_journal(cut_off: Path, tmp_path: Path) -> None:
    check_damage(cut_off, tmp_path, 400)


@pytest.mark.full
def test_random_damage_to_a_journal_5_000_times(cut_off: Path, tmp_path: Path) -> None:
    check_damage(cut_off, tmp_path, 5_000)


def test_an_empty_folder_goes_and_one_without_a_journal_stays(tmp_path: Path) -> None:
    folder = tmp_path / ".x.sftrace.journal"
    folder.mkdir()
    assert recover(folder).path is None and not folder.exists()
    folder.mkdir()
    (folder / "events.jsonl").write_bytes(b"{}")
    with pytest.raises(TraceStorageError, match=r"holds no journal\.jsonl"):
        recover(folder)
    assert (folder / "events.jsonl").exists()


def test_a_journal_without_a_readable_line_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / ".x.sftrace.journal"
    folder.mkdir()
    (folder / "journal.jsonl").write_bytes(b"\0\n" * 50)
    with pytest.raises(TraceStorageError, match="none of its 50 lines"):
        recover(folder)
    assert (folder / "journal.jsonl").exists()


def test_the_journal_of_a_living_process_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with record("agent", output=tmp_path / "run.sftrace"):
        code = "import sys; from sftrace_otel.cli.app import main; sys.exit(main(['recover', sys.argv[1]]))"
        done = run_child(code, str(tmp_path))
        assert done.returncode == 2 and "a living process is writing this run" in done.stderr
    assert read.validate_bundle(tmp_path / "run.sftrace", verify_integrity=True).exit_code == 0
    recorder.release()


@pytest.mark.parametrize("at", ["finish_folder", "unlink", "publish"])
def test_a_run_whose_closing_failed_is_recovered_whole(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    @trace_tool
    def work(x: int) -> int:
        return x

    with record("agent", output=tmp_path / "run.sftrace") as session:
        work(1)
        session.set_output("done")
        if at == "unlink":
            monkeypatch.setattr(Path, "unlink", fails)
        else:
            monkeypatch.setattr(journals, at, fails)
    monkeypatch.undo()
    recorder.release()
    assert session.path is None and not (tmp_path / "run.sftrace").exists()
    assert app.main(["recover", str(tmp_path)]) == 0
    assert "(the run had ended)" in capsys.readouterr().out
    bundle = read.open_bundle(tmp_path / "run.sftrace")
    assert bundle.manifest.status == "completed" and outputs(bundle.path) == [1]
    assert "truncated" not in bundle.run["losses"]
    assert read.validate_bundle(bundle.path, verify_integrity=True).exit_code == 0


def test_a_failed_run_is_recovered_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(journals, "build", fails)
    with pytest.raises(KeyError), record("agent", output=tmp_path / "run.sftrace"):
        raise KeyError("mine")
    monkeypatch.undo()
    recorder.release()
    done = recover(find_journals(tmp_path)[0])
    assert done.path is not None and done.whole
    failure = read.open_bundle(done.path).manifest.failure
    assert failure is not None and (failure.type, failure.message) == ("KeyError", "'mine'")
    assert read.validate_bundle(done.path, verify_integrity=True).exit_code == 0


def test_a_new_run_never_touches_what_a_killed_one_left(cut_off: Path) -> None:
    before = (cut_off / "journal.jsonl").read_bytes()
    target = cut_off.parent / "run.sftrace"
    with record("agent", output=target):
        pass
    recorder.release()
    assert (cut_off / "journal.jsonl").read_bytes() == before
    assert read.open_bundle(target).manifest.status == "completed"
    done = recover(cut_off)
    assert done.path is not None and done.path.name.startswith("run-") and outputs(done.path) == list(range(10))
    assert read.open_bundle(target).manifest.status == "completed"


def test_verbs_say_that_a_recording_is_unfinished(cut_off: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = cut_off.parent / "run.sftrace"
    for verb in ("verify", "inspect", "validate"):
        assert app.main([verb, str(path)]) == 2
        assert "an unfinished recording of it" in capsys.readouterr().err
    with pytest.raises(TraceStorageError, match="sftrace recover"):
        read.open_bundle(path)
    assert app.main(["ls", str(cut_off.parent)]) == 0
    assert "1 recording is open or cut off" in capsys.readouterr().err
    assert app.main(["ls", str(cut_off.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unfinished"] == 1
    recover(cut_off)
    assert app.main(["verify", str(path)]) == 0


def test_links_in_a_journal_are_not_followed(cut_off: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("events.jsonl", "run.json", "wire.jsonl", "journal.jsonl"):
        copy = tmp_path / f".{name}.sftrace.journal"
        shutil.copytree(cut_off, copy)
        (copy / name).unlink(missing_ok=True)
        (copy / name).symlink_to(victim)
        with pytest.raises(TraceStorageError):
            recover(copy)
        assert victim.read_text() == "mine"
    alias = tmp_path / ".alias.sftrace.journal"
    alias.symlink_to(cut_off)
    assert alias not in find_journals(tmp_path)
    fifo = tmp_path / ".fifo.sftrace.journal"
    fifo.mkdir()
    os.mkfifo(fifo / "journal.jsonl")
    with pytest.raises(TraceStorageError, match="regular"):
        recover(fifo)


def test_the_head_decides_no_place(tmp_path: Path) -> None:
    for number, name in enumerate(("../out.sftrace", "/tmp/out.sftrace", "a/b.sftrace", "CON.sftrace", "x", "")):
        folder = tmp_path / str(number)
        journal = Journal(folder / "run.sftrace", fsync="never", head=head_of(target=name))
        journal.record(Single(id="evt_0", m=0, w=0, type="run_start", f={}))
        journal.abandon()
        assert recover(journal.folder, fsync=False).path == folder / "run.sftrace"


def head_of(**changes: object) -> Head:
    values = {"run": "run_1", "agent": "a", "at": 10**18, "target": "run.sftrace", "pid": 1, "python": "3", "os": "x"}
    return Head(**{**values, "version": "v", **changes})  # type: ignore[arg-type]


def test_records_out_of_order_are_sorted_on_recovery(tmp_path: Path) -> None:
    import msgspec

    journal = Journal(tmp_path / "run.sftrace", fsync="event", head=head_of())
    digest = "74234e98afe7498fb5daf1f36ac2d78acc339464f950703b8c019892f982b90b"
    start = {"input": msgspec.Raw(b"null")}
    journal.record(Single(id="evt_0", m=0, w=0, type="run_start", f=start, ih=digest))
    for n, at in ((1, 50), (2, 10)):
        null = msgspec.Raw(b"null")
        journal.record(Begin(n=n, id=f"evt_b{n}", m=at, w=at, kind="tool", name="t", p=null, h=digest))
        journal.record(End(n=n, m=at + 5, w=at + 5, end="finished", id=f"evt_e{n}", p=null, h=digest))
    journal.abandon()
    done = recover(journal.folder)
    assert done.path is not None and not done.issues
    assert [event.id for event in read.iter_events(done.path)] == ["evt_0", "evt_b2", "evt_e2", "evt_b1", "evt_e1"]


# A full disk


FULL = """
import resource, signal, sys
from sftrace_otel import record, trace_tool
@trace_tool
def work(x): return "y" * 500
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
with record("agent", output=sys.argv[1]):
    for number in range(60): assert work(number) == "y" * 500
print("went on")
"""


@pytest.mark.parametrize("limit", [100, 1_000, 20_011, 30_000])
def test_a_full_disk_stops_the_recording_and_not_the_program(limit: int, tmp_path: Path) -> None:
    done = run_child(FULL, str(tmp_path / "run.sftrace"), str(limit))
    assert done.returncode == 0 and "went on" in done.stdout
    assert "File too large" in done.stderr or "could not be written" in done.stderr
    for journal in find_journals(tmp_path):
        recover(journal)
    for path in tmp_path.glob("*.sftrace"):
        assert read.validate_bundle(path, strict=False, verify_integrity=True).exit_code == 0
        count = len(outputs(path))
        assert count >= limit // 1000 - 8
        assert read.open_bundle(path).run["losses"].get("damaged_records", 0) == 0


def test_a_recovery_that_finds_no_room_keeps_the_journal(cut_off: Path) -> None:
    code = """
    import resource, signal, sys
    from sftrace_otel.cli.app import main
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    sys.exit(main(["recover", sys.argv[1]]))
    """
    done = run_child(code, str(cut_off))
    assert done.returncode == 2 and "the journal is kept" in done.stderr and "Traceback" not in done.stderr
    result = recover(cut_off)
    assert result.path is not None and outputs(result.path) == list(range(10))


# Several processes


MANY = """
import multiprocessing, os, sys, time
from pathlib import Path
from sftrace_otel import recorder, trace_tool
from sftrace_otel.settings import Settings

@trace_tool
def work(x): return x

def start(folder): recorder.acquire(Settings(dir=Path(folder), quiet=True))

def child(folder, x):
    start(folder)
    work(x)
    return x

def hang(folder, x):
    child(folder, x)
    Path(folder, f"at-{x}").touch()
    time.sleep(60)

def main(folder, method):
    start(folder)
    work("parent")
    context = multiprocessing.get_context(method)
    process = context.Process(target=child, args=(folder, "process"))
    process.start()
    process.join()
    assert process.exitcode == 0
    with context.Pool(2) as pool:
        pool.starmap(child, [(folder, f"pool{number}") for number in range(4)], chunksize=1)
        pool.close()
        pool.join()
    pool = context.Pool(2)
    waiting = [pool.apply_async(hang, (folder, f"terminated{number}")) for number in range(2)]
    while len(list(Path(folder).glob("at-*"))) < 2: time.sleep(0.01)
    pool.terminate()
    pool.join()
    work("parent again")

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_write_bundles_of_their_own(method: str, tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(MANY)
    folder = tmp_path / "out"
    folder.mkdir()
    command = [sys.executable, str(tmp_path / "many.py"), str(folder), method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    whole = sorted(outputs(path)[0] for path in folder.glob("*.sftrace"))  # type: ignore[type-var]
    left = [recover(path, fsync=False) for path in find_journals(folder)]
    assert len(left) == 2 and all(one.path is not None and not one.issues for one in left)
    seen: list[object] = []
    for path in folder.glob("*.sftrace"):
        assert read.validate_bundle(path, strict=False, verify_integrity=True).exit_code == 0
        seen += outputs(path)
    parts = ["parent", "parent again", "process", *(f"pool{n}" for n in range(4)), "terminated0", "terminated1"]
    assert sorted(map(str, seen)) == sorted(parts)
    assert {"parent", "process"} <= set(whole)  # type: ignore[arg-type]


def test_forked_children_share_no_file_with_the_parent(tmp_path: Path) -> None:
    code = """
    import os, signal, sys
    from pathlib import Path
    from sftrace_otel import recorder, trace_tool
    from sftrace_otel.settings import Settings
    recorder.acquire(Settings(dir=Path(sys.argv[1]), quiet=True))
    @trace_tool
    def work(x): return x
    work("parent")
    for number in range(3):
        if os.fork() == 0:
            mine = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name.isdigit()
                    and os.path.exists(f"/proc/self/fd/{name}")}
            assert not [name for name in mine if sys.argv[1] in name], mine
            work(f"child{number}")
            os._exit(0)
        assert os.wait()[1] == 0
    os.kill(os.getpid(), signal.SIGKILL)
    """
    run_child(code, str(tmp_path))
    done = [recover(path, fsync=False) for path in find_journals(tmp_path)]
    found = sorted(str(outputs(one.path)) for one in done if one.path is not None)
    assert found == ["['child0']", "['child1']", "['child2']", "['parent']"]


def test_a_lock_held_at_the_fork_does_not_hang_the_child(tmp_path: Path) -> None:
    code = """
    import os, sys
    from pathlib import Path
    from sftrace_otel import recorder, trace_tool
    from sftrace_otel.settings import Settings
    made = recorder.acquire(Settings(dir=Path(sys.argv[1]), quiet=True))
    @trace_tool
    def inside(x):
        run = recorder.current_scope().run
        run.lock.acquire(); made._lock.acquire(); recorder._registry.acquire()
        pid = os.fork()
        if pid == 0: return "child"
        run.lock.release(); made._lock.release(); recorder._registry.release()
        assert os.waitpid(pid, 0)[1] == 0
        return "parent"
    inside(1)
    """
    done = run_child(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert next(outputs(path) for path in tmp_path.glob("*.sftrace")) == ["parent"]


# The verb


def test_recover_on_the_command_line(cut_off: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "elsewhere.sftrace"
    assert app.main(["recover", str(tmp_path / "run.sftrace"), "-o", str(other), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["failed"] == [] and document["recovered"][0]["bundle"] == str(other)
    assert document["recovered"][0]["open_calls"] == 1
    assert app.main(["recover", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    recorder.release()


def test_one_output_for_several_journals_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        (tmp_path / f".{name}.sftrace.journal").mkdir()
    assert app.main(["recover", str(tmp_path), "-o", str(tmp_path / "x.sftrace")]) == 2
    assert "name one of them" in capsys.readouterr().err


def test_the_input_that_was_said_last_counts(tmp_path: Path) -> None:
    """A request's body may be read after the first call; the journal then has a second run_start."""
    made = Recorder(Settings(dir=tmp_path, quiet=True), RedactionPolicy.reference())
    body = ["only a part"]
    paths = []
    for killed in (False, True):
        run = made.new_run("request")
        run.inbound = lambda: made.prepare({"body": body[-1]})
        call = made.begin("tool", "t", made.prepare({}), scope=Scope(run=run), lineage=None)
        made.end(call, made.prepare(1))
        body.append(f"the whole {killed}")
        with run.lock:
            run.reword()
        if killed:
            assert run.journal is not None
            run.journal.abandon()
            paths.append(recover(run.journal.folder).path)
        else:
            paths.append(made.close_run(run))
        body.append("only a part")
    for path, whole in zip(paths, ("the whole False", "the whole True"), strict=True):
        assert path is not None
        assert read.validate_bundle(path, strict=False, verify_integrity=True).valid
        start, *others = read.open_bundle(path).events
        assert (start.type, start.input) == ("run_start", {"body": whole})
        assert "run_start" not in {event.type for event in others}
