# SPDX-License-Identifier: Apache-2.0
"""`validate PATH`: every check with its outcome, every finding with its place, and what the verdict covers.

The check list and its order are the field's (seed `003`); a check that could not be made because a file is unreadable
says so instead of passing. What ends in `.flight` goes to `chains`.
"""

from __future__ import annotations

import argparse

from sftrace_otel.cli.places import add_json, add_path, locate
from sftrace_otel.cli.sign import add_signature, checked, outcome, told
from sftrace_otel.cli.text import clean, note, say, say_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from sftrace_otel.bundle.read import Validation
    from sftrace_otel.bundle.signing import SignatureReport
    from sftrace_otel.formats.sftrace import Issue

USAGE = "PATH [--strict | --partial] [--verify-integrity] [--signature-key FILE [--require-signature]] [--json]"
EXITS = "Exit code: 0 valid, 1 invalid, 2 unreadable, 3 nothing to verify against (no checksums or no payload hashes)."
NO_SIGNATURE = "Checksums detect changes by accident and by those who cannot rewrite them; they are no signature."

_MANIFEST, _EVENTS, _REDACTIONS, _INTEGRITY = "manifest.json", "events.jsonl", "redactions.json", "integrity.json"

# What is said, the findings that make it fail, the file it is about (None: a relation), the files it needs.
_CHECKS: tuple[tuple[str, frozenset[str], str | None, frozenset[str]], ...] = (
    ("Manifest valid", frozenset(), _MANIFEST, frozenset()),
    (
        "Event structure valid",
        frozenset({"step_order", "run_start_count", "missing_error_event"}),
        _EVENTS,
        frozenset(),
    ),
    ("Event IDs unique", frozenset({"duplicate_event_id"}), None, frozenset({_EVENTS})),
    ("Parent references valid", frozenset({"invalid_parent", "parent_not_earlier"}), None, frozenset({_EVENTS})),
    ("Run IDs consistent", frozenset({"run_id_mismatch"}), None, frozenset({_MANIFEST, _EVENTS})),
    ("Event count matches", frozenset({"event_count_mismatch"}), None, frozenset({_MANIFEST, _EVENTS})),
)
_HASHES = ("Payload hashes match", frozenset({"payload_hash_mismatch"}), None, frozenset({_EVENTS}))
_SHOWN = 5
FAILED = "Validation failed."
_UNREADABLE = frozenset(
    {
        "missing_file",
        "invalid_json",
        "unsupported_schema",
        "invalid_manifest",
        "invalid_event",
        "integrity_metadata_invalid",
        "integrity_algorithm_unsupported",
    }
)


