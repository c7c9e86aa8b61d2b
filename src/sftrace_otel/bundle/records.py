# SPDX-License-Identifier: Apache-2.0
"""The records of a journal: a head that says whose run it is, then one record for each thing that happened.

Decision: short keys, defaults left out, payloads as the redacted bytes that the bundle will hold. The head carries all
that making a bundle takes once the process is gone: run id, agent, time, policy, settings, process id. Rejected: a file
of its own for the head (two files to be torn apart), and a checksum for each record (payloads carry their digests).
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

JOURNAL_FILE = "journal.jsonl"
JOURNAL_SUFFIX = ".journal"

NOTHING = msgspec.Raw(b"")
"""No payload. One object, so that an encoder that leaves defaults out leaves it out."""


class Begin(msgspec.Struct, tag_field="k", tag="b", gc=False, omit_defaults=True):
    """A call began: `n` its number in the run, `m` ns since run start, `w` ns since the epoch, `p` its payload."""

    n: int
    id: str
    m: int
    w: int
    kind: str
    name: str
    p: msgspec.Raw
    h: str
    parent: str | None = None
    provider: str | None = None
    model: str | None = None
    policy: str = "frozen"
    lineage: str | None = None
    trace: str | None = None
    span: str | None = None
    r: list[tuple[str, str]] = []
    tags: dict[str, str] = {}
    cut: bool = False


class End(msgspec.Struct, tag_field="k", tag="e", gc=False, omit_defaults=True):
    """A call ended: with an output `p`, or with an error, or both (a failed tool). `cost` in US dollars."""

    n: int
    m: int
    w: int
    end: str
    id: str | None = None
    p: msgspec.Raw = NOTHING
    h: str | None = None
    status: str = "ok"
    model: str | None = None
    tokens: tuple[int | None, int | None, int | None] = (None, None, None)
    error: dict[str, Any] | None = None
    error_id: str | None = None
    r: list[tuple[str, str]] = []
    tags: dict[str, str] = {}
    extra: dict[str, Any] = {}
    cut: bool = False
    cost: Decimal | None = None


class Single(msgspec.Struct, tag_field="k", tag="v", gc=False, omit_defaults=True):
    """An event that is no call: run_start, state_change, error, run_end. `f` holds its own fields."""

    id: str
    m: int
    w: int
    type: str
    f: dict[str, msgspec.Raw]
    parent: str | None = None
    status: str = "ok"
    ih: str | None = None
    oh: str | None = None
    r: list[tuple[str, str]] = []


class Head(msgspec.Struct, tag_field="k", tag="h", gc=False, omit_defaults=True):
    """Whose run it is: what a bundle says of a run before anything happened. `at` in ns since the epoch; `target` is
    the name of the bundle-to-be; `found` are redactions of the head itself as (pointer into the manifest, reason)."""

    run: str
    agent: str
    at: int
    target: str
    pid: int
    python: str
    os: str
    version: str
    kind: str = "process"
    origin: dict[str, Any] = {}
    policy: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    command: list[str] = []
    found: list[tuple[str, str]] = []


Record = Head | Begin | End | Single
decode = msgspec.json.Decoder(Record).decode
encode = msgspec.json.Encoder().encode


def record_of(tag: str, members: Mapping[str, Any], payload: bytes) -> Record:
    """The record of that tag with `members`, plain JSON values, and the payload `p`; empty where there is none.

    Raises:
        msgspec.MsgspecError: The members are of other types.
    """
    given = {"p": msgspec.Raw(payload)} if payload else {}
    return decode(encode({**members, "k": tag, **given}))
