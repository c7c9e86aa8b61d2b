# SPDX-License-Identifier: Apache-2.0
"""The schemas of `.flight`: they accept what the verifier accepts, and refuse what it calls no event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sftrace_otel.formats import schema

VECTORS = Path(__file__).parents[1] / "data" / "vectors" / "flight"


def validator(name: str) -> Any:
    document = json.loads(schema.schema(name))
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


EVENT, MANIFEST = validator("flight-event"), validator("flight-manifest")


def test_what_is_written_fits(good: Path) -> None:
    for bundle in (good, VECTORS / "valid.flight", VECTORS / "ok_more_manifest.flight"):
        MANIFEST.validate(json.loads((bundle / "manifest.json").read_bytes()))
        for line in (bundle / "events.jsonl").read_bytes().split(b"\n")[:-1]:
            EVENT.validate(json.loads(line))


@pytest.mark.parametrize(
    "change",
    [
        {"v": 0}, {"v": "1"}, {"seq": -1}, {"run_id": None}, {"id": "no number"}, {"t_wall": "yesterday"},
        {"t_mono_ns": 1.5}, {"parents": [-1]}, {"parents": {}}, {"body": []}, {"hash": "sha256:ABC"}, {"prev_hash": ""},
        {"body": {"x": {"$blob": "sha256:" + "A" * 64, "size": 1}}}, {"body": {"x": [{"$blob": "sha256:" + "0" * 64}]}},
        {"body": {"x": {"$literal": {}}}}, {"body": {"x": {"$literal": [["a"]]}}},
    ],
)  # fmt: skip
def test_what_is_no_event_is_refused(good: Path, change: dict[str, Any]) -> None:
    event = json.loads((good / "events.jsonl").read_bytes().split(b"\n")[8])
    EVENT.validate(event)
    assert not EVENT.is_valid(event | change)


@pytest.mark.parametrize("name", ["no_head", "other_alg", "other_canonicalization", "major_version"])
def test_manifests_of_vectors_are_refused(name: str) -> None:
    assert not MANIFEST.is_valid(json.loads((VECTORS / f"{name}.flight" / "manifest.json").read_bytes()))


def test_they_are_printed(cli: Any) -> None:
    names = cli("schema").out.split()
    assert {"flight-event", "flight-manifest"} <= set(names)
    assert cli("schema", "flight-event").json == json.loads(schema.schema("flight-event"))
