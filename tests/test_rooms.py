# SPDX-License-Identifier: Apache-2.0
"""One owner per power: the SDK in `otel/`, patching in `instrumentation/`, printing in `cli/`; and a light import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sftrace_otel

SOURCE = Path(sftrace_otel.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PURE = ("formats", "core")
IMPURE = {"os", "socket", "time", "random", "secrets", "tempfile", "shutil", "subprocess"}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def calls(path: Path, *names: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            found += [text] if text in names else []
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_each_power_has_one_room(path: Path) -> None:
    found = set(imports(path))
    if room(path) != "otel":
        assert not {name for name in found if name.startswith("opentelemetry.sdk")}
    if room(path) in PURE:
        assert not {name.partition(".")[0] for name in found} & IMPURE
    if room(path) not in ("instrumentation", "otel"):
        assert "wrapt" not in found
    if room(path) not in ("cli", "__main__"):
        assert calls(path, "print", "sys.exit") == []
    assert not {name.partition(".")[0] for name in found} & {"openai", "httpx", "httpx2", "pydantic", "stepfork"}


def test_importing_the_package_imports_no_sdk_and_no_client() -> None:
    code = """
import sys
import sftrace_otel
heavy = ("openai", "httpx", "httpx2", "pydantic", "opentelemetry.sdk", "anthropic", "requests", "rich")
found = [name for name in heavy if name in sys.modules]
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_surface_is_this_list() -> None:
    assert sorted(sftrace_otel.__all__) == [
        "RecordedDependencyError", "RecordingSession", "RedactionPolicy", "ReplayError", "ReplayExhaustedError",
        "ReplayMismatchError", "ReplayPolicyError", "ReplaySession", "ReplaySpanProcessor", "SftraceASGI",
        "SftraceError", "SftraceExporter", "SftraceSpanProcessor", "SftraceTransport", "SftraceWSGI", "ToolCall",
        "Trace", "__version__", "allm_request", "instrument", "keep", "llm_request", "record", "record_state_change",
        "set_input", "set_output", "trace_tool", "uninstrument",
    ]  # fmt: skip
    for name in sftrace_otel.__all__:
        assert getattr(sftrace_otel, name) is not None


def test_no_submodule_shares_a_name_with_a_public_function() -> None:
    modules = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not modules & set(sftrace_otel.__all__)
