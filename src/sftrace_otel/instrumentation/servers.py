# SPDX-License-Identifier: Apache-2.0
"""Inbound requests and tasks as runs: ASGI, WSGI, and by themselves uvicorn, gunicorn and celery.

Decision: a wrapper around the application that makes no span. It opens a run, which is on disk only once something is
recorded in it, lets the application run in its scope, and ends it with the last byte of the answer. Where a server
instrumentation makes a SERVER or CONSUMER span, inside or outside of ours, that span's run and this are one. The
request becomes the run's input as far as the application has read it: the body is copied as it passes and never asked
for. An exception of the application fails the run, and so does an answer of 500 and above, as OpenTelemetry marks the
spans of servers; since the exception behind such an answer comes after it, that run ends when the application returns.
Rejected: a span of our own (two SERVER spans wherever there is an instrumentation), reading the body first (it changes
what a slow client sees), and runs for websockets and lifespan (they last as long as the process; what is called there
belongs to the process's run).

Source: `design.md`, "Runs"; ADR 17.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextvars import Token
from typing import Any

from sftrace_otel import recorder as recording
from sftrace_otel.core.prepare import Prepared
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.exchange import BEGINNING, Head, body_value
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.recorder import Recorder, Run, Scope, current_scope, enter, leave

__all__ = ["SftraceASGI", "SftraceWSGI", "install", "patched", "uninstall"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_Token = Token[Scope | None]


# --- the inbound request ----------------------------------------------------------------------------------------------


class _Inbound:
    """A request as far as the application has read it. `target` is the path with the query."""

    def __init__(self, method: str, target: str, headers: list[list[str]], room: int) -> None:
        self.head = Head("", method, target, headers)
        self.size = 0
        self._room = room
        self._parts: list[bytes] = []

    def dropped(self) -> int:
        """Bytes that were read and not kept."""
        return self.size - sum(map(len, self._parts))

    def read(self, data: bytes) -> None:
        """The application read `data` of the body."""
        self.size += len(data)
        if self._room > 0:
            self._parts.append(bytes(data[: self._room]))
            self._room -= len(data)

    def value(self, recorder: Recorder) -> dict[str, object]:
        """The request as it is recorded: headers as pairs; of a body that is too large the beginning and its size."""
        data = b"".join(self._parts)
        media = self.head.media()
        if self.size > len(data):
            beginning = body_value(data[:BEGINNING], media, recorder.policy)
            body: object = {"size": self.size, "beginning": beginning}  # what is cut further is cut from the end
        else:
            body = body_value(data, media, recorder.policy)
        return {"method": self.head.method, "path": self.head.url, "headers": self.head.headers, "body": body}


class _Request:
    """An inbound request or task and its run. `owned`: the run is ours to end, since no one else's was there."""

    __slots__ = ("inbound", "over", "owned", "recorder", "run", "status", "worded")

    def __init__(self, recorder: Recorder, kind: str, traceparent: str) -> None:
        self.recorder = recorder
        self.inbound: _Inbound | None = None
        self.status = 0
        self.over = False
        self.worded = 0
        around = recorder.joinable(tracing.current_ids()[1])
        self.owned = around is None
        self.run: Run = recorder.new_run(kind) if around is None else around
        if self.owned:
            self.run.responding = True
            remote = tracing.traceparent(traceparent)
            if remote is not None:
                self.run.came_from(*remote)
                self.run.trace_ids[f"{remote[0]:032x}"] = None

    def takes_input(self) -> bool:
        """Whether the run has no input yet: its own request, or that of the server span around."""
        run = self.run
        return run.kind != "record" and run.input is None and run.inbound is None and run.journal is None

    def given(self, inbound: _Inbound) -> None:
        """Have the run take `inbound` for its input, when the time comes."""
        if self.takes_input():
            self.inbound = inbound
            self.run.inbound = self._input

    def _input(self) -> Prepared | None:
        if self.inbound is None:
            return None
        self.worded = self.inbound.size
        return self.recorder.prepare(self.inbound.value(self.recorder))

    @fails_open("entering a request", None)
    def enter(self) -> _Token:
        """Make the run that of the code that follows; give the result to `_left` in the same function."""
        here = current_scope()
        return enter(here if here.run is self.run else Scope(run=self.run))

    @fails_open("recording a request", None)
    def read(self, data: bytes, *, last: bool) -> None:
        """The application read a part of the body."""
        inbound = self.inbound
        if inbound is None:
            return
        if self.recorder.has_content:
            inbound.read(data)
        if last:
            self._reword()

    def _reword(self) -> None:
        """Where the run began before the body was read, have it told what was read since."""
        if self.inbound is not None and self.run.journal is not None and self.inbound.size != self.worded:
            with self.run.lock:
                self.run.reword()

    @fails_open("ending a request", None)
    def answered(self) -> None:
        """The last byte of the answer was sent."""
        if self.status < 500:
            self._end(None)

    @fails_open("ending a request", None)
    def returned(self, error: BaseException | None = None, *, beside: bool = True) -> None:
        """The application has returned, or raised `error`: what it did after its answer is over too."""
        failure = self._failure(error)
        if not self.over:
            self._end(failure, beside=beside, returned=True)
        elif self.owned and self.run.later is not None:
            self.recorder.end_run(self.run.later, failure=failure, beside=beside)

    def _failure(self, error: BaseException | None) -> tuple[str, str] | None:
        if error is not None:
            described = self.recorder.describe_error(error)
            return (described["type"], described["message"])
        if self.status >= 500 and not self.over and self.run.failure is None:
            return (str(self.status), f"the request was answered with {self.status}")
        return None

    def _end(self, failure: tuple[str, str] | None, *, beside: bool = True, returned: bool = False) -> None:
        if self.over:
            return
        self._reword()
        self.over = True
        if self.inbound is not None and self.inbound.dropped():
            self.run.lost("bytes of the request's body beyond the limit", self.inbound.dropped())
        if not self.owned:
            return
        self.run.responding = False
        if returned or not self.run.roots:  # else the run ends with its server span
            self.recorder.end_run(self.run, failure=failure, beside=beside)


