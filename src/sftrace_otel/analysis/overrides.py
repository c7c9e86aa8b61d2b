# SPDX-License-Identifier: Apache-2.0
"""Overrides as text: `T=JSON` replaces an output, `T:POINTER=JSON` one value in it, `T=Class:message` makes the call
a failure; T is a step or an event id. `@FILE` stands for the JSON of a file.

A file of overrides (TOML or JSON) has up to three tables, `override`, `set` and `error`, whose keys are what stands
before the `=` of the options, and whose values are what stands after it.

Decision: changes are applied in the order given (a file's tables in the order above), each to what the ones before
left, so that several `--set` of one event add up. A fault names the option and its target, never the value: it may be
a secret, and standard error is a log. Rejected: JSON Patch documents, which nobody types into a shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftrace_otel.errors import ForkError, FormatError, SettingsError
from sftrace_otel.formats import Json, canonical
from sftrace_otel.formats.sftrace import EventBase, LLMResponse, ToolResult

__all__ = ["Change", "Override", "outputs", "read_error", "read_file", "read_override", "read_set"]

_ESCAPE = re.compile(r"~(?![01])")
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One option: `target` as typed, `pointer` an RFC 6901 pointer into the output ("" is all of it), `status` what the
    event's becomes (None: as the output says)."""

    target: str
    pointer: str
    value: Json
    status: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """A new output for the event of a step, or of an id: exactly one of the two is set."""

    step: int | None
    event_id: str | None
    output: Json
    status: str | None = None


def read_override(text: str) -> Change:
    """Read `T=JSON` or `T=@FILE`. Raises SettingsError."""
    target, equals, value = text.partition("=")
    if not equals or not _is_target(target):
        raise SettingsError('--override: write it as T=JSON, for instance 5=\'{"status":"ok"}\'')
    return Change(target=target, pointer="", value=_json(value, f"--override {target}"))


def read_set(text: str) -> Change:
    """Read `T:POINTER=JSON`; the first `=` that JSON follows ends the pointer. Raises SettingsError."""
    target, colon, rest = text.partition(":")
    if not colon or not _is_target(target) or not rest.startswith("/") or "=" not in rest:
        raise SettingsError("--set: write it as T:POINTER=JSON, for instance 5:/results/0/price=10")
    at = rest.index("=")
    while True:
        try:
            value = _json(rest[at + 1 :], f"--set {target}")
            return Change(target=target, pointer=_pointer(rest[:at], f"--set {target}"), value=value)
        except SettingsError:
            at = rest.find("=", at + 1)
            if at < 0:
                raise


def read_error(text: str) -> Change:
    """Read `T=Class:message`: the call failed with an exception of that class. Raises SettingsError."""
    target, equals, value = text.partition("=")
    if not equals or not _is_target(target):
        raise SettingsError("--error: write it as T=Class:message, for instance 5=TimeoutError:no answer")
    return _failure(target, value, f"--error {target}")


def _is_target(text: str) -> bool:
    """Whether `text` may be a step or an event id, and be shown; else it may be a value, and that a secret."""
    return bool(text) and not any(sign in text for sign in '{["\n')


def _pointer(text: str, where: str) -> str:
    if _ESCAPE.search(text):
        raise SettingsError(f"{where}: in a JSON Pointer ~ stands for nothing but ~0 (a ~) and ~1 (a /)")
    return text


def _failure(target: str, value: object, where: str) -> Change:
    name, _, message = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not _CLASS.fullmatch(name):
        raise SettingsError(f"{where}: before the ':' stands the name of an exception class, as in TimeoutError:text")
    return Change(target=target, pointer="", value={"error_type": name, "message": message or name}, status="error")


