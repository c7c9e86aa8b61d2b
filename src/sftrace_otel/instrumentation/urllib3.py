# SPDX-License-Identifier: Apache-2.0
"""The boundary of urllib3 (1.26 and 2), and with it of requests: one request on one connection of a pool.

Decision: wrap `HTTPConnectionPool._make_request`, through which each try, retry and redirect goes by itself, above the
connection and below everything that parses, decodes, retries and raises. The answer's body is watched one layer down,
in a subclass of the connection's own `response_class` (`http.client.HTTPResponse`): there every way to read it meets,
and what urllib3 reads ahead at the caller's wish (`preload_content`) is seen as it is read. Under replay the same
`http.client.HTTPResponse` parses recorded bytes from memory, so that urllib3 and requests make their own objects and
errors of it, as of bytes from a socket. A connection to a proxy that fails before that (`_prepare_proxy`) is an attempt
that failed. requests sends everything through urllib3 and needs nothing of its own.
Rejected: `urlopen` (hides retries), requests' adapters (hide urllib3), `urllib3.HTTPResponse` (in version 2 its body is
read before anybody gets hold of it), a connection class of our own (pools and programs have theirs).

Headers are those that the client hands to the connection, without what `http.client` adds to them (host, lengths).
"""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import wrapt

from sftrace_otel import recorder as recording
from sftrace_otel.instrumentation import guard, replaying, tracing
from sftrace_otel.instrumentation.exchange import Exchange, Head, Pairs, call_name, unpacked
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.outcomes import GoesOut
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.instrumentation.serving import (
    Body,
    come_out,
    exchange_of,
    go_inside,
    sends_unseen,
    served_answer,
)
from sftrace_otel.instrumentation.urllib3_served import answer_around, failure, http_answer
from sftrace_otel.recorder import Recorder, how_ended

__all__ = ["install", "patched", "uninstall"]

_SKIPPED = "@@@SKIP_HEADER@@@"
"""Value by which urllib3 is told to leave a default header out (`urllib3.util.SKIP_HEADER`)."""

_asked: ContextVar[tuple[Any, ...] | None] = ContextVar("sftrace_urlopen", default=None)
"""Method, URL, body and headers of the `urlopen` under way here."""


# --- drivers ----------------------------------------------------------------------------------------------------------


