# SPDX-License-Identifier: Apache-2.0
"""The model's id of a tool call, on its way from the framework that makes the call to the span of it.

Decision: a context variable that the next tool call takes, whatever traces it: a function of the program with
`@trace_tool` on it gets the id too, and a tool that this one calls does not. Rejected: an argument through every
framework, which has no room for one.

Source: GenAI conventions, `gen_ai.tool.call.id`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

__all__ = ["asked", "identified"]

_waiting: ContextVar[list[str] | None] = ContextVar("sftrace_asked", default=None)
"""The id of the next tool call here, until that takes it; a list, since the call may be made in a copied context."""


@contextlib.contextmanager
def asked(call_id: object) -> Iterator[None]:
    """The first tool call in this block is the one that the model knows by `call_id`."""
    token = _waiting.set([call_id] if isinstance(call_id, str) else None)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # left in another context, which has its own value
            _waiting.reset(token)


def identified(attributes: dict[str, Any]) -> Mapping[str, Any]:
    """Attributes of the span of the tool call that begins here: with its id, if the model gave one."""
    waiting = _waiting.get()
    return {**attributes, "gen_ai.tool.call.id": waiting.pop()} if waiting else attributes
