# SPDX-License-Identifier: Apache-2.0
"""One turn of a contender of `flight_rows.py`, in a process of its own; prints a JSON object of numbers.

python flight_worker.py floor|append|buffered COUNT      events of 1 KB
python flight_worker.py make FOLDER COUNT                a chain of COUNT events of 1 KB, and one spelled otherwise
python flight_worker.py list|verify|oracle BUNDLE
python flight_worker.py ours|rfc8785 KIND                canonical bytes of one kind of value
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import io
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import rfc8785

from sftrace_otel.bundle import flight as files
from sftrace_otel.flight import FlightWriter, verify_flight
from sftrace_otel.formats import canonical

BODY: dict[str, Any] = {
    "name": "look_up",
    "input": {"text": "a result of a tool " * 28, "numbers": [1, 2.5, None, True], "more": {"k": "v" * 40}},
}


def floor(count: str) -> dict[str, float]:
    """The least that an event on disk costs: its JSON, a hash of it, and a buffered write."""
    with tempfile.TemporaryFile() as file:
        began = time.process_time()
        for number in range(int(count)):
            event = {
                "v": 1, "seq": number, "run_id": "run_1", "id": f"run_1/{number}", "type": "tool.call",
                "t_wall": "2026-01-01T00:00:00.000000Z", "t_mono_ns": number * 1000, "parents": [0], "body": BODY,
                "body_hash": "sha256:" + "0" * 64, "prev_hash": "sha256:" + "0" * 64,
            }  # fmt: skip
            line = orjson.dumps(event, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)
            hashlib.sha256(line).hexdigest()
            file.write(line)
        return {"us": (time.process_time() - began) / int(count) * 1e6}


def buffered(count: str) -> dict[str, float]:
    """The same into a buffer instead of a write each: what is not the system call."""
    sink = io.BytesIO()
    files.append_to = lambda file, data: sink.write(data)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        chain = FlightWriter(Path(folder) / "a.flight", run_id="run_1", fsync="never")
        chain.append("run.start", {})
        began = time.process_time()
        for _ in range(int(count)):
            chain.append("tool.call", BODY, parents=(0,))
        used = time.process_time() - began
        chain.discard()
    return {"us": used / int(count) * 1e6}


def append(count: str) -> dict[str, float]:
    """An event in a live chain: canonical bytes, both digests, a write of its own."""
    with tempfile.TemporaryDirectory() as folder:
        chain = FlightWriter(Path(folder) / "a.flight", run_id="run_1", fsync="never")
        chain.append("run.start", {})
        began = time.process_time()
        for _ in range(int(count)):
            chain.append("tool.call", BODY, parents=(0,))
        used = time.process_time() - began
        assert verify_flight(chain.close()).valid
    return {"us": used / int(count) * 1e6}


def make(folder: str, count: str) -> dict[str, float]:
    """Write the chain that is verified, as our writer spells it and as `json.dumps` does."""
    chain = FlightWriter(Path(folder) / "canonical.flight", run_id="run_1", fsync="never")
    chain.append("run.start", {})
    for number in range(1, int(count)):
        chain.append("tool.call", {**BODY, "call": number}, parents=(0,))
    bundle = chain.close()
    other = bundle.with_name("respelled.flight")
    shutil.copytree(bundle, other)
    with (bundle / "events.jsonl").open("rb") as lines, (other / "events.jsonl").open("wb") as file:
        for line in lines:
            event = json.loads(line)
            file.write(json.dumps(dict(reversed(event.items()))).encode() + b"\n")
    return {"bytes": (bundle / "events.jsonl").stat().st_size}


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Seconds of the processor that `work` takes; its result is kept until then."""
    gc.collect()
    began = time.process_time()
    kept = work()
    return {"seconds": time.process_time() - began, "kept": float(kept is not None)}


def plain_list(bundle: str) -> dict[str, float]:
    """The contender of verifying: a list of what orjson makes of each line."""

    def work() -> list[Any]:
        with (Path(bundle) / "events.jsonl").open("rb") as file:
            return [orjson.loads(line) for line in file]

    return timed(work)


def verify(bundle: str) -> dict[str, float]:
    """Everything that `sftrace verify` asks."""

    def work() -> object:
        result = verify_flight(bundle)
        assert result.valid, result.findings[:3]
        return result

    return timed(work)


def by_oracle(bundle: str) -> dict[str, float]:
    """The independent verifier of the tests."""
    spec = importlib.util.spec_from_file_location("oracle", Path(__file__).parents[1] / "tests/flight/oracle.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def work() -> object:
        assert module.verify(Path(bundle)) is None
        return module

    return timed(work)


def value(kind: str) -> Any:
    """Values like those in events, the same each time."""
    draw = random.Random(kind)
    words = ["the", "model", "répond", "with", "a", "résumé", "of", "flights", "😀", "to", "Zürich", "and", "back"]

    def prose(size: int) -> str:
        text = ""
        while len(text) < size:
            text += draw.choice(words) + draw.choice([" ", ", ", ".\n", ' "'])
        return text[:size]

    if kind == "tool":
        return {"name": "search_flights", "input": {"from": "ZRH", "to": "LIS", "seats": 2, "flexible": True,
                "price": {"max": 350.5, "currency": "EUR"}, "tags": ["direct", "morning"]}}  # fmt: skip
    if kind == "chat":
        return {"model": "m-1", "temperature": 0.2, "top_p": 1.0, "max_tokens": 800, "messages": [
            {"role": role, "content": prose(600)} for role in ("system", *["user", "assistant"] * 2, "user")
        ]}  # fmt: skip
    if kind == "rag":
        return {"query": prose(80), "chunks": [
            {"id": f"doc-{n}", "score": draw.random(), "page": n, "text": prose(900), "meta": {"ok": True}}
            for n in range(105)
        ]}  # fmt: skip
    assert kind == "embedding"
    return {"model": "e-1", "embedding": [draw.gauss(0, 0.03) for _ in range(1536)], "usage": {"tokens": 12}}


def canonicalised(write: Callable[[Any], bytes], kind: str) -> dict[str, float]:
    """Canonical bytes of one value, again and again; each time a new value, so that no text is kept as bytes."""
    data = orjson.dumps(value(kind))
    rounds = max(20, 4_000_000 // (len(data) + 200) // (1 if write is not rfc8785.dumps else 8))
    best = float("inf")
    for _ in range(rounds):
        fresh = orjson.loads(data)
        began = time.perf_counter()
        write(fresh)
        best = min(best, time.perf_counter() - began)
    assert canonical.rfc8785(fresh) == rfc8785.dumps(fresh)
    return {"us": best * 1e6, "bytes": len(data)}


CONTENDERS: dict[str, Callable[..., dict[str, float]]] = {
    "floor": floor,
    "append": append,
    "buffered": buffered,
    "make": make,
    "list": plain_list,
    "verify": verify,
    "oracle": by_oracle,
    "ours": lambda kind: canonicalised(canonical.rfc8785, kind),
    "rfc8785": lambda kind: canonicalised(rfc8785.dumps, kind),
}

if __name__ == "__main__":
    print(json.dumps(CONTENDERS[sys.argv[1]](*sys.argv[2:])))
