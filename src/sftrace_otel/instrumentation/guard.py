# SPDX-License-Identifier: Apache-2.0
"""Ways out of the process: noticed while recording, stopped while replaying, outside every boundary.

They are connections, look-ups of names, and programs that are started. Decision: one audit hook (PEP 578). It sees
every library, those written in C too as far as they go through CPython's sockets, patches nothing, and costs other
audit events two comparisons. It cannot be taken off, so it is added when first needed and idles when off. Rejected:
wrapping `socket.socket` and `subprocess.Popen`, which misses what took a reference earlier and changes `isinstance`.

A connection inside a boundary is known by a context variable that the boundary sets around its transport. While
recording, exporters are known by OpenTelemetry's suppression key; under replay, where any program could set that, by
the addresses of the configured OTLP endpoints; a boundary goes inside there only with a call that was let out. What a
traced tool does is not noticed: a replay skips it with the tool.

Let through under replay: what `allow` names (`host:port`, `exec:NAME`, `unix:PATH`); names that need no look-up
(`localhost`, this host's own); sockets of this machine that multiprocessing and loggers use; programs that the standard
library starts to ask about the machine; and a Python process that starts under the same replay, which answers by
itself.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sftrace_otel import recorder as recording
from sftrace_otel.core.mapping.wire import LLM_HOSTS
from sftrace_otel.errors import ReplayPolicyError
from sftrace_otel.instrumentation.tracing import suppressed
from sftrace_otel.recorder.lineage import current_scope, current_task

if TYPE_CHECKING:
    from sftrace_otel.core.session import Session

__all__ = ["commands", "connections", "inside", "let_connections", "notice_connections", "stop_connections"]

_inside: ContextVar[bool] = ContextVar("sftrace_inside", default=False)
_where: ContextVar[int] = ContextVar("sftrace_inside_where", default=0)
"""The task or thread that went inside."""
_hooked = False
_noticing = False
_session: Session | None = None
_allowed: frozenset[tuple[str, int]] = frozenset()
_allowed_names: frozenset[str] = frozenset()
_allowed_words: frozenset[str] = frozenset()
_EXEC, _UNIX = "exec:", "unix:"
_applies: Callable[[str, int], bool] | None = None
"""Whether a connection made here and now is the replay's business; None: each is."""
_seen: dict[tuple[str, int], dict[str, object]] = {}
_started: dict[str, dict[str, object]] = {}
_names: dict[int, str] = {}
_lock = threading.Lock()
_LIMIT = 256

_COMMANDS = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn", "os.startfile"}
)
_INTERNET = frozenset({2, 10, 23, 30})  # AF_INET, and AF_INET6 on Linux, Windows and macOS


def enter() -> Token[bool]:
    """What connects from now on does so inside a boundary; give the result to `leave`."""
    _where.set(_here())
    return _inside.set(True)


def leave(token: Token[bool]) -> None:
    """Undo `enter`; harmless in another context."""
    try:
        _inside.reset(token)
    except ValueError:
        pass


@contextmanager
def inside() -> Iterator[None]:
    """What connects in this block does so inside a boundary."""
    token = enter()
    try:
        yield
    finally:
        leave(token)


@contextmanager
def outside() -> Iterator[None]:
    """What the program does in this block is its own, although a boundary's transport asked for it."""
    token = _inside.set(False)
    try:
        yield
    finally:
        try:
            _inside.reset(token)
        except ValueError:
            pass


def is_inside() -> bool:
    """Whether a boundary's transport is at work here: in this very task or thread.

    A task that was started there has the same context and a life of its own (what an ASGI application does in the
    background): its calls are calls, its connections are the transport's.
    """
    return _inside.get() and _where.get() == _here()


def _here() -> int:
    task = current_task()
    return threading.get_ident() if task is None else id(task)


def notice_connections() -> None:
    """From now on remember connections made outside every boundary."""
    global _noticing
    _noticing = True
    _hook()


def connections() -> list[dict[str, object]]:
    """Connections outside every boundary so far: host, port, the library that made them, whether for LLMs."""
    with _lock:
        return [dict(item) for item in _seen.values()]


def commands() -> list[dict[str, object]]:
    """Programs that were started outside every boundary so far: the program's name, and the library that did."""
    with _lock:
        return [dict(item) for item in _started.values()]


def forget_connections() -> None:
    """Start the list anew (tests)."""
    with _lock:
        _seen.clear()
        _started.clear()
        _names.clear()