def configure(parser: argparse.ArgumentParser, *, verifying: bool = False) -> None:
    """Add the arguments; `verifying` fixes `--verify-integrity` as on."""
    add_path(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--strict",
        action="store_true",
        help="a whole run: one run_start, an error where it failed (default); typed, also no file that is not listed",
    )
    how.add_argument("--partial", action="store_true", help="accept a part of a run")
    if verifying:
        parser.set_defaults(verify_integrity=True)
    else:
        parser.add_argument(
            "--verify-integrity", action="store_true", help="also compare the files with integrity.json"
        )
    add_signature(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Validate and print."""
    path = locate(arguments)
    if path.name.rstrip("/").removesuffix(".journal").endswith(".flight"):
        from sftrace_otel.cli import chains

        return chains.run(arguments, path)
    from sftrace_otel.bundle.read import validate_bundle

    result = validate_bundle(path, strict=not arguments.partial, verify_integrity=arguments.verify_integrity)
    if arguments.strict:
        result = _without_foreign_files(result)
    signed, required = checked(arguments, path), arguments.require_signature
    code = outcome(signed, required=required, exit_code=result.exit_code)
    if arguments.json:
        say_json(with_signature(_document(path, result), signed, code))
        return code
    report = _report(path, result, verify=arguments.verify_integrity)
    show(arguments, report, result.exit_code, signed, [*_findings(result.issues)], result.warnings)
    return code


def show(
    arguments: argparse.Namespace,
    report: Sequence[str],
    exit_code: int,
    signed: SignatureReport | None,
    findings: Iterable[str],
    warnings: Iterable[str],
) -> None:
    """Print a validation, whose last line is the verdict, with its signature where that was asked for."""
    required = arguments.require_signature
    *lines, verdict = report
    held = outcome(signed, required=required, exit_code=exit_code) == exit_code
    say(*lines[:-1], *([told(signed, required=required)] if signed else []), "", verdict if held else FAILED)
    note(*(f"sftrace {arguments.verb}: {line}" for line in findings))
    note(*(f"sftrace {arguments.verb}: {clean(line)}" for line in signature_lines(signed)))
    note(*(f"sftrace {arguments.verb}: warning: {clean(warning)}" for warning in warnings))


def with_signature(document: dict[str, object], signed: SignatureReport | None, code: int) -> dict[str, object]:
    """The document of a validation with what its signature says, where that was asked for."""
    if signed is None:
        return document
    from sftrace_otel.bundle.signing import document as said

    return {**document, "valid": code in (0, 3), "exit_code": code, "signature": said(signed)}


def signature_lines(signed: SignatureReport | None) -> list[str]:
    """What a signature does not say, one line each."""
    return [] if signed is None else [f"{where}: {what}" for what, where in signed.findings]


def _without_foreign_files(result: Validation) -> Validation:
    """What somebody who types `--strict` is told: files that no record lists make the bundle invalid."""
    import msgspec

    from sftrace_otel.formats.sftrace import Issue, exit_code

    found = [
        Issue("integrity_mismatch", f"{name} is not part of the bundle", location=name) for name in result.unlisted
    ]
    issues = (*result.issues, *found)
    return msgspec.structs.replace(result, issues=issues, exit_code=exit_code(issues)) if found else result


def _report(path: Path, result: Validation, *, verify: bool) -> list[str]:
    codes = {issue.code for issue in result.issues}
    broken = _broken(result.issues)
    lines = [f"Bundle: {clean(path)}", "", *(_line(check, codes, broken) for check in _CHECKS)]
    if _REDACTIONS in broken:
        lines.append("✗ Redaction metadata valid")
    lines += (
        _verified(result, codes, broken) if verify else ["- Payload hashes, file checksums: add --verify-integrity"]
    )
    return [*lines, "", _verdict(result)]


def _broken(issues: Sequence[Issue]) -> set[str]:
    """The files that could not be read; all of them where there is no bundle."""
    files = {(issue.location or "").partition(":")[0] for issue in issues if issue.code in _UNREADABLE}
    return files if files <= {_MANIFEST, _EVENTS, _REDACTIONS, _INTEGRITY} else {*files, _MANIFEST, _EVENTS}


def _line(check: tuple[str, frozenset[str], str | None, frozenset[str]], codes: set[str], broken: set[str]) -> str:
    text, faults, about, needs = check
    if codes & faults or about in broken:
        return f"✗ {text}"
    return (
        f"- {text}: not checked, {', '.join(sorted(needs & broken))} cannot be read" if needs & broken else f"✓ {text}"
    )


def _verified(result: Validation, codes: set[str], broken: set[str]) -> list[str]:
    hashless = any(issue.code == "integrity_unverified" and issue.event_id for issue in result.issues)
    lines = [_line(_HASHES, codes, broken)]
    if hashless and "payload_hash_mismatch" not in codes:
        lines = ["- Payload hashes: some events store none"]
    if result.profile == "rfc8785":
        lines.append("  they follow RFC 8785 instead of this format's own profile; accepted")
    if result.integrity == "mismatch":
        lines.append("✗ File checksums match")
    elif result.covered_files:
        lines.append("✓ File checksums match")
    else:
        lines.append("- File checksums: the bundle holds none")
    covered = ", ".join(map(clean, result.covered_files)) or "no file"
    return [*lines, f"  covered: {covered}", f"  {NO_SIGNATURE}"]


def _verdict(result: Validation) -> str:
    return {
        0: "Validation passed.",
        3: "Validation passed, but not everything could be verified.",
    }.get(result.exit_code, FAILED)


def _findings(issues: Sequence[Issue]) -> Iterator[str]:
    """A line for each finding; of one kind the first few, and how many more."""
    left: dict[str, int] = {}
    for issue in issues:
        left[issue.code] = left.get(issue.code, 0) + 1
        if left[issue.code] <= _SHOWN:
            yield _finding(issue)
    for code, count in left.items():
        if count > _SHOWN:
            yield f"and {count - _SHOWN} more of {clean(code)}; --json lists all"


def _finding(issue: Issue) -> str:
    place = [clean(issue.location)] if issue.location else []
    if issue.step is not None:
        place.append(f"step {issue.step}")
    if issue.event_id:
        place.append(clean(issue.event_id))
    return f"{', '.join(place)}: {clean(issue.code)}: {clean(issue.message)}".removeprefix(": ")


def _document(path: Path, result: Validation) -> dict[str, object]:
    return {
        "path": str(path),
        "valid": result.exit_code in (0, 3),
        "exit_code": result.exit_code,
        "integrity": result.integrity,
        "hash_profile": result.profile,
        "covered_files": list(result.covered_files),
        "note": NO_SIGNATURE,
        "issues": _issues(result.issues),
        "warnings": list(result.warnings),
    }


def _issues(issues: Sequence[Issue]) -> list[dict[str, object]]:
    names = ("code", "message", "event_id", "step", "location")
    return [{name: getattr(issue, name) for name in names} for issue in issues]
