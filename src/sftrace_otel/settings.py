# SPDX-License-Identifier: Apache-2.0
"""Settings: one frozen value, read once from `OTEL_SFTRACE_*` variables and keywords.

Decision: a keyword that is wrong raises, since a programmer is there to read it; a variable that is wrong also raises
here, and the caller that runs inside somebody's production (distro, exporter) turns that into one log line and records
nothing. Rejected: guessing a near value, because a recorder that records less than asked, silently, is found out when
the recording is needed.

Source: `design.md`, "Names that users type".
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sftrace_otel.errors import SettingsError

__all__ = ["PREFIX", "Settings"]

PREFIX = "OTEL_SFTRACE_"
_log = logging.getLogger("sftrace_otel")

_named: set[str] = set()
"""Unknown variables that were logged already."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to record and where. Each field is also the variable `OTEL_SFTRACE_<NAME IN UPPER CASE>`.

    `dir`: folder for bundles. `agent`: name of the agent, None: from the resource or the script. `formats`: `sftrace`,
    `flight` or both. `scope`: what makes a run (`auto`, `process`, `trace`). `capture`: `full`, `metadata` (no
    payloads) or `off`. `content`: `reference` keeps payloads off spans, `span` also puts the redacted payload there.
    `keep`: which ended runs stay on disk: `all`, `failed` (the run, its root span, or any call failed), `flagged`
    (`keep()` was called). `max_disk_mb`: room for bundles in `dir`, in MiB; completed ones go first. `max_run_mb`: a
    run of this size in MiB closes and another one goes on. `on_close`: `module:callable`, given each bundle's path.
    `fsync`: `never`, `close` or `event`. `max_payload_bytes`: longer payloads are cut and marked. `redaction`: a TOML
    file with rules of one's own. `tools`: `module:callable` patterns traced on import. `quiet`: no lines on stderr.
    `replay`: a bundle to answer from instead of recording. `replay_mode`: `frozen`, `hybrid`, `live` or `resume`.
    `replay_live_llms`: `provider/model` names that hybrid mode lets out; `replay_live_tools`: tools that live mode
    does. `replay_policies`: what resume mode does past the end, `KIND:NAME=POLICY`; `replay_reuse`: true, or the parent
    whose calls it reuses; `replay_allow_redacted`: tools go out with placeholders.
    `replay_ignore`: JSON Pointers left out of matching; `replay_normalize`: `iso_time`, `uuid`, `path`.
    `replay_record`: a bundle to record the replay into. `replay_force`: also in production.
    `replay_order`: `causal`, `strict` or `any`.
    `replay_allow`: `host:port` pairs that may be connected to under replay. `replay_report`: file for the report.
    `nondeterminism`: `record` also keeps what the program reads of clock and chance, for replay to give back.
    `parent`: run id of the process that started this one. `prices`: a JSON file with prices of models.
    """

    dir: Path = Path("sftraces")
    agent: str | None = None
    formats: tuple[str, ...] = ("sftrace",)
    scope: str = "auto"
    capture: str = "full"
    content: str = "reference"
    keep: str = "all"
    max_disk_mb: int = 1024
    max_run_mb: int = 256
    on_close: str | None = None
    fsync: str = "close"
    max_payload_bytes: int = 16 * 1024 * 1024
    redaction: Path | None = None
    tools: tuple[str, ...] = ()
    quiet: bool = False
    replay: str | None = None
    replay_mode: str = "frozen"
    replay_order: str = "causal"
    replay_allow: tuple[str, ...] = ()
    replay_live_llms: tuple[str, ...] = ()
    replay_live_tools: tuple[str, ...] = ()
    replay_policies: tuple[str, ...] = ()
    replay_reuse: str | None = None
    replay_allow_redacted: bool = False
    replay_ignore: tuple[str, ...] = ()
    replay_normalize: tuple[str, ...] = ()
    replay_record: Path | None = None
    replay_force: bool = False
    replay_report: Path | None = None
    nondeterminism: str = "off"
    parent: str | None = None
    prices: Path | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], **keywords: Any) -> Settings:
        """Read the variables in `environ`, then let `keywords` (field names; None means unset) win.

        Raises SettingsError that names the variable or keyword. An unknown `OTEL_SFTRACE_*` variable is logged once
        per process and ignored.
        """
        values: dict[str, Any] = {}
        for name, text in environ.items():
            if not name.startswith(PREFIX):
                continue
            field = name[len(PREFIX) :].lower()
            if field not in _READERS:
                if name not in _named:
                    _named.add(name)
                    _log.warning("%s is not a setting of this version and has no effect", name)
            elif text.strip():
                values[field] = _read(field, text.strip(), name)
        for field, value in keywords.items():
            if field not in _READERS:
                raise SettingsError(f"there is no setting {field!r}; settings are {', '.join(_READERS)}")
            if value is not None:
                values[field] = _read(field, value, field)
        return cls(**values)

    def public(self) -> dict[str, object]:
        """The settings as JSON values for a bundle's `run.json`; paths as they were given, stubs without answers."""
        known = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {**known, "replay_policies": [_without_answer(policy) for policy in self.replay_policies]}


