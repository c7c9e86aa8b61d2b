# SPDX-License-Identifier: Apache-2.0
"""What a bundle is exported as for people who do not have this package: for now a program that verifies it.

Decision: the program is `analysis.verifier`, copied as it is, so that what a recipient runs is what our tests run.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from sftrace_otel.bundle.write import reporting, write_file
from sftrace_otel.errors import TraceStorageError

VERIFIER_SUFFIX = ".verify.py"


def export_verifier(bundle: Path, target: Path | None = None, *, overwrite: bool = False) -> Path:
    """Put a program that verifies `bundle` with the standard library alone beside it.

    Args:
        bundle: A `.flight` or `.sftrace` folder; it is not read.
        target: Where the program goes; by default beside the bundle, as `<its name>.verify.py`. Under that name it
            needs no argument.
        overwrite: Replace a file that is there.

    Raises:
        TraceStorageError: The bundle is no folder of these, something else is at `target`, or writing failed.
    """
    if bundle.suffix not in (".flight", ".sftrace") or not bundle.is_dir():
        text = "is no .flight or .sftrace folder, which a verifier of its own can read"
        raise TraceStorageError(text, where=str(bundle), code="bad_target")
    place = bundle.with_name(bundle.name + VERIFIER_SUFFIX) if target is None else target
    program = Path(__file__).with_name("verifier.py").read_bytes()
    with reporting(place):
        if place.exists() or place.is_symlink():
            if place.is_file() and not place.is_symlink() and place.read_bytes() == program:
                return place
            if not overwrite or place.is_symlink() or not place.is_file():
                text = "already exists; choose another name, or ask to overwrite it"
                raise TraceStorageError(text, where=str(place), code="exists")
        scratch = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
        write_file(scratch, [program])
        scratch.replace(place)
    return place
