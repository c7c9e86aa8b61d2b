# SPDX-License-Identifier: Apache-2.0
"""Exceptions of tools come back under replay as the program saw them: class, text, arguments and members."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel import RecordedDependencyError, trace_tool
from sftrace_otel.core.plan import Outcome
from sftrace_otel.instrumentation.exceptions import rebuilt_exception

Run = Callable[..., Any]


class Coded(Exception):
    """Its text is made of members that no argument carries."""

    def __init__(self, code: int, detail: str) -> None:
        self.code, self.detail = code, detail

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Opaque(Exception):
    """Its text needs a member that is not recorded."""

    def __init__(self, response: object) -> None:
        self.args = ()
        self.response = response

    def __str__(self) -> str:
        return f"answered {self.response.status}"  # type: ignore[attr-defined]


class Answer:
    status = 418


class Abort(BaseException):
    """Not to be caught by `except Exception`."""


class Named(Exception):
    """Has members of the names that a RecordedDependencyError uses."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(name)
        self.name, self.kind = name, kind


def raising(make: Callable[[], object]) -> Callable[[], BaseException]:
    """A program that calls a tool which does `make`, raises what that gives, and looks at what comes out."""

    @trace_tool
    def tool() -> None:
        raise make()  # type: ignore[misc]

    def program() -> BaseException:
        try:
            tool()
        except BaseException as error:
            return error
        raise AssertionError

    return program


def group() -> ExceptionGroup[Exception]:
    return ExceptionGroup("many", [ValueError(1), ExceptionGroup("inner", [KeyError("k")])])


CASES: list[Callable[[], object]] = [
    lambda: Path("/nonexistent/file.txt").read_text(),
    lambda: PermissionError(13, "Permission denied", "from", None, "to"),
    lambda: subprocess.CalledProcessError(3, ["ls", "x"], output=b"\xff"),
    lambda: subprocess.TimeoutExpired("ls", 5),
    lambda: Coded(404, "gone"),
    lambda: KeywordOnly(code=5),
    lambda: Opaque(Answer()),
    lambda: Named("n", "k"),
    lambda: b"\xff".decode("utf-8"),
    lambda: json.loads("{bad"),
    lambda: compile("x = (", "f.py", "exec"),
    lambda: ModuleNotFoundError("no module", name="m", path="p"),
    lambda: KeyError("missing"),
    ValueError,
    lambda: ValueError({"a": 1}, [2], (3,)),
    lambda: StopIteration(5),
    group,
]


@pytest.mark.parametrize("make", CASES)
def test_text_arguments_and_members_are_those_recorded(make: Callable[[], object], recorded: Run, frozen: Run) -> None:
    program = raising(make)
    errors: list[BaseException] = []

    def run() -> str:
        errors.append(program())
        return str(errors[-1])

    assert recorded(run) == frozen(run)
    want, got = errors
    assert type(got).__name__ == type(want).__name__ and type(got).__module__ == type(want).__module__
    assert isinstance(got, type(want)) and isinstance(got, RecordedDependencyError)
    assert repr(got.args) == repr(want.args)
    for member in ("errno", "filename", "filename2", "code", "cmd", "returncode", "output", "pos", "lineno", "object",
                   "name", "path", "value"):  # fmt: skip
        if hasattr(want, member):
            assert getattr(got, member) == getattr(want, member)


def test_a_group_can_be_taken_apart(recorded: Run, frozen: Run) -> None:
    program = raising(group)

    def run() -> list[str]:
        values, keys = program().split(ValueError)  # type: ignore[attr-defined]
        return [repr(values.exceptions[0].args), str(keys.exceptions[0].exceptions[0])]

    assert recorded(run) == frozen(run) == ["(1,)", "'k'"]


@pytest.mark.parametrize("make", [lambda: SystemExit(3), KeyboardInterrupt, lambda: Abort("now")])
def test_what_is_no_exception_passes_except_exception(make: Callable[[], object], recorded: Run, frozen: Run) -> None:
    program = raising(make)
    errors: list[BaseException] = []

    def run() -> list[Any]:
        errors.append(program())
        error = errors[-1]
        return [type(error).__name__, isinstance(error, Exception), str(error), getattr(error, "code", None)]

    assert recorded(run) == frozen(run)
    assert isinstance(errors[1], type(errors[0]))


def test_secrets_in_members_are_hidden(recorded: Run, bundle_path: Path) -> None:
    def make() -> Exception:
        error = ValueError("refused")
        error.api_key = "sk-abcdefghijklmnopqrstuvwxyz0123456789"  # type: ignore[attr-defined]
        error.attempts = 2  # type: ignore[attr-defined]
        return error

    recorded(lambda: str(raising(make)()))
    stored = b"".join(path.read_bytes() for path in bundle_path.rglob("*") if path.is_file())
    assert b"sk-abcdef" not in stored and b'"attempts":2' in stored


def outcome(error_type: str, message: str, **exception: Any) -> Outcome:
    return Outcome(status="error", error_type=error_type, error_message=message, exception=exception or None)  # type: ignore[arg-type]


def test_nothing_that_a_bundle_names_is_imported() -> None:
    assert "antigravity" not in sys.modules
    error = rebuilt_exception("tool", "t", outcome("Odd", "text", module="antigravity", qualname="Odd", args=[1]))
    assert "antigravity" not in sys.modules
    assert type(error).__module__ == "antigravity" and isinstance(error, RecordedDependencyError)
    assert (str(error), error.kind, error.name, error.error_type, error.message) == ("text", "tool", "t", "Odd", "text")


@pytest.mark.parametrize(
    ("error_type", "exception"),
    [
        ("ExceptionGroup", {"module": "builtins", "qualname": "ExceptionGroup", "args": ["text", []]}),
        ("ExceptionGroup", {"module": "builtins", "qualname": "ExceptionGroup", "args": ["text", [{"type": 1}]]}),
        ("UnicodeDecodeError", {"module": "builtins", "qualname": "UnicodeDecodeError", "args": ["[REDACTED]"]}),
        ("Odd\0", {"module": 3, "qualname": None, "args": "x", "state": [], "tags": []}),
        ("Odd", {"args": [1], "state": {"__class__": 1, "args": 2}, "tags": {"/args": "set", "": "tuple"}}),
        ("bool", {"module": "builtins", "qualname": "bool"}),
        ("\ud800", {"module": "\ud800", "qualname": "\ud800"}),
        ("OSError", {"module": "builtins", "qualname": "OSError", "args": [], "state": {"errno": "x", "filename": 1}}),
        ("BaseExceptionGroup", {"module": "builtins", "qualname": "BaseExceptionGroup", "args": []}),
    ],
)  # fmt: skip
def test_a_forged_row_gives_an_exception_with_the_text(error_type: str, exception: dict[str, Any]) -> None:
    error = rebuilt_exception("tool", "t", outcome(error_type, "text", **exception))
    assert isinstance(error, BaseException) and str(error) == "text"
