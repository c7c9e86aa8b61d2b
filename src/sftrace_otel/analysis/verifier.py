# SPDX-License-Identifier: Apache-2.0
"""Verify a .flight or .sftrace bundle with nothing but Python 3.8 or newer.

    python3 NAME.flight.verify.py            the bundle NAME.flight beside this file
    python3 NAME.flight.verify.py PATH       another one

.flight: every event is hashed again and compared with the chain, the manifest and the blobs (the format's section 6).
.sftrace: every file is compared with integrity.json. Exit code: 0 holds, 1 does not, 2 cannot be read, 3 there is
nothing to compare with. No network, no secret and no package is needed: `python3 -I -S` runs it too.

Decision: this file is a module of sftrace-otel and, copied by `sftrace export BUNDLE --verifier`, a program of its own;
so it imports the standard library only, writes RFC 8785 itself, and is tested against the package on every vector.
Rejected: generating it from the package's code (a bug would be in both, and it would not be short enough to read).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
import unicodedata
from typing import Any, BinaryIO, Iterator

GENESIS = "sha256:" + "0" * 64
VOLATILE = ("latency_ns", "duration_ns", "truncated", "mono_origin_ns")
FIELDS = {
    "v": int, "seq": int, "run_id": str, "id": str, "type": str, "t_wall": str, "t_mono_ns": int, "parents": list,
    "body": dict, "body_hash": str, "prev_hash": str, "hash": str,
}  # fmt: skip
MANIFEST = ("spec_version", "hash_alg", "canonicalization", "run_id", "head_hash", "event_count")
LONGEST_LINE = 128 << 20
SAFE_INT = 2**53 - 1
DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z")
ESCAPES = {**{chr(code): f"\\u{code:04x}" for code in range(0x20)}, '"': '\\"', "\\": "\\\\"}
ESCAPES.update({"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"})
ESCAPED = re.compile(r'[\x00-\x1f"\\]')


class Unreadable(Exception):
    """There is no bundle, or a part of it is not what the format says."""


class Mismatch(Exception):
    """The bundle can be read, and something in it is not what was written."""


# RFC 8785 with every string in NFC


def canonical(value: Any) -> str:
    """The text that hashes are over."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return text(unicodedata.normalize("NFC", value))
    if isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    members = {unicodedata.normalize("NFC", key): item for key, item in value.items()}
    if len(members) != len(value):
        raise Unreadable("two keys of an object are equal after NFC")
    ordered = sorted(members, key=lambda key: key.encode("utf-16-be"))
    return "{" + ",".join(f"{text(key)}:{canonical(members[key])}" for key in ordered) + "}"


def text(value: str) -> str:
    """A JSON string."""
    return '"' + ESCAPED.sub(lambda found: ESCAPES[found[0]], value) + '"'


def number(value: Any) -> str:
    """A number as ECMAScript writes the double that it is."""
    if isinstance(value, int) and -SAFE_INT <= value <= SAFE_INT:
        return str(value)
    double = float(value)
    if double == 0:
        return "0"
    digits, _, exponent = repr(abs(double)).partition("e")
    whole, _, fraction = digits.partition(".")
    point = len(whole) + int(exponent or 0)
    digits = (whole + fraction).lstrip("0")
    point -= len(whole + fraction) - len(digits)
    digits = digits.rstrip("0")
    sign = "-" if double < 0 else ""
    if len(digits) <= point <= 21:
        return sign + digits.ljust(point, "0")
    if 0 < point <= 21:
        return sign + digits[:point] + "." + digits[point:]
    if -6 < point <= 0:
        return sign + "0." + "0" * -point + digits
    return sign + digits[0] + ("." + digits[1:] if len(digits) > 1 else "") + "e" + format(point - 1, "+d")


def digest(value: Any) -> str:
    """`sha256:` and the hash of the canonical bytes."""
    return "sha256:" + hashlib.sha256(canonical(value).encode()).hexdigest()


# Reading, strictly


def loads(data: bytes) -> Any:
    """The value of a JSON text in which no key comes twice, and no number is beyond the range of a double."""
    try:
        return json.loads(data.decode(), object_pairs_hook=pairs, parse_constant=refuse, parse_float=finite)
    except RecursionError:
        raise Unreadable("nested too deep") from None
    except UnicodeDecodeError:
        raise Unreadable("is not UTF-8") from None
    except ValueError as error:
        raise Unreadable(f"malformed JSON: {error}") from None


