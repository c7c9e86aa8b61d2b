# SPDX-License-Identifier: Apache-2.0
"""The whole path in one go: record the quickstart agent, check, look, replay with the server stopped, fork.

Each command is printed before it runs, as one would type it in the activated environment. Nothing is set for sftrace;
the agent finds its model by the ordinary OPENAI_BASE_URL. The bundle stays in ./sftraces, the fork in ./.demo.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AGENT = "examples/quickstart/agent.py"
BUNDLES = ROOT / "sftraces"
FORK_STEP = 8  # the answer in which the model asks for the right refund; the agent's bug shows in the call after it


def main() -> int:
    """Run the commands; the first one that fails ends the demo with its exit code."""
    try:
        with server() as addresses:
            environment = clean_environment(addresses)
            known = set(BUNDLES.glob("*.sftrace"))
            run("opentelemetry-instrument python " + AGENT, environment)
            made = sorted(set(BUNDLES.glob("*.sftrace")) - known)
            if len(made) != 1:
                say(f"expected one new bundle in sftraces/, found {len(made)}")
                return 1
            bundle = shlex.quote(str(made[0].relative_to(ROOT)))
            run(f"python -m sftrace_otel validate --verify-integrity {bundle}", environment)
            run(f"python -m sftrace_otel inspect {bundle}", environment)
        say("\n# the server is stopped; from here on nothing answers")
        run(f"python -m sftrace_otel replay {bundle} -- python {AGENT}", environment)
        run(
            f"python -m sftrace_otel fork {bundle} --at-step {FORK_STEP} -o .demo/forked.sftrace --overwrite",
            environment,
        )
        run("python -m sftrace_otel validate --verify-integrity .demo/forked.sftrace", environment)
    except subprocess.CalledProcessError as error:
        say(f"\nthe command failed with exit code {error.returncode}: {shlex.join(error.cmd)}")
        return int(error.returncode)
    say(f"\nThe bundle is {bundle}; the fork is .demo/forked.sftrace.")
    return 0


@contextmanager
def server() -> Iterator[dict[str, str]]:
    """The example's server in a process of its own; yields the variables that it says to export."""
    command = [sys.executable, str(ROOT / "examples" / "quickstart" / "server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        say(f"$ python examples/quickstart/server.py &\n{line}")
        try:
            yield dict(word.split("=", 1) for word in line.split()[1:])
        finally:
            process.terminate()


def clean_environment(addresses: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without settings of OpenTelemetry or sftrace, the venv first on PATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    path = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", "")))
    return {**kept, **addresses, "PATH": path, "OPENAI_API_KEY": "none"}


def run(command: str, environment: Mapping[str, str]) -> None:
    """Print a command, then run it; raises CalledProcessError when it fails."""
    say(f"\n$ {command}")
    subprocess.run(shlex.split(command), cwd=ROOT, env=environment, check=True)


def say(text: str) -> None:
    """Print at once, in order with what the commands print."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