def _without_answer(policy: str) -> str:
    head, stub, _ = policy.partition("=stub")
    return head + stub


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _read(field: str, value: object, where: str) -> object:
    try:
        return _READERS[field](value)
    except (TypeError, ValueError) as fault:
        raise SettingsError(f"{where}={value!r}: {fault}") from None


def _one_of(*choices: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        text = str(value).strip().lower()
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return read


def _list(value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        raise TypeError("must be a list or text with commas")
    return tuple(part for part in (str(item).strip() for item in parts) if part)


def _policies(value: object) -> tuple[str, ...]:
    """Texts with commas between, or, since an answer may hold commas, a JSON array of them."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json.loads(value)
    return _list(value)


def _formats(value: object) -> tuple[str, ...]:
    names = _list(value)
    if not names or not set(names) <= {"sftrace", "flight"}:
        raise ValueError("must be sftrace, flight, or sftrace,flight")
    return names


def _boolean(value: object) -> bool:
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("must be true or false")


def _positive(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError("must be a whole number")
    number = int(value)
    if number <= 0:
        raise ValueError("must be above 0")
    return number


def _path(value: object) -> Path:
    if not isinstance(value, (str, Path)):
        raise TypeError("must be a path")
    return Path(value).expanduser()


def _callable_name(value: object) -> str:
    text = str(value).strip()
    module, colon, name = text.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError("must be module:callable")
    return text


def _text(value: object) -> str:
    text = str(value).strip()
    if not text:
        raise ValueError("must not be empty")
    return text


_READERS: dict[str, Callable[[object], object]] = {
    "dir": _path,
    "agent": _text,
    "formats": _formats,
    "scope": _one_of("auto", "process", "trace"),
    "capture": _one_of("full", "metadata", "off"),
    "content": _one_of("reference", "span"),
    "keep": _one_of("all", "failed", "flagged"),
    "max_disk_mb": _positive,
    "max_run_mb": _positive,
    "on_close": _callable_name,
    "fsync": _one_of("close", "never", "event"),
    "max_payload_bytes": _positive,
    "redaction": _path,
    "tools": _list,
    "quiet": _boolean,
    "replay": _text,
    "replay_mode": _one_of("frozen", "hybrid", "live", "resume"),
    "replay_order": _one_of("causal", "strict", "any"),
    "replay_allow": _list,
    "replay_live_llms": _list,
    "replay_live_tools": _list,
    "replay_policies": _policies,
    "replay_reuse": _text,
    "replay_allow_redacted": _boolean,
    "replay_ignore": _list,
    "replay_normalize": _list,
    "replay_record": _path,
    "replay_force": _boolean,
    "replay_report": _path,
    "nondeterminism": _one_of("off", "record"),
    "parent": _text,
    "prices": _path,
}
