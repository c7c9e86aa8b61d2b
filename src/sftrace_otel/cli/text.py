# SPDX-License-Identifier: Apache-2.0
"""How the verbs print: escaped text, aligned tables, one JSON document.

A bundle comes from strangers, so no string of it reaches a terminal as it is: control characters, line and paragraph
separators, bidi overrides and lone surrogates are spelled out. Rejected: stripping them (nobody would see that they
were there).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SHORT = {0x07: "\\a", 0x08: "\\b", 0x09: "\\t", 0x0A: "\\n", 0x0B: "\\v", 0x0C: "\\f", 0x0D: "\\r", 0x1B: "\\x1b"}
_HIDDEN = (
    *range(0x20),
    *range(0x7F, 0xA0),
    0x061C,
    *range(0x200B, 0x2010),
    *range(0x2028, 0x202F),
    *range(0x2060, 0x2070),
    0xFEFF,
)
_TABLE = {code: _SHORT.get(code, f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}") for code in _HIDDEN}


def clean(value: object) -> str:
    """One line for a terminal: `str(value)` with everything that could move the cursor or hide text spelled out."""
    text = str(value).translate(_TABLE)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def clean_lines(value: object) -> str:
    """Text of several lines for a terminal: as `clean`, line breaks kept."""
    return "\n".join(clean(line) for line in str(value).split("\n"))


def shorten(value: object, width: int) -> str:
    """`clean` text of at most `width` characters, the cut marked by `…`."""
    text = clean(value)
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def table(rows: Iterable[Sequence[object]], header: Sequence[str] = (), indent: str = "") -> list[str]:
    """Lines of left-aligned columns two spaces apart; cells are cleaned, numbers right-aligned."""
    cells = [[clean(cell) for cell in row] for row in rows]
    right = [all(isinstance(value, int) for value in column) for column in zip(*rows, strict=True)] if cells else []
    lines = [list(header), *cells] if header else cells
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right and right[at] else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return (indent + "  ".join(padded)).rstrip()

    return [line(row) for row in lines]


def box(title: str, rows: Sequence[tuple[str, object]]) -> list[str]:
    """Lines of a framed list of name and value under a title."""
    width = max(len(name) for name, _ in rows)
    body = [f"   {name.ljust(width)}     {clean(value)}" for name, value in rows]
    inner = max(*(len(line) + 3 for line in body), len(title) + 6)
    return [
        "╭" + f" {title} ".center(inner, "─") + "╮",
        *("│" + line.ljust(inner) + "│" for line in body),
        "╰" + "─" * inner + "╯",
    ]


def say(*lines: str) -> None:
    """Print result lines (already cleaned) on standard output."""
    for line in lines:
        print(line)


def note(*lines: str) -> None:
    """Print lines (already cleaned) that are no result on standard error."""
    for line in lines:
        print(line, file=sys.stderr)


def say_json(document: object) -> None:
    """Print one JSON document, ASCII only, so that no content of a bundle can reach the terminal raw."""
    import json

    print(json.dumps(document, indent=2, ensure_ascii=True).replace("\x7f", "\\u007f"))
