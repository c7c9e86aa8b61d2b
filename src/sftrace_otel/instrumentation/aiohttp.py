# SPDX-License-Identifier: Apache-2.0
"""The boundary of the aiohttp client, 3.11 and later: its connector, its requests and its responses.

Decision: wrap the four steps that aiohttp makes for each attempt, below its middlewares, redirects and its own retry of
a dropped connection: `BaseConnector.connect`, `ClientRequest.send` and `write_bytes`, `ClientResponse.start`. So every
hop and every retry is an exchange by itself, of what really goes out. The body's own `StreamReader` is watched by a
subclass without members of its own, put on that one object: the program keeps the stream that aiohttp feeds, and each
piece is noted as it is taken out of its buffer. aiohttp decodes gzip, deflate, br and zstd before that; then the bundle
says `encoding_removed`, as it does where we decode.
A replayed attempt is answered by `aiohttp_served`. A websocket is noted, not recorded, and refused under replay.
Rejected: `ClientSession._request` (hides redirects and retries, and answers cannot be of the program's
`response_class`), trace configs (they see no body of an answer), a proxy object for the stream (no `StreamReader`).

A compressed request body is recorded as it was before it was compressed: redaction could not see into it otherwise.
Where HTTP chunks ended is not recorded beyond the pieces that were read: `iter_chunks` tells an end after each of them.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable
from contextvars import Token
from typing import Any

from sftrace_otel import recorder as recording
from sftrace_otel.errors import ReplayPolicyError
from sftrace_otel.instrumentation import guard, replaying, tracing
from sftrace_otel.instrumentation.aiohttp_served import Asked, connected, started, with_methods
from sftrace_otel.instrumentation.exchange import LARGE, Exchange, Head, Pairs, unpacked
from sftrace_otel.instrumentation.failopen import afails_open, fails_open
from sftrace_otel.instrumentation.outcomes import GoesOut
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.instrumentation.serving import come_out, exchange_of, go_inside, in_thread, sends_unseen
from sftrace_otel.recorder import Recorder, Scope, aside, enter, leave

__all__ = ["install", "patched", "uninstall"]


class _Attempt:
    """An attempt that is recorded. `streams`: its body is noted as it goes out."""

    __slots__ = ("exchange", "sending", "streams")

    def __init__(self, exchange: Exchange, streams: bool) -> None:
        self.exchange = exchange
        self.streams = streams
        self.sending = exchange.sending


class _Out:
    """An attempt that a replay lets out and that nobody records."""

    streams = False


_OUT = _Out()

_ATTEMPT = "_sftrace_attempt"
"""Member of a request while it is sent, then of its response: the attempt. Both may be of a program's own class, of
which not every one can be the key of a dictionary."""
_PARAMS = "_sftrace_params"
"""Member of a protocol: how its next answer is to be parsed."""
_NO_PARAMS: dict[str, Any] = {}


@fails_open("recording a request", None)
def _attempt_of(thing: Any) -> _Attempt | Asked | _Out | None:
    found = getattr(thing, "__dict__", {}).get(_ATTEMPT)
    return found if isinstance(found, (_Attempt, Asked, _Out)) else None


@fails_open("recording an answer", _NO_PARAMS)
def _params_of(connection: Any) -> dict[str, Any]:
    found = getattr(getattr(connection, "protocol", None), "__dict__", {}).get(_PARAMS)
    return found if isinstance(found, dict) else _NO_PARAMS


# --- drivers ----------------------------------------------------------------------------------------------------------


async def _connect(
    wrapped: Callable[..., Awaitable[Any]], connector: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    request = args[0] if args else kwargs.get("req")
    replay = replaying._active
    recorder = recording._active
    if (replay is None and recorder is None) or request is None or _passes(replay, request):
        return await wrapped(*args, **kwargs)
    if _is_websocket(request):
        _meet_websocket(replay, recorder, request)
        token = go_inside()
        try:
            return await wrapped(*args, **kwargs)
        finally:
            come_out(token)
    goes_out: GoesOut | None = None
    if replay is not None:
        await _read_first(replay, request)
        asked = _asked(replay, request)
        goes_out = None if asked.streams else asked.goes_out()
        if goes_out is None:
            return connected(asked, request, connector)
    attempt = await _let_out(recorder, request, goes_out)
    if attempt is None:
        return await wrapped(*args, **kwargs)
    token = go_inside()
    try:
        return await wrapped(*args, **kwargs)
    except BaseException as error:
        if isinstance(attempt, _Attempt):
            attempt.exchange.failed(_as_seen(error, request, connecting=True) or error)
        raise
    finally:
        come_out(token)


async def _send(
    wrapped: Callable[..., Awaitable[Any]], request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    attempt = _attempt_of(request)
    if attempt is None:  # the request of a proxy, or a connector that connects all by itself
        replay = replaying._active
        recorder = recording._active
        if (replay is None and recorder is None) or _passes(replay, request) or _is_websocket(request):
            return await wrapped(*args, **kwargs)
        goes_out: GoesOut | None = None
        if replay is not None:
            await _read_first(replay, request)
            attempt = _asked(replay, request)
            goes_out = None if attempt.streams else attempt.goes_out()
        if replay is not None and goes_out is None:
            assert isinstance(attempt, Asked)
            args, kwargs = (_unplugged(attempt, request, args[0] if args else kwargs["conn"]),), {}
        else:
            attempt = await _let_out(recorder, request, goes_out)
            if attempt is None:
                return await wrapped(*args, **kwargs)
    token = _step_aside()  # the task that writes a body takes no slot: not every attempt comes as far as to have one
    try:
        response = await wrapped(*args, **kwargs)
    except BaseException as error:
        if isinstance(attempt, _Attempt):
            attempt.exchange.failed(_as_seen(error, request) or error)
        raise
    finally:
        _step_back(token)
        request.__dict__.pop(_ATTEMPT, None)
    response.__dict__[_ATTEMPT] = attempt
    return response


def _write_bytes(wrapped: Callable[..., Any], request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    attempt = _attempt_of(request)
    if isinstance(attempt, (_Attempt, Asked)) and attempt.streams:
        _tee_writer(args[0] if args else kwargs["writer"], attempt.sending)
    return wrapped(*args, **kwargs)


def _set_response_params(
    wrapped: Callable[..., Any], protocol: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if replaying._active is not None or recording._active is not None:
        protocol.__dict__[_PARAMS] = kwargs
    return wrapped(*args, **kwargs)


async def _start(
    wrapped: Callable[..., Awaitable[Any]], response: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    attempt = _attempt_of(response)
    if attempt is None or isinstance(attempt, _Out):
        return await wrapped(*args, **kwargs)
    if isinstance(attempt, Asked):
        return await started(wrapped, response, attempt)
    params = _params_of(
        args[0] if args else kwargs.get("connection")
    )  # it may be released before the head has been parsed
    try:
        given = await wrapped(*args, **kwargs)
    except BaseException as error:
        attempt.exchange.failed(_as_seen(error, response) or error)
        raise
    _watch(attempt.exchange, response, decoded=params.get("auto_decompress", True))
    return given


def _let_go(wrapped: Callable[..., Any], response: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`close` and `release` of a response: nothing more of its body will be read."""
    _over(response.content, "closed")
    return wrapped(*args, **kwargs)


