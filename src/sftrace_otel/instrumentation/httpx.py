# SPDX-License-Identifier: Apache-2.0
"""The boundary of httpx and httpx2: transports, sync and async.

Decision: wrap `handle_request` of the two standard transports, and what `_transport_for_url` gives where that is
another kind (MockTransport, ASGI, WSGI, aiohttp, a cache): together every exchange, each retry and redirect by itself,
below the client's own types. One flow (`exchange.Exchange`); this file only drives it. Nothing here imports httpx: the
module comes with the request, so a replayed answer is of the type that the caller's client expects.
Rejected: `Client.send` (hides redirects), event hooks (cannot answer), reading bodies ahead (kills streaming).
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import wrapt

from sftrace_otel import recorder as recording
from sftrace_otel.instrumentation import guard, replaying, tracing
from sftrace_otel.instrumentation.exchange import (
    LARGE,
    Exchange,
    Head,
    Pairs,
    call_name,
    unpacked,
)
from sftrace_otel.instrumentation.failopen import afails_open, fails_open
from sftrace_otel.instrumentation.outcomes import Answer, GoesOut
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.instrumentation.serving import (
    Body,
    exchange_of,
    in_thread,
    recorded_error,
    sends_unseen,
    served_answer,
)
from sftrace_otel.recorder import Recorder, how_ended

__all__ = ["SftraceTransport", "install", "patched", "uninstall"]

_busy: ContextVar[object] = ContextVar("sftrace_exchange", default=None)
"""The request whose exchange is under way here: a transport inside a transport is one exchange."""


# --- drivers ----------------------------------------------------------------------------------------------------------


def _handle(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    request = args[0] if args else kwargs.get("request")
    replay = replaying._active
    recorder = recording._active
    if (replay is None and recorder is None) or request is None or _passes(request):
        return wrapped(*args, **kwargs)
    goes_out: GoesOut | None = None
    if replay is not None:
        served = _serve(replay, request, _read_body(request), asynchronous=False)
        if type(served) is not GoesOut:
            return served
        goes_out = served
    exchange = None if recorder is None else _start(recorder, request, goes_out)
    if exchange is None and goes_out is None:
        return wrapped(*args, **kwargs)
    tokens = _enter(request)
    try:
        response = wrapped(*args, **kwargs)
    except BaseException as error:
        if exchange is not None:
            exchange.failed(error)
        raise
    finally:
        _reset(tokens)
    if exchange is not None:
        _tee(exchange, request, response, asynchronous=False)
    return response


async def _ahandle(
    wrapped: Callable[..., Awaitable[Any]], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    request = args[0] if args else kwargs.get("request")
    replay = replaying._active
    recorder = recording._active
    if (replay is None and recorder is None) or request is None or _passes(request):
        return await wrapped(*args, **kwargs)
    goes_out: GoesOut | None = None
    if replay is not None:
        response = _serve(replay, request, await _aread_body(request), asynchronous=True)
        if response is None:  # it was cancelled when it was recorded; so it waits until it is cancelled again
            await asyncio.get_running_loop().create_future()
        if type(response) is not GoesOut:
            return response
        goes_out = response
    exchange = None if recorder is None else await _astart(recorder, request, goes_out)
    if exchange is None and goes_out is None:
        return await wrapped(*args, **kwargs)
    tokens = _enter(request)
    try:
        response = await wrapped(*args, **kwargs)
    except BaseException as error:
        if exchange is not None:
            exchange.failed(error)
        raise
    finally:
        _reset(tokens)
    if exchange is not None:
        _tee(exchange, request, response, asynchronous=True)
    return response


def _ahandle_entry(
    wrapped: Callable[..., Awaitable[Any]], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Awaitable[Any]:
    return _ahandle(wrapped, instance, args, kwargs)


@fails_open("recording a request", True)
def _passes(request: Any) -> bool:
    """True for a request that is under way already in an outer transport or that this makes, and for an exporter's own.

    Under replay only for one that goes to an allowed address: anything may set the suppression key.
    """
    if _busy.get() is request:
        return True
    if replaying._active is None and guard.is_inside():
        _fold()
        return True
    return tracing.suppressed() and sends_unseen(request.url.host, request.url.port)


def _fold() -> None:
    """The span of an exchange that a boundary makes for a call of its own is no call either."""
    span_id = tracing.http_span_id()
    if recording._active is not None and span_id:
        recording._active.fold(span_id)


@fails_open("entering an exchange", None)
def _enter(request: Any) -> tuple[Any, Any] | None:
    return _busy.set(request), guard.enter()


@fails_open("leaving an exchange", None, replay_too=True)
def _reset(tokens: tuple[Any, Any] | None) -> None:
    if tokens is None:
        return
    try:
        _busy.reset(tokens[0])
    except ValueError:
        pass
    guard.leave(tokens[1])


# --- recording --------------------------------------------------------------------------------------------------------


@fails_open("recording a request", None)
def _start(recorder: Recorder, request: Any, goes_out: GoesOut | None) -> Exchange:
    """Begin the exchange."""
    exchange = _made(recorder, request, goes_out)
    body = _known_body(request)
    if body is not None:
        exchange.begin(body)
    return exchange


@afails_open("recording a request", None)
async def _astart(recorder: Recorder, request: Any, goes_out: GoesOut | None) -> Exchange:
    """As `_start`; a large body is recorded in a thread, and the request waits for that."""
    exchange = _made(recorder, request, goes_out)
    body = _known_body(request)
    if body is not None and len(body) > LARGE:
        await in_thread(exchange, functools.partial(exchange.begin, body))
    elif body is not None:
        exchange.begin(body)
    return exchange


def _made(recorder: Recorder, request: Any, goes_out: GoesOut | None) -> Exchange:
    head = _head(request)
    exchange = exchange_of(recorder, head)
    if _known_body(request) is None:
        request.stream = _tee_request(request, exchange)
    exchange.decoder = _decoder(sys.modules.get(head.module))
    exchange.place(tracing.current_ids(), tracing.http_span_id(), goes_out)
    return exchange


@fails_open("recording an answer", None)
def _tee(exchange: Exchange, request: Any, response: Any, *, asynchronous: bool) -> None:
    """Watch the answer's body as it is read."""
    version = response.extensions.get("http_version", b"")
    reason = response.extensions.get("reason_phrase", b"")
    exchange.answered(
        int(response.status_code),
        reason.decode("ascii", "replace"),
        version.decode("ascii", "replace") or "HTTP/1.1",
        _pairs(response.headers),
    )
    exchange.late_span(tracing.traceparent_ids(request.headers.get("traceparent", "")))
    content = getattr(response, "_content", None)
    if content is not None:  # made in memory by the transport: nobody will read the stream
        if content:
            exchange.chunk(bytes(content))
        exchange.finish("finished")
        return
    kinds = _kinds(_module_of(request))
    response.stream = (kinds.atee if asynchronous else kinds.tee)(response.stream, exchange)


