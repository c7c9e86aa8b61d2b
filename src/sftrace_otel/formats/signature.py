# SPDX-License-Identifier: Apache-2.0
"""What a signature of a bundle says, and its envelope: an in-toto Statement v1 inside a DSSE v1 envelope. No keys here.

Decision: the statement is computed from the bundle alone and holds no time, so the same bundle always gives the same
bytes; verifying is computing it anew and comparing. What is signed is the pre-authentication encoding of DSSE, over the
payload's bytes as they stand in the envelope, which are never parsed before a signature over them holds. Rejected: a
signature inside `integrity.json` or the manifest (other readers refuse members that they do not know, and a file cannot
hold a digest of itself), and a format of our own (no other tool would check it).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from sftrace_otel.errors import FormatError
from sftrace_otel.formats import Json, canonical

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:sftrace:predicate:bundle:v1"
"""Our own type: `predicate` is `{"format", "runId", "eventCount"}`, for `.flight` also `headHash`."""
CODE = "invalid_signature"


class Signature(Struct, frozen=True):
    """One signature of an envelope. `keyid` is a hint that nothing vouches for."""

    keyid: str
    sig: bytes


class Envelope(Struct, frozen=True):
    """A DSSE envelope, decoded."""

    payload_type: str
    payload: bytes
    signatures: tuple[Signature, ...]


def pae(payload_type: str, payload: bytes) -> bytes:
    """The bytes that are signed: `DSSEv1 SP LEN(type) SP type SP LEN(body) SP body`, lengths in bytes, in decimal."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def statement(digests: Mapping[str, str], predicate: Mapping[str, Json]) -> bytes:
    """The payload: a statement about files, given by name and SHA-256 in hex."""
    return canonical.dumps(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(digests.items())],
            "predicateType": PREDICATE_TYPE,
            "predicate": dict(predicate),
        }
    )


def dump_envelope(envelope: Envelope) -> bytes:
    """The bytes of the file: one JSON object, with a newline at its end."""
    return (
        canonical.dumps(
            {
                "payload": base64.b64encode(envelope.payload).decode(),
                "payloadType": envelope.payload_type,
                "signatures": [
                    {"keyid": one.keyid, "sig": base64.b64encode(one.sig).decode()} for one in envelope.signatures
                ],
            }
        )
        + b"\n"
    )


def parse_envelope(data: bytes) -> Envelope:
    """The envelope in `data`; members that DSSE does not know are left aside. Raises FormatError."""
    document = _object(data, "the envelope")
    kind, given = document.get("payloadType"), document.get("signatures")
    if not isinstance(kind, str) or not isinstance(given, list) or not given:
        raise FormatError("the envelope lacks its payloadType or its signatures", code=CODE)
    return Envelope(kind, _decoded(document.get("payload"), "payload"), tuple(map(_signature, given)))


def differences(payload_type: str, payload: bytes, now: bytes) -> Iterator[tuple[str, str]]:
    """How a bundle differs from what was signed, as pairs of what and where; nothing where it is the same.

    Args:
        payload_type: That of the envelope.
        payload: What was signed; a signature over it was found to hold.
        now: The statement of the bundle as it is.

    Raises:
        FormatError: The payload is no statement about a bundle.
    """
    if payload_type != PAYLOAD_TYPE:
        raise FormatError(f"it signs a payload of type {canonical.printable(payload_type)}, no statement", code=CODE)
    signed, found = _object(payload, "the statement"), _object(now, "the statement")
    for member in ("_type", "predicateType"):
        if signed.get(member) != found[member]:
            text = f"it signs a statement whose {member} is {canonical.printable(str(signed.get(member)))}"
            raise FormatError(text, code=CODE)
    was, is_ = _predicate(signed), _predicate(found)
    for name in is_:
        if name not in was or was[name] != is_[name]:
            yield f"{name} is {_shown(is_[name])}, signed was {_shown(was.get(name))}", "predicate"
    yield from _of_files(_subjects(signed), _subjects(found))


def _of_files(signed: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in sorted({*signed, *found}):
        if name not in found:
            yield "was signed, but is not there", name
        elif name not in signed:
            yield "was added: the signature does not cover it", name
        elif signed[name] != found[name]:
            yield "was changed since it was signed", name


def _subjects(document: Mapping[str, Any]) -> dict[str, str]:
    given = document.get("subject")
    if not isinstance(given, list):
        raise FormatError("the statement has no subjects", code=CODE)
    found: dict[str, str] = {}
    for one in given:
        name, digest = (one.get("name"), one.get("digest")) if isinstance(one, dict) else (None, None)
        value = digest.get("sha256") if isinstance(digest, dict) else None
        if not isinstance(name, str) or not isinstance(value, str) or name in found:
            raise FormatError("a subject of the statement has no name and SHA-256 of its own", code=CODE)
        found[name] = value
    return found


def _predicate(document: Mapping[str, Any]) -> dict[str, Any]:
    given = document.get("predicate")
    if not isinstance(given, dict):
        raise FormatError("the statement has no predicate", code=CODE)
    return given


def _shown(value: object) -> str:
    return "nothing" if value is None else canonical.printable(str(value))


def _signature(one: object) -> Signature:
    if not isinstance(one, dict):
        raise FormatError("a signature of the envelope is no object", code=CODE)
    keyid = one.get("keyid")
    return Signature(keyid if isinstance(keyid, str) else "", _decoded(one.get("sig"), "sig"))


def _decoded(text: object, name: str) -> bytes:
    """Base64 in either alphabet, as DSSE wants of a reader."""
    if not isinstance(text, str):
        raise FormatError(f"the envelope has no {name}", code=CODE)
    try:
        return base64.b64decode(text.translate({0x2D: "+", 0x5F: "/"}), validate=True)
    except (binascii.Error, ValueError):
        raise FormatError(f"the {name} of the envelope is not base64", code=CODE) from None


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = canonical.loads(data)
    except ValueError:
        raise FormatError(f"{what} is not JSON", code=CODE) from None
    if not isinstance(value, dict):
        raise FormatError(f"{what} is no JSON object", code=CODE)
    return value


def keyids(signatures: Sequence[Signature]) -> list[str]:
    """The hints of all signatures, printable."""
    return [canonical.printable(one.keyid, quote=False) for one in signatures]
