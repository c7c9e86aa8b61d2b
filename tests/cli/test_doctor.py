# SPDX-License-Identifier: Apache-2.0
"""`doctor`: what would be recorded, who wins, and each reason why nothing would be."""

from __future__ import annotations

from pathlib import Path

import pytest

from sftrace_otel.analysis import doctor

from .conftest import Cli


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_is_well(cli: Cli, tmp_path: Path) -> None:
    done = cli("doctor")
    assert done.code == 0
    assert done.err == ""
    assert not list(tmp_path.iterdir()), "looking leaves nothing behind"
    for word in ("opentelemetry-sdk", "distro", "httpx2", "sftraces", "Not captured", "none"):
        assert word in done.out


def test_json(cli: Cli) -> None:
    document = cli("doctor", "--json").json
    assert document["problems"] == []
    states = {one["name"]: one["state"] for one in document["libraries"]}
    assert states["httpx2"] == "patchable"
    distro = next(one for one in document["entry_points"] if one["group"] == "opentelemetry_distro")
    assert distro["chosen"] == ["sftrace"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_SDK_DISABLED", "true", "OTEL_SDK_DISABLED"),
        ("OTEL_TRACES_EXPORTER", "none", "OTEL_TRACES_EXPORTER=none"),
        ("OTEL_SFTRACE_CAPTURE", "off", "CAPTURE=off"),
        ("OTEL_SFTRACE_SCOPE", "galaxy", "OTEL_SFTRACE_SCOPE"),
        ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "*", "DISABLED_INSTRUMENTATIONS"),
    ],
)
def test_each_reason_why_nothing_is_recorded(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    done = cli("doctor")
    assert done.code == 1
    assert said in done.out.partition("Problems:")[2]


def test_another_distro_that_the_user_chose_is_shown(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_DISTRO", "distro")
    document = cli("doctor", "--json").json
    distro = next(one for one in document["entry_points"] if one["group"] == "opentelemetry_distro")
    assert (distro["chosen"], distro["why"]) == (["distro"], "OTEL_PYTHON_DISTRO")


def test_a_folder_that_cannot_be_made(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    done = cli("doctor", "--dir", tmp_path / "taken" / "runs")
    assert done.code == 1
    assert "bundles cannot be written" in done.out


def test_a_library_outside_the_supported_range(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setitem(doctor._BOUNDARIES, "openai", ("openai >= 1, < 2", "chat"))
    done = cli("doctor")
    assert done.code == 1
    assert "outside openai >= 1, < 2" in done.out


def test_what_is_patched_in_this_process() -> None:
    import httpx2  # noqa: F401

    from sftrace_otel.instrumentation import httpx as boundary

    boundary.install()
    try:
        states = {one.name: one.state for one in doctor.diagnose({}).libraries}
    finally:
        boundary.uninstall()
    assert states["httpx2"] == "patched"
    assert {one.name: one.state for one in doctor.diagnose({}).libraries}["httpx2"] == "patchable"


def test_a_secret_in_a_variable_is_not_shown(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-" + "proj-" + "Zx9" * 14
    monkeypatch.setenv("OTEL_SFTRACE_AGENT", f"desk {secret}")
    for options in ((), ("--json",)):
        assert secret not in cli("doctor", *options).out


def test_patterns_are_looked_up_without_an_import(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "agents_of_doctor"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('it was imported')\n")
    (package / "deep" / "__init__.py").write_text("def search_deep(q): ...\n")
    (package / "tools.py").write_text(
        "from json import dumps\nasync def search_web(q): ...\ndef _private(): ...\n"
        "class Box:\n    def open(self): ...\n    def _hide(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    name = package.name
    patterns = {
        f"{name}.tools:*": [f"{name}.tools:search_web"],
        f"{name}.tools:Box.*": [f"{name}.tools:Box.open"],
        f"{name}.*:search_*": [f"{name}.deep:search_deep", f"{name}.tools:search_web"],
        f"{name}.tools:dumps": [f"{name}.tools:dumps"],
        f"{name}.tools:_private": [f"{name}.tools:_private"],
    }
    monkeypatch.setenv("OTEL_SFTRACE_TOOLS", ",".join(patterns))
    done = cli("doctor", "--json")
    assert done.code == 0
    assert {one["text"]: sorted(one["found"]) for one in done.json["tools"]} == patterns
    assert "Tools by pattern:" in cli("doctor").out


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("no_such_module_here:f", "no source file of no_such_module_here"),
        ("sftrace_otel.version:nothing", "no function nothing is defined there"),
        ("sftrace_otel.errors:SftraceError", "name its methods, for instance SftraceError.run"),
        ("no-colon", "it is not module:callable"),
    ],
)
def test_a_pattern_that_names_nothing_is_a_problem(
    pattern: str, said: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_TOOLS", pattern)
    done = cli("doctor")
    assert done.code == 1
    assert said in done.out.partition("Problems:")[2]


def test_tools_without_an_event_are_named_from_the_recorded_bundles(cli: Cli, tmp_path: Path) -> None:
    from sftrace_otel.core.redact import RedactionPolicy
    from sftrace_otel.recorder import Recorder
    from sftrace_otel.settings import Settings

    recorder = Recorder(Settings(dir=tmp_path / "sftraces", quiet=True), RedactionPolicy.default({}))
    for _ in range(2):
        run = recorder.process_run()
        run.answered.answer("c1", "pay", ["0" * 64])
        run.open()
        recorder.close_run(run)
    out = cli("doctor").out
    assert out.count("the result of pay went back to the model") == 1 and "OTEL_SFTRACE_TOOLS" in out


def test_what_this_process_could_not_follow_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from sftrace_otel.instrumentation import tools

    monkeypatch.setitem(tools._unfollowed, "m:f was taken before it was patched", None)
    assert "m:f was taken before it was patched" in doctor.diagnose({}).not_captured
