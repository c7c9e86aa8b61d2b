# SPDX-License-Identifier: Apache-2.0
"""The JSON Schemas: held to the models, to the reference's bundles, and to what the recorder writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import jsonschema
import pytest

from sftrace_otel import llm_request, record, record_state_change, recorder, trace_tool
from sftrace_otel.bundle import read
from sftrace_otel.cli import app
from sftrace_otel.errors import FormatError
from sftrace_otel.fork import ForkPoint, OverrideSpec, fork_trace
from sftrace_otel.formats import schema as schemas
from sftrace_otel.formats import sftrace, sidecars

VECTORS = Path(__file__).parents[1] / "data" / "vectors" / "sftrace"
DOCUMENTS = {
    "manifest.json": "manifest",
    "redactions.json": "redactions",
    "integrity.json": "integrity",
    "run.json": "run",
    "provenance.json": "provenance",
}
ROWS = {
    "events.jsonl": "event",
    "calls.jsonl": "calls",
    "wire.jsonl": "wire",
    "spans.jsonl": "spans",
    "nondeterminism.jsonl": "nondeterminism",
}


def validator(name: str) -> Any:
    document = json.loads(schemas.schema(name))
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


VALIDATORS = {name: validator(name) for name in schemas.NAMES}


def check(folder: Path) -> int:
    """Validate every file of a bundle that has a schema; how many values these were."""
    count = 0
    for file, name in DOCUMENTS.items():
        if (folder / file).exists():
            VALIDATORS[name].validate(json.loads((folder / file).read_bytes()))
            count += 1
    for file, name in ROWS.items():
        for line in (folder / file).read_bytes().split(b"\n")[:-1] if (folder / file).exists() else []:
            value = json.loads(line)
            VALIDATORS[name].validate(value)
            if name == "event":
                VALIDATORS[value["type"]].validate(value)
            count += 1
    return count


def test_every_schema_is_one_and_is_listed() -> None:
    shipped = {path.name.partition(".")[0] for path in (Path(schemas.__file__).parent / "schemas").iterdir()}
    assert shipped == set(schemas.NAMES) == set(VALIDATORS)
    with pytest.raises(KeyError):
        schemas.schema("../manifest")


@pytest.mark.parametrize("name", sorted(json.loads((VECTORS / "expected.json").read_bytes())))
def test_bundles_of_the_reference_fit(name: str) -> None:
    assert check(VECTORS / name) > 3


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, openai_server: Any) -> Iterator[Path]:
    """A bundle with every kind of event, HTTP, a failed call, an open one, tags and a flag."""
    import httpx

    monkeypatch.chdir(tmp_path)

    @trace_tool
    def tool(x: Any) -> Any:
        if x == "fail":
            raise LookupError("password=hunter2hunter2")
        return (1, {2}, b"3", x)

    path = tmp_path / "run.sftrace"
    with pytest.raises(ValueError), record("agent", output=path, run_input={"q": (1, 2)}) as session:
        tool(float("nan"))
        with pytest.raises(LookupError):
            tool("fail")
        llm_request(model="m", provider="own", input={"api_key": "sk-secret"}, call=lambda: {"text": "x"})
        httpx.get(openai_server.url + "/json")
        httpx.get(openai_server.url + "/json", headers={"authorization": "Bearer abcdefghijkl"})
        record_state_change(key="k", before=None, after=[1])
        session.keep("why not")
        session.set_output({"done": True})
        raise ValueError("failed")
    yield path
    recorder.release()


def test_bundles_of_ours_fit(recorded: Path, tmp_path: Path) -> None:
    assert check(recorded) > 20
    kinds = {event.type for event in read.iter_events(recorded)}
    assert kinds == set(sftrace.EVENT_CLASSES)
    assert len(list(read.open_bundle(recorded).wire())) == 2
    override = OverrideSpec(step=2, output={"other": 1})
    fork_trace(recorded, ForkPoint(step=4), overrides=[override], output_path=tmp_path / "fork.sftrace")
    assert check(tmp_path / "fork.sftrace") > 8


@pytest.mark.parametrize("name", ["manifest", "redactions", "integrity", *sftrace.EVENT_CLASSES])
def test_schemas_name_the_fields_of_the_models(name: str) -> None:
    models = {
        "manifest": sftrace.Manifest,
        "redactions": sftrace.Redactions,
        "integrity": sftrace.Integrity,
        **sftrace.EVENT_CLASSES,
    }
    document = json.loads(schemas.schema(name))
    fields = [field for field in models[name].__struct_fields__ if field != "kept"]
    assert list(document["properties"]) == fields
    if name == "manifest":
        for part, model in (("environment", sftrace.Environment), ("totals", sftrace.Totals)):
            assert [*document["properties"][part]["properties"]] == [*model.__struct_fields__[1:]]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("calls", sidecars.CallRow),
        ("wire", sidecars.WireRow),
        ("run", sidecars.RunInfo),
        ("provenance", sidecars.Provenance),
        ("nondeterminism", sidecars.DrawRow),
    ],
)
def test_schemas_name_the_members_of_the_sidecars(name: str, row: type) -> None:
    document = json.loads(schemas.schema(name))
    members = document.get("else", document)["properties"]
    assert set(get_type_hints(row)) <= set(members)
    if name == "calls":
        assert set(get_type_hints(sidecars.Recorded)) == set(members["exception"]["properties"])


@pytest.mark.parametrize("name", ["manifest", "llm_request", "tool_result", "error", "run_end"])
def test_what_a_schema_refuses_the_reader_refuses(name: str, recorded: Path) -> None:
    """Each key of a good document left out, and set to values of every kind: the schema refuses no more than we do."""
    if name == "manifest":
        good, parse = json.loads((recorded / "manifest.json").read_bytes()), sftrace.parse_manifest
    else:
        event = next(event for event in read.iter_events(recorded) if event.type == name)
        good, parse = json.loads(sftrace.dump_event(event)), sftrace.parse_event  # type: ignore[assignment]
    refused = 0
    for key in good:
        for value in ("gone", None, -1, 1.5, "", "x", [], {}, True):
            document = {other: item for other, item in good.items() if other != key or value != "gone"}
            if value != "gone":
                document[key] = value
            fits = VALIDATORS[name].is_valid(document)
            try:
                parse(json.dumps(document).encode())
                reads = True
            except FormatError:
                reads = False
            hashes = key in ("input_hash", "output_hash", "created_at", "timestamp", "redactions")
            assert fits == reads or (hashes and not fits), (key, value)
            refused += not fits
    assert refused > 20


def test_the_verb_prints_names_and_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["schema"]) == 0
    assert capsys.readouterr().out.split() == list(schemas.NAMES)
    for name in schemas.NAMES:
        assert app.main(["schema", name]) == 0
        assert json.loads(capsys.readouterr().out)["$id"] == f"urn:sftrace:{name}"
    assert app.main(["schema", "nonsense"]) == 2
    assert "there are manifest, event" in capsys.readouterr().err


def test_printing_a_schema_starts_fast_and_needs_no_library() -> None:
    code = "import sys; from sftrace_otel.cli.app import main; main(['schema', 'event']); "
    code += "assert not {'msgspec', 'orjson', 'jsonschema'} & set(sys.modules), 'heavy'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
