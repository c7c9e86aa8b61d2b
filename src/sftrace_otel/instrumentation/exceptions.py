# SPDX-License-Identifier: Apache-2.0
"""Recorded exceptions made again: their class, text, arguments and members.

Decision: a bundle is data from strangers, so nothing it names is imported. A class is used only if its module is loaded
already; else the recorded names stand on a class of ours. A replayed Exception is also a RecordedDependencyError, so
that a test can tell it from a fault of today. What is no Exception (an exit, an interrupt, a cancellation) comes back
as what it was: `except Exception` must not catch under replay what it did not catch before. The class's own
`__init__` is not run; where its text then fails or differs, the recorded one stands in.

Source: `design.md`, "Outcome".
"""

from __future__ import annotations

import asyncio
import builtins
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sftrace_otel.core.prepare import restore
from sftrace_otel.errors import RecordedDependencyError
from sftrace_otel.formats import Json
from sftrace_otel.recorder.exceptions import NATIVE_MEMBERS

if TYPE_CHECKING:
    from sftrace_otel.core.plan import Outcome

__all__ = ["rebuilt_exception"]

_AS_THEY_ARE = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)


def rebuilt_exception(kind: str, name: str, outcome: Outcome) -> BaseException:
    """An exception like the one that a call `name` of `kind` ended with. Never raises."""
    error_type = outcome.error_type or "Exception"
    message = outcome.error_message or error_type
    error = _rebuilt(outcome.exception or {}, error_type, message)
    if isinstance(error, RecordedDependencyError):
        own = type(error).__mro__[1]
        details = {"kind": kind, "name": name, "error_type": error_type}
        if own is RecordedDependencyError:
            details["message"] = message
        for member, value in details.items():
            if own is RecordedDependencyError or not hasattr(own, member):
                error.__dict__.setdefault(member, value)
    return error


def _rebuilt(recorded: Mapping[str, Any], error_type: str, message: str) -> BaseException:
    module, _, name = error_type.rpartition(".")
    base = _loaded_class(recorded.get("module") or module or None, recorded.get("qualname") or name)
    arguments, state = _members(recorded, message)
    if base in _AS_THEY_ARE:
        return base(*arguments)
    names = {
        "__module__": str(recorded.get("module") or "builtins"),
        "__qualname__": str(recorded.get("qualname") or error_type),
    }

    def made(bases: tuple[type, ...]) -> BaseException:
        error = _instance(_subclass(error_type, bases, names), arguments)
        _set_members(error, state)
        _keep_text(error, error_type, message)
        return error

    try:
        return made(_bases(base))
    except Exception:  # a layout or metaclass that does not combine, or a class with an opinion of its own
        return made((RecordedDependencyError if base is None or issubclass(base, Exception) else BaseException,))


def _loaded_class(module: object, qualname: object) -> type[BaseException] | None:
    """The class, if its module is loaded already. Nothing is imported, and no attribute that is code is run."""
    loaded = sys.modules.get(module) if isinstance(module, str) else builtins
    found: object = loaded
    for part in str(qualname).split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _members(recorded: Mapping[str, Any], message: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and members with their types; the text stands for arguments that were not recorded."""
    arguments, state, tags = recorded.get("args"), recorded.get("state"), recorded.get("tags")
    stored: Json = {
        "args": arguments if isinstance(arguments, list) else [message],
        "state": state if isinstance(state, dict) else {},
    }
    known: dict[str, str] = {}
    if isinstance(tags, dict):
        known = {pointer: str(tag) for pointer, tag in tags.items() if pointer.startswith(("/args/", "/state/"))}
    restored: Any = restore(stored, known)
    return tuple(restored["args"]), dict(restored["state"])


# --- the class --------------------------------------------------------------------------------------------------------


def _bases(base: type[BaseException] | None) -> tuple[type, ...]:
    """What the new class is made of."""
    if base is None:
        return (RecordedDependencyError,)
    return (base, RecordedDependencyError) if issubclass(base, Exception) else (base,)


def _subclass(error_type: str, bases: tuple[type, ...], names: Mapping[str, str]) -> type[BaseException]:
    name = error_type.encode("utf-8", "backslashreplace").decode().replace("\0", "")
    return type(name, bases, {**names, "__init__": _init, "__reduce__": _reduce})


def _init(self: BaseException, *args: object) -> None:
    self.args = args


def _reduce(self: BaseException) -> tuple[object, ...]:
    return (Exception, self.args)


# --- the instance -----------------------------------------------------------------------------------------------------


def _instance(kind: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    """An instance without the class's own `__init__`, but with that of the builtin class below it."""
    native: Any = next(base for base in kind.__mro__[1:] if base.__module__ == "builtins" and "__init__" in vars(base))
    if issubclass(kind, BaseExceptionGroup):
        return kind.__new__(kind, *_of_group(arguments))
    error: BaseException
    try:
        error = kind.__new__(kind, *arguments)
    except Exception:
        error = kind.__new__(kind)
    error.args = arguments
    try:
        native.__init__(error, *arguments)
    except Exception:  # arguments that were redacted, or that the class's own __init__ did not pass on
        pass
    error.args = arguments
    return error


def _of_group(arguments: Sequence[Any]) -> tuple[str, list[BaseException]]:
    """Text and exceptions of a group: as its argument they were recorded as objects of type, module, text and args."""
    message, members = arguments
    return str(message), [_member(member) for member in members]


def _member(described: Mapping[str, Any]) -> BaseException:
    qualname = str(described["type"])
    recorded = {"module": described["module"], "qualname": qualname, "args": described["args"]}
    return _rebuilt(recorded, qualname.rpartition(".")[2], str(described["message"]))


def _set_members(error: BaseException, state: Mapping[str, Any]) -> None:
    """Put back what was in `__dict__`, and what builtin classes keep elsewhere; no setter of the program is run."""
    left = dict(state)
    for kind, names in NATIVE_MEMBERS.items():
        if isinstance(error, kind):
            for name in names:
                if name in left:
                    vars(kind)[name].__set__(error, left.pop(name))
    error.__dict__.update(left)


def _keep_text(error: BaseException, error_type: str, message: str) -> None:
    """Give the recorded text where the class's own fails or differs. An empty one was recorded as the class name."""
    try:
        own: str | None = str(error).encode("utf-8", "backslashreplace").decode()
    except Exception:
        own = None
    if own != message and (own != "" or message != error_type):
        type.__setattr__(type(error), "__str__", lambda self: message)
