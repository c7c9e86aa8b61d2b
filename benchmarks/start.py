# SPDX-License-Identifier: Apache-2.0
"""The start rows: the command line, `opentelemetry-instrument` with and without us, and what an import of us loads.

"Without us" is a second environment made of links to everything in this one but our distribution. It has what the
target names: opentelemetry-distro, the SDK and the standard HTTP instrumentations, all of which this environment
holds as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from harness import Row, interleaved, wall

HEAVY = ("openai", "httpx", "httpx2", "pydantic", "opentelemetry.sdk")
OURS = ("sftrace_otel", "_editable_impl_sftrace_otel", "__editable__")
INSTRUMENT = "from opentelemetry.instrumentation.auto_instrumentation import run; run()"


def command_line() -> Row:
    """`--help` beside bare Python."""
    best = interleaved(
        {
            "help": lambda: wall([sys.executable, "-m", "sftrace_otel", "--help"]),
            "pass": lambda: wall([sys.executable, "-c", "pass"]),
        },
        rounds=15,
    )
    note = f"{best['help'] * 1e3:.0f} ms, python -c pass {best['pass'] * 1e3:.0f} ms"
    return Row(what="--help / python -c pass, wall", value=best["help"] / best["pass"], limit=3.5, note=note)


def instrument_start() -> Row:
    """The start of an empty program under `opentelemetry-instrument`, with us later than without."""
    with tempfile.TemporaryDirectory() as scratch:
        with_us, without = Path(scratch, "with"), Path(scratch, "without")
        linked_environment(with_us, ours=True)
        linked_environment(without, ours=False)
        best = interleaved(
            {"with": lambda: start(with_us, Path(scratch)), "without": lambda: start(without, Path(scratch))}
        )
    note = f"{best['with'] * 1e3:.0f} ms with us, {best['without'] * 1e3:.0f} ms without"
    return Row(
        what="opentelemetry-instrument starts later than without us",
        value=(best["with"] - best["without"]) * 1e3,
        limit=150,
        unit="ms",
        note=note,
    )


def linked_environment(folder: Path, *, ours: bool) -> None:
    """A venv whose packages are links to this one's, with or without our distribution."""
    venv.create(folder, with_pip=False, symlinks=True)
    target = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if ours or not entry.name.startswith(OURS):
            (target / entry.name).symlink_to(entry)


def start(environment: Path, cwd: Path) -> float:
    """Seconds for an empty program under auto-instrumentation; network exporters would only add to both."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    if environment.name == "without":
        variables |= {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}
    python = str(environment / "bin" / "python")
    return wall([python, "-c", INSTRUMENT, python, "-c", "pass"], variables, cwd)


def imports() -> Row:
    """Heavy modules that `import sftrace_otel` loads."""
    code = f"import sys, json, sftrace_otel; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    loaded = json.loads(done.stdout)
    note = "loads " + ", ".join(loaded) if loaded else "none of " + ", ".join(HEAVY)
    return Row(what="import sftrace_otel loads heavy modules", value=len(loaded), limit=0, unit="modules", note=note)