def stop_connections(
    session: Session, allow: Sequence[str] = (), applies: Callable[[str, int], bool] | None = None
) -> None:
    """Raise ReplayPolicyError, latched in `session`, for what is outside `allow`: `host:port`, `exec:PROGRAM`,
    `unix:PATH`.

    `applies(host, port)` tells whether one that is made here and now counts; by default each does. Names
    in `allow`, and the OTLP endpoints of the environment, are resolved now: what counts later is the address.
    """
    global _session, _allowed, _allowed_names, _allowed_words, _applies
    _applies = applies
    _allowed_words = frozenset(allow)
    places = [place for place in allow if not place.startswith((_EXEC, _UNIX))]
    _allowed = frozenset(_addresses([*places, *_otlp_endpoints(os.environ)]))
    _allowed_names = frozenset(host.lower() for host, _ in _allowed) | {"localhost", "", socket.gethostname().lower()}
    _session = session
    _hook()


def _addresses(places: Iterable[str]) -> Iterator[tuple[str, int]]:
    for place in places:
        host, _, port = place.rpartition(":")
        if not port.isdigit():
            continue
        host = host.strip("[]")
        yield host, int(port)
        try:
            found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except OSError:
            continue
        yield from ((str(item[4][0]), int(port)) for item in found)


def _otlp_endpoints(environ: Mapping[str, str]) -> Iterator[str]:
    """`host:port` of the configured OTLP exporters, and of their defaults: telemetry is nobody's dependency."""
    yield from ("localhost:4317", "localhost:4318")
    for name, value in environ.items():
        if name.startswith("OTEL_EXPORTER_OTLP") and name.endswith("ENDPOINT"):
            parts = urlsplit(value if "//" in value else f"//{value}")
            try:
                port = parts.port or (443 if parts.scheme == "https" else 80)
            except ValueError:
                continue
            if parts.hostname:
                yield f"{parts.hostname}:{port}"


def is_allowed(host: str, port: int | None) -> bool:
    """Whether a connection there would be let through under replay."""
    return port is not None and (host, port) in _allowed


def let_connections() -> None:
    """Stop stopping them."""
    global _session, _allowed, _allowed_names, _allowed_words, _applies
    _session = None
    _applies = None
    _allowed = frozenset()
    _allowed_names = _allowed_words = frozenset()


def _hook() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_audit)


def _audit(event: str, args: tuple[object, ...]) -> None:
    look = event.startswith("socket.")
    if not (look or event in _COMMANDS) or not (_noticing or _session is not None):
        return
    try:
        if not look:
            _command(event, args)
        elif event == "socket.connect" or (event in ("socket.sendto", "socket.sendmsg") and _session is not None):
            _connect(args[0], args[1])
        elif event in _LOOK_UPS:
            _resolve(*args[:2])
    except Exception as error:
        if _session is not None:  # a replay fails closed
            raise
        recording.fault("noticing a connection", error)


_LOOK_UPS = frozenset({"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo"})


# --- names ------------------------------------------------------------------------------------------------------------


def _resolve(host: object, port: object = None) -> None:
    if isinstance(host, (bytes, bytearray)):
        host = host.decode("ascii", "replace")
    if isinstance(host, tuple):  # of `getnameinfo`: an address to look up the name of
        host = host[0] if host else None
    if not isinstance(host, str):
        return
    if is_address(host):
        return
    if _session is not None and host.rstrip(".").lower() not in _allowed_names:
        _refuse(
            f"look up the name {host}",
            f"allow it with OTEL_SFTRACE_REPLAY_ALLOW={host}:{port if _is_port(port) else 'PORT'}",
        )
    if _is_port(port) and (int(str(port)) in _names or len(_names) < _LIMIT):
        _names[int(str(port))] = host


def _is_port(port: object) -> bool:
    return isinstance(port, (int, str)) and str(port).isdigit()


def is_address(host: str) -> bool:
    """Whether a host is an IP address, which needs no look-up."""
    return ":" in host or not host.strip("0123456789.")


# --- connections ------------------------------------------------------------------------------------------------------


def _connect(sock: object, address: object) -> None:
    family = getattr(sock, "family", None)
    if family not in _INTERNET:
        if _session is not None and family == _LOCAL and isinstance(address, (str, bytes)):
            _connect_here(os.fsdecode(address))
        return
    if not isinstance(address, tuple) or len(address) < 2:
        return
    host, port = str(address[0]), address[1]
    if not isinstance(port, int) or port == 0:
        return
    if _session is not None:
        if (host, port) not in _allowed:
            named = _names.get(port, host)
            instead = f"allow it with OTEL_SFTRACE_REPLAY_ALLOW={named}:{port}"
            _refuse(f"connect to {named}:{port}", instead, host, port)
    elif not _inside.get() and not suppressed() and current_scope().parent is None:
        _notice(host, port)


