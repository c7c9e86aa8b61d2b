# SPDX-License-Identifier: Apache-2.0
"""The matching cases from public bug reports, decided by the session alone: HTTP rows as the payloads of their calls.

What a row asks beyond "which answer comes back" (bytes, streams, types, sockets) is tested with the boundaries.
"""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.core.session import LiveCall, RunOutcome, Session
from sftrace_otel.errors import ReplayError, ReplayMismatchError

ROWS = [
    json.loads(line)
    for line in (Path(__file__).resolve().parent.parent / "data" / "cases" / "matching.jsonl")
    .read_text("utf-8")
    .splitlines()
]
CASES = [row for row in ROWS if row.get("type") != "about"]

SECRETS = {"[secret one]", "another-secret-value"}


def redacted(value: Any) -> Any:
    """What the default policy makes of the secrets in these rows, on both sides."""
    if isinstance(value, dict):
        return {key: "[REDACTED]" if key in ("password", "api_key") else redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item) for item in value]
    if isinstance(value, str):
        for secret in SECRETS:
            value = value.replace(secret, "[REDACTED]")
    return value


def body_and_type(request: dict[str, Any]) -> tuple[Any, str | None]:
    """The body as a call records it (JSON if it parses, text, or base64), and the content type a client would send."""
    if "json" in request:
        return request["json"], "application/json"
    if "text" in request:
        return json.loads(request["text"]), None
    if "body_b64" in request:
        return {"base64": request["body_b64"]}, None
    if "multipart" in request:
        return multipart(**request["multipart"])
    return None, None


def multipart(boundary: str, parts: list[list[Any]]) -> tuple[Any, str]:
    raw = b""
    for name, filename, content in parts:
        named = f'; filename="{filename}"' if filename else ""
        raw += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode()
        raw += base64.b64decode(content) + b"\r\n"
    raw += f"--{boundary}--\r\n".encode()
    return {"base64": base64.b64encode(raw).decode()}, f"multipart/form-data; boundary={boundary}"


def request_of(request: dict[str, Any], build: Any) -> tuple[str, str, Any]:
    """(kind, name, payload) of a request of a row."""
    if "tool" in request:
        return "tool", request["tool"], {"args": request["args"], "kwargs": request["kwargs"]}
    body, content_type = body_and_type(request)
    headers = [(name.lower(), value) for name, value in request.get("headers", {}).items()]
    if content_type is not None:
        headers.append(("content-type", content_type))
    method, url = request["method"], redacted(request["url"])
    return "http", build.http_name(method, url), build.http_payload(method, url, headers, redacted(body))


def recorded_calls(row: dict[str, Any], build: Any) -> list[Any]:
    """One after the other in the root scope; calls that the row lets run at once started together."""
    together = isinstance(row["live"], dict)
    calls = []
    for index, exchange in enumerate(row["recorded"]):
        kind, name, payload = request_of(exchange["req"], build)
        span = (index, 100 + index) if together else (10 * index, 10 * index + 5)
        calls.append(
            build.tool(index, name, payload, kind=kind, span=span, lineage=f"t{index}/0" if together else str(index))
        )
    return calls


def live_calls(row: dict[str, Any], build: Any) -> list[LiveCall]:
    live = row["live"]
    requests = live if isinstance(live, list) else live.get("concurrent") or live["calls"]
    calls = []
    for index, request in enumerate(requests):
        if "tool" not in request and "method" not in request:
            continue  # a raw socket, urllib, a child process: the guard's
        kind, name, payload = request_of(request, build)
        calls.append(
            LiveCall(kind=kind, name=name, payload=payload, lineage=str(index) if isinstance(live, list) else None)
        )
    return calls


def session_for(row: dict[str, Any], build: Any) -> Session:
    option = row.get("option", "")
    if option == "strict order":
        return Session(recorded_calls(row, build), order="strict")
    if option.startswith("normalise: ISO 8601"):
        return Session(recorded_calls(row, build), normalize=["iso_time"])
    assert option == ""
    return Session(recorded_calls(row, build))


@pytest.mark.parametrize("row", CASES, ids=[row["id"] for row in CASES])
def test_row(row: dict[str, Any], build: Any) -> None:
    session = session_for(row, build)
    lives = live_calls(row, build)
    if isinstance(row["live"], dict) and "threads" in row["live"]:
        with ThreadPoolExecutor(row["live"]["threads"]) as pool:
            served = list(pool.map(lambda live: session.decide(live).call.index, lives))  # type: ignore[union-attr]
        assert served == [want["serve"] for want in row["expect"]]
        return
    for number, (live, want) in enumerate(zip(lives, row["expect"], strict=False)):
        if want.get("diverge"):
            _diverges(session, live, want)
            break  # latched: what follows in the row is told the same, and is the guard's where it is no call
        decision = session.decide(live)
        assert decision.call is not None
        assert decision.call.index == want.get("serve", number)


def _diverges(session: Session, live: LiveCall, want: dict[str, Any]) -> None:
    with pytest.raises(ReplayMismatchError) as caught:
        session.decide(live)
    for mention in want["mentions"]:
        assert mention in str(caught.value)
    with pytest.raises(ReplayError):
        session.decide(live)
    done = RunOutcome(status="completed")
    assert session.report(outcome=done, expected=done).exit_code == 1


def test_every_row_is_decided() -> None:
    assert len(CASES) == 31


def test_the_time_row_names_the_way_out(build: Any) -> None:
    row = next(row for row in CASES if row["id"] == "mat-025")
    with pytest.raises(ReplayMismatchError) as caught:
        session_for(row, build).decide(live_calls(row, build)[0])
    assert "--normalize iso_time (normalize=['iso_time'] in Python)" in str(caught.value)
    assert 'ignore=["/body/messages/0/content"]' in str(caught.value)