def _module_of(request: Any) -> ModuleType:
    return sys.modules[type(request).__module__.partition(".")[0]]


def _head(request: Any) -> Head:
    return Head(
        type(request).__module__.partition(".")[0], str(request.method), str(request.url), _pairs(request.headers)
    )


def _pairs(headers: Any) -> Pairs:
    encoding = headers.encoding
    return [[key.decode(encoding).lower(), value.decode(encoding)] for key, value in headers.raw]


def _known_body(request: Any) -> bytes | None:
    """The body if it is in memory already; None if it is still to be streamed."""
    content = getattr(request, "_content", None)
    if content is not None:
        return bytes(content)
    try:
        return bytes(request.content)
    except Exception:
        return None


def _decoder(module: ModuleType | None) -> Callable[[str, list[bytes]], list[bytes] | None]:
    """The standard library's for gzip and deflate, the client's own for the others (brotli, zstd)."""
    decoders = getattr(getattr(module, "_decoders", None), "SUPPORTED_DECODERS", {})

    def decode(encoding: str, parts: list[bytes]) -> list[bytes] | None:
        plain = unpacked(encoding, parts)
        if plain is not None:
            return plain
        steps = [decoders.get(name.strip()) for name in reversed(encoding.split(","))]
        if not steps or None in steps:
            return None
        try:
            for step in steps:
                decoder = step()  # type: ignore[misc]
                parts = [_joined(decoder.decode(part)) for part in parts]
                parts[-1] += _joined(decoder.flush())
        except Exception:
            return None
        return parts

    return decode


