# SPDX-License-Identifier: Apache-2.0
"""Connections: noticed while recording, stopped while replaying, when they are made outside every boundary.

Decision: one audit hook (PEP 578). It sees every library, those written in C too, patches nothing, and costs other
audit events one comparison. It cannot be taken off, so it is added when first needed and idles when off. Rejected:
wrapping `socket.socket`, which misses what took a reference earlier and changes `isinstance` for the program.

A connection inside a boundary is known by a context variable that the boundary sets around its transport. While
recording, exporters are known by OpenTelemetry's suppression key; under replay, where any program could set that, by
the addresses of the configured OTLP endpoints; a boundary goes inside there only with a call that was let out.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sftrace_otel import recorder as recording
from sftrace_otel.core.mapping.wire import LLM_HOSTS
from sftrace_otel.errors import ReplayPolicyError
from sftrace_otel.instrumentation.tracing import suppressed
from sftrace_otel.recorder.lineage import current_scope, current_task

if TYPE_CHECKING:
    from sftrace_otel.core.session import Session

__all__ = ["connections", "inside", "let_connections", "notice_connections", "stop_connections"]

_inside: ContextVar[bool] = ContextVar("sftrace_inside", default=False)
_where: ContextVar[int] = ContextVar("sftrace_inside_where", default=0)
"""The task or thread that went inside."""
_hooked = False
_noticing = False
_session: Session | None = None
_allowed: frozenset[tuple[str, int]] = frozenset()
_applies: Callable[[str, int], bool] | None = None
"""Whether a connection made here and now is the replay's business; None: each is."""
_seen: dict[tuple[str, int], dict[str, object]] = {}
_names: dict[int, str] = {}
_lock = threading.Lock()
_LIMIT = 256

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


def forget_connections() -> None:
    """Start the list anew (tests)."""
    with _lock:
        _seen.clear()
        _names.clear()


def stop_connections(
    session: Session, allow: Sequence[str] = (), applies: Callable[[str, int], bool] | None = None
) -> None:
    """Raise ReplayPolicyError, latched in `session`, for connections outside `allow` (`host:port`).

    `applies(host, port)` tells whether one that is made here and now counts; by default each does. Names
    in `allow`, and the OTLP endpoints of the environment, are resolved now: what counts later is the address.
    """
    global _session, _allowed, _applies
    _applies = applies
    _allowed = frozenset(_addresses([*allow, *_otlp_endpoints(os.environ)]))
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
    global _session, _allowed, _applies
    _session = None
    _applies = None
    _allowed = frozenset()


def _hook() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_audit)


def _audit(event: str, args: tuple[object, ...]) -> None:
    if not event.startswith("socket.") or not (_noticing or _session is not None):
        return
    try:
        if event == "socket.connect" or (event in ("socket.sendto", "socket.sendmsg") and _session is not None):
            _connect(args[0], args[1])
        elif event == "socket.getaddrinfo":
            _resolve(args[0], args[1])
    except Exception as error:
        if _session is not None:  # a replay fails closed
            raise
        recording.fault("noticing a connection", error)


def _resolve(host: object, port: object) -> None:
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if not isinstance(host, str) or not host.strip("0123456789.") or ":" in host:
        return  # an address, not a name
    if isinstance(port, (int, str)) and str(port).isdigit() and (int(port) in _names or len(_names) < _LIMIT):
        _names[int(port)] = host


def _connect(sock: object, address: object) -> None:
    if getattr(sock, "family", None) not in _INTERNET or not isinstance(address, tuple) or len(address) < 2:
        return
    host, port = str(address[0]), address[1]
    if not isinstance(port, int) or port == 0:
        return
    if _session is not None:
        _refuse(host, port)
    elif not _inside.get() and not suppressed():
        _notice(host, port)


def _refuse(host: str, port: int) -> None:
    session = _session
    named = _names.get(port, host)
    if session is None or (host, port) in _allowed or _inside.get() or current_scope().live:
        return
    if _applies is not None and not _applies(host, port):
        return
    library = _library()
    error = ReplayPolicyError(
        f"replay: {library} tried to connect to {named}:{port}, which no boundary answers; nothing was sent. Trace the "
        f"function that connects as a tool, or allow it with OTEL_SFTRACE_REPLAY_ALLOW={named}:{port}"
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


_PLUMBING = frozenset(
    {"socket", "asyncio", "ssl", "http", "contextlib", "selectors", "threading", "concurrent", "anyio", "sftrace_otel",
     "sniffio", "httpcore", "httpcore2", "urllib3", "runpy", "eventlet", "gevent"}
)  # fmt: skip


def _library() -> str:
    """The package nearest to the connection that is not plumbing."""
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
