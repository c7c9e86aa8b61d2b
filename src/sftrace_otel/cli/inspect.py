# SPDX-License-Identifier: Apache-2.0
"""`inspect PATH`: summary, verdict, the tree of calls, what was lost or redacted; with options every event, or one."""

from __future__ import annotations

import argparse

from sftrace_otel.cli.places import add_json, add_path, locate
from sftrace_otel.cli.text import clean, clean_lines, note, say, say_json, shorten, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from sftrace_otel.analysis.inspect import CallLine, EventLine, Inspection
    from sftrace_otel.bundle.read import Bundle
    from sftrace_otel.formats import Json
    from sftrace_otel.formats.sidecars import ForkPointRow, OverrideRow, Provenance

USAGE = "PATH [--events] [--step N] [--errors-only] [--json]"
EXITS = "Exit code: 0; 1 no such step, or the files are not what their checksums say; 2 the bundle cannot be read."
_WIDTH = 72
_INTEGRITY = {
    "verified": "as their checksums say (no signature)",
    "mismatch": "CHANGED: they do not have their checksums; see sftrace verify",
    "unverified_legacy": "without checksums",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `inspect`."""
    add_path(parser)
    parser.add_argument("--events", action="store_true", help="every event instead of the tree of calls")
    parser.add_argument("--step", type=int, metavar="N", help="the events of one step, payloads included, as JSON")
    parser.add_argument("--errors-only", action="store_true", help="only what failed")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what is in a bundle."""
    from sftrace_otel.analysis.inspect import event_at, inspect_bundle
    from sftrace_otel.bundle.read import open_bundle

    bundle = open_bundle(locate(arguments))
    if arguments.step is not None:
        found = event_at(bundle, arguments.step)
        if not found:
            last = bundle.manifest.totals.events - 1
            note(f"sftrace inspect: step {arguments.step} not found; the steps of this bundle are 0 to {last}")
            return 1
        _say_events(found, as_json=arguments.json)
        return 0
    seen = inspect_bundle(bundle, untraced=() if "verdict" in bundle.run else _untraced(bundle))
    if arguments.json:
        say_json(_document(seen, errors_only=arguments.errors_only))
    else:
        say(*_report(seen, events=arguments.events, errors_only=arguments.errors_only))
    return 1 if seen.integrity == "mismatch" else 0


def _say_events(found: list[dict[str, Json]], *, as_json: bool) -> None:
    import json

    document = found[0] if len(found) == 1 else found
    if as_json:
        say_json(document)
    else:
        say(clean_lines(json.dumps(document, indent=2, ensure_ascii=False)))


def _untraced(bundle: Bundle) -> list[str]:
    from sftrace_otel.core.plan import extract_calls
    from sftrace_otel.replay import untraced_tools

    return untraced_tools(extract_calls(bundle.events))


def _document(seen: Inspection, *, errors_only: bool) -> dict[str, object]:
    document = seen.to_dict()
    if errors_only:
        document["calls"] = [one for one in document["calls"] if one["status"] == "error"]
        document["events"] = [one for one in document["events"] if one["status"] == "error"]
    return document


def _report(seen: Inspection, *, events: bool, errors_only: bool) -> list[str]:
    return [
        *_summary(seen),
        "",
        *_verdict(seen),
        *_section("Events" if events else "Calls", _timeline(seen, events=events, errors_only=errors_only)),
        *_section("Lost", [f"  {clean(line)}" for line in seen.lost]),
        *_section("Redacted", table([("  " + clean(why), count) for why, count in seen.redacted.items()])),
        *_section("Made from", list(_origin(seen.origin))),
    ]


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", *lines] if lines else []


def _summary(seen: Inspection) -> list[str]:
    run = seen.summary
    failure = run.failure and f"{run.failure['type']}: {run.failure['message']} (step {run.failure['step']})"
    rows = [
        ("Bundle", seen.path),
        ("Agent", run.agent),
        ("Run", run.run_id),
        ("Status", run.status),
        ("Failure", failure),
        ("Created", run.created_at),
        ("Duration", None if run.duration_ms is None else f"{run.duration_ms} ms"),
        ("Calls", f"{run.llm_calls} LLM, {run.tool_calls} tool and HTTP; {run.events} events"),
        ("Tokens", _tokens(run.prompt_tokens, run.completion_tokens)),
        ("Files", _INTEGRITY.get(seen.integrity, seen.integrity)),
        ("Traces", _some(run.trace_ids)),
    ]
    return [f"{name + ':':<10}{shorten(value, 200)}" for name, value in rows if value is not None]


def _some(names: tuple[str, ...]) -> str | None:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more or None


def _tokens(prompt: int | None, completion: int | None) -> str | None:
    if prompt is None and completion is None:
        return None
    return f"{prompt if prompt is not None else '?'} in, {completion if completion is not None else '?'} out"


def _verdict(seen: Inspection) -> list[str]:
    if seen.verdict == "offline":
        return ["Replays offline."]
    if seen.verdict == "unknown":
        return ["Nothing speaks against an offline replay; its recorder gave no verdict."]
    lines = ["Does not replay offline:"]
    for one in seen.obstacles:
        lines.append(f"  {clean(one['what'])}")
        lines.append(f"    {clean(one['do'])}")
    return lines


def _timeline(seen: Inspection, *, events: bool, errors_only: bool) -> list[str]:
    if events:
        header = ["STEP", "AT", "TYPE", "WHAT", "STATUS", "EVENT"]
        rows = [_event_row(one) for one in seen.events if not errors_only or one.status == "error"]
    else:
        header = ["STEP", "AT", "TOOK", "STATUS", "CALL"]
        rows = [_call_row(one) for one in seen.calls if not errors_only or one.status == "error"]
    return table(rows, header, indent="  ") if rows else ["  none"]


def _call_row(call: CallLine) -> list[object]:
    tokens = _tokens(*call.tokens) if call.tokens else None
    details = [one for one in (tokens, call.error, call.remark) if one]
    what = "  " * call.depth + call.title + (f"  ({'; '.join(details)})" if details else "")
    return [call.step, _ms(call.started_ms), _ms(call.took_ms), call.status, shorten(what, 160)]


def _event_row(event: EventLine) -> list[object]:
    status = event.status + (f", {event.redactions} redacted" if event.redactions else "")
    return [event.step, _ms(event.at_ms), event.type, shorten(event.about, _WIDTH), status, event.event_id]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} ms"


def _origin(origin: Provenance) -> Iterator[str]:
    if origin.get("origin") in (None, "recorded"):
        return
    yield f"  {clean(origin['origin'])}"
    for parent in origin.get("parents", ()):
        yield f"  parent: {clean(parent.get('name') or '')} ({clean(parent.get('run_id'))})"
    if "fork_point" in origin:
        yield f"  fork point: {_place(origin['fork_point'])}"
    resumed = origin.get("resumed", {})
    if "went_live" in resumed:
        yield f"  first call that was made: {clean(resumed['went_live'])}"
    for words, ids in (("answered by a stub", resumed.get("stubbed")), ("from the parent", resumed.get("reused"))):
        if ids:
            yield f"  {words}: {', '.join(map(clean, ids))}"
    for override in origin.get("overrides", ()):
        yield f"  override: {_place(override)}"


def _place(at: ForkPointRow | OverrideRow) -> str:
    return f"step {clean(at.get('step'))}, {clean(at.get('event_id'))}"
