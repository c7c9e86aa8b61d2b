# SPDX-License-Identifier: Apache-2.0
"""Recorded answers and errors as those of urllib3 (1.26 and 2).

Decision: an answer is laid out as it stood on the wire and read by `http.client` from memory, so that everything above
does what it does with a socket. Parts come one to a read, and as chunks where the answer was chunked: boundaries stay.
An error gets its class and the recorded text but not its constructor run, which would build a text anew; what was in
its arguments is read back from the text, since callers print errors inside of errors.
Rejected: `urllib3.HTTPResponse` around a file of bytes (it cannot be read by chunks, and requests finds no cookies).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import io
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sftrace_otel.instrumentation.serving import recorded_error

if TYPE_CHECKING:
    from sftrace_otel.instrumentation.outcomes import Answer

__all__ = ["answer_around", "failure", "http_answer"]

Part = bytes | Callable[[], BaseException]
"""What one read from the wire gives, or what makes the error that it raises."""


# --- answers ----------------------------------------------------------------------------------------------------------


def http_answer(answer: Answer, method: str, beyond: Callable[[], BaseException]) -> Any:
    """http.client's own answer, made of recorded bytes. `beyond`: the error of who reads on where it had been left."""
    from http.client import HTTPResponse

    response = HTTPResponse(_Memory(_wire(answer, method, beyond)), method=method)  # type: ignore[arg-type]
    response.begin()
    return response


def answer_around(below: Any, pool: Any, method: str, target: str, options: Mapping[str, Any]) -> Any:
    """urllib3 2's answer around http.client's, as its connection makes one. `options`: those of `_make_request`."""
    from urllib3 import HTTPHeaderDict, HTTPResponse

    given: dict[str, Any] = {
        "body": below,
        "headers": HTTPHeaderDict(_fields(below.msg)),
        "status": below.status,
        "version": below.version,
        "version_string": "HTTP/1.0" if below.version == 10 else "HTTP/1.1",
        "reason": below.reason,
        "preload_content": options.get("preload_content", True),
        "decode_content": options.get("decode_content", True),
        "original_response": below,
        "enforce_content_length": options.get("enforce_content_length", True),
        "request_method": method,
        "request_url": target,
    }
    known = inspect.signature(HTTPResponse.__init__).parameters
    response: Any = HTTPResponse(**{name: value for name, value in given.items() if name in known})
    response.retries = options.get("retries")
    response._connection = options.get("response_conn")
    response._pool = pool
    return response


def _fields(message: Any) -> list[tuple[str, str]]:
    """Header fields as urllib3's connection takes them from http.client: newer versions put folded lines together."""
    of_client = getattr(sys.modules.get("urllib3.connection"), "_normalize_header_values", None)
    fields: list[tuple[str, str]] = message.items() if of_client is None else of_client(message)
    return fields


class _Memory:
    """What http.client wants of a socket."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts

    def makefile(self, mode: str) -> Any:
        return io.BufferedReader(_Parts(self._parts))


class _Parts(io.RawIOBase):
    """Recorded parts, at most one to a read, so that boundaries stay; an exception among them is raised."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts[::-1]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._parts:
            return 0
        part = self._parts.pop()
        if not isinstance(part, bytes):
            raise part()
        taken = part[: len(buffer)]
        buffer[: len(taken)] = taken
        if len(taken) < len(part):
            self._parts.append(part[len(taken) :])
        return len(taken)


def _wire(answer: Answer, method: str, beyond: Callable[[], BaseException]) -> list[Part]:
    """An answer as it stood on the wire: its head, then its chunks, then the failure if there was one."""
    version = answer.version if answer.version in ("HTTP/1.0", "HTTP/1.1") else "HTTP/1.1"
    lines = [f"{version} {answer.status} {answer.reason}", *(f"{name}: {value}" for name, value in answer.headers)]
    wire: list[Part] = [b"".join(_header_bytes(line) + b"\r\n" for line in lines) + b"\r\n"]
    if method == "HEAD" or answer.status in (204, 304):
        return wire
    names = {name.lower(): value.lower() for name, value in answer.headers}
    chunked = names.get("transfer-encoding") == "chunked"
    for chunk in answer.chunks:
        if chunk:
            wire.append(b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunked else chunk)
    error = _read_failure(answer) if answer.exception else None
    if error is not None:
        if not (_is_incomplete(error) and (chunked or "content-length" in names)):
            wire.append(lambda: error)  # where the length is told, an early end is found by the client itself
    elif answer.left:
        wire.append(beyond)
    elif chunked:
        wire.append(b"0\r\n\r\n")
    return wire


def _header_bytes(line: str) -> bytes:
    try:
        return line.encode("latin-1")
    except UnicodeEncodeError:
        return line.encode("utf-8")


