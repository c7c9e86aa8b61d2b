# SPDX-License-Identifier: Apache-2.0
"""`doctor`: what is installed, chosen, recorded, and what cannot be."""

from __future__ import annotations

import argparse

from sftrace_otel.cli.places import add_json
from sftrace_otel.cli.text import clean, say, say_json, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sftrace_otel.analysis.doctor import Diagnosis, Pattern

USAGE = "[--dir DIR] [--json]"
EXITS = "Exit code: 0 when a run started now would be recorded, else 1."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.add_argument("--dir", metavar="DIR", help="folder for bundles to look at (default: sftraces)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis."""
    import os

    from sftrace_otel.analysis.doctor import diagnose

    found = diagnose(os.environ, directory=arguments.dir)
    if arguments.json:
        say_json(found.to_dict())
    else:
        say(*_report(found))
    return 1 if found.problems else 0


def _report(found: Diagnosis) -> list[str]:
    needs = [
        ("✓" if one.fits else "✗", one.name, one.version or "not installed", one.needs) for one in found.requirements
    ]
    chosen = [
        (
            one.group.removeprefix("opentelemetry_"),
            ", ".join(one.chosen) or "-",
            f"({one.why})",
            ", ".join(one.registered),
        )
        for one in found.entry_points
    ]
    libraries = [(one.name, one.version or "-", one.state, one.supported, one.captures) for one in found.libraries]
    frameworks = [(one.name, one.version, one.tools) for one in found.frameworks]
    return [
        f"sftrace-otel {clean(found.version)}, Python {clean(found.python)}, {clean(found.platform)}",
        *_section("Needs", table(needs, indent="  ")),
        *_section("OpenTelemetry entry points: chosen, why, registered", table(chosen, indent="  ")),
        *_section("Boundaries", table(libraries, indent="  ")),
        *_section("Agent frameworks", table(frameworks, indent="  ")),
        *_section("Tools by pattern", [f"  {_pattern(one)}" for one in found.tools]),
        *_section("Recorded, and in the way of a replay", [f"  {clean(line)}" for line in found.recorded]),
        *_section("Bundles", [f"  {_folder(found)}"]),
        *_section("Settings", [f"  {clean(name)}={clean(value)}" for name, value in found.settings.items()]),
        *_section("Not captured", [f"  {clean(line)}" for line in found.not_captured]),
        *_section("Problems", [f"  ✗ {clean(line)}" for line in found.problems] or ["  none"]),
    ]


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", *lines] if lines else []


def _pattern(one: Pattern) -> str:
    return f"{clean(one.text)}: {clean(one.problem or ', '.join(one.found))}"


def _folder(found: Diagnosis) -> str:
    state = "exists" if found.folder.exists else "made when the first run is recorded"
    return f"{clean(found.folder.path)} ({clean(found.folder.problem or f'{state}, writable')})"
