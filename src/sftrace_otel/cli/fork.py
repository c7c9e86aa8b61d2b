# SPDX-License-Identifier: Apache-2.0
"""`fork PATH`: a new bundle up to a step, outputs changed where asked; the report is the field's (seed `003`)."""

from __future__ import annotations

import argparse

from sftrace_otel.cli import replay
from sftrace_otel.cli.places import add_json, add_path, locate
from sftrace_otel.cli.text import box, clean, note, say, say_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from sftrace_otel.bundle.read import Bundle
    from sftrace_otel.core.prices import Prices
    from sftrace_otel.fork import ForkResult, OverrideSpec
    from sftrace_otel.formats import Json

USAGE = "PATH (--at-step N | --at-event ID) [-o OUT] [options] [--run (--entrypoint M:F | --asgi M:app | -- CMD …)]"
EXITS = (
    "Exit code: 0; 1 the fork point or an override does not fit the bundle; 2 a file cannot be read or written. With "
    "--run that of 'replay --mode resume'."
)
TAKES_COMMAND = True


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fork``."""
    add_path(parser)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--at-step", type=int, metavar="N", help="last step of the fork (0 is the first)")
    where.add_argument("--at-event", metavar="ID", help="id of the last event of the fork")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        help="new bundle, .sftrace or .flight (default: {stem}-forked.sftrace)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a bundle")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="T=JSON",
        help="replace the output of a tool_result or llm_response; T is its step or event id; @FILE reads the JSON "
        "from a file; may be repeated",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="T:POINTER=JSON",
        help="change one value inside such an output, named by a JSON Pointer; may be repeated",
    )
    parser.add_argument(
        "--error",
        action="append",
        default=[],
        metavar="T=CLASS:TEXT",
        help="let the call fail with an exception of that class; may be repeated",
    )
    parser.add_argument(
        "--override-file",
        action="append",
        default=[],
        metavar="FILE",
        help="TOML or JSON with tables override, set and error: what stands before and after the '=' of these options",
    )
    parser.add_argument(
        "--run",
        dest="run_it",
        action="store_true",
        help="go on from the fork: what 'replay OUT --mode resume' does, with its options",
    )
    replay.add_program(parser)
    replay.add_resume(parser)
    replay.add_options(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Fork and print the report; with `--run` go on from it."""
    from sftrace_otel.errors import ForkError

    programs = (arguments.entrypoint, arguments.asgi, arguments.rest)
    if arguments.run_it and replay.lacks_program(arguments, "fork --run"):
        return 2
    if not arguments.run_it and (any(programs) or arguments.reuse or arguments.policy or arguments.allow_redacted):
        note("sftrace fork: what to run and how is for --run; add it, or leave that out")
        return 2
    try:
        return _fork(arguments)
    except ForkError as fault:
        if arguments.debug:
            raise
        note(f"sftrace fork: {clean(fault)}")
        return 1


def _fork(arguments: argparse.Namespace) -> int:
    from sftrace_otel.bundle.read import open_bundle
    from sftrace_otel.fork import ForkPoint, fork_trace

    path = locate(arguments)
    bundle = open_bundle(path)
    out = _output(path, arguments.output)
    result = fork_trace(
        path,
        ForkPoint(step=arguments.at_step, event_id=arguments.at_event),
        overrides=_overrides(bundle, arguments),
        output_path=out,
        overwrite=arguments.overwrite,
        prices=_prices(),
    )
    if not arguments.run_it:
        if arguments.json:
            say_json(_document(path, result, out))
        else:
            say(*_report(path, bundle, result, out))
        return 0
    if not arguments.json:
        note(*_report(path, bundle, result, out))
    arguments.mode = "resume"
    return replay.answer(arguments, out, _document(path, result, out))


def _overrides(bundle: Bundle, arguments: argparse.Namespace) -> list[OverrideSpec]:
    from pathlib import Path as File

    from sftrace_otel.analysis.overrides import outputs, read_error, read_file, read_override, read_set
    from sftrace_otel.bundle.read import iter_events
    from sftrace_otel.fork import OverrideSpec

    changes = [
        *(change for name in arguments.override_file for change in read_file(File(name).expanduser())),
        *map(read_override, arguments.override),
        *map(read_set, arguments.set),
        *map(read_error, arguments.error),
    ]
    parts = any(change.pointer for change in changes)
    return [
        OverrideSpec(step=one.step, event_id=one.event_id, output=one.output, status=one.status)
        for one in outputs(iter_events(bundle.path) if parts else (), changes)
    ]


def _prices() -> Prices | None:
    """The table that `OTEL_SFTRACE_PRICES` names. Raises SettingsError."""
    import os

    from sftrace_otel.core.prices import Prices
    from sftrace_otel.errors import SettingsError
    from sftrace_otel.settings import Settings

    path = Settings.from_environ(os.environ).prices
    if path is None:
        return None
    try:
        return Prices.from_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as fault:
        raise SettingsError(f"OTEL_SFTRACE_PRICES={path} cannot be read: {fault}") from None


def _output(path: Path, given: str | None) -> Path:
    from pathlib import Path as NewPath

    stem = path.name.removesuffix(".zip").removesuffix(".sftrace").removesuffix(".flight")
    return NewPath(given) if given else path.with_name(f"{stem}-forked.sftrace")


def _report(path: Path, bundle: Bundle, result: ForkResult, out: Path) -> list[str]:
    rows: list[tuple[str, object]] = [
        ("Original Events", result.original_event_count),
        ("Forked Events", result.forked_event_count),
        ("Fork Point Step", result.fork_point_step),
        ("Fork Point Event", result.fork_point_event_id),
        ("Events Excluded", result.original_event_count - result.forked_event_count),
    ]
    if result.overrides_applied:
        rows.append(("Overrides Applied", result.overrides_applied))
    return [
        "Sftrace Fork",
        "",
        f"Original trace:  {clean(path)}",
        f"Agent:           {clean(bundle.manifest.agent_name)}",
        f"Events:          {result.original_event_count}",
        f"Fork at step:    {result.fork_point_step}",
        "",
        *box("Fork Report", rows),
        "",
        f"✓ Forked trace saved to: {clean(out)}",
    ]


def _document(path: Path, result: ForkResult, out: Path) -> dict[str, Json]:
    return {
        "original": str(path),
        "forked": str(out),
        "original_event_count": result.original_event_count,
        "forked_event_count": result.forked_event_count,
        "events_excluded": result.original_event_count - result.forked_event_count,
        "fork_point_step": result.fork_point_step,
        "fork_point_event_id": result.fork_point_event_id,
        "overrides_applied": result.overrides_applied,
    }
