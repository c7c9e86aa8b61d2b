# SPDX-License-Identifier: Apache-2.0
"""One turn of a contender of `fork_rows.py`, in a process of its own; prints a JSON object of numbers.

python fork_worker.py copy|ours|stepfork BUNDLE STEP      seconds of CPU, and the peak of memory in MiB
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

CHUNK = 1 << 20


def copy(bundle: Path, step: int, out: Path) -> None:
    """The floor: the bundle's bytes read, hashed once, written, and flushed to the disk."""
    out.mkdir()
    for path in bundle.iterdir():
        digest = hashlib.sha256()
        with path.open("rb") as source, (out / path.name).open("wb") as target:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())


def ours(bundle: Path, step: int, out: Path) -> None:
    """`fork_trace` from bundle to bundle."""
    from sftrace_otel.fork import ForkPoint, fork_trace

    fork_trace(bundle, ForkPoint(step=step), output_path=out)


def stepfork(bundle: Path, step: int, out: Path) -> None:
    """The same of stepfork 0.2.1, which raises nothing when it fails."""
    from stepfork.fork import ForkPoint, fork_trace

    result = fork_trace(bundle, ForkPoint(event_id=None, step=step), output_path=out)
    assert result.success, result.error_message


CONTENDERS: dict[str, Callable[[Path, int, Path], None]] = {"copy": copy, "ours": ours, "stepfork": stepfork}


def main() -> None:
    """Run one contender; importing what it needs is not its work, so a small fork goes first."""
    name, bundle, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    work = CONTENDERS[name]
    with tempfile.TemporaryDirectory(dir=bundle.parent) as folder:
        if name == "ours":
            work(bundle.with_name("small.sftrace"), 1, Path(folder) / "warm.sftrace")
        elif name == "stepfork":
            import stepfork.fork  # noqa: F401
        began = time.process_time()
        work(bundle, step, Path(folder) / "out.sftrace")
        seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "mib": peak}))


if __name__ == "__main__":
    main()
