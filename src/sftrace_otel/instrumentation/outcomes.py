# SPDX-License-Identifier: Apache-2.0
"""Recorded outcomes given back to the program: values with their types, exceptions with their class, HTTP answers.

Decision: values come back as fresh copies by their type tags, exceptions as `exceptions` makes them, HTTP answers as
bytes and chunks that the client parses itself, so that an SDK makes its own objects and raises its own errors.

Source: `design.md`, "Outcome".
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sftrace_otel.core.mapping import dialects, wire
from sftrace_otel.core.prepare import restore
from sftrace_otel.errors import ReplayError
from sftrace_otel.formats import canonical
from sftrace_otel.instrumentation.exceptions import rebuilt_exception
from sftrace_otel.instrumentation.exchange import described_encoding

if TYPE_CHECKING:
    from sftrace_otel.core.plan import RecordedCall

__all__ = ["Answer", "GoesOut", "answers_of", "give_back"]


def give_back(call: RecordedCall) -> object:
    """The recorded result of a tool or a semantic LLM call, or its exception raised."""
    outcome = call.outcome
    if outcome.status == "error":
        raise rebuilt_exception(call.kind, call.name, outcome)
    if outcome.is_fresh and not outcome.output_tags:
        return outcome.output
    return restore(outcome.output, outcome.output_tags)


# --- HTTP -------------------------------------------------------------------------------------------------------------


class Answer:
    """One attempt's answer: a head and chunks, or an exception of the transport, or both.

    `left`: the recorded program did not read it to its end, so what follows the chunks is not known.
    """

    __slots__ = ("cancelled", "chunks", "exception", "headers", "left", "reason", "status", "version")

    def __init__(
        self,
        status: int | None,
        headers: Sequence[Sequence[str]],
        chunks: list[bytes],
        *,
        reason: str = "",
        version: str = "HTTP/1.1",
        exception: Mapping[str, Any] | None = None,
        cancelled: bool = False,
        left: bool = False,
        same_body: bool = False,
    ) -> None:
        self.status = status
        fields = [(str(key), str(value)) for key, value in headers]
        if not same_body:
            size = str(sum(map(len, chunks)))
            fields = [
                (key, size if key == "content-length" else value)
                for key, value in fields
                if not described_encoding(key) and (key != "content-length" or not left)
            ]
        self.headers = fields
        self.cancelled = cancelled
        self.chunks = chunks
        self.left = left
        self.reason = reason
        self.version = version
        self.exception = exception


class GoesOut(NamedTuple):
    """In place of an answer: the exchange is made, since the replay lets the call out; and its place."""

    lineage: str | None


_STATUS = {
    "BadRequestError": 400,
    "AuthenticationError": 401,
    "PermissionDeniedError": 403,
    "NotFoundError": 404,
    "ConflictError": 409,
    "UnprocessableEntityError": 422,
    "RateLimitError": 429,
    "InternalServerError": 500,
    "RequestTooLargeError": 413,
    "ServiceUnavailableError": 503,
    "OverloadedError": 529,
    "DeadlineExceededError": 504,
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""HTTP status by the class that an SDK raises, and by the word of the service (Anthropic's, Google's)."""
_ERROR_MEMBERS = frozenset({"error", "type", "request_id"})
_TRANSPORT = {"APITimeoutError": "ReadTimeout", "APIConnectionError": "ConnectError"}


def answers_of(call: RecordedCall, *, framing: str, blob: Any) -> list[Answer]:
    """The answers of a call's attempts in order, from its wire rows, or made from its semantic answer without them.

    `framing`: how the answer is asked to be streamed, as of `core.mapping.dialects.Inference`; "" where it is not.
    """
    rows = [row for row in call.outcome.wire if isinstance(row, Mapping)]
    if rows:
        blob = call.outcome.read_blob or blob  # a call of a fork's parent has its bodies there
        answers = [_from_row(row, blob) for row in sorted(rows, key=lambda row: row.get("attempt", 0))]
        for answer in answers[:-1]:  # an SDK waits before it tries again; nothing is gained by waiting in a replay
            answer.headers = [pair for pair in answer.headers if not pair[0].startswith("retry-after")]
            answer.headers.append(("retry-after-ms", "1"))
        last, raised = answers[-1].exception, call.outcome.exception
        if last is not None and raised is not None and last.get("qualname") == raised.get("qualname"):
            answers[-1].exception = {**raised, **last}  # a row has no members
        return answers
    return [_from_meaning(call, framing)]


