# SPDX-License-Identifier: Apache-2.0
"""Builders of recorded and live calls for the tests of the session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.core.plan import Outcome, RecordedCall
from sftrace_otel.core.session import LiveCall, Session
from sftrace_otel.formats import canonical

DATA = Path(__file__).resolve().parent.parent / "data"


class Build:
    """Makes calls with little to write; what is left out is what most calls have."""

    data = DATA

    @staticmethod
    def tool(index: int, name: str = "search", payload: Any = None, **more: Any) -> RecordedCall:
        """A recorded tool call that returned its own index; sequential unless `span` says otherwise."""
        start, end = more.pop("span", (10 * index, 10 * index + 5))
        outcome = more.pop("outcome", Outcome(status="ok", held=index))
        hashed = more.pop("hashed", True)
        return RecordedCall(
            index=index,
            kind=more.pop("kind", "tool"),
            name=name,
            held=payload,
            input_hash=canonical.digest(payload) if hashed else None,
            started=(start, 0),
            ended=None if end is None else (end, 0),
            step=2 * index + 1,
            request_id=f"evt_{index}",
            outcome=outcome,
            **more,
        )

    @classmethod
    def sequence(cls, *payloads: Any, **more: Any) -> list[RecordedCall]:
        """Tool calls one after the other in the root scope."""
        return [cls.tool(i, payload=payload, lineage=str(i), **more) for i, payload in enumerate(payloads)]

    @staticmethod
    def llm(index: int, request: Any, **more: Any) -> RecordedCall:
        payload = {"method": "chat.completions.create", "request": request}
        model = more.pop("model", "m")
        return Build.tool(
            index, model, payload, kind="llm", provider=more.pop("provider", "openai"), model=model, **more
        )

    @staticmethod
    def http(index: int, method: str, url: str, headers: Any = (), body: Any = None, **more: Any) -> RecordedCall:
        payload = Build.http_payload(method, url, headers, body)
        return Build.tool(index, Build.http_name(method, url), payload, kind="http", **more)

    @staticmethod
    def http_payload(method: str, url: str, headers: Any = (), body: Any = None) -> Any:
        return {"method": method, "url": url, "headers": [list(pair) for pair in headers], "body": body}

    @staticmethod
    def http_name(method: str, url: str) -> str:
        return f"http {method} {url.partition('?')[0]}"

    @staticmethod
    def live(call: RecordedCall, lineage: str | bool | None = True, *, hashed: bool = True, **more: Any) -> LiveCall:
        """The live call that a recorded one came from; `lineage=True` means the recorded place."""
        payload = more.pop("payload", call.input)
        fields = {
            "kind": call.kind,
            "name": call.name,
            "provider": call.provider,
            "model": call.model,
            "method": call.method,
            "payload": payload,
            "lineage": call.lineage if lineage is True else lineage,
            "digest": canonical.digest(payload) if hashed else None,
        }
        return LiveCall(**{**fields, **more})

    @staticmethod
    def serve(session: Session, live: LiveCall) -> tuple[int, str]:
        """(index of the call that was served, rung)."""
        decision = session.decide(live)
        assert decision.action == "serve" and decision.call is not None and decision.rung is not None
        return decision.call.index, decision.rung

    @classmethod
    def serve_all(cls, session: Session, lives: Sequence[LiveCall]) -> list[int]:
        return [cls.serve(session, live)[0] for live in lives]


@pytest.fixture(scope="session")
def build() -> type[Build]:
    return Build
