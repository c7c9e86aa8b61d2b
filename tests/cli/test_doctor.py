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
