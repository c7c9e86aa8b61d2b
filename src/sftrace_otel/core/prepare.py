# SPDX-License-Identifier: Apache-2.0
"""Any Python value as redacted JSON with canonical bytes, digest and type tags: one function for recording and replay.

`prepare` never raises. Clean plain JSON is looked at once and taken as it is, without a copy; everything else is
converted (`convert` lists the forms), then redacted, then cut where it is too large, in this order, so that neither a
cut nor a conversion can hide a secret from the rules.

Decision: the digest is over the redacted canonical bytes, as the `.sftrace` format asks; the stored text keeps the
program's key order, since a replayed object often goes into the next prompt. Rejected: a digest over the original,
which would let a guessed secret be tested, and storing the sorted text, which would change replayed prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import orjson

from sftrace_otel.core.convert import LOSSY, Converter, restore
from sftrace_otel.core.cut import CUT, Cutter, is_plain
from sftrace_otel.core.redact import MARK, Finding, RedactionPolicy
from sftrace_otel.core.redact.policy import Look
from sftrace_otel.errors import CanonicalizationError
from sftrace_otel.formats import Json, canonical

MAX_BYTES = 16 << 20
"""Default for the canonical bytes of one payload."""
_EXACT, _CLEAN, _LARGE = Look.CLEAN_WITHOUT_FLOATS, Look.CLEAN, Look.LARGE
_SPARE = 64 * 1024
_STAND_IN = "<no canonical form>"


class Prepared(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A payload ready to be written, matched and referred to.

    Attributes:
        value: The redacted JSON value. Where the given value was clean plain JSON it is that very object: read it
            before the program goes on, or take `data`.
        data: Its JSON text in UTF-8, keys in the order that the program gave them (a replayed object often goes into
            the next prompt).
        digest: SHA-256 over its canonical bytes in the profile `stepfork-json-v0.1`, 64 hex digits.
        findings: What was redacted, with JSON Pointers into `value`.
        tags: JSON Pointer into `value` to the tag of a value that was no JSON; `restore` reads them.
        truncated: Whether anything was dropped because of its size.
        size: Canonical bytes that there would have been without the cut, as far as known.
        clean: Whether the policy's first look found nothing in the given value, so that it is recorded as it is.
    """

    value: Json
    data: bytes
    digest: str
    findings: tuple[Finding, ...] = ()
    tags: dict[str, str] = {}
    truncated: bool = False
    size: int = 0
    clean: bool = False