def _recorder() -> Recorder | None:
    """The recorder that requests are runs of; None under replay, where nothing is recorded, and where the scope is set
    to the process or the trace."""
    recorder = recording._active
    if recorder is None or replaying._active is not None or recorder.settings.scope != "auto":
        return None
    return recorder


@fails_open("leaving a request", None, replay_too=True)
def _left(token: _Token | None) -> None:
    if token is not None:
        leave(token)


# --- ASGI -------------------------------------------------------------------------------------------------------------


class SftraceASGI:
    """`app` (ASGI 3) with a run for each HTTP request, while something records: `app = SftraceASGI(app)`."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> Any:
        if scope.get("type") != "http":
            return await self.app(scope, receive, send)
        if replaying._active is not None:
            return await self._replayed(scope, receive, send)
        request = self._request(scope)
        if request is None:
            return await self.app(scope, receive, send)
        token = request.enter()
        try:
            result = await self.app(scope, _received(request, receive), _sent(request, send))
        except BaseException as error:
            request.returned(error)
            raise
        finally:
            _left(token)
        request.returned()
        return result

    async def _replayed(self, scope: Message, receive: Receive, send: Send) -> Any:
        """Under replay a request has the lineage that it had as a run: counted from its beginning."""
        token = enter(Scope())
        try:
            return await self.app(scope, receive, send)
        finally:
            _left(token)

    @fails_open("recording a request", None)
    def _request(self, scope: Message) -> _Request | None:
        recorder = _recorder()
        if recorder is None or not self._on():
            return None
        headers = [[name.decode("latin-1").lower(), value.decode("latin-1")] for name, value in scope["headers"]]
        request = _Request(recorder, "request", _value(headers, "traceparent"))
        target = (scope.get("raw_path") or b"").decode("latin-1") or scope["path"]
        query = scope.get("query_string") or b""
        if query and "?" not in target:
            target += "?" + query.decode("latin-1")
        request.given(_Inbound(scope["method"], target, headers, recorder.settings.max_payload_bytes))
        return request

    def _on(self) -> bool:
        return True


def _received(request: _Request, receive: Receive) -> Receive:
    async def received() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            request.read(message.get("body", b""), last=not message.get("more_body", False))
        return message

    return received


def _sent(request: _Request, send: Send) -> Send:
    trailers = False

    async def sent(message: Message) -> None:
        nonlocal trailers
        await send(message)
        kind = message["type"]
        if kind == "http.response.start":
            request.status = message["status"]
            trailers = message.get("trailers", False)
        elif _is_last(message, trailers):
            request.answered()

    return sent


def _is_last(message: Message, trailers: bool) -> bool:
    kind = message["type"]
    if kind == "http.response.trailers":
        return not message.get("more_trailers", False)
    if trailers:
        return False
    return kind == "http.response.pathsend" or (
        kind in ("http.response.body", "http.response.zerocopysend") and not message.get("more_body", False)
    )


def _value(headers: list[list[str]], name: str) -> str:
    return next((value for key, value in headers if key == name), "")


# --- WSGI -------------------------------------------------------------------------------------------------------------


class SftraceWSGI:
    """`app` (WSGI) with a run for each request, while something records: `app = SftraceWSGI(app)`."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if replaying._active is not None:
            return self._replayed(environ, start_response)
        request = self._request(environ)
        if request is None:
            return self.app(environ, start_response)  # type: ignore[no-any-return]
        token = request.enter()
        try:
            result = self.app(environ, _starting(request, start_response))
        except BaseException as error:
            request.returned(error)
            raise
        finally:
            _left(token)
        answer = _answer(request, result)
        return result if answer is None else answer  # type: ignore[no-any-return]

    def _replayed(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        token = enter(Scope())
        try:
            return self.app(environ, start_response)  # type: ignore[no-any-return]
        finally:
            _left(token)

    @fails_open("recording a request", None)
    def _request(self, environ: dict[str, Any]) -> _Request | None:
        recorder = _recorder()
        if recorder is None or not self._on():
            return None
        headers = list(_headers(environ))
        request = _Request(recorder, "request", environ.get("HTTP_TRACEPARENT", ""))
        target = environ.get("RAW_URI") or environ.get("REQUEST_URI") or ""
        if not target.startswith("/"):
            target = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
            target += "?" + environ["QUERY_STRING"] if environ.get("QUERY_STRING") else ""
        request.given(_Inbound(environ["REQUEST_METHOD"], target, headers, recorder.settings.max_payload_bytes))
        if request.inbound is not None and "wsgi.input" in environ:
            environ["wsgi.input"] = _body(environ["wsgi.input"], request)
        return request

    def _on(self) -> bool:
        return True


def _headers(environ: Mapping[str, Any]) -> Iterator[list[str]]:
    for key, value in environ.items():
        if key in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            if value:
                yield [key.replace("_", "-").lower(), str(value)]
        elif key.startswith("HTTP_"):
            yield [key[5:].replace("_", "-").lower(), str(value)]


def _starting(request: _Request, start_response: Callable[..., Any]) -> Callable[..., Any]:
    def start(*args: Any, **kwargs: Any) -> Any:
        request.status = _status(args[0] if args else kwargs.get("status"))
        return start_response(*args, **kwargs)

    return start


def _status(line: object) -> int:
    text = str(line)[:3]
    return int(text) if text.isdecimal() else 0


class _Body:
    """`wsgi.input`, from which what the application reads is copied."""

    def __init__(self, stream: Any, request: _Request) -> None:
        self._stream = stream
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def read(self, *args: Any) -> bytes:
        return self._seen(self._stream.read(*args))

    def readline(self, *args: Any) -> bytes:
        return self._seen(self._stream.readline(*args))

    def readlines(self, *args: Any) -> list[bytes]:
        lines: list[bytes] = self._stream.readlines(*args)
        self._seen(b"".join(lines))
        return lines

    def __iter__(self) -> Iterator[bytes]:
        for line in self._stream:
            yield self._seen(line)

    def _seen(self, data: bytes) -> bytes:
        self._request.read(data, last=False)
        return data


class _WideBody(_Body):
    """One that can also be read into a buffer, as `io.RawIOBase` has it."""

    def readinto(self, buffer: Any) -> int:
        count: int = self._stream.readinto(buffer)
        if count:
            self._seen(bytes(memoryview(buffer)[:count]))
        return count

    def read1(self, *args: Any) -> bytes:
        return self._seen(self._stream.read1(*args))


def _body(stream: Any, request: _Request) -> _Body:
    wide = hasattr(stream, "readinto") and hasattr(stream, "read1")
    return (_WideBody if wide else _Body)(stream, request)


@fails_open("following an answer", None)
def _answer(request: _Request, result: Any) -> Any:
    """What stands for the application's answer, None where it may go as it is: nothing of the application is run any
    more while a list or a file is sent, so its run is over."""
    iterates = getattr(type(result), "__iter__", None) is not None
    if iterates and not isinstance(result, (list, tuple)) and type(result).__name__ != "FileWrapper":
        return (_SizedAnswer if hasattr(type(result), "__len__") else _Answer)(result, request)
    request.returned()
    return None


class _Answer:
    """An answer that the application makes as it is sent."""

    def __init__(self, result: Any, request: _Request) -> None:
        self._result = result
        self._request = request
        self._steps: Iterator[bytes] | None = None

    def __iter__(self) -> _Answer:
        return self

    def __next__(self) -> bytes:
        token = self._request.enter()
        try:
            if self._steps is None:
                self._steps = iter(self._result)
            return next(self._steps)
        except StopIteration:
            self._request.answered()
            raise
        except BaseException as error:
            self._request.returned(error)
            raise
        finally:
            _left(token)

    def close(self) -> None:
        """Close the application's answer, as the server does at its end."""
        token = self._request.enter()
        try:
            close = getattr(self._result, "close", None)
            if close is not None:
                close()
        except BaseException as error:
            self._request.returned(error)
            raise
        finally:
            _left(token)
        self._request.returned()


class _SizedAnswer(_Answer):
    def __len__(self) -> int:
        return len(self._result)


# --- servers and workers ----------------------------------------------------------------------------------------------


class _AutoASGI(SftraceASGI):
    """Put around the application by us, and so idle once the boundaries are off."""

    def _on(self) -> bool:
        return _patches.on


class _AutoWSGI(SftraceWSGI):
    def _on(self) -> bool:
        return _patches.on


def _uvicorn_load(wrapped: Callable[..., Any], config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    _wrap(config, "loaded_app", _AutoASGI)
    return result


def _gunicorn_load(wrapped: Callable[..., Any], worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    if _speaks_wsgi(worker):
        _wrap(worker, "wsgi", _AutoWSGI)
    return result


def _gunicorn_load_asgi(wrapped: Callable[..., Any], worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    _wrap(worker, "asgi", _AutoASGI)
    return result


@fails_open("putting a boundary on", None, replay_too=True)
def _wrap(owner: Any, attribute: str, boundary: type) -> None:
    app = getattr(owner, attribute, None)
    if app is not None and not isinstance(app, (SftraceASGI, SftraceWSGI)):
        setattr(owner, attribute, boundary(app))


def _uvicorn_signals(wrapped: Callable[..., Any], server: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _Signals(wrapped(*args, **kwargs), server)


class _Signals:
    """uvicorn's context of a serving server. When it is left, the signals that ended the server are raised again, and
    SIGTERM then ends the process without an exit handler: so what is recorded is made whole first."""

    def __init__(self, context: Any, server: Any) -> None:
        self._context = context
        self._server = server
        self._fatal = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> Any:
        if self._fatal and _was_terminated(self._server):
            _close_all()
        return self._context.__exit__(*error)


@fails_open("following a server's end", False, replay_too=True)
def _was_terminated(server: Any) -> bool:
    return _patches.on and signal.SIGTERM in server._captured_signals


@fails_open("closing the recording", None, replay_too=True)
def _close_all() -> None:
    recording.close_all()


_WSGI_WORKERS = frozenset({"gunicorn.workers.sync", "gunicorn.workers.base_async", "gunicorn.workers.gthread"})


@fails_open("putting a boundary on", False, replay_too=True)
def _speaks_wsgi(worker: Any) -> bool:
    """Whether a worker calls its application as WSGI; those of other packages (uvicorn's) load ASGI the same way."""
    return any(kind.__module__ in _WSGI_WORKERS for kind in type(worker).__mro__)


def _celery_tracer(wrapped: Callable[..., Any], _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    trace_task = wrapped(*args, **kwargs)
    if isinstance(trace_task, _Traced):
        return trace_task
    _close_with_pool_process()
    name = args[0] if args else kwargs.get("name")
    return _Traced(trace_task, str(name))


class _Traced:
    """What celery calls to run a task: `(uuid, args, kwargs, request)`, gives (result, info, runtime, text)."""

    def __init__(self, trace_task: Callable[..., Any], name: str) -> None:
        self._trace_task = trace_task
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if replaying._active is not None:
            return self._replayed(args, kwargs)
        request = self._request(*args, **kwargs)
        if request is None:
            return self._trace_task(*args, **kwargs)
        token = request.enter()
        try:
            result = self._trace_task(*args, **kwargs)
        except BaseException as error:
            request.returned(error, beside=False)
            raise
        finally:
            _left(token)
        request.returned(_task_error(result), beside=False)
        return result

    def _replayed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        token = enter(Scope())
        try:
            return self._trace_task(*args, **kwargs)
        finally:
            _left(token)

    @fails_open("recording a task", None)
    def _request(self, uuid: Any, args: Any, kwargs: Any, request: Any = None) -> _Request | None:
        recorder = _recorder()
        if recorder is None or not _patches.on:
            return None
        made = _Request(recorder, "task", _traceparent_of(request))
        if made.takes_input():
            given = {"task": self._name, "id": uuid, "args": list(args), "kwargs": dict(kwargs)}
            made.run.input = recorder.prepare(given)
        return made


def _traceparent_of(request: Any) -> str:
    found = request.get("traceparent") if isinstance(request, Mapping) else None
    if found is None and isinstance(request, Mapping) and isinstance(request.get("headers"), Mapping):
        found = request["headers"].get("traceparent")
    return found if isinstance(found, str) else ""


@fails_open("recording a task", None)
def _task_error(result: Any) -> BaseException | None:
    """The exception that a task failed with. One that asks to be run again fails by the exception it names, if any."""
    info = result[1]
    error = getattr(info, "retval", None)
    if getattr(info, "state", None) == "RETRY":
        error = getattr(error, "exc", None)
    elif getattr(info, "state", None) != "FAILURE":
        return None
    return error if isinstance(error, BaseException) else None


_SHUTDOWN = "sftrace-close"


@fails_open("following a pool's processes", None, replay_too=True)
def _close_with_pool_process() -> None:
    """A process of celery's pool leaves by `os._exit`, which runs no exit handler: end its runs when celery says so."""
    signals = sys.modules["celery.signals"]
    signals.worker_process_shutdown.connect(_pool_process_ends, weak=False, dispatch_uid=_SHUTDOWN)


def _pool_process_ends(**_: Any) -> None:
    _close_all()


_patches = Patches("servers")
_patches.add("uvicorn.config", "Config.load", _uvicorn_load)
_patches.add("uvicorn.server", "Server.capture_signals", _uvicorn_signals)
_patches.add("gunicorn.workers.base", "Worker.load_wsgi", _gunicorn_load)
_patches.add("gunicorn.workers.gasgi", "ASGIWorker.load_wsgi", _gunicorn_load_asgi)
_patches.add("celery.app.trace", "build_tracer", _celery_tracer)
_patches.add("celery.worker.consumer.consumer", "build_tracer", _celery_tracer)

install = _patches.install
patched = _patches.installed


def uninstall() -> None:
    """Take the boundaries of servers and workers off; applications that they are around are called as without them."""
    _patches.uninstall()
    signals = sys.modules.get("celery.signals")
    if signals is not None:
        signals.worker_process_shutdown.disconnect(dispatch_uid=_SHUTDOWN)
