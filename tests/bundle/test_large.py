# SPDX-License-Identifier: Apache-2.0
"""A bundle of 300 MB: validated, read and forked in less than 200 MB of memory, by the library and the verbs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sftrace_otel.bundle import read, write
from sftrace_otel.formats import canonical, sftrace
from sftrace_otel.formats.sftrace import Manifest, RedactionEntry, Totals

PAYLOAD = {"text": "a result of a tool " * 36, "numbers": [1, 2.5, None, True], "more": {"k": "v" * 40}}
CODE = """
import re, sys
from pathlib import Path
{work}
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""
WORK = {
    "validate": "from sftrace_otel.bundle.read import validate_bundle\n"
    "assert validate_bundle(sys.argv[1], verify_integrity=True).exit_code == 0",
    "iterate": "from sftrace_otel.trace import iter_events\nassert sum(1 for _ in iter_events(sys.argv[1])) == {count}",
    "fork": "from sftrace_otel.fork import ForkPoint, OverrideSpec, fork_trace\n"
    "o = [OverrideSpec(step=2, output={{'changed': 1}})]\n"
    "r = fork_trace(sys.argv[1], ForkPoint(step={count} - 2), overrides=o, output_path=sys.argv[1] + '-f.sftrace')\n"
    "assert r.forked_event_count == {count} - 1 and r.overrides_applied == 1",
    "verb": "from sftrace_otel.cli.app import main\n"
    "assert main(['fork', sys.argv[1], '--at-step', '2', '-o', sys.argv[1] + '-v.sftrace', '--override', '2=1']) == 0",
}


def make(target: Path, count: int) -> Path:
    """A bundle of one run_start and pairs of a call and its result, about 1 KB an event."""
    payload = canonical.dumps(PAYLOAD)
    digest = canonical.digest(PAYLOAD)
    common = (
        '"run_id":"run_1","parent_id":%s,"step":%d,"type":"%s","timestamp":"2026-01-01T00:00:00Z","duration_ms":null,'
    )
    rest = '"status":"ok","replay_policy":"frozen","input_hash":%s,"output_hash":%s,"redactions":[],"name":"look_up",'

    def lines() -> Iterator[bytes]:
        start = sftrace.with_hashes(sftrace.RunStart(id="evt_0", run_id="run_1", input=None))
        yield sftrace.dump_event(start) + b"\n"
        for step in range(1, count):
            call = step % 2
            name = f'{{"id":"evt_{step:030x}",'
            parent = '"evt_0"' if call else f'"evt_{step - 1:030x}"'
            head = name + common % (parent, step, "tool_call" if call else "tool_result")
            hashes = (f'"{digest}"', "null") if call else ("null", f'"{digest}"')
            yield (head + rest % hashes).encode() + (b'"input":' if call else b'"output":') + payload + b"}\n"

    manifest = Manifest(
        run_id="run_1", agent_name="a", created_at="2026-01-01T00:00:00Z", status="running",
        totals=Totals(events=count, tool_calls=count // 2),
    )  # fmt: skip
    entries = [RedactionEntry(event_id="evt_0", path="/input", reason="sensitive_key")]
    return write.save_lines(lines(), lambda: (manifest, entries), target, fsync=False)


def memory(work: str, bundle: Path, count: int) -> float:
    """Peak memory of a process that does `work`, in MB.

    Of its own address space: `ru_maxrss` counts that of the process that started it, up to the exec.
    """
    code = CODE.format(work=WORK[work].format(count=count))
    done = subprocess.run([sys.executable, "-c", code, str(bundle)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1]) * 1024 / 1e6


@pytest.mark.full
def test_a_bundle_of_300_mb_takes_less_than_200_mb_of_memory(tmp_path: Path) -> None:
    count = 270_001
    bundle = make(tmp_path / "large.sftrace", count)
    assert (bundle / "events.jsonl").stat().st_size > 300e6
    used = {work: memory(work, bundle, count) for work in WORK}
    assert max(used.values()) < 200, used
    fork = Path(f"{bundle}-f.sftrace")
    assert read.validate_bundle(fork, strict=False, verify_integrity=True).exit_code == 0
    assert json.loads((fork / "manifest.json").read_bytes())["totals"]["events"] == count - 1


def test_memory_does_not_grow_with_the_payloads(tmp_path: Path) -> None:
    few, many = 401, 20_001
    small, large = (make(tmp_path / f"{count}.sftrace", count) for count in (few, many))
    for work in ("iterate", "fork", "validate"):
        grown = memory(work, large, many) - memory(work, small, few)
        assert grown < 12, work