def pairs(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) != len(members):
        raise Unreadable("duplicate key")
    return found


def refuse(name: str) -> None:
    raise Unreadable(f"{name} is not JSON")


def finite(digits: str) -> float:
    if float(digits) in (float("inf"), -float("inf")):
        raise Unreadable("a number beyond the range of a double")
    return float(digits)


def opened(folder: str, name: str) -> BinaryIO:
    """A regular file of the bundle, no part of whose name is a link."""
    path = folder
    for part in name.split("/"):
        path = os.path.join(path, part)
        try:
            mode = os.lstat(path).st_mode
        except (OSError, ValueError):
            raise Unreadable(f"{name}: the file is missing") from None
        if stat.S_ISLNK(mode):
            raise Unreadable(f"{name}: is reached through a symlink, which is not followed")
    if not stat.S_ISREG(mode):
        raise Unreadable(f"{name}: is not a regular file")
    return open(path, "rb")


def sha256_of(folder: str, name: str) -> tuple[str, int]:
    """Hash and size of a file."""
    found, size = hashlib.sha256(), 0
    with opened(folder, name) as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            found.update(chunk)
            size += len(chunk)
    return found.hexdigest(), size


def document(folder: str, name: str) -> Any:
    """The JSON object in a file."""
    with opened(folder, name) as file:
        data = file.read(LONGEST_LINE)
    try:
        value = loads(data)
    except Unreadable as error:
        raise Unreadable(f"{name}: {error}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"{name}: is not an object")
    return value


# .flight


def verify_flight(folder: str) -> str:
    """Walk the chain; what to say of it when it holds."""
    manifest = document(folder, "manifest.json")
    for name in MANIFEST:
        if name not in manifest:
            raise Unreadable(f"manifest.json: no {name}")
    if not isinstance(manifest["spec_version"], str) or manifest["spec_version"].split(".")[0] != "0":
        raise Unreadable(f"manifest.json: spec_version {manifest['spec_version']!r} is not 0.x")
    if manifest["hash_alg"] != "sha256":
        raise Unreadable(f"manifest.json: hash_alg {manifest['hash_alg']!r} is not sha256")
    if not str(manifest["canonicalization"]).lower().startswith(("rfc8785", "jcs")):
        raise Unreadable(f"manifest.json: canonicalization {manifest['canonicalization']!r} is not RFC8785")
    count, head = 0, GENESIS
    with opened(folder, "events.jsonl") as file:
        for line in iter(lambda: file.readline(LONGEST_LINE), b""):
            where = f"events.jsonl, line {count + 1} (seq {count})"
            try:
                head = event(folder, line, count, head, manifest["run_id"])
            except (Unreadable, Mismatch) as error:
                raise type(error)(f"{where}: {error}") from None
            except (RecursionError, ValueError, OverflowError) as error:
                raise Unreadable(f"{where}: has no canonical form: {error}") from None
            count += 1
    if isinstance(manifest["event_count"], bool):
        raise Unreadable("manifest.json: event_count is no number")
    same("manifest.json: event_count", manifest["event_count"], count)
    same("manifest.json: head_hash", manifest["head_hash"], head)
    return f"{count} events, head {head}"


def event(folder: str, line: bytes, seq: int, prev: str, run: Any) -> str:
    """Check one line; its hash."""
    if not line.endswith(b"\n"):
        raise Unreadable("the last line has no newline: it was cut")
    found = loads(line)
    if not isinstance(found, dict):
        raise Unreadable("is not an object")
    for name, kind in FIELDS.items():
        if not isinstance(found.get(name), kind) or isinstance(found.get(name), bool):
            raise Unreadable(f"field {name} is missing, or of another type")
    same("seq", seq, found["seq"])
    same("run_id", run, found["run_id"])
    same("id", f"{run}/{seq}", found["id"])
    if found["v"] < 1 or found["t_mono_ns"] < 0:
        raise Unreadable("v or t_mono_ns is too small")
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < seq for one in found["parents"]):
        raise Mismatch("parents: an event that is not before this one")
    same("prev_hash", prev, found["prev_hash"])
    body = {name: item for name, item in found["body"].items() if name not in VOLATILE}
    same("body_hash", digest({"type": found["type"], "v": found["v"], "body": body}), found["body_hash"])
    same("hash", digest({name: item for name, item in found.items() if name != "hash"}), found["hash"])
    for reference in blobs(found["body"]):
        blob(folder, reference)
    return str(found["hash"])


