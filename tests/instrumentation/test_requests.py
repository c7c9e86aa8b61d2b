# SPDX-License-Identifier: Apache-2.0
"""requests, which sends through urllib3: sessions, streams, uploads and errors are its own, recorded and served."""

from __future__ import annotations

import copy
import gzip
import io
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
from opentelemetry.instrumentation.requests import RequestsInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from sftrace_otel import instrumentation, record, trace_tool
from sftrace_otel.bundle.read import open_bundle
from sftrace_otel.recorder import Recorder

Run = Callable[..., Any]

NEVER = "http://127.0.0.1:9"


def rows(bundle: Any) -> list[dict[str, Any]]:
    return list(bundle.wire())


def test_answers_of_every_kind(srv: Any, recorded: Run, frozen: Run, read: Run) -> None:
    def program() -> list[Any]:
        seen: list[Any] = []
        with requests.Session() as session:
            for method, path in [
                ("GET", "/json"), ("GET", "/gzip"), ("GET", "/binary"), ("GET", "/204"), ("HEAD", "/json"),
                ("GET", "/latin1"), ("GET", "/nowhere"), ("GET", "/redirect?q=a"), ("DELETE", "/json"),
            ]:  # fmt: skip
                answer = session.request(method, srv.url + path)
                seen.append([answer.status_code, answer.reason, answer.content, answer.text, answer.url, answer.ok])
                seen.append([[hop.status_code for hop in answer.history], answer.encoding, answer.is_redirect])
            seen.append(sorted(session.cookies.get_dict()))
        return seen

    want = recorded(program)
    hits = len(srv.hits)
    assert frozen(program) == want
    assert len(srv.hits) == hits
    assert want[-1] == ["sid", "t"]
    assert {row["end"] for row in rows(read())} == {"finished"}


STREAMS: dict[str, Callable[[requests.Response], Any]] = {
    "content": lambda answer: answer.content,
    "parts": lambda answer: list(answer.iter_content(7)),
    "parts as they come": lambda answer: list(answer.iter_content(None)),
    "text": lambda answer: list(answer.iter_content(7, decode_unicode=True)),
    "lines": lambda answer: list(answer.iter_lines()),
    "short lines": lambda answer: list(answer.iter_lines(chunk_size=4)),
    "raw": lambda answer: [answer.raw.read(5), answer.raw.read()],
    "raw stream": lambda answer: list(answer.raw.stream(6)),
    "raw read1": lambda answer: list(iter(answer.raw.read1, b"")),
}


@pytest.mark.parametrize("how", STREAMS)
def test_every_spelling_of_a_streamed_answer(how: str, raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    parts = [b": hello\n\n", b"data: caf\xc3", b"\xa9\n\nda", b"ta: 2\r", b"\n\r\ndata: [DONE]\n\n"]
    kind = "Content-Type: text/event-stream; charset=utf-8"
    answers = {"/chunks": raw.chunked(*parts, headers=[kind]), "/whole": raw.whole(b"".join(parts), kind)}

    def program(url: str) -> list[Any]:
        found = []
        for path in answers:
            with requests.get(url + path, stream=True) as answer:
                found.append(STREAMS[how](answer))
        return found

    with raw.RawServer(answers) as server:
        want = recorded(program, server.url)
    assert frozen(program, server.url) == want
    for row in rows(read()):
        assert (row["body"], row["end"]) == (b"".join(parts).decode(), "finished")
    if how == "parts as they come":
        assert [size for size, _ in rows(read())[0]["chunks"]] == [len(part) for part in parts]


def test_a_compressed_stream_keeps_its_parts(raw: Any, recorded: Run, frozen: Run) -> None:
    squeezed = io.BytesIO()
    sent = []
    with gzip.GzipFile(fileobj=squeezed, mode="wb", mtime=0) as packer:
        for number in range(3):
            packer.write(b"data: %d\n\n" % number)
            packer.flush()
            sent.append(squeezed.getvalue()[sum(map(len, sent)) :])
    sent.append(squeezed.getvalue()[sum(map(len, sent)) :])

    def program(url: str) -> list[bytes]:
        with requests.get(url + "/", stream=True) as answer:
            return list(answer.iter_content(None))

    with raw.RawServer({"/": raw.chunked(*sent, headers=["Content-Encoding: gzip"])}) as server:
        want = recorded(program, server.url)
    assert want == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]
    assert frozen(program, server.url) == want


