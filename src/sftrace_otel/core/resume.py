# SPDX-License-Identifier: Apache-2.0
"""What a resumed run may do once its recording has ended: a policy per tool, LLM and host, and what a stub answers.

Decision: one line of text per policy, `KIND:NAME=POLICY`, the same on the command line, in a variable and in Python, so
that what was typed can be read in the bundle's provenance. Of several that fit the last one counts, as with options.
LLM calls go out and everything else is blocked unless something says otherwise: an answer of a model can be asked for
again, an e-mail cannot be taken back. An HTTP exchange is treated like a tool, since its URL says nothing about what it
does; inside a tool that runs live it goes out, as it is how the tool works.

A value that was redacted when it was recorded is not known any more: the program has the placeholder. A model that is
asked with one answers about a placeholder, which the report counts; a tool or an exchange would act on it, so it stops.

Rejected: `allow` and `deny` lists (a stub and a question have no place in them), the most specific pattern wins (two
wildcards have no order), and a default of live (the first resume of a payment agent would pay).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from sftrace_otel.core.lookup import LiveCall
from sftrace_otel.core.match import marks_in
from sftrace_otel.core.plan import Outcome, RecordedCall
from sftrace_otel.errors import ReplayPolicyError, SettingsError
from sftrace_otel.formats import Json, canonical

__all__ = [
    "ACTIONS",
    "ANYTHING",
    "DEFAULTS",
    "KINDS",
    "Policies",
    "Policy",
    "Stub",
    "carried",
    "placeholders",
    "stubbed",
]

KINDS: Final = ("tool", "llm", "http")
ACTIONS: Final = ("live", "stub", "block", "ask")
ANYTHING: Final = ""
"""The pattern of a default."""
DEFAULTS: Final[Mapping[str, str]] = {"tool": "block", "llm": "live", "http": "block"}


class Stub(NamedTuple):
    """A fixed answer. `output`: what the call gives; without `given` a neutral one (`stubbed`)."""

    output: Json = None
    given: bool = False


class Policy(NamedTuple):
    """What becomes of the calls that a pattern fits.

    Attributes:
        kind: "tool", "llm" or "http".
        pattern: A tool's name, `provider/model`, or a host with or without port, or `METHOD scheme://host/path`; `*`
            stands for anything.
        action: "live", "stub", "block" or "ask".
        stub: The answer of a stub.
    """

    kind: str
    pattern: str
    action: str
    stub: Stub = Stub()

    @classmethod
    def read(cls, text: str) -> Policy:
        """A policy as it is typed: `tool:refund=live`, `llm:openai/*=ask`, `http:api.example.com=block`,
        `tool:mail=stub`, `tool:mail=stub:{"sent": true}`.

        Raises:
            SettingsError: It is none.
        """
        kind, colon, rest = text.strip().partition(":")
        pattern, equals, said = rest.partition("=")
        action, given, answer = said.partition(":")
        shown = canonical.printable(text.partition("=")[0])  # the answer of a stub may hold a secret
        if kind not in KINDS or not (colon and equals and pattern) or action not in ACTIONS:
            raise SettingsError(
                f"policy {shown}: write it as KIND:NAME=POLICY, KIND one of {', '.join(KINDS)}, POLICY one of "
                f"{', '.join(ACTIONS)}, as in tool:refund=live or http:api.example.com=ask"
            )
        if not given:
            return cls(kind, pattern, action)
        if action != "stub":
            raise SettingsError(f"policy {shown}: only a stub is given an answer")
        return cls(kind, pattern, action, Stub(_answer(answer, shown), given=True))

    def fits(self, live: LiveCall) -> bool:
        """Whether it is about this call."""
        if self.kind != live.kind:
            return False
        return any(name == self.pattern or fnmatchcase(name, self.pattern) for name in _names(live))

    def __str__(self) -> str:
        return f"{self.kind}:{self.pattern}={self.action}"


def _answer(text: str, policy: str) -> Json:
    try:
        return json.loads(text)  # type: ignore[no-any-return]
    except ValueError as fault:
        raise SettingsError(f"policy {policy}: the answer is no JSON: {fault}") from None


def _names(live: LiveCall) -> tuple[str, ...]:
    """What a pattern may call a call."""
    if live.kind == "llm":
        return (f"{live.provider}/{live.model}" if live.provider else live.model or "",)
    if live.kind == "tool":
        return (live.name,)
    name = live.name.removeprefix("http ")
    host = name.partition("://")[2].partition("/")[0]
    return (host, host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host, name)


class Policies:
    """The policies of a resumed run.

    Args:
        given: Policies as they are typed, or pattern with kind → action, in the order of their weight: the last counts.
        live_tools: Tools, and HTTP exchanges by the name of their event, that go out: as if `given` began with them.
        live_llms: LLM calls that do.

    Raises:
        SettingsError: One that cannot be read.
    """

    def __init__(
        self,
        given: Iterable[str] | Mapping[str, str | Stub] = (),
        live_tools: Iterable[str] = (),
        live_llms: Iterable[str] = (),
    ) -> None:
        if isinstance(given, str):
            raise SettingsError(f"policies={given!r} is one string; give a list of them")
        shorter = [*map(_live_tool, live_tools), *(Policy("llm", name, "live") for name in live_llms)]
        if isinstance(given, Mapping):
            read = [_pair(name, action) for name, action in given.items()]
        else:
            read = [Policy.read(text) for text in given]
        self._last_first = tuple(reversed([*shorter, *read]))

    def of(self, live: LiveCall, *, inside_live: bool = False) -> Policy:
        """The policy of a call. `inside_live`: it is made inside one that went out."""
        for policy in self._last_first:
            if policy.fits(live):
                return policy
        action = "live" if inside_live and live.kind == "http" else DEFAULTS[live.kind]
        return Policy(live.kind, ANYTHING, action)

    def described(self) -> list[str]:
        """Them without answers, in the order in which they were given."""
        return [str(policy) for policy in reversed(self._last_first)]


def _live_tool(name: str) -> Policy:
    if name.startswith("http "):
        return Policy("http", name.removeprefix("http "), "live")
    return Policy("tool", name, "live")


def _pair(name: str, action: str | Stub) -> Policy:
    if isinstance(action, Stub):
        return Policy.read(f"{name}=stub")._replace(stub=action._replace(given=True))
    return Policy.read(f"{name}={action}")


# --- stubs ------------------------------------------------------------------------------------------------------------


def stubbed(live: LiveCall, stub: Stub) -> RecordedCall:
    """A call that was never recorded, with the answer of a stub.

    Given answers: of a tool its result; of an LLM call the service's answer, or a text, which becomes what the model
    says; of an exchange `{"status_code", "headers", "body"}`, or the JSON body of an answer 200. Neutral ones: null; an
    empty message; an answer 204.

    Raises:
        ReplayPolicyError: There is no neutral answer or text of such an LLM call.
    """
    return RecordedCall(
        index=-1,
        kind=live.kind,  # type: ignore[arg-type]
        name=live.name,
        provider=live.provider,
        model=live.model,
        held=live.payload,
        lineage=live.lineage,
        started=(0, 0),
        ended=(0, 0),
        outcome=Outcome(status="ok", held=_output(live, stub), end="finished"),
    )


def _output(live: LiveCall, stub: Stub) -> Json:
    if live.kind == "http":
        return _exchange(stub)
    if live.kind == "llm" and live.method is not None and (not stub.given or isinstance(stub.output, str)):
        return _said(live, str(stub.output or ""))
    return stub.output


def _exchange(stub: Stub) -> Json:
    if not stub.given:
        return {"status_code": 204, "headers": [], "body": None}
    if isinstance(stub.output, dict) and isinstance(stub.output.get("status_code"), int):
        return {"headers": [], "body": None, **stub.output}
    return {"status_code": 200, "headers": [["content-type", "application/json"]], "body": stub.output}


def _said(live: LiveCall, text: str) -> Json:
    """The answer of a model that says `text`, in the form of its service."""
    make = _FORMS.get(live.method or "")
    if make is None:
        raise ReplayPolicyError(
            f"a stub of {live.method} needs the service's whole answer: --policy 'llm:…=stub:JSON'",
            code="stub_needs_answer",
        )
    return make(live.model or "", text)


def _chat(model: str, text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return {"id": "chatcmpl-stub", "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}


def _responses(model: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"type": "message", "id": "msg_stub", "status": "completed", "role": "assistant", "content": [part]}
    return {
        "id": "resp_stub", "object": "response", "created_at": 0, "status": "completed", "model": model,
        "output": [message], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    }  # fmt: skip


def _messages(model: str, text: str) -> dict[str, Any]:
    return {
        "id": "msg_stub", "type": "message", "role": "assistant", "model": model, "stop_reason": "end_turn",
        "stop_sequence": None, "content": [{"type": "text", "text": text}],
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }  # fmt: skip


def _gemini(model: str, text: str) -> dict[str, Any]:
    content = {"role": "model", "parts": [{"text": text}]}
    return {"candidates": [{"index": 0, "content": content, "finishReason": "STOP"}], "modelVersion": model}


def _ollama(model: str, text: str) -> dict[str, Any]:
    return {
        "model": model, "created_at": "1970-01-01T00:00:00Z", "message": {"role": "assistant", "content": text},
        "done": True, "done_reason": "stop",
    }  # fmt: skip


_FORMS: Final = {
    "chat.completions.create": _chat,
    "responses.create": _responses,
    "messages.create": _messages,
    "models.generate_content": _gemini,
    "models.generate_content_stream": _gemini,
    "ollama.chat": _ollama,
}


# --- redacted values --------------------------------------------------------------------------------------------------


def carried(payload: Json, found: Iterable[str]) -> int:
    """Placeholders of redacted values in a live payload that the program itself had in hand.

    `found`: JSON Pointers to what our own redaction took out of this payload just now: the live value is whole there.
    Headers don't count; they are redacted whatever they hold.
    """
    here = tuple(found)
    return sum(
        count
        for pointer, count in marks_in(payload)
        if not pointer.startswith("/headers/") and not any(f"{pointer}/".startswith(f"{one}/") for one in here)
    )


def placeholders(value: Json) -> int:
    """Placeholders of redacted values in a recorded payload."""
    return sum(count for _, count in marks_in(value))
