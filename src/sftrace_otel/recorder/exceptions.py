# SPDX-License-Identifier: Apache-2.0
"""What of an exception is recorded beside its class and text, so that a replay can give an equal one.

Decision: its arguments, the simple members of its `__dict__`, and the members that builtin classes keep in C. Code of
the exception's own is not run. Rejected: pickling it, which a bundle from a stranger could abuse.

Source: `design.md`, "Outcome".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, Final

from sftrace_otel.core.prepare import Prepared
from sftrace_otel.recorder.bodies import BLOB_ABOVE

__all__ = ["NATIVE_MEMBERS", "how_ended", "members_of"]

NATIVE_MEMBERS: Final[Mapping[type[BaseException], tuple[str, ...]]] = {
    OSError: ("errno", "strerror", "filename", "filename2"),
    ImportError: ("name", "path"),
    NameError: ("name",),
    AttributeError: ("name",),
}
"""Members outside `__dict__` that the arguments do not give back."""

_SCALARS = (str, int, float, bool, type(None), bytes)
_MANY = 64


def how_ended(error: BaseException) -> str:
    """How a call ended that `error` came out of: what stops its task or the program cancels it, the rest fails it."""
    stops = isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit))
    return "cancelled" if stops or type(error).__name__ == "CancelledError" else "failed"


def members_of(error: BaseException, prepare: Callable[[object], Prepared]) -> dict[str, Any]:
    """`args`, `state` (member → value) and `tags` (JSON Pointer under these two → type tag) of an exception, redacted.

    Empty ones are left out but for `args`, and all where they take more than 16 KiB; then `args` alone is tried.
    """
    arguments = list(vars(BaseException)["args"].__get__(error))
    state = _state(error)
    for members in ({"args": arguments, "state": state}, {"args": arguments}) if state else ({"args": arguments},):
        prepared = prepare(members)
        if not prepared.truncated and len(prepared.data) <= BLOB_ABOVE and isinstance(prepared.value, dict):
            return {**prepared.value, "tags": prepared.tags} if prepared.tags else dict(prepared.value)
    return {}


def _state(error: BaseException) -> dict[str, object]:
    members = object.__getattribute__(error, "__dict__")
    state = {name: value for name, value in members.items() if type(name) is str and _is_simple(value)}
    for kind, names in NATIVE_MEMBERS.items():
        if isinstance(error, kind):
            found = {name: vars(kind)[name].__get__(error) for name in names}
            state.update({name: value for name, value in found.items() if value is not None and _is_simple(value)})
    return state


def _is_simple(value: object) -> bool:
    """Whether a member comes back as it was: a scalar, a path, or a short list or tuple of scalars."""
    if type(value) in (list, tuple):
        return len(value) <= _MANY and all(type(item) in _SCALARS for item in value)  # type: ignore[arg-type, attr-defined]
    return type(value) in _SCALARS or isinstance(value, PurePath)