def test_a_stream_that_is_left_early(raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    def program(url: str) -> Any:
        with requests.get(url + "/", stream=True) as answer:
            return next(answer.iter_lines())

    with raw.RawServer({"/": [*raw.chunked(b"one\ntwo\n" * 100, end=False), raw.HOLD]}) as server:
        assert recorded(program, server.url) == b"one"
    assert frozen(program, server.url) == b"one"
    assert rows(read())[0]["end"] == "closed"


class Encoder:
    """A body as requests-toolbelt's encoders are: it is read, and knows its length."""

    def __init__(self, data: bytes) -> None:
        self.stream = io.BytesIO(data)
        self.len = len(data)

    def read(self, size: int = -1) -> bytes:
        return self.stream.read(size)


def test_uploads(srv: Any, recorded: Run, frozen: Run, read: Run) -> None:
    def parts() -> Iterator[bytes]:
        yield b"one "
        yield b"two"

    def program() -> list[Any]:
        url = srv.url + "/echo"
        return [
            requests.post(url, data=parts()).json(),
            requests.post(url, data=io.BytesIO(b"file")).json(),
            requests.post(url, data=Encoder(b"encoded" * 5000)).json(),
            requests.post(url, data={"q": "a b", "r": "\u00e9"}).json(),
            requests.post(url, json={"a": [1, None]}).json(),
            requests.post(url, files={"f": ("a.bin", b"\x00one")}, data={"x": "y"}).status_code,
            requests.post(url, data="t\u00e9xt".encode()).json(),
        ]

    want = recorded(program)
    hits = len(srv.hits)
    assert frozen(program) == want
    assert len(srv.hits) == hits
    sent = [row["request"]["body"] for row in rows(read())]
    assert sent[0] == "one two" and sent[1] == "file"
    assert bytes(read().blob(sent[2]["$blob"])) == b"encoded" * 5000


FAILURES = {
    "refused": requests.ConnectionError,
    "no-answer": requests.ConnectionError,
    "reset": requests.ConnectionError,
    "silent": requests.ReadTimeout,
    "cut": requests.exceptions.ChunkedEncodingError,
    "cut-chunks": requests.exceptions.ChunkedEncodingError,
    "stalled": requests.ConnectionError,
    "bad-gzip": requests.exceptions.ContentDecodingError,
    "proxy": requests.exceptions.ProxyError,
    "tunnel": requests.exceptions.ProxyError,
    "not-json": requests.exceptions.JSONDecodeError,
    "status": requests.HTTPError,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_errors_are_those_of_requests(failure: str, raw: Any, recorded: Run, frozen: Run) -> None:
    answers = {
        "/no-answer": b"",
        "/reset": [raw.RESET],
        "/silent": [raw.HOLD],
        "/cut": [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabcd"],
        "/cut-chunks": raw.chunked(b"abcd", end=False),
        "/stalled": [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabcd", raw.HOLD],
        "/bad-gzip": raw.whole(b"this is no gzip", "Content-Encoding: gzip"),
        "/not-json": raw.whole(b"<html>"),
        "/status": raw.whole(b"no", status="500 Broken"),
        "elsewhere.test:443": raw.whole(b"", status="403 Forbidden"),
    }

    def program(url: str) -> list[str]:
        where = {"refused": NEVER, "proxy": "http://elsewhere.test", "tunnel": "https://elsewhere.test"}
        proxies = {"proxy": {"http": NEVER}, "tunnel": {"https": url}}.get(failure)
        patience = 0.3 if failure in ("silent", "stalled") else 30
        try:
            answer = requests.get(f"{where.get(failure, url)}/{failure}", timeout=(5, patience), proxies=proxies)
            answer.raise_for_status()
            answer.json()
        except requests.RequestException as error:
            return [type(error).__name__, str(error), str(error.request.url) if error.request else ""]
        return []

    with raw.RawServer(answers) as server:
        want = recorded(program, server.url)
    assert want[0] == FAILURES[failure].__name__
    assert frozen(program, server.url) == want


def test_retries_of_an_adapter_run_over_served_attempts(raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    def program(url: str) -> Any:
        with requests.Session() as session:
            session.mount("http://", HTTPAdapter(max_retries=Retry(3, status_forcelist=[503], backoff_factor=0)))
            answer = session.get(url + "/")
            return [answer.status_code, len(answer.raw.retries.history)]

    busy = [raw.whole(b"", status="503 Busy")]
    with raw.RawServer({"/": [busy, [raw.RESET], [raw.whole(b"ok")]]}) as server:
        want = recorded(program, server.url)
    assert want == [200, 2]
    assert frozen(program, server.url) == want
    assert [row.get("status") for row in rows(read())] == [503, None, 200]


def test_adapters_hooks_and_auth_of_the_program_still_work(srv: Any, recorded: Run, frozen: Run, read: Run) -> None:
    seen: list[str] = []

    class Adapter(HTTPAdapter):
        def send(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append("adapter")
            return super().send(request, *args, **kwargs)

    def signed(request: Any) -> Any:
        seen.append("auth")
        request.headers["X-Signed"] = "yes"
        return request

    def program() -> Any:
        with requests.Session() as session:
            session.mount("http://", Adapter())
            session.hooks["response"].append(lambda answer, **_: seen.append("hook"))
            return session.get(srv.url + "/json", auth=signed, params={"a": "b"}).json()

    want = recorded(program)
    assert frozen(program) == want
    assert seen == ["auth", "adapter", "hook"] * 2
    assert ["x-signed", "yes"] in rows(read())[0]["request"]["headers"]


def test_sessions_and_answers_can_be_copied_and_pickled(srv: Any, recorded: Run, frozen: Run) -> None:
    def program() -> Any:
        with requests.Session() as session:
            answer = session.get(srv.url + "/json")
            again = pickle.loads(pickle.dumps(answer))
            with pickle.loads(pickle.dumps(session)) as other, copy.copy(session) as third:
                found = [other.get(srv.url + "/json").json(), third.get(srv.url + "/json").json()]
        return [again.content, again.status_code, *found]

    want = recorded(program)
    assert frozen(program) == want


def test_a_session_made_before_is_recorded(srv: Any, bundle_path: Path) -> None:
    with requests.Session() as session:
        session.get(srv.url + "/json")
        instrumentation.install()
        with record("agent", output=bundle_path):
            session.get(srv.url + "/json")
    assert len(open_bundle(bundle_path).calls) == 1


def test_record_alone_puts_the_boundary_on(srv: Any, bundle_path: Path) -> None:
    with record("agent", output=bundle_path):
        requests.get(srv.url + "/json")
    assert len(open_bundle(bundle_path).calls) == 1


def test_calls_inside_a_tool_hang_on_it(srv: Any, recorded: Run, frozen: Run, read: Run) -> None:
    @trace_tool
    def fetch(path: str) -> Any:
        return requests.get(srv.url + path).json()

    want = recorded(lambda: fetch("/json"))
    tool, http = [event for event in read().events if event.type == "tool_call"]
    assert http.parent_id == tool.id and http.name.startswith("http GET http://127.0.0.1")
    assert frozen(lambda: fetch("/json")) == want


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_the_spans_of_opentelemetry_stay_and_are_referred_to(
    first: str, srv: Any, bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    referred: list[int] = []
    refer = Recorder.refer
    monkeypatch.setattr(Recorder, "refer", lambda self, span, call: (referred.append(span), refer(self, span, call)))
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    if first == "ours":
        instrumentation.install()
    RequestsInstrumentor().instrument(tracer_provider=provider)
    try:
        instrumentation.install()
        with record("agent", output=bundle_path):
            assert requests.get(srv.url + "/json").status_code == 200
    finally:
        RequestsInstrumentor().uninstrument()
    (span,) = exporter.get_finished_spans()
    (row,) = rows(open_bundle(bundle_path))
    sent = dict(row["request"]["headers"])["traceparent"]
    assert sent.split("-")[2] == f"{span.context.span_id:016x}"
    assert set(referred) == {span.context.span_id}


def test_a_transport_of_httpx_made_of_requests_is_one_exchange(srv: Any, recorded: Run, frozen: Run, read: Run) -> None:
    class Transport(httpx.BaseTransport):
        def handle_request(self, request: Any) -> Any:
            answer = requests.request(request.method, str(request.url), data=request.read())
            return httpx.Response(answer.status_code, content=answer.content)

    def parts() -> Iterator[bytes]:
        yield requests.get(srv.url + "/json").content

    def program() -> Any:
        with httpx.Client(transport=Transport()) as client:
            return [client.get(srv.url + "/json").json(), httpx.post(srv.url + "/echo", content=parts()).json()]

    want = recorded(program)
    assert frozen(program) == want
    modules = sorted((row["module"], row["method"]) for row in rows(read()))
    assert modules == [("httpx", "GET"), ("httpx", "POST"), ("urllib3", "GET")]


def test_an_otlp_exporter_is_not_recorded(raw: Any, tmp_path: Path) -> None:
    with raw.RawServer({"/v1/traces": raw.whole(b""), "/json": raw.whole(b"{}")}) as server:
        code = f"""
        from sftrace_otel import instrumentation, record
        instrumentation.install()
        import requests
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint={server.url + "/v1/traces"!r})))
        with record("agent", output="run.sftrace"):
            with provider.get_tracer("t").start_as_current_span("work"):
                requests.get({server.url + "/json"!r})
            provider.force_flush()
        provider.shutdown()
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        paths = sorted(line.split(" ")[1] for line, _, _ in server.requests)
    assert paths == ["/json", "/v1/traces"]
    assert [row["url"] for row in rows(open_bundle(tmp_path / "run.sftrace"))] == [server.url + "/json"]


def test_secrets_reach_no_disk(raw: Any, recorded: Run, bundle_path: Path) -> None:
    secrets = [f"hunter2-{name}-0123456789abcdef" for name in ("query", "header", "body", "cookie", "user", "proxy")]
    query, header, body, cookie, user, proxy = secrets

    def program(url: str) -> None:
        requests.post(
            f"{url}/?token={query}", data={"password": body}, headers={"X-Api-Key": header}, cookies={"sid": cookie}
        )
        requests.get(f"{url.replace('//', f'//me:{user}@')}/")
        requests.get("http://elsewhere.test/", proxies={"http": url.replace("//", f"//me:{proxy}@")})

    with raw.RawServer({"/": raw.whole(b"ok", f"Set-Cookie: sid={cookie}")}) as server:
        recorded(program, server.url)
        assert len(server.requests) == 3
    files = [bundle_path] if bundle_path.is_file() else [path for path in bundle_path.rglob("*") if path.is_file()]
    written = b"".join(path.read_bytes() for path in files)
    assert b"elsewhere.test" in written and [secret for secret in secrets if secret.encode() in written] == []
