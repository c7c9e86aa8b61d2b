# SPDX-License-Identifier: Apache-2.0
"""Carries out the operations of `corrupt_bundles.jsonl` on a copy of a good bundle."""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = {
    "@events": "events.jsonl",
    "@manifest": "manifest.json",
    "@redactions": "redactions.json",
    "@integrity": "integrity.json",
}
POINTERS = {"@format_version": "/schema_version", "@parent_id": "/parent_id", "@hash_field": "/input_hash"}


def damage(bundle: Path, operations: list[dict[str, Any]]) -> None:
    """Apply the operations one after the other."""
    for operation in operations:
        if operation["op"] == "rehash":
            rehash(bundle)
        else:
            name = FILES.get(operation["file"], operation["file"])
            OPERATIONS[operation["op"]](bundle / name, operation)


def rehash(bundle: Path) -> None:
    """Seal the bundle again, as somebody with write access would."""
    record = json.loads((bundle / "integrity.json").read_bytes())
    for name in record["files"]:
        record["files"][name] = hashlib.sha256((bundle / name).read_bytes()).hexdigest()
    (bundle / "integrity.json").write_text(json.dumps(record, indent=2) + "\n")


def _octets(change: Callable[[bytes, dict[str, Any]], bytes]) -> Callable[[Path, dict[str, Any]], None]:
    return lambda path, op: _put(path, change(path.read_bytes(), op))


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _lines(change: Callable[[list[bytes], dict[str, Any]], None]) -> Callable[[Path, dict[str, Any]], None]:
    def apply(path: Path, op: dict[str, Any]) -> None:
        lines = path.read_bytes().split(b"\n")[:-1]
        change(lines, op)
        path.write_bytes(b"".join(line + b"\n" for line in lines))

    return apply


def _drop(lines: list[bytes], op: dict[str, Any]) -> None:
    for index in sorted((number % len(lines) for number in op["lines"]), reverse=True):
        del lines[index]


def _insert(lines: list[bytes], op: dict[str, Any]) -> None:
    lines.insert(op["at"], op["text"].encode())


def _weld(lines: list[bytes], op: dict[str, Any]) -> None:
    at = op["line"]
    lines[at : at + 2] = [lines[at] + lines[at + 1]]


def _split(lines: list[bytes], op: dict[str, Any]) -> None:
    at = op["line"]
    middle = len(lines[at]) // 2
    lines[at : at + 1] = [lines[at][:middle], lines[at][middle:]]


def _set_in_line(lines: list[bytes], op: dict[str, Any]) -> None:
    value = json.loads(lines[op["line"]])
    value[POINTERS[op["pointer"]].removeprefix("/")] = op["value"]
    lines[op["line"]] = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _dup_key(lines: list[bytes], op: dict[str, Any]) -> None:
    member = json.dumps({op["key"]: op["value"]})[1:-1].encode()
    lines[op["line"]] = b"{" + member + b"," + lines[op["line"]][1:]


def _replace(data: bytes, op: dict[str, Any]) -> bytes:
    assert op["find"].encode() in data
    return data.replace(op["find"].encode(), op["with"].encode(), op.get("count", -1))


def _flip(data: bytes, op: dict[str, Any]) -> bytes:
    changed = bytearray(data)
    changed[op["offset"] % len(changed)] ^= op.get("mask", 1)
    return bytes(changed)


def _recode(data: bytes, op: dict[str, Any]) -> bytes:
    if op["to"] == "crlf":
        return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    if op["to"] == "cr":
        return data.replace(b"\n", b"\r")
    if op["to"] == "nfd":
        return unicodedata.normalize("NFD", data.decode()).encode()
    return data.decode().encode(op["to"])


def _document(change: Callable[[dict[str, Any], str, dict[str, Any]], None]) -> Callable[[Path, dict[str, Any]], None]:
    def apply(path: Path, op: dict[str, Any]) -> None:
        value = json.loads(path.read_bytes())
        change(value, POINTERS[op["pointer"]].removeprefix("/"), op)
        path.write_text(json.dumps(value))

    return apply


def _link(path: Path, op: dict[str, Any]) -> None:
    target = op.get("target")
    if path.exists():
        outside = path.parent.parent / "outside"
        outside.mkdir()
        path.rename(outside / path.name)
        target = outside / path.name
    path.symlink_to(target)


def _instead(make: Callable[[Path], object]) -> Callable[[Path, dict[str, Any]], None]:
    def apply(path: Path, op: dict[str, Any]) -> None:
        path.unlink()
        make(path)

    return apply


OPERATIONS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "truncate_tail": _octets(lambda data, op: data[: len(data) - op["bytes"]]),
    "append_hex": _octets(lambda data, op: data + bytes.fromhex(op["hex"])),
    "prepend_hex": _octets(lambda data, op: bytes.fromhex(op["hex"]) + data),
    "replace_text": _octets(_replace),
    "flip_bit": _octets(_flip),
    "recode": _octets(_recode),
    "reindent": _octets(lambda data, op: json.dumps(json.loads(data), indent=2).encode()),
    "empty": lambda path, op: _put(path, b""),
    "fill": lambda path, op: _put(path, op["text"].encode() * op["times"]),
    "write": lambda path, op: _put(path, op["text"].encode()),
    "append_big_line": _octets(lambda data, op: data + b'{"pad":"' + b"x" * op["bytes"] + b'"}\n'),
    "append_deep_line": _octets(lambda data, op: data + b'{"d":' + b"[" * op["depth"] + b"]" * op["depth"] + b"}\n"),
    "drop_lines": _lines(_drop),
    "insert_line": _lines(_insert),
    "weld_lines": _lines(_weld),
    "split_line": _lines(_split),
    "line_set": _lines(_set_in_line),
    "line_dup_key": _lines(_dup_key),
    "json_set": _document(lambda value, key, op: value.update({key: op["value"]})),
    "json_del": _document(lambda value, key, op: value.pop(key)),
    "delete": lambda path, op: path.unlink(),
    "symlink": _link,
    "fifo_instead": _instead(os.mkfifo),
    "dir_instead": _instead(Path.mkdir),
}
