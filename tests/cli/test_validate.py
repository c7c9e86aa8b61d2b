# SPDX-License-Identifier: Apache-2.0
"""`validate` and `verify`: the check list, exit codes, findings with their place, what the verdict covers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import VECTORS, Cli

EXPECTED = json.loads((VECTORS / "expected.json").read_text())
SEED_LIST = [
    "✓ Manifest valid",
    "✓ Event structure valid",
    "✓ Event IDs unique",
    "✓ Parent references valid",
    "✓ Run IDs consistent",
    "✓ Event count matches",
]


@pytest.mark.parametrize("name", EXPECTED)
def test_vectors(cli: Cli, name: str) -> None:
    expected = EXPECTED[name]
    verified = {"verified": 0, "mismatch": 1, "unverified_legacy": 3}[expected["integrity"]]
    assert cli("validate", VECTORS / name).code == (0 if expected["strict_valid"] else 1)
    assert cli("validate", VECTORS / name, "--partial").code == (0 if expected["partial_valid"] else 1)
    assert cli("verify", VECTORS / name, "--partial").code == verified
    assert cli("validate", VECTORS / name, "--partial", "--verify-integrity").code == verified


def test_the_check_list_is_the_field_s(cli: Cli, bundle: Callable[[str], Path]) -> None:
    lines = cli("validate", bundle("completed"), "--strict").out.splitlines()
    assert lines[2:8] == SEED_LIST
    assert lines[-1] == "Validation passed."


def test_what_the_verdict_covers_and_that_it_is_no_signature(cli: Cli, bundle: Callable[[str], Path]) -> None:
    done = cli("verify", bundle("completed"))
    assert "covered: events.jsonl, manifest.json, redactions.json" in done.out
    assert "no signature" in done.out
    assert done.err == ""


def test_a_changed_file_is_named(cli: Cli, bundle: Callable[[str], Path]) -> None:
    path = bundle("completed")
    events = path / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b"value is 42", b"value is 43"))
    assert cli("validate", path).code == 0
    done = cli("verify", path)
    assert done.code == 1
    assert "✗ File checksums match" in done.out
    assert "✗ Payload hashes match" in done.out
    assert "covered: manifest.json, redactions.json" in done.out
    assert "events.jsonl: integrity_mismatch" in done.err
    assert "events.jsonl:5, step 4, evt_" in done.err


@pytest.mark.parametrize(
    ("spoil", "code", "failed"),
    [
        (lambda event: event.update(id="evt_e1ebe1bb070e4902bccddb4a83275ccc"), 1, "✗ Event IDs unique"),
        (lambda event: event.update(parent_id="evt_none"), 1, "✗ Parent references valid"),
        (lambda event: event.update(run_id="run_other"), 1, "✗ Run IDs consistent"),
        (lambda event: event.update(step=0), 1, "✗ Event structure valid"),
        (lambda event: event.update(type="nonsense"), 2, "✗ Event structure valid"),
    ],
    ids=["duplicate id", "unknown parent", "other run", "step falls", "unknown type"],
)
def test_each_check_can_fail(
    cli: Cli, bundle: Callable[[str], Path], spoil: Callable[[dict[str, object]], None], code: int, failed: str
) -> None:
    path = bundle("completed")
    lines = (path / "events.jsonl").read_text().splitlines()
    event = json.loads(lines[2])
    spoil(event)
    lines[2] = json.dumps(event)
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    done = cli("validate", path)
    assert done.code == code
    assert failed in done.out.splitlines()
    assert done.out.endswith("Validation failed.\n")
    assert "events.jsonl:3" in done.err


def test_a_count_that_does_not_match(cli: Cli, bundle: Callable[[str], Path]) -> None:
    path = bundle("completed")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["totals"]["events"] = 99
    (path / "manifest.json").write_text(json.dumps(manifest))
    done = cli("validate", path)
    assert done.code == 1
    assert "✗ Event count matches" in done.out


def test_what_cannot_be_checked_does_not_pass(cli: Cli, bundle: Callable[[str], Path]) -> None:
    path = bundle("completed")
    (path / "events.jsonl").write_bytes(b"")
    (path / "manifest.json").write_text("{")
    done = cli("validate", path)
    assert done.code == 2
    assert "✗ Manifest valid" in done.out
    assert "✓ Event IDs unique" in done.out
    assert "- Run IDs consistent: not checked, manifest.json cannot be read" in done.out
    (path / "events.jsonl").unlink()
    done = cli("verify", path)
    assert done.code == 2
    assert "✓" not in done.out


def test_json(cli: Cli, bundle: Callable[[str], Path]) -> None:
    document = cli("verify", bundle("hashless"), "--json").json
    assert document["exit_code"] == 3
    assert document["valid"] is True
    assert document["integrity"] == "unverified_legacy"
    assert {issue["code"] for issue in document["issues"]} == {"integrity_unverified"}
    assert "no signature" in document["note"]
    assert cli("validate", bundle("partial"), "--json").json["valid"] is False


def test_many_findings_of_one_kind_are_cut_short(cli: Cli, bundle: Callable[[str], Path]) -> None:
    done = cli("verify", bundle("hashless"))
    assert len(done.err.splitlines()) == 6
    assert "5 more of integrity_unverified" in done.err


def test_a_file_that_does_not_belong_is_a_warning(cli: Cli, bundle: Callable[[str], Path]) -> None:
    path = bundle("completed")
    (path / "no\x1btes.txt").write_text("hello")
    done = cli("verify", path)
    assert done.code == 0
    assert r"no\x1btes.txt" in done.err


def test_text_of_a_bundle_reaches_the_terminal_escaped(cli: Cli, bundle: Callable[[str], Path]) -> None:
    path = bundle("completed")
    lines = (path / "events.jsonl").read_text().splitlines()
    event = json.loads(lines[1]) | {"id": "evt_\x1b[2J\u202e", "parent_id": "evt_\x07"}
    lines[1] = json.dumps(event)
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    done = cli("validate", path)
    assert done.code == 1
    assert not any(raw in done.out + done.err for raw in ("\x1b", "\u202e", "\x07"))
