# SPDX-License-Identifier: Apache-2.0
"""`sign PATH`: sign a bundle, check a signature, or make a pair of keys.

Verifying without `--require` asks whether a signature that is there holds; with it, that there is one by this key.
"""

from __future__ import annotations

import argparse

from sftrace_otel.cli.places import add_json, folder
from sftrace_otel.cli.text import clean, note, say, say_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from sftrace_otel.bundle.signing import SignatureReport

USAGE = "PATH --key FILE [--verify [--require] [--signature FILE] | -o FILE] [--json], or --new-key FILE"
EXITS = (
    "A passphrase is taken from SFTRACE_KEY_PASSPHRASE, else asked for. Exit code: 0 signed, or nothing against it; "
    "1 the signature does not hold, or --require and none by this key; 2 the bundle, the signature or the key cannot "
    "be used."
)
PASSPHRASE = "SFTRACE_KEY_PASSPHRASE"
NEEDS_KEY = "--require-signature needs --signature-key"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sign`."""
    parser.add_argument("path", metavar="PATH", nargs="?", help="a bundle, a trace id, a run id, or 'latest'")
    parser.add_argument("--dir", metavar="DIR", help="where to look up ids and 'latest' (default: sftraces)")
    parser.add_argument("--key", metavar="FILE", help="PEM file: the private key, or with --verify the public one")
    parser.add_argument("--verify", action="store_true", help="check the signature instead of making one")
    parser.add_argument("--require", action="store_true", help="with --verify: fail where none is by this key")
    parser.add_argument("--signature", metavar="FILE", help="with --verify: the signature, where it is not in PATH")
    parser.add_argument("-o", "--output", metavar="FILE", help="where the signature goes (default: into the bundle)")
    parser.add_argument("--overwrite", action="store_true", help="replace a signature of other content")
    parser.add_argument("--new-key", metavar="FILE", help="make a key, FILE, and its public part, FILE.pub")
    add_json(parser)


def add_signature(parser: argparse.ArgumentParser) -> None:
    """Add what `validate` and `verify` have for signatures."""
    parser.add_argument("--signature-key", metavar="FILE", help="also check the signature, with this public key")
    parser.add_argument("--require-signature", action="store_true", help="fail where no signature is by that key")


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked."""
    from sftrace_otel.errors import SettingsError

    if arguments.new_key is not None:
        return _new_key(arguments)
    if arguments.path is None or arguments.key is None:
        raise SettingsError("PATH and --key are needed; see 'sftrace sign --help'")
    if not arguments.verify and (arguments.require or arguments.signature):
        raise SettingsError("--require and --signature go with --verify")
    from sftrace_otel.bundle.read import resolve

    path = resolve(arguments.path, dir=folder(arguments.dir))
    return _verify(arguments, path) if arguments.verify else _sign(arguments, path)


def checked(arguments: argparse.Namespace, path: Path) -> SignatureReport | None:
    """The report on the signature that `validate` was asked for; None where it was not."""
    from sftrace_otel.errors import SettingsError, TraceStorageError

    if arguments.signature_key is None:
        if arguments.require_signature:
            raise SettingsError(NEEDS_KEY)
        return None
    from sftrace_otel.bundle.signing import SignatureReport, load_public, verify

    key = load_public(arguments.signature_key)
    try:
        return verify(path, key)
    except TraceStorageError as error:
        return SignatureReport("invalid", ((error.reason, error.where),), "")


def outcome(report: SignatureReport | None, *, required: bool, exit_code: int) -> int:
    """The exit code of a validation, worse where the signature fails it."""
    fails = report is not None and not report.passes(required=required)
    return 1 if fails and exit_code in (0, 3) else exit_code


def told(report: SignatureReport, *, required: bool) -> str:
    """One line of a check list."""
    sign = "✓" if report.state == "valid" else "-" if report.passes(required=required) else "✗"
    text = {
        "valid": f"Signature holds, by {clean(report.keyid)}",
        "invalid": "Signature holds",
        "missing": "Signature: there is none",
        "unknown": "Signature: by another key",
    }[report.state]
    return f"{sign} {text}"


def _new_key(arguments: argparse.Namespace) -> int:
    import os

    from sftrace_otel.bundle.signing import new_key

    public, keyid = new_key(arguments.new_key, os.environ.get(PASSPHRASE, ""))
    if arguments.json:
        say_json({"key": arguments.new_key, "public": str(public), "keyid": keyid})
    else:
        say(f"{clean(arguments.new_key)}: the private key; keep it where nobody else reads it",
            f"{clean(public)}: the public key, {keyid}")  # fmt: skip
    return 0


def _sign(arguments: argparse.Namespace, path: Path) -> int:
    from pathlib import Path

    from sftrace_otel.bundle.signing import load_private, sign

    key = load_private(arguments.key, _passphrase)
    output = Path(arguments.output) if arguments.output else None
    done = sign(path, key, output=output, overwrite=arguments.overwrite)
    if arguments.json:
        say_json({"bundle": str(path), "signature": str(done.path), "keyid": done.keyid, "format": done.format})
    else:
        say(f"{clean(done.path)}: signed by {done.keyid}")
    return 0


def _verify(arguments: argparse.Namespace, path: Path) -> int:
    from pathlib import Path

    from sftrace_otel.bundle.signing import document, lines, load_public, verify

    key = load_public(arguments.key)
    report = verify(path, key, envelope=Path(arguments.signature) if arguments.signature else None)
    passes = report.passes(required=arguments.require)
    if arguments.json:
        say_json({"bundle": str(path), "required": arguments.require, "passes": passes, **document(report)})
        return 0 if passes else 1
    say(f"Bundle: {clean(path)}", told(report, required=arguments.require))
    note(*(f"sftrace sign: {clean(line)}" for line in lines(report)))
    if passes and report.state != "valid":
        note("sftrace sign: nothing was verified; --require makes this fail")
    return 0 if passes else 1


def _passphrase() -> str:
    """From the variable; else asked for where somebody can answer."""
    import os
    import sys

    word = os.environ.get(PASSPHRASE)
    if word is not None or not sys.stdin.isatty():
        return word or ""
    from getpass import getpass

    return getpass("Passphrase of the key: ")