_LOCAL = int(getattr(socket, "AF_UNIX", -1))


def _connect_here(path: str) -> None:
    """A replay meets a connection to a socket of this machine. Let through: multiprocessing's, and the system's log."""
    if f"{_UNIX}{path}" not in _allowed_words and _library() not in ("multiprocessing", "logging"):
        _refuse(f"connect to the socket {path!r}", f"allow it with OTEL_SFTRACE_REPLAY_ALLOW={_UNIX}{path}")


def _refuse(what: str, instead: str, host: str = "", port: int = 0) -> None:
    """Stop the replay, unless the call was let out or `_applies` says that it is none of the replay's business."""
    session = _session
    if session is None or _inside.get() or current_scope().live:
        return
    if _applies is not None and not _applies(host, port):
        return
    error = ReplayPolicyError(
        f"replay: {_library()} tried to {what}, which no boundary answers; nothing was sent. Trace the function that "
        f"does it as a tool, or {instead}"
    )
    session.latch(error)
    raise error


def _notice(host: str, port: int) -> None:
    with _lock:
        key = (host, port)
        if key in _seen or len(_seen) >= _LIMIT:
            return
        name = _names.get(port, host)
        _seen[key] = {"host": name, "port": port, "library": _library(), "llm": name in LLM_HOSTS}


# --- programs ---------------------------------------------------------------------------------------------------------


def _command(event: str, args: tuple[object, ...]) -> None:
    library = _library()
    if library in _ASK_THE_MACHINE or (_session is None and (_inside.get() or current_scope().parent is not None)):
        return
    name = _program_of(event, args)
    if _replays_too(event, args, name):
        return
    if _session is None:
        with _lock:
            if len(_started) < _LIMIT:
                _started.setdefault(name, {"program": name, "library": library})
    elif f"{_EXEC}{name}" not in _allowed_words:
        _refuse(f"start the program {name}", f"allow it with OTEL_SFTRACE_REPLAY_ALLOW={_EXEC}{name}")


_ASK_THE_MACHINE = frozenset({"platform", "uuid", "ctypes", "sysconfig", "locale", "multiprocessing"})
"""Modules of the standard library that start programs to learn about the machine, or to run this one's code."""


def _program_of(event: str, args: tuple[object, ...]) -> str:
    """The name of the program that is started; never its arguments, which may hold secrets."""
    if event in ("os.system", "os.startfile"):
        words = os.fsdecode(args[0]).split() if isinstance(args[0], (str, bytes)) else []
        while words and "=" in words[0]:  # variables set for the command
            words.pop(0)
        first: object = words[0] if words else "?"
    else:
        first = args[1] if event == "os.spawn" else args[0]
        if first is None and event == "subprocess.Popen":
            first = args[1]
    if isinstance(first, (list, tuple)):
        first = first[0] if first else "?"
    try:
        return Path(os.fsdecode(first)).name or "?"  # type: ignore[arg-type]
    except TypeError:
        return "?"


def _replays_too(event: str, args: tuple[object, ...], name: str) -> bool:
    """Whether a Python process starts with auto-instrumentation, and so records or replays by itself."""
    if not name.startswith("python"):
        return False
    given = args[-1] if event != "os.system" else None
    environ: dict[Any, Any] = given if isinstance(given, dict) else os.environ.copy()

    def value(variable: str) -> str:
        return os.fsdecode(environ.get(variable) or environ.get(os.fsencode(variable)) or "")

    if "auto_instrumentation" not in value("PYTHONPATH"):
        return False
    return _session is None or bool(value("OTEL_SFTRACE_REPLAY"))


_PLUMBING = frozenset(
    {"socket", "subprocess", "os", "pty", "asyncio", "ssl", "http", "contextlib", "selectors", "threading", "anyio",
     "concurrent", "sftrace_otel", "sniffio", "httpcore", "httpcore2", "urllib3", "runpy", "eventlet", "gevent"}
)  # fmt: skip


def _library() -> str:
    """The package nearest to the way out that is not plumbing."""
    frame = sys._getframe(2)
    first = ""
    while frame is not None:
        root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if root and root not in _PLUMBING and not root.startswith("importlib"):
            return "the program" if root == "__main__" else root
        if root and root != "sftrace_otel":
            first = first or root
        frame = frame.f_back  # type: ignore[assignment]
    return first or "the program"