def _joined(decoded: Any) -> bytes:
    """httpx decoders give bytes, those of httpx2 an iterator of them."""
    return decoded if isinstance(decoded, bytes) else b"".join(decoded)


class _Kinds:
    """Stream classes of one module: they must be subclasses of its own abstract streams."""

    def __init__(self, module: ModuleType) -> None:
        self.tee: type = type("TeeStream", (_Tee, module.SyncByteStream), {})
        self.atee: type = type("AsyncTeeStream", (_AsyncTee, module.AsyncByteStream), {})
        self.served: type = type("ServedStream", (_Served, module.SyncByteStream), {})
        self.aserved: type = type("AsyncServedStream", (_AsyncServed, module.AsyncByteStream), {})
        self.sent: type = type("SentStream", (_Sent, module.SyncByteStream, module.AsyncByteStream), {})


_known_kinds: dict[str, _Kinds] = {}


def _kinds(module: ModuleType) -> _Kinds:
    kinds = _known_kinds.get(module.__name__)
    if kinds is None:
        kinds = _known_kinds[module.__name__] = _Kinds(module)
    return kinds


def _tee_request(request: Any, exchange: Exchange) -> Any:
    return _kinds(_module_of(request)).sent(request.stream, exchange)


class _Sent:
    """A streamed request body, watched as it goes out."""

    def __init__(self, inner: Any, exchange: Exchange) -> None:
        self._inner = inner
        self._exchange = exchange

    def __iter__(self) -> Iterator[bytes]:
        parts = iter(self._inner)
        while True:
            with guard.outside():  # what the program does to make its body is not ours
                try:
                    part = next(parts)
                except StopIteration:
                    return
            self._exchange.sending(part)
            yield part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        parts = aiter(self._inner)
        while True:
            with guard.outside():
                try:
                    part = await anext(parts)
                except StopAsyncIteration:
                    return
            self._exchange.sending(part)
            yield part

    def close(self) -> None:
        close = getattr(self._inner, "close", None)
        if close is not None:
            close()

    async def aclose(self) -> None:
        close = getattr(self._inner, "aclose", None)
        if close is not None:
            await close()


class _Tee:
    """An answer's body, watched as it is read; ends the exchange once, however it ends."""

    def __init__(self, inner: Any, exchange: Exchange) -> None:
        self._inner = inner
        self._exchange = exchange

    def __iter__(self) -> Iterator[bytes]:
        exchange = self._exchange
        try:
            for part in self._inner:
                exchange.chunk(part)
                yield part
        except GeneratorExit:
            exchange.finish("closed")
            raise
        except BaseException as error:
            exchange.finish(how_ended(error), error)
            raise
        exchange.finish("finished")

    def close(self) -> None:
        try:
            self._inner.close()
        finally:
            self._exchange.finish("closed")

    @fails_open("recording an answer", None, replay_too=True)
    def __del__(self) -> None:
        exchange = getattr(self, "_exchange", None)
        if exchange is not None:
            exchange.finish("abandoned")