def _make_request(wrapped: Callable[..., Any], pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    replay = replaying._active
    recorder = recording._active
    if (replay is None and recorder is None) or _passes(pool):
        return wrapped(*args, **kwargs)
    named = (args, kwargs) if len(args) <= 3 else _by_name(wrapped, args, kwargs)
    if named is None:
        return wrapped(*args, **kwargs)
    if replay is None:
        assert recorder is not None
        return _record(recorder, wrapped, pool, *named)
    request = _Request(pool, *named)
    body = _read_body(request.body)
    served = _serve(replay, request, body)
    if type(served) is not GoesOut:
        return served
    if request.body is not None and _known_body(request.body) is None:  # it was read to be matched
        named = (named[0], {**named[1], "body": body.data})
    if recorder is not None:
        return _record(recorder, wrapped, pool, *named, goes_out=served)
    token = go_inside()
    try:
        return wrapped(*named[0], **named[1])
    finally:
        come_out(token)


def _record(
    recorder: Recorder,
    wrapped: Callable[..., Any],
    pool: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    goes_out: GoesOut | None = None,
) -> Any:
    watch = _watched(recorder, pool, args, kwargs, goes_out)
    if watch is None:
        return wrapped(*args, **kwargs)
    if "body" in kwargs:
        kwargs = {**kwargs, "body": watch.body}
    token = go_inside()
    try:
        response = wrapped(*args, **kwargs)
    except BaseException as error:
        watch.exchange.failed(_blamed(watch.conn, error) or error)
        raise
    finally:
        come_out(token)
        watch.end()
    if not watch.seen:
        _watch_late(watch.exchange, response)
    return response


def _prepare_proxy(wrapped: Callable[..., Any], pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tunnel through a proxy. It is the attempt's only if it fails; under replay there is none."""
    recorder = recording._active
    if (replaying._active is None and recorder is None) or _passes(pool):
        return wrapped(*args, **kwargs)
    if replaying._active is not None:
        return None
    assert recorder is not None
    token = go_inside()
    try:
        return wrapped(*args, **kwargs)
    except BaseException as error:
        _failed_before(recorder, pool, args[0] if args else kwargs.get("conn"), error)
        raise
    finally:
        come_out(token)


@fails_open("recording a request", None)
def _failed_before(recorder: Recorder, pool: Any, conn: Any, error: BaseException) -> None:
    asked = _asked.get()
    if asked is not None:
        method, url, body, headers = asked
        request = _Request(pool, (conn, method, url), {"body": body, "headers": headers or pool.headers})
        error = _timed_out(pool, conn, error)
        _start(recorder, request).failed(_blamed(conn, error) or error)


def _timed_out(pool: Any, conn: Any, error: BaseException) -> BaseException:
    """The error of version 2 for a timeout of the system, as its `urlopen` makes it."""
    if _is_1():
        return error
    try:
        pool._raise_timeout(err=error, url=pool.proxy.url, timeout_value=conn.timeout)
    except Exception as told:
        return told if type(told).__module__.startswith("urllib3") else error
    return error


@fails_open("recording an answer", None)
def _blamed(conn: Any, error: BaseException) -> BaseException:
    """The error as `urlopen` of version 2 tells it where the proxy was not reached; only the connection knows that."""
    try:
        if conn.proxy is None or conn.has_connected_to_proxy:
            return error
        module: Any = sys.modules["urllib3.exceptions"]
        if not isinstance(error, (OSError, module.TimeoutError, module.SSLError, _http().HTTPException)):
            return error
        told: BaseException = sys.modules["urllib3.connection"]._wrap_proxy_error(error, conn.proxy.scheme)
        return told
    except Exception:  # version 1 has none of these, and blames the proxy for whatever there is
        return error


def _http() -> Any:
    return sys.modules["http.client"]


def _urlopen(wrapped: Callable[..., Any], pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if recording._active is None:
        return wrapped(*args, **kwargs)
    given = dict(zip(("method", "url", "body", "headers"), args, strict=False))
    names = ("method", "url", "body", "headers")
    token = _asked.set(tuple(given.get(name, kwargs.get(name)) for name in names))
    try:
        return wrapped(*args, **kwargs)
    finally:
        try:
            _asked.reset(token)
        except ValueError:
            pass


@fails_open("recording a request", True)
def _passes(pool: Any) -> bool:
    """True for what is part of another boundary's exchange, and for an exporter's own.

    Instrumentations of HTTP clients suppress those below them (requests does); that is not meant for us.
    """
    if replaying.active() is None and guard.is_inside():
        return True
    if not tracing.exporting():
        return False
    place = getattr(pool, "proxy", None) or pool
    return sends_unseen(str(place.host), place.port)


@fails_open("recording a request", None)
def _by_name(
    wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with everything after connection, method and URL by name: the order differs by version."""
    names = list(inspect.signature(wrapped).parameters)
    return args[:3], {**dict(zip(names[3:], args[3:], strict=False)), **kwargs}


class _Request:
    """One call of `_make_request`."""

    __slots__ = ("body", "conn", "headers", "method", "options", "pool", "target")

    def __init__(self, pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(("conn", "method", "url"), args, strict=False)), **kwargs}
        self.pool = pool
        self.conn = given["conn"]
        self.method = str(given["method"])
        self.target = str(given["url"])
        self.body = given.get("body")
        self.headers = given.get("headers")
        self.options = given

    def head(self) -> Head:
        return Head("urllib3", self.method, self.url(), _sent_pairs(self.headers))

    def url(self) -> str:
        """The absolute URL; in a request to a proxy the target is one already."""
        if not self.target.startswith("/"):
            return self.target
        scheme, host, port = str(self.pool.scheme), str(self.pool.host), self.pool.port
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        place = host if port is None or (scheme, port) in (("http", 80), ("https", 443)) else f"{host}:{port}"
        return f"{scheme}://{place}{self.target}"


def _sent_pairs(headers: Any) -> Pairs:
    pairs = [(_text(name).lower(), _text(value)) for name, value in (headers.items() if headers else ())]
    return [[name, value] for name, value in pairs if value != _SKIPPED]


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _is_1() -> bool:
    return str(getattr(sys.modules.get("urllib3"), "__version__", "")).startswith("1.")


# --- recording: the request -------------------------------------------------------------------------------------------


@fails_open("recording a request", None)
def _watched(
    recorder: Recorder, pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any], goes_out: GoesOut | None
) -> _Watch:
    """Begin the exchange of a request and watch for its answer."""
    request = _Request(pool, args, kwargs)
    exchange = _start(recorder, request, goes_out)
    return _Watch(exchange, request.conn, _watched_body(request.body, exchange))


def _start(recorder: Recorder, request: _Request, goes_out: GoesOut | None = None) -> Exchange:
    """Begin the exchange."""
    exchange = exchange_of(recorder, request.head())
    exchange.decoder = _decode
    exchange.place(tracing.current_ids(), tracing.http_span_id(), goes_out)
    body = _known_body(request.body)
    if body is not None:
        exchange.begin(body)
    return exchange


def _known_body(body: Any) -> bytes | None:
    """The body if it is in memory already; None if it is still to be read."""
    if body is None:
        return b""
    if isinstance(body, (bytes, str)):
        return _encoded(body)
    try:
        return bytes(memoryview(body))
    except (TypeError, BufferError):
        return None


def _encoded(part: Any) -> bytes:
    """A part of a body as the client encodes it: text is Latin-1 to http.client, and UTF-8 to urllib3 2."""
    if isinstance(part, str):
        return part.encode("latin-1" if _is_1() else "utf-8", "replace")
    return bytes(part)


def _watched_body(body: Any, exchange: Exchange) -> Any:
    if _known_body(body) is not None:
        return body
    if hasattr(body, "read"):
        return _SentFile(body, exchange)
    return _SentParts(body, exchange) if hasattr(body, "__iter__") else body


class _SentParts(wrapt.ObjectProxy[Any]):
    """An iterable request body, watched as it goes out. To the client it is of the class that it wraps."""

    def __init__(self, body: Any, exchange: Exchange) -> None:
        super().__init__(body)
        self._self_exchange = exchange

    def __iter__(self) -> Iterator[Any]:
        parts = iter(self.__wrapped__)
        while True:
            with guard.outside():  # what the program does to make its body is not ours
                try:
                    part = next(parts)
                except StopIteration:
                    return
            self._self_exchange.sending(part, _encoded)
            yield part


class _SentFile(_SentParts):
    """As `_SentParts`, for a body that is read."""

    def read(self, *args: Any, **kwargs: Any) -> Any:
        with guard.outside():
            part = self.__wrapped__.read(*args, **kwargs)
        self._self_exchange.sending(part, _encoded)
        return part


# --- recording: the answer --------------------------------------------------------------------------------------------


class _Watch:
    """Makes a connection's next answer a watched one, until `end`. `body`: what is to be sent."""

    def __init__(self, exchange: Exchange, conn: Any, body: Any) -> None:
        self.exchange = exchange
        self.conn = conn
        self.body = body
        self.seen = False
        self._before = getattr(conn, "__dict__", {}).get("response_class")
        self._kind = getattr(conn, "response_class", None)
        if isinstance(self._kind, type):
            try:
                conn.response_class = self._made
            except Exception as error:
                exchange.recorder.fault("recording an answer", error)

    def _made(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self._kind, type)
        response = (_watched_kind(self._kind) or self._kind)(*args, **kwargs)
        response._sftrace_watch = self
        return response

    @fails_open("recording an answer", None, replay_too=True)
    def end(self) -> None:
        """Leave the connection as it was."""
        if self._before is not None:
            self.conn.response_class = self._before
        elif vars(self.conn).get("response_class") == self._made:
            del self.conn.response_class


_watched_kinds: dict[type, type] = {}


@fails_open("recording an answer", None)
def _watched_kind(kind: type) -> type:
    watched = _watched_kinds.get(kind)
    if watched is None:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        watched = _watched_kinds[kind] = type(kind.__name__, (_Watched, kind), names)
    return watched


class _Watched(io.BufferedIOBase):
    """An `http.client.HTTPResponse` whose body is watched as it is read; ends the exchange once, however it ends.

    http.client reads in terms of its own methods: only the outermost call is the program's.
    """

    _sftrace_watch: _Watch | None = None
    _sftrace_exchange: Exchange | None = None
    _sftrace_inner = False

    def begin(self) -> None:
        super().begin()  # type: ignore[misc]
        watch, self._sftrace_watch = self._sftrace_watch, None
        if watch is not None:
            watch.seen = True
            self._sftrace_begun(watch.exchange)

    @fails_open("recording an answer", None)
    def _sftrace_begun(self, exchange: Exchange) -> None:
        response: Any = self
        self._sftrace_exchange = exchange
        if response.chunked and response.fp is not None:
            response.fp = _Framing(response.fp, exchange)
        _answered(exchange, response)

    def read(self, *args: Any, **kwargs: Any) -> bytes:
        return self._sftrace_read(super().read, args, kwargs)

    def read1(self, *args: Any, **kwargs: Any) -> bytes:
        return self._sftrace_read(super().read1, args, kwargs)

    def readline(self, *args: Any, **kwargs: Any) -> bytes:
        return self._sftrace_read(super().readline, args, kwargs)

    def readinto(self, buffer: Any) -> int:
        count = 0

        def read() -> bytes:
            nonlocal count
            count = super(_Watched, self).readinto(buffer)
            return bytes(memoryview(buffer).cast("B")[:count])

        self._sftrace_read(read, (), {})
        return count

    def _safe_read(self, amt: int) -> bytes:
        """urllib3 calls this for each part of a chunk, and for the line end after a chunk, which is no content."""
        response: Any = self
        framing = response.fp if isinstance(response.fp, _Framing) else None
        read = super()._safe_read  # type: ignore[misc]
        if framing is None or self._sftrace_inner:
            return read(amt)  # type: ignore[no-any-return]
        if not framing.left:
            return self._sftrace_read(read, (amt,), {}, content=False)
        data = self._sftrace_read(read, (amt,), {})
        framing.left -= len(data)
        return data

    def _sftrace_read(
        self, read: Callable[..., bytes], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, content: bool = True
    ) -> bytes:
        exchange = self._sftrace_exchange
        if exchange is None or self._sftrace_inner:
            return read(*args, **kwargs)
        self._sftrace_inner = True
        try:
            data = read(*args, **kwargs)
        except BaseException as error:
            _broken(exchange, error, content)
            raise
        finally:
            self._sftrace_inner = False
        if data and content:
            exchange.chunk(data)
        response: Any = self
        if response.fp is None:
            _ended(exchange, response, None)
        return data

    def close(self) -> None:
        exchange, response = self._sftrace_exchange, self
        framing = getattr(response, "fp", None)
        try:
            super().close()
        finally:
            if exchange is not None and not self._sftrace_inner:
                _ended(exchange, response, framing if isinstance(framing, _Framing) else None, closed=True)

    def __del__(self) -> None:
        exchange = self._sftrace_exchange
        if exchange is not None:
            exchange.finish("abandoned")
        super().__del__()


class _Framing:
    """The file below a chunked answer. Sees where chunks begin (RFC 9112, section 7.1), which nothing above tells."""

    def __init__(self, file: Any, exchange: Exchange) -> None:
        self._file = file
        self._exchange = exchange
        self.left = 0
        self.ended = False
        self.cut = False

    def readline(self, *args: Any) -> bytes:
        try:
            line: bytes = self._file.readline(*args)
        except BaseException as error:
            self._exchange.finish(how_ended(error), error)
            raise
        if not self.ended:
            try:
                self.left = int(line.partition(b";")[0], 16)
                self.ended = self.left == 0
            except ValueError:
                self.cut = True
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _answered(exchange: Exchange, response: Any) -> None:
    """The head of an answer is here: of http.client's, or of urllib3's where there is none below it."""
    version = {9: "HTTP/0.9", 10: "HTTP/1.0", 11: "HTTP/1.1", 20: "HTTP/2"}.get(response.version, "HTTP/1.1")
    pairs = [[str(name).lower(), str(value)] for name, value in response.headers.items()]
    exchange.answered(int(response.status), str(response.reason or ""), version, pairs)
    parents = [value for name, value in exchange.head.headers if name == "traceparent"]
    exchange.late_span(tracing.traceparent_ids(parents[0] if parents else ""))


@fails_open("recording an answer", None)
def _watch_late(exchange: Exchange, response: Any) -> None:
    """An answer that was not made by our class: some connections choose theirs late (botocore), HTTP/2 has another."""
    below = getattr(response, "_original_response", response)
    if isinstance(below, _http().HTTPResponse) and below.fp is not None:
        below.__class__ = _watched_kind(type(below)) or type(below)
        below._sftrace_begun(exchange)
        return
    _answered(exchange, response)
    read = (getattr(response, name, None) for name in ("_data", "_body"))
    body = next((body for body in read if isinstance(body, bytes)), None)
    if body:
        exchange.decoder = lambda encoding, parts: parts  # it was unpacked as it was read ahead
        exchange.chunk(body)
    exchange.finish("closed" if body is None else "finished")


@fails_open("recording an answer", None)
def _ended(exchange: Exchange, response: Any, framing: _Framing | None, *, closed: bool = False) -> None:
    """The answer is closed: because its end was reached, because the server ended it early, or by the program."""
    if response.chunked is True:
        if not closed or (framing is not None and framing.ended):
            exchange.finish("finished")
        elif framing is not None and framing.cut:
            exchange.finish("failed", _http().IncompleteRead(b""))
    elif response.length:
        if not closed:
            exchange.finish("failed", _http().IncompleteRead(b"", response.length))
    elif response.length == 0 or not closed:
        exchange.finish("finished")
    exchange.finish("closed")  # counts where none of the above did


@fails_open("recording an answer", None)
def _broken(exchange: Exchange, error: BaseException, content: bool) -> None:
    """A read failed. What had arrived is in the error, if anywhere."""
    partial = getattr(error, "partial", None)
    if content and isinstance(partial, bytes) and partial:
        exchange.chunk(partial)
    exchange.finish(how_ended(error), error)


def _decode(encoding: str, parts: list[bytes]) -> list[bytes] | None:
    """urllib3's own decoders, which know gzip in several members and brotli or zstd where their package is here."""
    module: Any = sys.modules.get("urllib3.response")
    try:
        known = module.HTTPResponse.CONTENT_DECODERS
        if any(name.strip() not in known for name in encoding.split(",")):
            return None
        decoder = module._get_decoder(encoding)
        decoded = [decoder.decompress(part) for part in parts]
        decoded[-1] += decoder.flush()
    except Exception:
        return unpacked(encoding, parts)
    return decoded


# --- replaying --------------------------------------------------------------------------------------------------------


def _serve(replay: replaying.Active, request: _Request, body: Body) -> Any:
    """The recorded answer, as `_make_request` would have given it, or GoesOut. Raises a ReplayError for neither."""
    head = request.head()
    answer = served_answer(replay, head, body)
    if isinstance(answer, GoesOut):
        return answer
    if hasattr(request.pool, "num_requests"):
        request.pool.num_requests += 1
    if answer.status is None:
        _reach_proxy(request.conn, kept=True)  # what the proxy is to blame for is recorded as its error
        raise failure(answer, request.pool, request.conn, request.target, request.url())
    below = http_answer(answer, request.method, lambda: replaying.read_beyond(call_name(head, replay.policy)))
    _reach_proxy(request.conn, kept=not below.will_close)
    return below if _is_1() else answer_around(below, request.pool, request.method, request.target, request.options)


def _reach_proxy(conn: Any, *, kept: bool) -> None:
    """Let version 2 not blame the proxy for what fails next, as it does not while a connection to it is open."""
    if getattr(conn, "proxy", None) is not None and hasattr(conn, "_has_connected_to_proxy"):
        conn._has_connected_to_proxy = kept


def _read_body(body: Any) -> Body:
    known = _known_body(body)
    if known is not None:
        return Body(known)
    parts: list[bytes] = []
    try:
        parts.extend(_encoded(part) for part in (_blocks(body) if hasattr(body, "read") else body))
    except Exception as error:
        return Body(b"".join(parts), error)
    return Body(b"".join(parts))


def _blocks(file: Any) -> Iterator[Any]:
    while block := file.read(16384):
        yield block


_patches = Patches("urllib3")
_patches.add("urllib3.connectionpool", "HTTPConnectionPool._make_request", _make_request)
_patches.add("urllib3.connectionpool", "HTTPConnectionPool.urlopen", _urlopen)
_patches.add("urllib3.connectionpool", "HTTPSConnectionPool._prepare_proxy", _prepare_proxy)

install = _patches.install
uninstall = _patches.uninstall
patched = _patches.installed