def same(name: str, expected: Any, found: Any) -> None:
    if expected != found:
        raise Mismatch(f"{name}: expected {expected}, found {found}")


def blobs(value: Any) -> Iterator[dict[str, Any]]:
    """The objects in a body that stand for blobs."""
    if isinstance(value, list):
        for item in value:
            yield from blobs(item)
    elif isinstance(value, dict):
        if "$literal" in value:
            literal = value["$literal"]
            if not isinstance(literal, list) or not all(isinstance(one, list) and len(one) == 2 for one in literal):
                raise Mismatch("body: $literal is not a list of pairs")
            for pair in literal:
                yield from blobs(pair)
        elif "$blob" in value:
            yield value
        else:
            for item in value.values():
                yield from blobs(item)


def blob(folder: str, reference: dict[str, Any]) -> None:
    name = DIGEST.match(reference["$blob"]) if isinstance(reference["$blob"], str) else None
    if name is None:
        raise Mismatch("body: $blob names no blob")
    try:
        found, size = sha256_of(folder, f"blobs/{name[1][:2]}/{name[1][2:4]}/{name[1]}")
    except Unreadable as error:
        raise Mismatch(f"body: {error}") from None
    same("body: bytes of a blob", name[1], found)
    if isinstance(reference.get("size"), bool):
        raise Mismatch("body: size of a blob")
    same("body: size of a blob", reference.get("size"), size)


# .sftrace


def verify_sftrace(folder: str) -> str | None:
    """Compare every file with integrity.json; what to say when all match, or None where there is no such record."""
    for name in ("manifest.json", "events.jsonl", "redactions.json"):
        opened(folder, name).close()
    if not os.path.lexists(os.path.join(folder, "integrity.json")):
        return None
    record = document(folder, "integrity.json")
    files = record.get("files")
    if record.get("algorithm", "sha256") != "sha256" or not isinstance(files, dict):
        raise Unreadable("integrity.json: is no record of SHA-256 checksums")
    for name in ("manifest.json", "events.jsonl", "redactions.json"):
        if name not in files:
            raise Unreadable(f"integrity.json: does not name {name}")
    for name, expected in files.items():
        if name.startswith("/") or "\\" in name or ":" in name or {"", ".", ".."} & set(name.split("/")):
            raise Unreadable(f"integrity.json: {name!r} is no path inside the bundle")
        same(name, expected, sha256_of(folder, name)[0])
    return f"{len(files)} files match integrity.json"


def main(arguments: list[str]) -> int:
    """Verify what is named, and say the outcome in one line."""
    own = os.path.abspath(__file__)
    if len(arguments) > 1 or (not arguments and not own.endswith(".verify.py")):
        return say(sys.stderr, "usage: python3 NAME.flight.verify.py [PATH]", 2)
    folder = arguments[0] if arguments else own[: -len(".verify.py")]
    try:
        if not os.path.isdir(folder):
            raise Unreadable("there is no such folder")
        flight = os.path.abspath(folder).endswith(".flight")
        outcome = verify_flight(folder) if flight else verify_sftrace(folder)
    except Unreadable as error:
        return say(sys.stderr, f"{folder}: cannot be read: {error}", 2)
    except Mismatch as error:
        return say(sys.stderr, f"{folder}: does not hold: {error}", 1)
    except OSError as error:
        return say(sys.stderr, f"{folder}: cannot be read: {error.strerror}", 2)
    if outcome is None:
        return say(sys.stderr, f"{folder}: has no integrity.json to compare with", 3)
    return say(sys.stdout, f"{folder}: holds: {outcome}", 0)


def say(stream: Any, line: str, code: int) -> int:
    """Print a line in which nothing moves the cursor."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    stream.write(shown.encode("ascii", "backslashreplace").decode() + "\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