def read_file(path: Path) -> list[Change]:
    """The changes that a TOML or JSON file holds. Raises SettingsError."""
    import tomllib

    where = f"--override-file {path}"
    data = _content(path, where)
    document: object
    try:
        document = tomllib.loads(data.decode("utf-8")) if path.suffix.lower() == ".toml" else canonical.loads(data)
    except (ValueError, FormatError) as fault:
        raise SettingsError(f"{where}: {fault}") from None
    if not isinstance(document, dict) or not document.keys() <= {"override", "set", "error"}:
        raise SettingsError(f"{where}: it has the tables override, set and error, and nothing else")
    changes: list[Change] = []
    for target, value in _table(document, "override", where).items():
        changes.append(Change(target=target, pointer="", value=value))
    for place, value in _table(document, "set", where).items():
        target, colon, pointer = place.partition(":")
        if not target or not colon or not pointer.startswith("/"):
            raise SettingsError(f"{where}: set: {place}: write it as T:POINTER, for instance 5:/results/0/price")
        changes.append(Change(target=target, pointer=_pointer(pointer, f"{where}: set: {target}"), value=value))
    for target, value in _table(document, "error", where).items():
        changes.append(_failure(target, value, f"{where}: error: {target}"))
    return changes


def _table(document: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise SettingsError(f"{where}: {name} is no table of targets")
    return table


def _content(path: Path, where: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as fault:
        raise SettingsError(f"{where}: {path} cannot be read: {fault.strerror}") from None


def outputs(events: Iterable[EventBase], changes: Sequence[Change]) -> list[Override]:
    """The overrides that `changes` come to, one for each target; `events` are gone through once, if a change is of a
    part. Raises ForkError for a place that is not there."""
    recorded = _Recorded(events, {change.target for change in changes if change.pointer})
    new: dict[str, tuple[Json, str | None]] = {}
    for change in changes:
        if change.pointer:
            old, status = new[change.target] if change.target in new else (recorded.output(change.target), None)
            new[change.target] = _replaced(old, change.pointer.split("/")[1:], change.value, change), status
        else:
            new[change.target] = change.value, change.status
    return [_override(target, *change) for target, change in new.items()]


class _Recorded:
    """What the events hold of some targets."""

    def __init__(self, events: Iterable[EventBase], targets: Set[str]) -> None:
        self._found: dict[str | int, EventBase] = {}
        self._steps = 0
        wanted = {_key(target) for target in targets}
        for event in events if wanted else ():
            self._steps = max(self._steps, event.step + 1)
            for key in wanted & {event.step, event.id}:
                known = self._found.get(key)
                if known is None or not isinstance(known, (ToolResult, LLMResponse)):
                    self._found[key] = event

    def output(self, target: str) -> Json:
        """The recorded output of a target. Raises ForkError."""
        found = self._found.get(_key(target))
        if isinstance(found, (ToolResult, LLMResponse)):
            return found.output
        if found is not None:
            only = "only tool_result and llm_response can be overridden"
            raise ForkError(f"invalid overrides: override targets {_name(target)} ({found.type}); {only}")
        if _step(target) is None:
            raise ForkError(f"invalid overrides: override targets non-existent event {target}")
        raise ForkError(f"invalid overrides: override targets step {target} but trace only has {self._steps} steps")


def _override(target: str, output: Json, status: str | None) -> Override:
    step = _step(target)
    return Override(step=step, event_id=target if step is None else None, output=output, status=status)


def _step(target: str) -> int | None:
    return int(target) if target.isascii() and target.isdecimal() else None


def _json(text: str, where: str) -> Json:
    data = text.encode("utf-8", "surrogatepass")
    if text.startswith("@"):
        data = _content(Path(text[1:]).expanduser(), where)
    try:
        return canonical.loads(data)
    except FormatError as fault:
        raise SettingsError(f"{where}: what follows '=' is not JSON ({fault}); quote text, as in '\"text\"'") from None


def _key(target: str) -> int | str:
    step = _step(target)
    return target if step is None else step


def _name(target: str) -> str:
    return f"event {target}" if _step(target) is None else f"step {target}"


def _replaced(value: Json, path: list[str], new: Json, change: Change) -> Json:
    """`value` with the place that `path` names set to `new`; what is not on the path is shared, nothing is changed."""
    if not path:
        return new
    name, rest = path[0].replace("~1", "/").replace("~0", "~"), path[1:]
    if isinstance(value, dict) and (name in value or not rest):
        return {**value, name: _replaced(value.get(name), rest, new, change)}
    if isinstance(value, list) and name.isascii() and name.isdecimal() and int(name) < len(value):
        at = int(name)
        return [*value[:at], _replaced(value[at], rest, new, change), *value[at + 1 :]]
    raise ForkError(
        f"invalid overrides: {change.pointer} is not in the output of {_name(change.target)}; "
        f"see it with: sftrace inspect PATH --step N"
    )