class _AsyncTee:
    """As `_Tee`, for async clients."""

    def __init__(self, inner: Any, exchange: Exchange) -> None:
        self._inner = inner
        self._exchange = exchange
        self._read = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        exchange = self._exchange
        if self._read:  # an SDK has what it wants, and empties the connection for its next request
            await self._finish("closed")
        self._read = True
        try:
            async for part in self._inner:
                exchange.chunk(part)
                yield part
        except GeneratorExit:
            exchange.finish("closed")
            raise
        except BaseException as error:
            exchange.finish(how_ended(error), error)
            raise
        await self._finish("finished")

    async def aclose(self) -> None:
        try:
            await self._inner.aclose()
        except BaseException:
            self._exchange.finish("closed")
            raise
        self._exchange.finish("closed")  # not in a thread: to wait would be a place to be cancelled at

    @afails_open("recording an answer", None)
    async def _finish(self, end: str) -> None:
        exchange = self._exchange
        if exchange.large:
            await in_thread(exchange, functools.partial(exchange.finish, end))
        else:
            exchange.finish(end)

    @fails_open("recording an answer", None, replay_too=True)
    def __del__(self) -> None:
        exchange = getattr(self, "_exchange", None)
        if exchange is not None:
            exchange.finish("abandoned")


# --- replaying --------------------------------------------------------------------------------------------------------


def _read_body(request: Any) -> Body:
    body = _known_body(request)
    if body is not None:
        return Body(body)
    parts: list[bytes] = []
    try:
        parts.extend(request.stream)
    except Exception as error:
        return Body(b"".join(parts), error)
    return Body(b"".join(parts))


async def _aread_body(request: Any) -> Body:
    body = _known_body(request)
    if body is not None:
        return Body(body)
    parts: list[bytes] = []
    try:
        async for part in request.stream:
            parts.append(part)
    except Exception as error:
        return Body(b"".join(parts), error)
    return Body(b"".join(parts))


def _serve(replay: replaying.Active, request: Any, body: Body, *, asynchronous: bool) -> Any:
    """The recorded answer as a response of the client's own type; None for one that has to be cancelled; GoesOut.

    Raises a ReplayError where there is none, and the error of the program's own request body, which was recorded as a
    failed call.
    """
    answer = served_answer(replay, _head(request), body)
    if isinstance(answer, GoesOut):
        if _known_body(request) is None:  # it was read to be matched, and a stream is read once
            request.stream = _module_of(request).ByteStream(body.data)
        return answer
    if answer.cancelled and answer.status is None and asynchronous:
        return None
    return _response(replay, _module_of(request), request, answer, asynchronous)


def _response(replay: replaying.Active, module: ModuleType, request: Any, answer: Answer, asynchronous: bool) -> Any:
    if answer.status is None:
        raise _transport_error(module, request, answer)
    kinds = _kinds(module)
    failure: Callable[[], BaseException] | None = None
    if answer.exception:
        failure = functools.partial(_transport_error, module, request, answer)
    elif answer.left:
        failure = functools.partial(replaying.read_beyond, call_name(_head(request), replay.policy))
    if answer.cancelled and asynchronous:
        stream = kinds.aserved(answer.chunks, None, waits=True)
    else:
        stream = (kinds.aserved if asynchronous else kinds.served)(answer.chunks, failure)
    return module.Response(
        answer.status,
        headers=[(key.encode("utf-8"), value.encode("utf-8")) for key, value in answer.headers],
        stream=stream,
        extensions=_extensions(answer),
    )


def _extensions(answer: Answer) -> dict[str, bytes]:
    """Without a recorded reason (HTTP/2, a transport that gives none) the client has its own for the status."""
    found = {"http_version": answer.version.encode("ascii", "replace")}
    if answer.reason:
        found["reason_phrase"] = answer.reason.encode("ascii", "replace")
    return found


def _transport_error(module: ModuleType, request: Any, answer: Answer) -> BaseException:
    """The recorded exception of the transport as the same class of the client's module."""
    recorded = answer.exception or {}
    kind = getattr(module, str(recorded.get("qualname")), None)
    message = str(recorded.get("message") or "")
    message = "" if message == recorded.get("qualname") else message  # one without was recorded as its class's name
    if isinstance(kind, type) and issubclass(kind, module.TransportError):
        return kind(message, request=request)  # type: ignore[no-any-return]
    if recorded.get("module") and recorded["module"].partition(".")[0] not in ("httpx", "httpx2"):
        return recorded_error(recorded, message, str(request.url))
    return module.ConnectError(message, request=request)  # type: ignore[no-any-return]


