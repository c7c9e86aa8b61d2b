# SPDX-License-Identifier: Apache-2.0
"""Bodies of exchanges on their way to disk: redacted here, before they are named or written."""

from __future__ import annotations

from sftrace_otel.bundle.journal import Journal
from sftrace_otel.core.redact import RedactionPolicy

__all__ = ["BLOB_ABOVE", "moved_chunks", "stored_body"]

BLOB_ABOVE = 16 * 1024
"""Bodies longer than this many bytes go to `blobs/` (formats/sidecars-v1.md)."""


def stored_body(
    journal: Journal, policy: RedactionPolicy, data: bytes | None, media: str | None
) -> tuple[object, bool, bytes | None]:
    """What stands for a body in `wire.jsonl`, whether redaction changed it, and the bytes kept."""
    if data is None:
        return None, False, None
    text: str | None = None
    try:
        text, changed = policy.redact_document(data.decode("utf-8"))
        kept = text.encode("utf-8") if changed else data
    except UnicodeDecodeError:
        changed = policy.holds_secret(data)
        kept = b"[REDACTED]" if changed else data
    if len(kept) > BLOB_ABOVE or text is None:
        ref = journal.blob(kept)
        return {"$blob": ref, "media_type": media or "application/octet-stream", "size": len(kept)}, changed, kept
    return text, changed, kept


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
