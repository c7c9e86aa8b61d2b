# SPDX-License-Identifier: Apache-2.0
"""README and documentation beside reality: snippets run, commands parse, tables match, links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from sftrace_otel.cli import app
from sftrace_otel.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [text for found, text in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def commands(page: Path) -> list[str]:
    """The commands shown in console blocks."""
    lines = [line for text in blocks(page, "console") for line in text.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_snippets_run(page: Path, tmp_path: Path) -> None:
    program = tmp_path / "snippet.py"
    program.write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    done = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"print\(.*\)  # (.*)$", program.read_text(encoding="utf-8"), flags=re.M)
    assert done.stdout.splitlines() == shown
    if "\ndef test_" in program.read_text(encoding="utf-8"):
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(program)]
        done = subprocess.run(tests, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_of_ours_parse(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(command, comments=True)
        ours = "sftrace_otel" if "sftrace_otel" in words else "sftrace"
        if ours not in words:
            continue
        verb, *arguments = words[words.index(ours) + 1 :]
        head = arguments[: arguments.index("--")] if "--" in arguments else arguments
        app.verb_parser(verb).parse_args(head)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_make_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    named = set(re.findall(r"`make ([a-z-]+)`", text)) | {
        command.split()[1] for command in commands(page) if command.startswith("make ")
    }
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_variables_exist(page: Path) -> None:
    named = set(re.findall(PREFIX + r"([A-Z_]+[A-Z])", page.read_text(encoding="utf-8")))
    assert named <= {field.name.upper() for field in fields(Settings)}


def test_settings_page_lists_every_setting_with_its_default() -> None:
    rows = re.findall(rf"^\| `{PREFIX}([A-Z_]+)` \| (?:`([^`]*)`)? ?\|", (ROOT / "docs/settings.md").read_text(), re.M)
    assert {name.lower(): default for name, default in rows} == {
        field.name: shown(getattr(Settings(), field.name)) for field in fields(Settings)
    }


def shown(value: object) -> str:
    """A default as the page spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else "" if value is None else str(value)


def test_command_line_page_is_what_the_program_says() -> None:
    spec = importlib.util.spec_from_file_location("cli_page", ROOT / "docs" / "cli_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    committed = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert spelled_alike(committed) == spelled_alike(module.page()), "run: python docs/cli_page.py"


def spelled_alike(text: str) -> str:
    """Help texts without what differs between Python versions: line breaks, and `-o OUT, --output OUT` before 3.13."""
    return re.sub(r"(-\w) (\w+), (--[\w-]+) \2", r"\1, \3 \2", " ".join(text.split()))


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, sftrace_otel; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["openai", "httpx", "httpx2", "pydantic", "opentelemetry.sdk"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.full
def test_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 0, done.stderr
