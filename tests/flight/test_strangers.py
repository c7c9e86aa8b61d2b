# SPDX-License-Identifier: Apache-2.0
"""Chains from strangers whose hashes hold and whose members are not what ours are: one clear error, or a bundle."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.bundle.convert import to_flight
from sftrace_otel.bundle.read import open_bundle
from sftrace_otel.errors import TraceStorageError
from sftrace_otel.flight import FlightWriter, open_flight
from sftrace_otel.formats import flight

from .conftest import VECTORS, oracle_module

ODD: list[Any] = [None, True, -1, 2**53 - 1, 1.5, "", "x", [], [[]], {}, {"json": "{"}, {"json": "[1]"}, {"$blob": "x"}]


def resealed(source: Path, target: Path, change: Any) -> None:
    """The chain with each event changed, and every hash taken again."""
    lines, prev = [], flight.GENESIS
    for event in open_flight(source).events():
        body, extra = change(event)
        sealed = flight.seal(
            seq=event.seq, run_id=event.run_id, type=event.type, body=body, prev_hash=prev, t_wall=event.t_wall,
            t_mono_ns=event.t_mono_ns, parents=event.parents, extra=extra,
        )  # fmt: skip
        prev = sealed.hash
        lines.append(sealed.line)
    target.mkdir()
    (target / "events.jsonl").write_bytes(b"".join(lines))
    manifest = flight.FlightManifest(run_id=event.run_id, head_hash=prev, event_count=len(lines))
    (target / "manifest.json").write_bytes(flight.dump_manifest(manifest))


def mangled(value: Any, draw: random.Random) -> Any:
    """The value with one of its members, at some depth, made something else or left out."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(sorted(value))
        if draw.random() < 0.2:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: mangled(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return [*value[:at], mangled(value[at], draw), *value[at + 1 :]]
    return draw.choice(ODD)


@pytest.mark.parametrize("name", ["failed_tool", "parallel"])
@pytest.mark.parametrize("part", range(3))
def test_mangled_members_give_one_error_or_a_bundle(part: int, name: str, tmp_path: Path) -> None:
    source = to_flight(VECTORS.parent / "sftrace" / f"{name}.sftrace", tmp_path / "good.flight").path
    count = sum(1 for _ in open_flight(source).events())
    refused = 0
    for seed in range(part * 30, part * 30 + 30):
        draw = random.Random(seed)
        at = draw.randrange(count)

        def change(event: Any, at: int = at, draw: random.Random = draw) -> tuple[Any, Any]:
            if event.seq != at:
                return event.body, event.extra
            if event.extra and draw.random() < 0.6:
                return event.body, {"x-sftrace": mangled(event.extra["x-sftrace"], draw)}
            body = mangled(event.body, draw)
            return body if isinstance(body, dict) else {}, event.extra

        chain = tmp_path / f"{seed}.flight"
        resealed(source, chain, change)
        if oracle_module.verify(chain) is not None:
            continue
        try:
            bundle = open_bundle(chain)
            assert bundle.trace.events == bundle.events
            list(bundle.wire()), list(bundle.spans()), bundle.calls, bundle.run, bundle.provenance
        except TraceStorageError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused


@pytest.mark.parametrize("member", ["id", "parent", "h", "policy"])
def test_words_that_would_end_their_quotes_are_refused(member: str, tmp_path: Path) -> None:
    """Ids and digests go into lines of `.sftrace` as they are."""
    source = to_flight(VECTORS.parent / "sftrace" / "completed.sftrace", tmp_path / "good.flight").path

    def change(event: Any) -> tuple[Any, Any]:
        told = dict(event.extra.get("x-sftrace", {}))
        if event.type == "tool.call":
            told["call"] = {**told["call"], member: 'x","type":"run_end'}
        return event.body, {"x-sftrace": told}

    resealed(source, tmp_path / "bad.flight", change)
    assert oracle_module.verify(tmp_path / "bad.flight") is None
    with pytest.raises(TraceStorageError, match="cannot be read"):
        open_bundle(tmp_path / "bad.flight")


def test_a_type_that_names_a_file_makes_none(tmp_path: Path) -> None:
    with FlightWriter(tmp_path / "odd.flight", run_id="run_1") as chain:
        chain.append("run.start", {"agent": "a"})
        for name in ("calls", "run", "events", "manifest"):
            chain.append(f"x-sftrace.{name}", {"a": 1}, parents=[0])
        chain.append("run.end", {"status": "completed"}, parents=[0])
    bundle = open_bundle(tmp_path / "odd.flight")
    assert sorted(bundle.store.names()) == ["events.jsonl", "integrity.json", "manifest.json", "provenance.json",
        "redactions.json", "run.json"]  # fmt: skip
