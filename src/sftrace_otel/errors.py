# SPDX-License-Identifier: Apache-2.0
"""Every error this package raises on purpose, in one tree.

::

    SftraceError                        anything of ours
    ├── SettingsError                   a setting or keyword that cannot be used          (also ValueError)
    ├── FormatError                     bytes that break a format                         (also ValueError)
    │   ├── TraceStorageError           a bundle that cannot be read or written
    │   ├── CanonicalizationError       a value without a canonical JSON form
    │   └── PayloadError                a payload that is not what its event says
    ├── ForkError                       a fork or override that the trace does not allow
    └── ReplayError                     a replay that cannot go on
        ├── ReplayMismatchError         a live call that the recording does not hold
        │   └── ReplayExhaustedError    the recording ended before the program did
        ├── ReplayPolicyError           a call that its policy forbids
        └── RecordedDependencyError     stands in for the exception that a recorded call raised

Each error carries a `code`: the reason in the words of the format page or of the replay report, for programs.
`str(error)` is for people: where, why, and what to do next, on one line (a replay miss may take several).
Errors of libraries and of the standard library never leave a call of ours; one root was preferred to separate
roots per module, so that a caller needs one `except`.
"""

from __future__ import annotations


class SftraceError(Exception):
    """Root of the errors of this package.

    Args:
        message: Where, why and what next, one line.
        code: Reason code; the class's own where it is left out.
    """

    code: str = "error"

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class SettingsError(SftraceError, ValueError):
    """A setting, environment variable or keyword that cannot be used; the text names it."""

    code = "invalid_setting"


class FormatError(SftraceError, ValueError):
    """Bytes or values that break a format.

    Attributes:
        where: `file`, `file:line`, or a JSON Pointer; empty where there is no place to name.
        reason: The text without the place.
    """

    code = "invalid_format"

    def __init__(self, message: str = "", *, where: str = "", code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.reason = message
        self.where = where

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" if self.where else self.reason

    def at(self, where: str) -> FormatError:
        """This error as seen from one level up: `where` is put before the place it already names."""
        place = where if not self.where else f"{where}{'' if self.where.startswith(('/', ':')) else ': '}{self.where}"
        return type(self)(self.reason, where=place, code=self.code)


class TraceStorageError(FormatError):
    """A bundle that cannot be read or written; `code` is one of the issue codes of the format page."""

    code = "unreadable_bundle"


class CanonicalizationError(FormatError):
    """A value that has no canonical JSON form; `where` is the JSON Pointer of the offending part."""

    code = "not_canonical"


class PayloadError(FormatError):
    """An event or payload that is not what its type asks for."""

    code = "invalid_event"


class ForkError(SftraceError):
    """A fork point or an override that the trace does not allow."""

    code = "fork_failed"


class ReplayError(SftraceError):
    """A replay that cannot go on."""

    code = "replay_failed"


class ReplayMismatchError(ReplayError):
    """A live call for which the recording holds no answer.

    Attributes:
        miss: What was looked for, what was nearest and how they differ (`core.session.Miss`), or None.
    """

    code = "mismatch"

    def __init__(self, message: str = "", *, miss: object | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.miss = miss


class ReplayExhaustedError(ReplayMismatchError):
    """The recording ended: every recorded call that could answer has been used."""

    code = "exhausted"


class ReplayPolicyError(ReplayError):
    """A call whose replay policy, or the mode of the session, forbids it."""

    code = "policy"


class RecordedDependencyError(ReplayError):
    """Stands in for the exception that a recorded call raised, where its own class is not at hand.

    Args:
        kind: "tool", "llm" or "http".
        name: The tool, the model, or the HTTP call.
        error_type: Recorded class name.
        message: Recorded text of the exception.
    """

    code = "recorded_error"

    def __init__(self, *, kind: str, name: str, error_type: str, message: str) -> None:
        super().__init__(f"recorded {kind} call {name!r} failed with {error_type}: {message}")
        self.kind = kind
        self.name = name
        self.error_type = error_type
        self.message = message

    def __reduce__(self) -> tuple[object, ...]:
        fields = {"kind": self.kind, "name": self.name, "error_type": self.error_type, "message": self.message}
        return _rebuild, (type(self), fields), self.__dict__


def _rebuild(cls: type[RecordedDependencyError], fields: dict[str, str]) -> RecordedDependencyError:
    """Pickle support: keyword-only arguments are not in `args`."""
    return cls(**fields)


__all__ = [
    "CanonicalizationError",
    "ForkError",
    "FormatError",
    "PayloadError",
    "RecordedDependencyError",
    "ReplayError",
    "ReplayExhaustedError",
    "ReplayMismatchError",
    "ReplayPolicyError",
    "SettingsError",
    "SftraceError",
    "TraceStorageError",
]