def _from_row(row: Mapping[str, Any], blob: Any) -> Answer:
    body = row.get("body")
    if isinstance(body, Mapping) and "$blob" in body:
        data = blob(body)
    else:
        data = b"" if body is None else str(body).encode("utf-8")
    ended = row.get("end") in ("failed", "cancelled")
    exception = row.get("exception") if ended else None
    return Answer(
        row.get("status"),
        row.get("headers") or (),
        list(_split(data, row.get("chunks"))),
        reason=str(row.get("reason") or ""),
        version=str(row.get("http_version") or "HTTP/1.1"),
        exception=exception,
        cancelled=row.get("end") == "cancelled" and _by_task(row.get("exception")),
        left=row.get("end") in ("closed", "abandoned", "cut"),
        same_body=not row.get("encoding_removed") and not row.get("redacted"),
    )


def _by_task(exception: object) -> bool:
    """Whether a task was cancelled, which is waited for again; an interrupt or exit is raised again."""
    return not isinstance(exception, Mapping) or exception.get("qualname") == "CancelledError"


def _split(data: bytes, chunks: object) -> Iterator[bytes]:
    at = 0
    for chunk in chunks if isinstance(chunks, list) else ():
        size = chunk[0] if isinstance(chunk, (list, tuple)) and chunk and isinstance(chunk[0], int) else 0
        if 0 < size <= len(data) - at:
            yield data[at : at + size]
            at += size
    if at < len(data):
        yield data[at:]


def _from_meaning(call: RecordedCall, framing: str) -> Answer:
    outcome = call.outcome
    if outcome.status == "error" and not (framing and _is_part(outcome.output)):
        return _error_answer(call)
    if call.kind == "http":
        return _http_answer(outcome.output)
    if framing:
        media, chunks = dialects.stream_of(call.method, outcome.output, framing)
        return Answer(200, [["content-type", media]], list(chunks), reason="OK")
    return Answer(200, [["content-type", "application/json"]], [canonical.dumps(outcome.output)], reason="OK")


def _is_part(output: object) -> bool:
    """Whether a failed call's output is an answer as far as it came, with the error that its stream ended with."""
    return isinstance(output, Mapping) and "error" in output and not output.keys() <= _ERROR_MEMBERS


def _error_answer(call: RecordedCall) -> Answer:
    outcome = call.outcome
    module, _, kind = (outcome.error_type or "InternalServerError").rpartition(".")
    message = outcome.error_message or kind
    transport = _TRANSPORT.get(kind)
    if transport is not None or (kind not in _STATUS and call.kind == "http"):
        recorded = outcome.exception or {}
        return Answer(
            None,
            (),
            [],
            exception={
                "module": recorded.get("module") or module or None,
                "qualname": transport or kind,
                "message": message,
            },
        )
    status = int(kind) if kind.isdecimal() and 400 <= int(kind) < 600 else _STATUS.get(kind, 500)
    told = outcome.output if wire.failure_of(outcome.output) else None
    body = canonical.dumps(told if told is not None else dialects.error_body(call.method, kind, message))
    return Answer(status, [["content-type", "application/json"], ["x-should-retry", "false"]], [body])


def _http_answer(output: object) -> Answer:
    if not isinstance(output, Mapping) or not isinstance(output.get("status_code"), int):
        raise ReplayError("the recorded HTTP answer has no status_code; replay cannot make an answer of it")
    body = output.get("body")
    headers = output.get("headers")
    pairs = headers if isinstance(headers, list) else []
    return Answer(output["status_code"], pairs, [_body_bytes(body)] if body is not None else [])


def _body_bytes(body: Any) -> bytes:
    if isinstance(body, str):
        return body.encode("utf-8")
    if isinstance(body, Mapping) and set(body) == {"base64"} and isinstance(body["base64"], str):
        return base64.b64decode(body["base64"])
    return canonical.dumps(body)