def prepare(
    value: object,
    policy: RedactionPolicy,
    *,
    serializer: Callable[[object], object] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Prepared:
    """`value` as it is recorded and matched. Never raises; interrupts pass.

    Args:
        value: Anything. It is not changed, and iterators are not consumed.
        policy: What is hidden.
        serializer: The user's hook for objects without a form of their own; see `Converter`.
        max_bytes: Canonical bytes beyond which texts and containers are cut and marked.
    """
    try:
        return _prepare(value, policy, serializer, max_bytes)
    except Exception:
        return _FAILED


def _prepare(
    value: object, policy: RedactionPolicy, serializer: Callable[[object], object] | None, max_bytes: int
) -> Prepared:
    look = policy.look(value, max_bytes)
    if look is _EXACT or look is _CLEAN:
        canon = _plain_bytes(value, look)
        if canon is not None and len(canon) > max_bytes:
            return _cut(value, (), {}, max_bytes, len(canon))  # type: ignore[arg-type]
        if canon is not None:
            digest = hashlib.sha256(canon).hexdigest()
            return Prepared(value=value, data=_text(value), digest=digest, size=len(canon), clean=True)  # type: ignore[arg-type]
    if look is _LARGE:
        return _prepare_large(value, policy, serializer, max_bytes)
    return _prepare_slowly(value, policy, serializer, max_bytes)


def _plain_bytes(value: Any, look: Look) -> bytes | None:
    """Canonical bytes of a clean value; None where it has none after all.

    Without floats orjson's bytes are canonical (`canonical`, "Decision"), and the policy has seen every type.
    """
    try:
        if look is _EXACT:
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        pass
    try:
        return canonical.dumps(value)
    except CanonicalizationError:
        return None


def _prepare_large(
    value: object, policy: RedactionPolicy, serializer: Callable[[object], object] | None, max_bytes: int
) -> Prepared:
    """Cut `value` roughly, with something to spare, before the work on it grows; what is left goes the usual way."""
    cutter = Cutter(max_bytes + max_bytes // 8 + _SPARE, at_words=True)
    return _prepare_slowly(cutter.cut(value), policy, serializer, max_bytes, cutter.pointers)


def _prepare_slowly(
    value: object,
    policy: RedactionPolicy,
    serializer: Callable[[object], object] | None,
    max_bytes: int,
    cut: Sequence[str] = (),
) -> Prepared:
    converter = Converter(policy, serializer, room=2 * max_bytes + 4096)
    converter.cut = bool(cut)
    converted: Json = value if is_plain(value) else converter.convert(value)  # type: ignore[assignment]
    redacted, findings = policy.redact(converted)
    tags = {**converter.tags, **dict.fromkeys(cut, CUT)}
    own = converter.findings
    if redacted is not converted:  # a name may have been redacted: no pointer may spell what it was
        tags = {pointer: tag for pointer, tag in tags.items() if standing_at(redacted, pointer) not in (NOWHERE, MARK)}
        own = [finding for finding in own if standing_at(redacted, finding.pointer) is not NOWHERE]
    found = tuple(dict.fromkeys([*findings, *own]))
    data = canonical.dumps(redacted)
    if len(data) > max_bytes:
        return _cut(redacted, found, tags, max_bytes, len(data))
    return _finished(redacted, data, found, tags, converter.cut, len(data))


def _finished(
    value: Json, canon: bytes, findings: tuple[Finding, ...], tags: dict[str, str], truncated: bool, size: int
) -> Prepared:
    digest = hashlib.sha256(canon).hexdigest()
    return Prepared(
        value=value, data=_text(value), digest=digest, findings=findings, tags=tags, truncated=truncated, size=size
    )


def _text(value: Any) -> bytes:
    """JSON text with the keys in their order; ints beyond 64 bits whole."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return msgspec.json.encode(value)


_FAILED = _finished(_STAND_IN, canonical.dumps(_STAND_IN), (), {"": LOSSY}, True, 0)
"""Made once: what failed for one value may fail for its stand-in."""

NOWHERE = object()
"""What `standing_at` gives for a place that is not there."""


def standing_at(value: object, pointer: str) -> object:
    """What stands at a JSON Pointer (RFC 6901) in `value`; `NOWHERE` where there is no such place."""
    place: object = value
    for part in pointer.split("/")[1:]:
        if isinstance(place, dict):
            place = place.get(part.replace("~1", "/").replace("~0", "~"), NOWHERE)
        elif isinstance(place, list) and part.isdecimal() and int(part) < len(place):
            place = place[int(part)]
        else:
            return NOWHERE
    return place


def _cut(value: Json, findings: tuple[Finding, ...], tags: dict[str, str], max_bytes: int, size: int) -> Prepared:
    """`value` with as much dropped from its end as `max_bytes` ask; the parts that lost something are tagged."""
    room = max_bytes
    while True:
        cutter = Cutter(room)
        kept = cutter.cut(value)
        data = canonical.dumps(kept)
        if len(data) <= max_bytes or room == 0:
            break
        room = min(room * max_bytes // len(data), room - 1) - 16 if room > 16 else 0
    left = {pointer: tag for pointer, tag in tags.items() if standing_at(kept, pointer) is not NOWHERE}
    left.update(dict.fromkeys(cutter.pointers, CUT))
    return _finished(kept, data, findings, left, True, size)


__all__ = ["CUT", "LOSSY", "MAX_BYTES", "NOWHERE", "Prepared", "prepare", "restore", "standing_at"]
