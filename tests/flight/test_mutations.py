# SPDX-License-Identifier: Apache-2.0
"""Random changes to good bundles: the package, the program of `export --verifier` and the oracle give one verdict."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.analysis import verifier
from sftrace_otel.flight import GENESIS, verify_flight

WHOLE = bool(os.environ.get("SFTRACE_AT_LENGTH"))
"""Whether the long tests try as often as they can; `make test-full` has time for a part."""


VECTORS = Path(__file__).parents[1] / "data" / "vectors" / "flight"
NAMES = ["seq", "v", "x", "$blob", "$literal", "size", "é", "e\u0301", "latency_ns", "hash", "prev_hash", "b"]
SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2**53, 2**70, 10**400, 0.0, -0.0, 1.5, 1e16, 1e21, 1e-7, "", "x", "é", "e\u0301",
    "\u2028", "0.1.0", "RFC8785", "run.start", GENESIS,
]  # fmt: skip
# Where we are stricter, as the format's text asks; the oracle takes what Python takes.
STRICTER = {
    ("invalid_event", "parents"),  # a boolean is no seq
    ("unsupported_schema", "spec_version"),  # a number is no version
    ("unsupported_schema", "canonicalization"),
    ("invalid_manifest", "event_count"),
    ("invalid_manifest", "run_id"),
    ("invalid_manifest", "head_hash"),
    ("invalid_blob", "body"),  # a name without its sha256:
    ("invalid_value", "body"),  # a $literal that iterates, and is no list of pairs
    ("blob_mismatch", "body"),  # a size that equals True, or 9.0
}


def anything(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.random()
    if depth > 2 or kind < 0.7:
        return draw.choice(SCALARS)
    if kind < 0.85:
        return [anything(draw, depth + 1) for _ in range(draw.randrange(3))]
    return {draw.choice(NAMES): anything(draw, depth + 1) for _ in range(draw.randrange(3))}


def change_value(draw: random.Random, value: Any) -> None:
    """Change, remove or add something at a random place inside an object or list."""
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not places:
            break
        at = draw.choice(places)
        if isinstance(value[at], dict | list) and draw.random() < 0.7:
            value = value[at]
            continue
        if draw.random() < 0.3:
            del value[at]
        else:
            value[at] = anything(draw)
        return
    if isinstance(value, dict):
        value[draw.choice(NAMES)] = anything(draw)
    else:
        value.append(anything(draw))


def spelled(draw: random.Random, value: Any) -> bytes:
    """Some spelling of a JSON value."""
    items = list(value.items())
    if draw.random() < 0.5:
        draw.shuffle(items)
    separators = draw.choice([(",", ":"), (", ", ": ")])
    text = json.dumps(dict(items), ensure_ascii=draw.random() < 0.5, separators=separators)
    return text.encode("utf-8", "surrogatepass")


def in_line(draw: random.Random, lines: list[bytes]) -> None:
    at = draw.randrange(len(lines))
    event = json.loads(lines[at])
    change_value(draw, event)
    lines[at] = spelled(draw, event)


def respell(draw: random.Random, lines: list[bytes]) -> None:
    at = draw.randrange(len(lines))
    lines[at] = spelled(draw, json.loads(lines[at])) + draw.choice([b"", b"", b"\r", b" ", b"\t"])


def move(draw: random.Random, lines: list[bytes]) -> None:
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    kind = draw.randrange(4)
    if kind == 0:
        lines[one], lines[other] = lines[other], lines[one]
    elif kind == 1:
        lines.insert(one, lines[other])
    elif kind == 2:
        del lines[one]
    else:
        del lines[one:]


def flip(draw: random.Random, data: bytes) -> bytes:
    if not data:
        return b"\x00"
    at = draw.randrange(len(data))
    kind = draw.randrange(4)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + data[at + 1 :]
    if kind == 2:
        return data[:at] + draw.choice([b" ", b"0", b'"', b"\n", b",", b"}", b"\xc3", b"\\"]) + data[at:]
    return data[:at]


def rehash(bundle: Path, draw: random.Random) -> None:
    """Seal every line that can be sealed, and the manifest too, or not."""
    oracle = sys.modules["flight_oracle"]
    prev, lines, count = GENESIS, [], 0
    for raw in (bundle / "events.jsonl").read_bytes().split(b"\n")[:-1]:
        count += 1
        try:
            event = json.loads(raw)
            event["prev_hash"] = prev
            event["body_hash"] = oracle.body_hash(event)
            event["hash"] = prev = oracle.event_hash(event)
            lines.append(json.dumps(event, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        except Exception:  # whatever a random change made of it
            lines.append(raw)
    (bundle / "events.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    if draw.random() < 0.8:
        manifest = json.loads((bundle / "manifest.json").read_bytes())
        manifest |= {"head_hash": prev, "event_count": count}
        (bundle / "manifest.json").write_text(json.dumps(manifest))


def mutate(draw: random.Random, bundle: Path) -> str:
    kind = draw.choice(["line", "line", "line", "respell", "move", "bytes", "manifest", "manifest bytes", "blob"])
    events, manifest = bundle / "events.jsonl", bundle / "manifest.json"
    change: Callable[[random.Random, list[bytes]], None] | None = {
        "line": in_line, "respell": respell, "move": move,
    }.get(kind)  # fmt: skip
    if change is not None:
        lines = events.read_bytes().split(b"\n")[:-1]
        change(draw, lines)
        events.write_bytes(b"".join(line + b"\n" for line in lines))
        if kind != "respell" and draw.random() < 0.6:
            rehash(bundle, draw)
            kind += ", sealed again"
    elif kind == "bytes":
        events.write_bytes(flip(draw, events.read_bytes()))
    elif kind == "manifest":
        document = json.loads(manifest.read_bytes())
        change_value(draw, document)
        manifest.write_bytes(spelled(draw, document))
    elif kind == "manifest bytes":
        manifest.write_bytes(flip(draw, manifest.read_bytes()))
    else:
        blob = draw.choice(sorted(path for path in bundle.rglob("blobs/*/*/*")))
        blob.write_bytes(flip(draw, blob.read_bytes()))
    return kind


def agree(bundle: Path, oracle: Callable[[Path], str | None], capsys: Any, count: int, seed: int) -> None:
    files = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    draw = random.Random(seed)
    verdicts = {True: 0, False: 0}
    for number in range(count):
        kind = mutate(draw, bundle)
        result, expected = verify_flight(bundle), oracle(bundle)
        said = (seed, number, kind, expected, result.findings[:2])
        if (expected is None) != result.valid:
            assert {(one.code, one.field) for one in result.findings} <= STRICTER, said
        else:
            verdicts[result.valid] += 1
        assert (verifier.main([str(bundle)]) == 0) in (result.valid, expected is None), said
        capsys.readouterr()
        for path, data in files.items():
            path.write_bytes(data)
    assert verdicts[True] > count // 20 and verdicts[False] > count // 3  # both were asked
    assert sum(verdicts.values()) > count * 0.97
    assert verify_flight(bundle).valid


@pytest.mark.parametrize("which", ["ours", "the oracle's"])
def test_agreement(which: str, good: Path, oracle: Any, capsys: Any) -> None:
    bundle = good if which == "ours" else Path(shutil.copytree(VECTORS / "valid.flight", good.parent / "v.flight"))
    agree(bundle, oracle, capsys, 120, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("which", ["ours", "the oracle's"])
def test_agreement_at_length(which: str, good: Path, oracle: Any, capsys: Any) -> None:
    bundle = good if which == "ours" else Path(shutil.copytree(VECTORS / "valid.flight", good.parent / "v.flight"))
    agree(bundle, oracle, capsys, 10_000 if WHOLE else 1_000, seed=2)
