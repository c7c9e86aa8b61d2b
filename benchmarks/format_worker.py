# SPDX-License-Identifier: Apache-2.0
"""One turn of a contender of `format_rows.py`, in a process of its own; prints a JSON object of numbers.

python format_worker.py make FOLDER COUNT       a bundle of COUNT events of 1 KB
python format_worker.py list|load|stepfork|validate BUNDLE
python format_worker.py floor|append|buffered COUNT
python format_worker.py history                 an agent that resends its history for 100 turns
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson

from sftrace_otel.bundle import journal as journals
from sftrace_otel.bundle.journal import Begin, Closing, End, Head, Journal, Single
from sftrace_otel.bundle.pack import pack
from sftrace_otel.bundle.read import load, validate_bundle
from sftrace_otel.core.prepare import prepare
from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.formats import canonical

PAYLOAD: dict[str, Any] = {
    "text": "a result of a tool " * 28,
    "numbers": [1, 2.5, None, True],
    "more": {"k": "v" * 40},
}


def memory() -> int:
    """Peak memory of this process so far, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Seconds and KiB that `work` takes; its result is kept until both are known."""
    gc.collect()
    before, began = memory(), time.perf_counter()
    kept = work()
    return {"seconds": time.perf_counter() - began, "kib": memory() - before, "kept": float(kept is not None)}


# Loading and validating


def make(folder: str, count: str) -> dict[str, float]:
    """Write the bundle that is loaded: pairs of calls and results through the journal, as a recording is written."""
    target = Path(folder) / f"{count}.sftrace"
    events = int(count)
    journal = Journal(target, fsync="never")
    journal.record(Single(id="evt_start", m=0, w=10**18, type="run_start", f={}))
    write(journal, events - 2)
    journal.record(
        Single(id="evt_end", m=2**40, w=10**18, type="run_end", f={"run_status": msgspec.Raw(b'"completed"')})
    )
    journal.close(closing())
    return {"bytes": (target / "events.jsonl").stat().st_size}


def closing() -> Closing:
    """How the runs of this file end."""
    return Closing(
        run_id="run_1", agent="bench", created_ns=10**18, status="completed", failure=None, duration_ms=1,
        python="", os="", version="", run={}, provenance={}, seen=lambda _: "bench",
    )  # fmt: skip


def plain_list(bundle: str) -> dict[str, float]:
    """The contender of loading: a list of what orjson makes of each line."""

    def work() -> list[Any]:
        with (Path(bundle) / "events.jsonl").open("rb") as file:
            return [orjson.loads(line) for line in file]

    return timed(work)


def load_stepfork(bundle: str) -> dict[str, float]:
    """stepfork 0.2.1 loads it."""
    from stepfork.trace import Trace

    return timed(lambda: Trace.load(Path(bundle)))


def validate(bundle: str) -> dict[str, float]:
    """Structure, payload hashes and file checksums."""

    def work() -> object:
        result = validate_bundle(bundle, verify_integrity=True)
        assert result.exit_code == 0, result.issues[:3]
        return result

    return timed(work)


# Appending and closing: time of the processor, so that neither other processes nor the disk's queue count


def floor(count: str) -> dict[str, float]:
    """The least that an event on disk costs: its JSON, a hash of it, and a buffered write."""
    with tempfile.TemporaryFile() as file:
        began = time.process_time()
        for number in range(int(count)):
            event = {
                "id": f"evt_{number:032x}", "run_id": "run_1", "parent_id": "evt_0", "step": number,
                "type": "tool_call", "timestamp": "2026-01-01T00:00:00Z", "name": "look_up", "input": PAYLOAD,
            }  # fmt: skip
            line = orjson.dumps(event, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)
            hashlib.sha256(line).hexdigest()
            file.write(line)
        return {"us": (time.process_time() - began) / int(count) * 1e6}


def write(journal: Journal, events: int, first: int = 0) -> None:
    """Calls and their results: canonical bytes of the payload, their digest, a record, a write."""
    for number in range(first, first + events):
        data = canonical.dumps(PAYLOAD)
        digest = hashlib.sha256(data).hexdigest()
        n, place, moment = number // 2, f"evt_{number:032x}", number * 1000
        if number % 2 == 0:
            record: Begin | End = Begin(
                n=n, id=place, m=moment, w=10**18 + moment, kind="tool", name="look_up", p=msgspec.Raw(data), h=digest,
                parent="evt_start", lineage=str(n),
            )  # fmt: skip
        else:
            record = End(n=n, m=moment, w=10**18 + moment, end="finished", id=place, p=msgspec.Raw(data), h=digest)
        journal.record(record)


def append(count: str) -> dict[str, float]:
    """The journal as it is: a write an event; then the bundle made of it. µs an event, and the tenths."""
    tenth = int(count) // 10
    with tempfile.TemporaryDirectory() as folder:
        head = Head(run="run_1", agent="b", at=0, target="x.sftrace", pid=1, python="", os="", version="")
        journal = Journal(Path(folder) / "x.sftrace", fsync="never", head=head)
        spent = []
        for part in range(10):
            began = time.process_time()
            write(journal, tenth, part * tenth)
            spent.append((time.process_time() - began) / tenth * 1e6)
        began = time.process_time()
        journal.close(closing())
        closed = time.process_time() - began
    return {
        "us": sum(spent) / 10,
        "close_us": closed / (10 * tenth) * 1e6,
        "first_us": spent[0],
        "last_us": spent[-1],
    }


def buffered(count: str) -> dict[str, float]:
    """The same into a buffer instead of a write each: what is not the system call. µs an event."""
    sink = io.BytesIO()
    journals._write = lambda file, data: sink.write(data)  # type: ignore[assignment]
    events = int(count)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "x.sftrace", fsync="never")
        began = time.process_time()
        write(journal, events)
        ended = time.process_time()
        journal.abandon()
    return {"us": (ended - began) / events * 1e6}


# A history that is sent again and again


def turns(count: int) -> Iterator[tuple[dict[str, Any], int]]:
    """The requests of an agent that sends its whole history each turn, and how many new characters each holds."""
    draw = random.Random(3)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 10))) for _ in range(5000)]
    messages: list[dict[str, str]] = []
    for _ in range(count):
        new = [" ".join(draw.choices(words, k=720)) for _ in range(2)]
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), new, strict=True)]
        yield (
            {"method": "chat.completions.create", "request": {"model": "m", "messages": [*messages]}},
            len("".join(new)),
        )


def history() -> dict[str, float]:
    """µs of redaction and hashing in one of the last turns, of the same without what was seen before, and of a plain
    JSON and hash of it; and the pack's size."""
    policy = RedactionPolicy.default({})
    spent: list[float] = []
    plain: list[float] = []
    unique = 0
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "x.sftrace", fsync="never")
        for number, (request, new) in enumerate(turns(100)):
            unique += new
            began = time.perf_counter()
            prepared = prepare(request, policy)
            middle = time.perf_counter()
            hashlib.sha256(orjson.dumps(request, option=orjson.OPT_SORT_KEYS)).hexdigest()
            plain.append(time.perf_counter() - middle)
            spent.append(middle - began)
            journal.record(
                Begin(
                    n=number, id=f"evt_{number}", m=number, w=number, kind="llm", name="m", model="m",
                    p=msgspec.Raw(prepared.data), h=prepared.digest,
                )
            )  # fmt: skip
        fresh = []
        for _ in range(3):
            new_policy = RedactionPolicy.default({})
            began = time.perf_counter()
            prepare(request, new_policy)
            fresh.append(time.perf_counter() - began)
        path, _ = journal.close(closing())
        packed = pack(path)
    return {
        "late_us": sorted(spent[90:])[5] * 1e6,
        "fresh_us": min(fresh) * 1e6,
        "plain_us": sorted(plain[90:])[5] * 1e6,
        "packed_by_unique": packed.size / unique,
        "unpacked_by_unique": packed.unpacked / unique,
    }


TURNS: dict[str, Callable[..., dict[str, float]]] = {
    "make": make,
    "list": plain_list,
    "load": lambda bundle: timed(lambda: load(bundle)),
    "stepfork": load_stepfork,
    "validate": validate,
    "floor": floor,
    "append": append,
    "buffered": buffered,
    "history": history,
}

if __name__ == "__main__":
    print(json.dumps(TURNS[sys.argv[1]](*sys.argv[2:])))