def _read_failure(answer: Answer) -> BaseException:
    """What the socket raised while the body was read; urllib3 makes its own error of it."""
    recorded = answer.exception or {}
    kind, message = str(recorded.get("qualname")), str(recorded.get("message"))
    if "IncompleteRead" in kind:
        return _incomplete()
    found = _of_the_system(recorded, message)
    if found is not None:
        return found
    if _of_a_client(recorded):
        return TimeoutError("timed out") if "Timeout" in kind else _incomplete()
    return recorded_error(recorded, message, "")


def _incomplete() -> Exception:
    from http.client import IncompleteRead

    return IncompleteRead(b"")


def _is_incomplete(error: BaseException) -> bool:
    return type(error).__name__ == "IncompleteRead"


# --- errors -----------------------------------------------------------------------------------------------------------


def failure(answer: Answer, pool: Any, conn: Any, target: str, url: str) -> BaseException:
    """The recorded exception of an attempt without an answer, as its own class of urllib3 or of the system."""
    recorded = answer.exception or {}
    name = str(recorded.get("qualname"))
    message = str(recorded.get("message") or recorded.get("qualname") or "connection failed")
    if _of_a_client(recorded):
        if not str(recorded.get("module")).startswith("urllib3"):
            name = "ReadTimeoutError" if "Timeout" in name else "NewConnectionError"
        error = _of_urllib3(name, message)
        error.__dict__.update(url=target, conn=conn)
        error.__dict__["pool"] = conn if isinstance(error, _exceptions().ConnectTimeoutError) else pool
        return error
    return _of_the_system(recorded, message) or recorded_error(recorded, message, url)


def _of_a_client(recorded: Mapping[str, Any]) -> bool:
    root = str(recorded.get("module") or "").partition(".")[0]
    return root in ("", "urllib3", "httpx", "httpx2", "aiohttp")


def _exceptions() -> Any:
    return sys.modules["urllib3.exceptions"]


def _of_urllib3(name: str, message: str) -> BaseException:
    found = getattr(_exceptions(), name, None)
    kind: Any = found
    if not (isinstance(found, type) and issubclass(found, _exceptions().HTTPError)):
        kind = _exceptions().NewConnectionError
    error = _unmade(kind)
    error.args = _arguments(message)
    error.__dict__["_message"] = re.sub(r"^(?:<.*?>|\w+\(.*?\)): ", "", message)
    if issubclass(kind, _exceptions().ProxyError):
        inner = error.args[-1]
        error.__dict__["original_error"] = inner if isinstance(inner, BaseException) else OSError(message)
    return error


def _of_the_system(recorded: Mapping[str, Any], message: str) -> BaseException | None:
    """An error of the system, of TLS or of http.client; None for any other."""
    name = str(recorded.get("module"))
    kind: Any = getattr(sys.modules.get(name), str(recorded.get("qualname")), None)
    http: Any = sys.modules["http.client"]
    if name not in ("builtins", "socket", "ssl", "http.client") or not isinstance(kind, type):
        return None
    if issubclass(kind, OSError):
        number = re.match(r"\[Errno (-?\d+)\] (.*)", message, re.DOTALL)
        return kind(int(number[1]), number[2]) if number else kind(message)
    if not issubclass(kind, http.HTTPException):
        return None
    error = _unmade(kind)
    error.args = (message,)
    error.__dict__["line"] = message
    return error


def _unmade(kind: Any) -> BaseException:
    """An error whose own constructor did not run."""
    error: BaseException = kind.__new__(kind)
    return error


class _Shown:
    """Stands for an object of which the recording has only how it is shown."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _arguments(message: str) -> tuple[object, ...]:
    """The arguments of an error whose text is `message`: a pair where that shows one, else the text."""
    shown = re.fullmatch(r"\((<.*>), (['\"].*['\"])\)", message, re.DOTALL)
    inner = re.fullmatch(r"\((['\"].*?['\"]), (\w+)\((.*)\)\)", message, re.DOTALL)
    try:
        if shown:
            return (_Shown(shown[1]), ast.literal_eval(shown[2]))
        if inner:
            return (ast.literal_eval(inner[1]), _inner(inner[2], inner[3]))
    except (ValueError, SyntaxError):
        pass
    return (message,)


def _inner(name: str, arguments: str) -> BaseException:
    """An error that is shown as `name(arguments)`."""
    given = ast.literal_eval(f"({arguments},)") if not arguments.startswith("<") else _arguments(f"({arguments})")
    if hasattr(_exceptions(), name) and not hasattr(builtins, name):
        error = _of_urllib3(name, str(given[-1]))
        error.args = given
        return error
    kind: Any = getattr(builtins, name, None) or getattr(sys.modules["http.client"], name, OSError)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = OSError
    made: BaseException = kind(*given)
    return made
