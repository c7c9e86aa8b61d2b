# SPDX-License-Identifier: Apache-2.0
"""What the boundaries of agent frameworks share: a call of a framework's tool, and the framework's own objects in it.

Decision: a boundary stands directly around the tool's own code, below all that the framework does with arguments and
results, so that under replay validation, hooks, retries and formatting run as they are. It builds a `FrameworkTool` for
the call and hands it to `run` or `arun`, which are the drivers of `tools`. Objects of the framework that decide what it
does next (a message, a command, a deferral) are recorded with their class, from a table of the boundary, and made again
from it: a bundle names nothing that is not in the table. Exceptions by which a tool says that it has no result yet are
results here: nothing has failed. Rejected: the framework's callbacks and hooks, which cannot answer in the tool's
place.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import threading
import typing
import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import FunctionType
from typing import Any

import wrapt

from sftrace_otel.errors import RecordedDependencyError, ReplayError
from sftrace_otel.instrumentation import replaying
from sftrace_otel.instrumentation.tools import Tool, driver

__all__ = ["Forms", "FrameworkTool", "Methods", "arun", "by_name", "is_traced", "owner_of", "refused", "run"]

Members = Callable[[Any], dict[str, Any]]


# --- the framework's own objects --------------------------------------------------------------------------------------


class _Raised:
    """Stands for the result of a tool that raised what is no failure."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Forms:
    """Objects and exceptions of a framework that are recorded as `{"class": NAME, "members": {…}}` (`"raised"` for an
    exception) and made again.

    `objects` are names of pydantic models and dataclasses, `exceptions` of exceptions that are no failures, each with
    what gives the arguments of its constructor by name. A name is `module:class`; nothing is imported for it.
    """

    def __init__(self, objects: Iterable[str], exceptions: Mapping[str, Members]) -> None:
        self._objects = frozenset(objects)
        self._exceptions = exceptions

    def of(self, value: object) -> object:
        """The form of an object or exception of the table; any other value itself. A serializer of `prepare`."""
        if isinstance(value, _Raised):
            found = self._exception_of(value.error)
            return value if found is None else {"raised": found, "members": self._exceptions[found](value.error)}
        kind = type(value)
        found = next((name for name in self._objects if _class(name) is kind), None)
        return value if found is None else {"class": found, "members": _members(value)}

    def is_control(self, error: BaseException) -> bool:
        """Whether an exception is one of the table."""
        return self._exception_of(error) is not None

    def _exception_of(self, error: BaseException) -> str | None:
        for name in self._exceptions:
            kind = _class(name)
            if kind is not None and isinstance(error, kind):
                return name
        return None

    def back(self, value: Any) -> Any:
        """A recorded result with the objects of the table made again; what cannot be made stays as it was recorded."""
        if type(value) is list:
            return [self.back(item) for item in value]
        if type(value) is tuple:
            return tuple(self.back(item) for item in value)
        if type(value) is not dict:
            return value
        inside = {key: self.back(item) for key, item in value.items()}
        members = inside.get("members")
        if len(inside) != 2 or not isinstance(members, dict):
            return inside
        if inside.get("class") in self._objects:
            return _made(inside["class"], members, inside)
        if inside.get("raised") in self._exceptions:
            error = _made(inside["raised"], members, None)
            return _Raised(error) if isinstance(error, BaseException) else inside
        return inside


def _class(name: str) -> type | None:
    """The class, if its module is loaded."""
    module, _, attribute = name.partition(":")
    found = getattr(sys.modules.get(module), attribute, None)
    return found if isinstance(found, type) else None


def _members(value: Any) -> dict[str, Any]:
    """The constructor's arguments of a pydantic model or a dataclass, without those that are None by default."""
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        fields = [(field.name, field.default) for field in dataclasses.fields(kind) if field.init]
    else:
        fields = [(name, field.default) for name, field in kind.model_fields.items()]
    found = {name: getattr(value, name) for name, _ in fields}
    defaults = dict(fields)
    found = {name: member for name, member in found.items() if member is not None or defaults[name] is not None}
    return {**found, **(getattr(value, "model_extra", None) or {})}


def _made(name: str, members: dict[str, Any], otherwise: object) -> object:
    kind = _class(name)
    if kind is None:
        return otherwise
    try:
        return kind(**members)
    except Exception:  # redacted, or of another version
        return otherwise


# --- one call ---------------------------------------------------------------------------------------------------------


