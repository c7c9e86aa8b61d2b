# SPDX-License-Identifier: Apache-2.0
"""`validate` and `verify` of a `.flight` bundle: the chain is always walked whole, so both say the same."""

from __future__ import annotations

import argparse

from sftrace_otel.cli.text import clean, say_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from sftrace_otel.bundle.flight import FlightValidation
    from sftrace_otel.formats.flight import Finding

NOTE = "A chain shows a change within it; that all of it was written anew it cannot show: note the head elsewhere."

# What is said, and the findings that make it fail.
_CHECKS = (
    ("Manifest valid", frozenset({"invalid_manifest", "unsupported_schema"})),
    ("Events whole", frozenset({"invalid_json", "invalid_event", "torn_line", "id_mismatch", "run_id_mismatch"})),
    ("Order complete", frozenset({"seq_mismatch", "event_count_mismatch", "invalid_parent"})),
    ("Body hashes match", frozenset({"body_hash_mismatch"})),
    ("Chain unbroken", frozenset({"chain_broken", "hash_mismatch", "head_hash_mismatch"})),
    ("Blobs match", frozenset({"blob_missing", "blob_mismatch", "invalid_blob", "invalid_value"})),
)
_SHOWN = 5


def run(arguments: argparse.Namespace, path: Path) -> int:
    """Verify the bundle at `path` and print."""
    from sftrace_otel.bundle.flight import verify_flight
    from sftrace_otel.cli.sign import checked, outcome
    from sftrace_otel.cli.validate import show, with_signature

    result = verify_flight(path, strict=arguments.strict)
    signed, required = checked(arguments, path), arguments.require_signature
    code = outcome(signed, required=required, exit_code=result.exit_code)
    if arguments.json:
        say_json(with_signature(_document(path, result), signed, code))
        return code
    show(arguments, _report(path, result), result.exit_code, signed, _findings(result.findings), result.warnings)
    return code


def _report(path: Path, result: FlightValidation) -> list[str]:
    codes = {finding.code for finding in result.findings}
    unread = {finding.location for finding in result.findings if finding.code == "missing_file"}
    lines = [f"Bundle: {clean(path)}", ""]
    if unread:
        lines.append(f"✗ Files there: {', '.join(sorted(map(clean, unread)))} cannot be read")
    lines += [f"{'✗' if codes & faults else '✓'} {text}" for text, faults in _CHECKS if not unread or codes & faults]
    lines.append(f"  {result.event_count} records, head {clean(result.head_hash or 'unknown')}")
    return [*lines, f"  {NOTE}", "", "Validation passed." if result.valid else "Validation failed."]


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    """A line for each finding; of one kind the first few, and how many more."""
    left: dict[str, int] = {}
    for finding in findings:
        left[finding.code] = left.get(finding.code, 0) + 1
        if left[finding.code] <= _SHOWN:
            yield _line(finding)
    for code, count in left.items():
        if count > _SHOWN:
            yield f"and {count - _SHOWN} more of {clean(code)}; --json lists all"


def _line(finding: Finding) -> str:
    place = [finding.location]
    if finding.seq is not None:
        place.append(f"seq {finding.seq}")
    if finding.field is not None:
        place.append(finding.field)
    text = f"{', '.join(place)}: {finding.code}: {finding.message}"
    if finding.expected is not None and finding.found is not None:
        text += f"; expected {finding.expected}, found {finding.found}"
    return clean(text)


def _document(path: Path, result: FlightValidation) -> dict[str, object]:
    names = ("code", "message", "seq", "field", "expected", "found", "location")
    return {
        "path": str(path),
        "format": "flight",
        "valid": result.valid,
        "exit_code": result.exit_code,
        "run_id": result.run_id,
        "event_count": result.event_count,
        "head_hash": result.head_hash,
        "canonical": result.canonical,
        "note": NOTE,
        "issues": [{name: getattr(finding, name) for name in names} for finding in result.findings],
        "warnings": list(result.warnings),
    }