class _Served:
    """Recorded chunks, then the failure that was recorded, or that of reading on where the recorded program stopped."""

    def __init__(self, chunks: list[bytes], failure: Callable[[], BaseException] | None) -> None:
        self._chunks = chunks
        self._failure = failure

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks
        if self._failure is not None:
            raise self._failure()

    def close(self) -> None:
        """Nothing is open."""


class _AsyncServed:
    """As `_Served`, for async clients. `waits`: it was cancelled while it was read, and waits for that again."""

    def __init__(
        self, chunks: list[bytes], failure: Callable[[], BaseException] | None, *, waits: bool = False
    ) -> None:
        self._chunks = chunks
        self._failure = failure
        self._waits = waits
        self._read = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._read:  # as when it was recorded: whoever comes a second time only empties the connection
            return
        self._read = True
        for chunk in self._chunks:
            yield chunk
        if self._waits:
            await asyncio.get_running_loop().create_future()
        if self._failure is not None:
            raise self._failure()

    async def aclose(self) -> None:
        """Nothing is open."""


# --- other transports -------------------------------------------------------------------------------------------------


class SftraceTransport(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Any transport of httpx or httpx2, sync or async, recorded and replayed: `SftraceTransport(own)`.

    Clients of these libraries need none: their transports are seen as they are. It is for a transport that is called
    without a client, or below a client that chooses its transports by itself. In everything else it is the transport
    that it is around; an exchange that goes through several of them is recorded once.
    """

    def handle_request(self, request: Any) -> Any:
        """As the transport's own."""
        inner = self.__wrapped__
        return _handle(inner.handle_request, inner, (request,), {})

    async def handle_async_request(self, request: Any) -> Any:
        """As the transport's own."""
        inner = self.__wrapped__
        return await _ahandle(inner.handle_async_request, inner, (request,), {})


def _transport_for_url(wrapped: Callable[..., Any], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    transport = wrapped(*args, **kwargs)
    if replaying._active is None and recording._active is None:
        return transport
    return _around(client, transport) or transport


@fails_open("recording a transport", None)
def _around(client: Any, transport: Any) -> Any:
    """`transport` recorded, None where it is anyway."""
    kind = type(transport)
    if kind is SftraceTransport:
        return None
    module = _base_module(client)
    return None if module is not None and _is_patched(module, kind) else SftraceTransport(transport)


def _is_patched(module: ModuleType, kind: type) -> bool:
    """Whether a transport goes through our wrapper anyway: not one that answers by itself, nor where it was popped."""
    for name, method in (("HTTPTransport", "handle_request"), ("AsyncHTTPTransport", "handle_async_request")):
        base = getattr(module, name)
        if issubclass(kind, base):
            held = next((vars(one)[method] for one in kind.__mro__ if method in vars(one)), None)
            return held is vars(base).get(method) and _patches.has(base, method)
    return False


def _base_module(client: Any) -> ModuleType | None:
    for kind in type(client).__mro__:
        root = kind.__module__.partition(".")[0]
        if root in ("httpx", "httpx2"):
            return sys.modules.get(root)
    return None


_patches = Patches("httpx")
for _name in ("httpx", "httpx2"):
    _patches.add(_name, "HTTPTransport.handle_request", _handle)
    _patches.add(_name, "AsyncHTTPTransport.handle_async_request", _ahandle_entry)
    _patches.add(_name, "Client._transport_for_url", _transport_for_url)
    _patches.add(_name, "AsyncClient._transport_for_url", _transport_for_url)

install = _patches.install
uninstall = _patches.uninstall
patched = _patches.installed