class FrameworkTool(Tool):
    """One call of a framework's tool, ready to be made.

    `call` makes it, and is a coroutine function for `arun`; `named` gives the arguments by name, `call_id` is the
    model's id of the call, `function` is the program's own function, whose return annotation says what results are.
    """

    __slots__ = ("_forms", "_function", "_named")

    def __init__(
        self,
        call: Callable[[], Any],
        name: str,
        named: Callable[[], dict[str, Any]],
        *,
        forms: Forms,
        call_id: str | None = None,
        function: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(_guarded(call, forms), name, forms.of, "frozen", signature=False)
        if call_id:
            self.attributes["gen_ai.tool.call.id"] = call_id
        self._named = named
        self._forms = forms
        self._function = function

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name."""
        return self._named()

    def outcome(self, result: Any, *, replayed: bool) -> Any:
        """What the framework is given for `result`. Raises the exception that stands for it."""
        if replayed:
            result = self._forms.back(result)
            if self._function is not None and not isinstance(result, _Raised):
                result = _as_annotated(self._function, result)
        if isinstance(result, _Raised):
            raise result.error
        return result


def run(tool: FrameworkTool) -> Any:
    """Make the call, or answer it from the recording."""
    replayed = replaying._active is not None
    return tool.outcome(driver(tool)(), replayed=replayed)


async def arun(tool: FrameworkTool) -> Any:
    """The same, for a call that is awaited."""
    replayed = replaying._active is not None
    return tool.outcome(await driver(tool)(), replayed=replayed)


def refused(tool: FrameworkTool) -> None:
    """Record a call that the framework refused before the tool's code was entered: `tool` raises what it refused it
    with. Under replay the recorded call is used up, and the refusal stays the framework's own.

    Raises a ReplayError where the recording has no such call.
    """
    try:
        run(tool)
    except RecordedDependencyError:
        pass
    except ReplayError:
        raise
    except Exception:  # the refusal
        pass


def _guarded(call: Callable[[], Any], forms: Forms) -> Callable[[], Any]:
    """`call`, with exceptions that are no failures as its result."""
    if inspect.iscoroutinefunction(call):

        async def acall() -> Any:
            try:
                return await call()
            except Exception as error:
                if forms.is_control(error):
                    return _Raised(error)
                raise

        return acall

    def scall() -> Any:
        try:
            return call()
        except Exception as error:
            if forms.is_control(error):
                return _Raised(error)
            raise

    return scall


def is_traced(function: Any) -> bool:
    """Whether `@trace_tool` or `OTEL_SFTRACE_TOOLS` records the function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return hasattr(function, "__sftrace_tool__")


def by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the function's parameters, defaults applied, those of `**kwargs` by their own names."""
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**({"args": list(args)} if args else {}), **kwargs}
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        elif kind is not inspect.Parameter.VAR_POSITIONAL or value:
            found[name] = value
    return found


# --- results of the program's own classes -----------------------------------------------------------------------------


def _as_annotated(function: Callable[..., Any], value: Any) -> Any:
    """A recorded result as the function's return annotation says, where that names a pydantic model, a dataclass or an
    enumeration; the value itself where it does not fit."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None:
        return value
    while isinstance(function, functools.partial):
        function = function.func
    try:
        hint = typing.get_type_hints(function, include_extras=True).get("return")
        return pydantic.TypeAdapter(hint).validate_python(value) if _holds_own(hint) else value
    except Exception:  # an annotation that cannot be resolved, a value that was redacted
        return value


def _holds_own(hint: Any) -> bool:
    if isinstance(hint, type):
        return hasattr(hint, "__pydantic_validator__") or dataclasses.is_dataclass(hint) or issubclass(hint, Enum)
    return any(map(_holds_own, typing.get_args(hint)))


# --- methods of classes that are not known beforehand -----------------------------------------------------------------


def owner_of(kind: type, name: str) -> type | None:
    """The class that `kind` has the attribute `name` from."""
    return next((base for base in kind.__mro__ if name in vars(base)), None)


class Methods:
    """Wrappers around methods of classes that the program defines, put on when such a class is first used.

    Decision: plain functions, so that classes pickled by value stay picklable, and weak references, so that classes
    made at run time can go. `made` is given the bound method and a call's object and arguments; it gives the
    `FrameworkTool` of the call, or None for one that is to be left alone.
    """

    def __init__(self, made: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], FrameworkTool | None]) -> None:
        self._made = made
        self._ours: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
        self._classes: weakref.WeakSet[type] = weakref.WeakSet()
        self._lock = threading.Lock()

    def put_on(self, kind: type, name: str) -> None:
        """Wrap the method `name` where `kind` has it from."""
        owner = owner_of(kind, name)
        if owner is None or vars(owner)[name] in self._ours:
            return
        with self._lock:
            method = vars(owner)[name]
            if method not in self._ours and isinstance(method, (FunctionType, wrapt.FunctionWrapper)):
                wrapper = self._wrapper(method)
                self._ours.add(wrapper)
                self._classes.add(owner)
                setattr(owner, name, wrapper)

    def take_off(self) -> None:
        """Put back what was wrapped, where ours is still in place."""
        with self._lock:
            for owner in list(self._classes):
                for name, method in list(vars(owner).items()):
                    if isinstance(method, FunctionType) and method in self._ours:
                        setattr(owner, name, method.__wrapped__)  # type: ignore[attr-defined]
            self._classes.clear()

    def patched(self) -> list[str]:
        """`module.class.method` of what is wrapped now."""
        return sorted(
            f"{owner.__module__}.{owner.__qualname__}.{name}"
            for owner in self._classes
            for name, method in vars(owner).items()
            if isinstance(method, FunctionType) and method in self._ours
        )

    def _wrapper(self, method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def acall(self_: Any, /, *args: Any, **kwargs: Any) -> Any:
                tool = self._made(method, self_, args, kwargs)
                return await (method(self_, *args, **kwargs) if tool is None else arun(tool))

            return acall

        @functools.wraps(method)
        def call(self_: Any, /, *args: Any, **kwargs: Any) -> Any:
            tool = self._made(method, self_, args, kwargs)
            return method(self_, *args, **kwargs) if tool is None else run(tool)

        return call