def _close_connector(wrapped: Callable[..., Any], connector: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A connector closes: so do the bodies that come through it. A task that it makes of that takes no slot."""
    for protocol in tuple(getattr(connector, "_acquired", ())):
        _over(getattr(protocol, "_payload", None), "closed")
    token = _step_aside()
    try:
        return wrapped(*args, **kwargs)
    finally:
        _step_back(token)


@fails_open("following a task", None)
def _step_aside() -> Token[Scope | None]:
    """Tasks that are made from now on take no slot; give the result to `_step_back`."""
    return enter(aside())


@fails_open("following a task", None, replay_too=True)
def _step_back(token: Token[Scope | None] | None) -> None:
    if token is not None:
        leave(token)


class _Collected:
    """Takes what a payload writes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    async def write(self, chunk: Any, **_: Any) -> None:
        self.parts.append(bytes(chunk))


async def _read_first(replay: replaying.Active, request: Any) -> None:
    """Where the mode may let a request out, a body that streams is read before that is decided, and sent from memory.

    In frozen mode it is read as it would be sent.
    """
    if replay.session.mode == "frozen" or _known_body(request) is not None:
        return
    collected = _Collected()
    await request.body.write(collected)
    whole = sys.modules["aiohttp.payload"].BytesPayload(b"".join(collected.parts))
    setattr(request, "_body" if "_body" in vars(request) else "body", whole)  # its setter warns of streams


def _asked(replay: replaying.Active, request: Any) -> Asked:
    asked = request.__dict__[_ATTEMPT] = Asked(replay, _head(request), _known_body(request))
    return asked


def _unplugged(asked: Asked, request: Any, connection: Any) -> Any:
    """The connection of a served request, in place of the one that a connector made all by itself."""
    params = _params_of(connection)
    connection.close()
    served = connected(asked, request, connection._connector)
    served.protocol.set_response_params(**params)
    return served


@fails_open("recording a request", True)
def _passes(replay: replaying.Active | None, request: Any) -> bool:
    """True for what is part of an exchange under way (a proxy's handshake, a transport of httpx), and an exporter's."""
    if replay is None and guard.is_inside():
        return True
    return tracing.suppressed() and sends_unseen(request.url.host, request.url.port)


@fails_open("recording a request", False)
def _is_websocket(request: Any) -> bool:
    return str(request.headers.get("Upgrade", "")).lower() == "websocket"


@fails_open("noting a websocket", None)
def _meet_websocket(replay: replaying.Active | None, recorder: Recorder | None, request: Any) -> None:
    """Note a websocket; under replay raise ReplayPolicyError, latched, unless its address is allowed."""
    host, port = str(request.url.host), request.url.port
    if replay is None:
        assert recorder is not None
        recorder.websocket(host)
    elif not guard.is_allowed(host, port):
        error = ReplayPolicyError(
            f"replay: the program opens a websocket to {host}:{port}, and what goes over one is not recorded; nothing "
            "was sent. Trace the function that opens it as a tool, or allow it with "
            f"OTEL_SFTRACE_REPLAY_ALLOW={host}:{port}"
        )
        replay.session.latch(error)
        raise error


# --- recording --------------------------------------------------------------------------------------------------------


@afails_open("recording a request", None)
async def _let_out(recorder: Recorder | None, request: Any, goes_out: GoesOut | None) -> _Attempt | _Out | None:
    """The attempt that is about to be made, recorded where anything is; None where that failed."""
    if recorder is not None:
        return await _begin(recorder, request, goes_out)
    request.__dict__[_ATTEMPT] = _OUT
    return _OUT


async def _begin(recorder: Recorder, request: Any, goes_out: GoesOut | None = None) -> _Attempt:
    """Begin the exchange of an attempt, off the loop where its body is large."""
    exchange = exchange_of(recorder, _head(request))
    exchange.place(tracing.current_ids(), tracing.http_span_id(), goes_out)
    body = _known_body(request)
    attempt = request.__dict__[_ATTEMPT] = _Attempt(exchange, body is None)
    if body is not None and len(body) > LARGE:
        await in_thread(exchange, functools.partial(exchange.begin, body))
    elif body is not None:
        exchange.begin(body)
    return attempt


def _head(request: Any) -> Head:
    return Head("aiohttp", str(request.method), str(request.url), _pairs(request.headers))


def _pairs(headers: Any) -> Pairs:
    return [[str(name).lower(), str(value)] for name, value in headers.items()]


def _raw_pairs(headers: Any) -> Pairs:
    return [[_text(name).lower(), _text(value)] for name, value in headers]


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _known_body(request: Any) -> bytes | None:
    """The body if it is in memory already; None if it is still to be written."""
    body = request.body
    if not body:
        return b""
    kind = getattr(sys.modules.get("aiohttp.payload"), "BytesPayload", None)
    if kind is not None and isinstance(body, kind):
        return bytes(body._value)
    return bytes(body) if isinstance(body, (bytes, bytearray)) else None


@fails_open("recording a request", None)
def _tee_writer(writer: Any, sending: Callable[[bytes], None]) -> None:
    """Note what is written to a `StreamWriter`, beside the trace configs, before it is compressed."""
    before = writer._on_chunk_sent

    async def sent(chunk: Any) -> None:
        sending(bytes(chunk))
        if before is not None:
            await before(chunk)

    writer._on_chunk_sent = sent


@fails_open("recording an answer", None)
def _as_seen(error: BaseException, of: Any, *, connecting: bool = False) -> BaseException:
    """The error that the program will see for `error` of a request or response.

    aiohttp ends a total timeout by cancelling its own task, and gives the timeout of a connection a class of its own.
    """
    if isinstance(error, asyncio.CancelledError) and getattr(getattr(of, "_timer", None), "_cancelled", False):
        return TimeoutError()
    named = getattr(sys.modules.get("aiohttp"), "ConnectionTimeoutError", None)
    if connecting and isinstance(error, TimeoutError) and named is not None:
        return named(f"Connection timeout to host {of.url}")  # type: ignore[no-any-return]
    return error


@fails_open("recording an answer", None)
def _watch(exchange: Exchange, response: Any, *, decoded: bool) -> None:
    """The head of an answer is here: note it, and watch the body as it is read."""
    try:
        version = response.version
        sent = response.request_info.headers
        exchange.answered(
            int(response.status),
            response.reason or "",
            f"HTTP/{version.major}.{version.minor}",
            _raw_pairs(response.raw_headers),
        )
        exchange.head.headers = _pairs(sent)
        exchange.late_span(tracing.traceparent_ids(sent.get("traceparent", "")))
        exchange.decoder = functools.partial(_plain, decoded)
        content = response.content
        if content.exception() is not None:
            exchange.finish("failed", content.exception())
        elif content.at_eof():
            exchange.finish("finished")
        else:
            _watched[id(content)] = _Watch(exchange)
            content.__class__ = with_methods(_WatchedStream, type(content))
    except Exception:
        exchange.finish("abandoned")
        raise


def _plain(decoded: bool, encoding: str, parts: list[bytes]) -> list[bytes] | None:
    """A body without its encoding: as it is where aiohttp has taken that off already (`decoded`)."""
    if decoded and (encoding in ("gzip", "deflate", "br") or (encoding == "zstd" and _knows_zstd())):
        return parts
    return unpacked(encoding, parts) or _unpacked_by_aiohttp(encoding, parts)


def _knows_zstd() -> bool:
    return hasattr(sys.modules.get("aiohttp.http_parser"), "HAS_ZSTD")


def _unpacked_by_aiohttp(encoding: str, parts: list[bytes]) -> list[bytes] | None:
    name = {"br": "BrotliDecompressor", "zstd": "ZSTDDecompressor"}.get(encoding, "")
    kind = getattr(sys.modules.get("aiohttp.compression_utils"), name, None)
    try:
        decoder = kind()  # type: ignore[misc]
        return [bytes(decoder.decompress_sync(part)) for part in parts]
    except Exception:
        return None


# --- the stream that is watched ---------------------------------------------------------------------------------------


class _Watch:
    """What is known of a stream while it is read."""

    __slots__ = ("exchange", "interrupted", "joining")

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.interrupted: BaseException | None = None
        """A read was cancelled, and none was made since."""
        self.joining = False
        """Pieces are being put together for one read."""


_watched: dict[int, _Watch] = {}
"""By the id of the stream, which takes its own entry away when it goes. No entry may lead to its stream."""


@fails_open("recording an answer", None, replay_too=True)
def _over(stream: Any, end: str, error: BaseException | None = None) -> None:
    """Nothing more of `stream` will be read."""
    watch = _watched.pop(id(stream), None)
    if watch is None:
        return
    if error is None and stream.at_eof():
        end = "finished"
    elif error is None and watch.interrupted is not None:
        end, error = "cancelled", watch.interrupted
    watch.exchange.finish(end, error)


@afails_open("recording an answer", None)
async def _settle(stream: Any, got: Any) -> None:
    """End the exchange of a stream that was read to its end, off the loop where there is much to put together.

    Only a read that `got` nothing waits for that: one that is cancelled meanwhile must lose no data.
    """
    watch = _watched.get(id(stream))
    if watch is None:
        return
    if not watch.exchange.large:
        _over(stream, "finished")
    elif got in (b"", (b"", False)):
        del _watched[id(stream)]
        await in_thread(watch.exchange, functools.partial(watch.exchange.finish, "finished"))


async def _read(stream: Any, reading: Awaitable[Any]) -> Any:
    """A read by the program. A cancelled one is no end yet: the stream can be read on."""
    watch = _watched.get(id(stream))
    if watch is None:
        return await reading
    watch.interrupted = None
    try:
        got = await reading
    except asyncio.CancelledError as error:
        watch.interrupted = asyncio.CancelledError(*error.args)  # without its traceback, which leads to the stream
        raise
    except TimeoutError as error:
        _over(stream, "failed", error)
        raise
    except RuntimeError as error:  # also for two reads at once, which end nothing
        if not stream._protocol.connected:
            _over(stream, "failed", error)
        raise
    if stream.at_eof():
        await _settle(stream, got)
    return got


class _WatchedStream:
    """A `StreamReader` whose pieces are noted as they are taken out of its buffer."""

    __slots__ = ()

    async def read(self, n: int = -1) -> Any:
        return await _read(self, super().read(n))  # type: ignore[misc]

    async def readany(self) -> Any:
        return await _read(self, super().readany())  # type: ignore[misc]

    async def readchunk(self) -> Any:
        return await _read(self, super().readchunk())  # type: ignore[misc]

    async def readuntil(self, *args: Any, **kwargs: Any) -> Any:
        return await _read(self, super().readuntil(*args, **kwargs))  # type: ignore[misc]

    def read_nowait(self, n: int = -1) -> Any:
        got = super().read_nowait(n)  # type: ignore[misc]
        if self.at_eof():  # type: ignore[attr-defined]
            _over(self, "finished")
        return got

    def _read_nowait(self, n: int) -> Any:
        watch = _watched.get(id(self))
        if watch is None:
            return super()._read_nowait(n)  # type: ignore[misc]
        watch.joining = True
        try:
            data = super()._read_nowait(n)  # type: ignore[misc]
        finally:
            watch.joining = False
        if data:
            watch.exchange.chunk(bytes(data))
        return data

    def _read_nowait_chunk(self, n: int) -> Any:
        data = super()._read_nowait_chunk(n)  # type: ignore[misc]
        watch = _watched.get(id(self))
        if watch is not None and not watch.joining and data:
            watch.exchange.chunk(bytes(data))
        return data

    def set_exception(self, exc: BaseException, *args: Any, **kwargs: Any) -> None:
        super().set_exception(exc, *args, **kwargs)  # type: ignore[misc]
        _over(self, "failed", exc)

    def __del__(self) -> None:
        _over(self, "abandoned")


_patches = Patches("aiohttp")
_patches.add("aiohttp.connector", "BaseConnector.connect", _connect)
_patches.add("aiohttp.connector", "BaseConnector.close", _close_connector)
_patches.add("aiohttp.client_proto", "ResponseHandler.set_response_params", _set_response_params)
_patches.add("aiohttp.client_reqrep", "ClientRequest.send", _send)
_patches.add("aiohttp.client_reqrep", "ClientRequest.write_bytes", _write_bytes)
_patches.add("aiohttp.client_reqrep", "ClientResponse.start", _start)
_patches.add("aiohttp.client_reqrep", "ClientResponse.close", _let_go)
_patches.add("aiohttp.client_reqrep", "ClientResponse.release", _let_go)

install = _patches.install
uninstall = _patches.uninstall
patched = _patches.installed
