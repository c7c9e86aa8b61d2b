# SPDX-License-Identifier: Apache-2.0
"""`fork`: the seed's report, default output, overrides from the shell, and what does not fit the bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.analysis.overrides import Change, outputs, read_override, read_set
from sftrace_otel.errors import SettingsError
from sftrace_otel.trace import Trace

from .conftest import VECTORS, Cli

LLM = "evt_c648cd92f30845c38debd6749c11d246"


def event(path: Path, step: int) -> dict[str, Any]:
    """An event of a bundle, read with nothing but `json`."""
    return dict(json.loads((path / "events.jsonl").read_text().splitlines()[step]))


def test_report(cli: Cli, bundle: Callable[[str], Path]) -> None:
    path = bundle("completed")
    done = cli("fork", path, "--at-step", 2)
    assert (done.code, done.err) == (0, "")
    out = path.with_name("completed-forked.sftrace")
    rows = [line.strip("│ ").rsplit(maxsplit=1) for line in done.out.splitlines() if line.startswith("│")]
    assert [(name.strip(), value) for name, value in rows] == [
        ("Original Events", "10"),
        ("Forked Events", "3"),
        ("Fork Point Step", "2"),
        ("Fork Point Event", "evt_d9139756e947416a849355c322384af6"),
        ("Events Excluded", "7"),
    ]
    for text in ("Agent:           sample-agent", "Events:          10", f"✓ Forked trace saved to: {out}"):
        assert text in done.out
    assert cli("validate", out, "--verify-integrity").code == 0


def test_json(cli: Cli, bundle: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out.sftrace"
    document = cli("fork", bundle("completed"), "--at-event", LLM, "-o", out, "--json").json
    assert document["fork_point_step"] == 4
    assert document["forked_event_count"] == 5
    assert document["forked"] == str(out)


def test_an_output_that_is_there_is_kept_unless_told(cli: Cli, bundle: Callable[[str], Path]) -> None:
    path = bundle("completed")
    assert cli("fork", path, "--at-step", 2).code == 0
    out = path.with_name("completed-forked.sftrace")
    before = (out / "events.jsonl").read_bytes()
    done = cli("fork", path, "--at-step", 4)
    assert (done.code, done.out) == (2, "")
    assert str(out) in done.line
    assert (out / "events.jsonl").read_bytes() == before
    assert cli("fork", path, "--at-step", 4, "--overwrite").code == 0
    assert len((out / "events.jsonl").read_text().splitlines()) == 5


def test_overrides_and_parts_of_outputs(cli: Cli, bundle: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out.sftrace"
    done = cli(
        "fork", bundle("completed"), "--at-step", 9, "-o", out, "--override", '2={"value":1}', "--set",
        f"{LLM}:/choices/0/message/content=\"it's 1\"", "--set", f"{LLM}:/usage/total_tokens=1",
    )  # fmt: skip
    assert done.code == 0
    assert "Overrides Applied     2" in done.out
    assert event(out, 2)["output"] == {"value": 1}
    answer = event(out, 4)["output"]
    assert answer["choices"][0]["message"] == {"content": "it's 1", "role": "assistant"}
    assert answer["usage"] == {"completion_tokens": 3, "prompt_tokens": 9, "total_tokens": 1}
    assert cli("verify", out).code == 0
    assert "override: step 2" in cli("inspect", out).out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--at-step", "999"), "step 999"),
        (("--at-event", "evt_none"), "evt_none"),
        (("--at-step", "9", "--override", "1={}"), "only tool_result and llm_response"),
        (("--at-step", "9", "--override", "999={}"), "step 999"),
        (("--at-step", "9", "--set", "1:/x=1"), "step 1 (tool_call); only tool_result and llm_response"),
        (("--at-step", "9", "--set", "999:/x=1"), "step 999 but trace only has 10 steps"),
        (("--at-step", "9", "--set", "evt_none:/x=1"), "evt_none"),
        (("--at-step", "9", "--set", "4:/choices/7/x=1"), "/choices/7/x is not in the output of step 4"),
        (("--at-step", "9", "--set", "4:/model/x=1"), "/model/x"),
    ],
)
def test_what_does_not_fit_the_bundle(
    cli: Cli, bundle: Callable[[str], Path], arguments: tuple[str, ...], said: str
) -> None:
    path = bundle("completed")
    done = cli("fork", path, *arguments)
    assert (done.code, done.out) == (1, "")
    assert said in done.line
    assert not path.with_name("completed-forked.sftrace").exists()


@pytest.mark.parametrize(
    "option",
    [("--override", "5"), ("--override", "=1"), ("--override", "5={"), ("--override", "5=NaN"), ("--set", "5=1"),
     ("--set", "5:x=1"), ("--set", "5:/x"), ("--set", "5:/x=yes"), ("--override", "5=@missing.json"),
     ("--error", "5"), ("--error", "5=not a class"), ("--error", "5=:text"), ("--override-file", "missing.toml")],
)  # fmt: skip
def test_options_that_cannot_be_read(cli: Cli, bundle: Callable[[str], Path], option: tuple[str, str]) -> None:
    done = cli("fork", bundle("completed"), "--at-step", 9, *option)
    assert (done.code, done.out) == (2, "")
    assert option[0] in done.line


@pytest.mark.parametrize("name", ["changes.toml", "changes.json"])
def test_overrides_from_files(name: str, cli: Cli, bundle: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "whole.json").write_text('{"value": [1, 2]}')
    (tmp_path / "changes.toml").write_text(f'[set]\n"{LLM}:/usage/total_tokens" = 7\n[error]\n2 = "KeyError:gone"\n')
    document = {"set": {f"{LLM}:/usage/total_tokens": 7}, "error": {"2": "KeyError:gone"}}
    (tmp_path / "changes.json").write_text(json.dumps(document))
    path, out = bundle("completed"), tmp_path / "out.sftrace"
    done = cli("fork", path, "--at-step", 9, "-o", out, "--override-file", tmp_path / name)
    assert (done.code, done.err) == (0, "")
    assert event(out, 4)["output"]["usage"]["total_tokens"] == 7
    failed = event(out, 2)
    assert (failed["status"], failed["output"]) == ("error", {"error_type": "KeyError", "message": "gone"})
    assert len((out / "events.jsonl").read_text().splitlines()) == 10
    assert cli("verify", out).code == 0
    assert (
        cli("fork", path, "--at-step", 2, "-o", out, "--overwrite", "--override", f"2=@{tmp_path}/whole.json").code == 0
    )
    assert event(out, 2)["output"] == {"value": [1, 2]}
    again = cli("fork", out, "--at-step", 2, "-o", tmp_path / "b.sftrace", "--error", "2=TimeoutError")
    assert again.code == 0
    assert event(tmp_path / "b.sftrace", 2)["output"] == {"error_type": "TimeoutError", "message": "TimeoutError"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "malformed JSON"),
        ("[]", "tables override, set and error"),
        ('{"overrides": {}}', "tables override, set and error"),
        ('{"set": []}', "set is no table"),
        ('{"set": {"5": 1}}', "set: 5: write it as T:POINTER"),
        ('{"error": {"5": 1}}', "error: 5: before the ':'"),
    ],
)
def test_files_that_hold_no_overrides(
    content: str, said: str, cli: Cli, bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "o.json").write_text(content)
    done = cli("fork", bundle("completed"), "--at-step", 9, "--override-file", tmp_path / "o.json")
    assert (done.code, done.out) == (2, "") and said in done.line and "o.json" in done.line


def test_a_changed_bundle_is_not_forked(cli: Cli, bundle: Callable[[str], Path]) -> None:
    path = bundle("completed")
    events = path / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b"value is 42", b"value is 43"))
    done = cli("fork", path, "--at-step", 2)
    assert done.code == 2
    assert "events.jsonl" in done.line


def test_reading_options() -> None:
    assert read_override("5=[1]") == Change(target="5", pointer="", value=[1])
    assert read_override('evt_a="x=y"') == Change(target="evt_a", pointer="", value="x=y")
    assert read_set("5:/a=b=1") == Change(target="5", pointer="/a=b", value=1)
    assert read_set('5:/a~1b/0="c=d"') == Change(target="5", pointer="/a~1b/0", value="c=d")
    with pytest.raises(SettingsError, match="not JSON"):
        read_set("5:/a=b=c")


def test_parts_add_up_and_nothing_recorded_is_changed() -> None:
    trace = Trace.load(VECTORS / "completed.sftrace")
    before = trace.events[4].output
    changes = [read_set("4:/a~1b={}"), read_set("4:/a~1b/c=1"), read_set("4:/choices/0/index=5")]
    (override,) = outputs(trace.events, changes)
    assert override.step == 4
    assert override.output["a/b"] == {"c": 1}
    assert override.output["choices"][0]["index"] == 5
    assert trace.events[4].output == before


@pytest.mark.parametrize(
    "option",
    [("--override", '2={"password": "SECRET"'), ("--override", '{"password":"SECRET"}'),
     ("--set", '2:/a={"password": "SECRET"'), ("--error", "2=password SECRET"), ("--error", '"SECRET'),
     ("--set", "2:/a~2b=1")],
)  # fmt: skip
def test_a_faulty_option_is_not_echoed(cli: Cli, bundle: Callable[[str], Path], option: tuple[str, str]) -> None:
    done = cli("fork", bundle("completed"), "--at-step", 9, *option)
    assert (done.code, done.out) == (2, "")
    assert done.line.startswith(f"sftrace fork: {option[0]}") and "SECRET" not in done.line


def test_a_secret_in_an_option_reaches_no_file(cli: Cli, bundle: Callable[[str], Path], tmp_path: Path) -> None:
    secret = "hunter2-" + "correct-horse"
    changes = tmp_path / "changes.json"
    changes.write_text(json.dumps({"override": {LLM: {"password": secret}}}))
    out = tmp_path / "out.sftrace"
    done = cli(
        "fork", bundle("completed"), "--at-step", 8, "-o", out, "--set", f'2:/api_key="{secret}"',
        "--error", f"7=ValueError:Authorization: Bearer {secret}", "--override-file", changes,
    )  # fmt: skip
    assert (done.code, done.err) == (0, "") and secret not in done.out
    assert all(secret.encode() not in path.read_bytes() for path in out.iterdir())
    assert [event(out, step)["redactions"] for step in (2, 4, 7)] == [
        ["/output/api_key"], ["/output/password"], ["/output/message"],
    ]  # fmt: skip
    assert cli("validate", out, "--verify-integrity").code == 0
