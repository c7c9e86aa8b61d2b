# SPDX-License-Identifier: Apache-2.0
"""Bodies of exchanges on their way to disk: redacted here, before they are named or written."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sftrace_otel.core.redact import RedactionPolicy, Vouched

if TYPE_CHECKING:
    from sftrace_otel.bundle.chains import RunJournal

__all__ = ["BLOB_ABOVE", "CleanBody", "clean_body", "moved_chunks", "stored_body"]

BLOB_ABOVE = 16 * 1024
"""Bodies longer than this many bytes go to `blobs/` (formats/sidecars-v1.md)."""


class CleanBody(NamedTuple):
    """A body without secrets: its bytes, the same as text where it is text, and whether redaction changed it."""

    data: bytes
    text: str | None
    changed: bool


def clean_body(policy: RedactionPolicy, data: bytes | None, vouched: Vouched | None = None) -> CleanBody | None:
    """`data` as it may be written; `vouched` is what the policy said of it before.

    Takes time in proportion to its length: hold no lock.
    """
    if data is None:
        return None
    try:
        text = data.decode("utf-8")
        text, changed = (text, False) if policy.vouches(vouched) else policy.redact_document(text)
    except UnicodeDecodeError:
        kept = vouched is not None and policy.vouches(vouched)
        clean = vouched.data if vouched is not None and kept else policy.redact_bytes(data)
        return CleanBody(clean, None, clean != data)
    return CleanBody(text.encode("utf-8") if changed else data, text, changed)


def stored_body(journal: RunJournal, body: CleanBody | None, media: str | None) -> object:
    """What stands for a body in `wire.jsonl`; large ones and those that are no text go into a blob."""
    if body is None:
        return None
    if len(body.data) > BLOB_ABOVE or body.text is None:
        ref = journal.blob(body.data)
        return {"$blob": ref, "media_type": media or "application/octet-stream", "size": len(body.data)}
    return body.text


def moved_chunks(chunks: object, before: bytes, after: bytes) -> object:
    """Chunk boundaries after redaction changed a body: kept at the same server-sent event, else one chunk."""
    if not isinstance(chunks, list) or b"\n\n" not in after:
        return [[len(after), chunks[0][1] if isinstance(chunks, list) and chunks else 0]]
    ends, at = [0], after.find(b"\n\n")
    while at >= 0:
        ends.append(at + 2)
        at = after.find(b"\n\n", at + 2)
    moved, position, start = [], 0, 0
    for size, offset in chunks:
        position += size
        count = before.count(b"\n\n", 0, position)
        stop = len(after) if position >= len(before) else ends[min(count, len(ends) - 1)]
        moved.append([max(0, stop - start), offset])
        start = max(start, stop)
    return moved
