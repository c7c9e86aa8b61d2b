# SPDX-License-Identifier: Apache-2.0
"""Secrets in a column whose head is a sensitive name: CSV (RFC 4180), other separators, Markdown tables.

Decision: a line is a head if it consists of names alone, one of them sensitive, and the line below it has as many
cells; the rows end with the first line that has fewer. A row with more holds a secret with the separator in it. Every
line is read once, and a quoted cell is bounded, so the time grows with the text. A head with `, ` between its names
counts where each of them is one word. Rejected: guessing columns that are aligned by spaces, which takes prose for
tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from sftrace_otel.core.redact.assignments import places
from sftrace_otel.core.redact.credentials import MARK, Rule
from sftrace_otel.core.redact.names import Sensitivity

__all__ = ["LONGEST_HEAD", "SEPARATORS", "find", "may_hold_table", "table_rule"]

NameRule = Callable[[str], Sensitivity]
Span = tuple[int, int]
Head = tuple[str, int, list[tuple[int, Sensitivity]]]

SEPARATORS = "\t|;,"
"""What may stand between two cells."""
LONGEST_HEAD = 2048
"""Characters of a line that may be a head."""
_MOST_CELLS = 256
_ENDS_CELL = re.compile(r"""[\w .\-()]{0,40}["']?[ \t]{0,40}(?:[,;\t|\r\n]|\Z)""")
_RULE_RAW = re.compile(rb"\n[ \t]{0,16}\|?[ \t]{0,16}:?-{2}")
_FIRST_LINES = 4
_NAME_RAW = rb" {0,64}+[\w.\-/()\"'#\x80-\xff]{0,64}+(?: [\w.\-/()\"'#\x80-\xff]{1,64}+){0,2}+ {0,64}+"
_HEAD_RAW = re.compile(rb"[a-z]{0,20}+(?:\r?\n){0,2}+%(name)s(?:[,;\t|]%(name)s){1,255}+\r?\n" % {b"name": _NAME_RAW})
"""A head, behind what may follow a fence or a colon."""
_NAME = re.compile(r"""\s*["']?[#\ufeff]?[^\W\d][\w.\-/()]{0,63}(?: [\w.\-/()]{1,63}){0,2}["']?\s*""")
_WORD = re.compile(r"""\s*["']?[#\ufeff]?[^\W\d][\w.\-]{0,63}["']?\s*""")
_CELL = {
    mark: re.compile(
        rf"[^{re.escape(mark)}\n]*" if mark == "|" else rf'[ ]?"(?:[^"]|""){{0,8192}}"\r?(?=[{mark}\n]|\Z)|[^{mark}\n]*'
    )
    for mark in SEPARATORS
}
_NOT_VALUES = frozenset({"none", "null", "nil", "true", "false", "yes", "no", "n/a", "required", "optional"})
_STATEMENTS = ("import ", "from ", "select ", "return ", "del ", "global ")
_STAND_INS = ("${", "{{", "<")


def may_hold_table(low: bytes, words: Iterable[bytes]) -> bool:
    """Whether a text, lower case in UTF-8, may have a head line that names a secret, one of `words` in a cell of it.

    Heads are looked for where tables begin: in the first lines of the text, below a fence and a line that ends in a
    colon, and above the rule of a table of Markdown. Looking at every line would cost a quarter of all other rules.
    """
    return b"\n" in low and any(_names_secret(low, at, words) for at in _beginnings(low))


def _beginnings(low: bytes) -> Iterator[int]:
    at = 0
    for _ in range(_FIRST_LINES):
        yield at
        at = low.find(b"\n", at, at + LONGEST_HEAD) + 1
        if at == 0:
            break
    if b"`" in low:
        yield from _each(low, b"```")
    if b":" in low:
        yield from _each(low, b":\n")
    if b"|" in low:
        for rule in _RULE_RAW.finditer(low):
            yield low.rfind(b"\n", max(0, rule.start() - LONGEST_HEAD), rule.start()) + 1


def _each(low: bytes, what: bytes) -> Iterator[int]:
    at = low.find(what)
    while at >= 0:
        yield at + len(what)
        at = low.find(what, at + len(what))


def _names_secret(low: bytes, at: int, words: Iterable[bytes]) -> bool:
    head = _HEAD_RAW.match(low, at)
    return head is not None and any(word in head[0] for word in words)


def table_rule(words: tuple[str, ...], sensitivity: NameRule) -> Rule:
    """The rule for the columns with a sensitive head."""

    def hide(text: str) -> str:
        lowered = text.encode("utf-8", "surrogatepass").lower().decode("utf-8", "surrogatepass")
        pieces: list[str] = []
        done = 0
        for start, end in find(text, lowered, words, sensitivity):
            pieces += (text[done:start], MARK)
            done = end
        return "".join((*pieces, text[done:])) if pieces else text

    return Rule("table-column", hide)


def find(text: str, low: str, words: tuple[str, ...], sensitivity: NameRule) -> Iterator[Span]:
    """The cells of `text` that hold a secret, in order. Arguments as for `assignments.find`."""
    done = 0
    for start, end in places(low, words):
        if start < done or _ENDS_CELL.match(text, end) is None:
            continue
        begin = text.rfind("\n", max(0, start - LONGEST_HEAD), start) + 1
        stop = text.find("\n", end, end + LONGEST_HEAD)
        if stop < 0 or (begin == 0 and start > LONGEST_HEAD):
            continue
        done = stop
        head = _head(text[begin:stop].rstrip("\r"), sensitivity)
        if head is not None:
            for span in _rows(text, stop + 1, *head):
                yield span
                done = span[1]


def _head(line: str, sensitivity: NameRule) -> Head | None:
    """Separator, number of cells and sensitive columns of a head line; None where it is none."""
    for mark in SEPARATORS:
        cells = line.split(mark)
        if not 1 < len(cells) <= _MOST_CELLS:
            continue
        inner = cells[not cells[0].strip() : len(cells) - (not cells[-1].strip())] if mark == "|" else cells
        spaced = mark == "," and any(cell[:1] == " " for cell in cells)
        if cells[0].lstrip().lower().startswith(_STATEMENTS) or not all(
            map((_WORD if spaced else _NAME).fullmatch, inner)
        ):
            continue
        kinds = [(place, sensitivity(cell.strip(" \t\"'#\ufeff"))) for place, cell in enumerate(cells)]
        columns = [(place, kind) for place, kind in kinds if kind]
        return (mark, len(cells), columns) if columns else None
    return None


def _rows(text: str, at: int, mark: str, width: int, columns: list[tuple[int, Sensitivity]]) -> Iterator[Span]:
    first = True
    while at < len(text):
        cells = list(_cells(text, at, mark))
        more = len(cells) - width
        end = cells[-1][1]
        if more < 0 or (first and more) or (end < len(text) and text[end] != "\n"):
            return
        hidden = 0
        for place, kind in columns:
            start, stop = _bare(text, max(cells[place][0], hidden), cells[place + more][1])
            if start < stop and _is_secret(text[start:stop], kind):
                yield start, stop
                hidden = stop
        at, first = end + 1, False


def _cells(text: str, at: int, mark: str) -> Iterator[Span]:
    cell = _CELL[mark]
    for _ in range(_MOST_CELLS * 2):
        found = cell.match(text, at)
        assert found is not None  # it may be empty
        yield found.span()
        at = found.end() + 1
        if text[found.end() : at] != mark:
            return


def _bare(text: str, start: int, end: int) -> Span:
    """A cell without the white space and the quotes around it."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    if end - start >= 2 and text[start] == text[end - 1] and text[start] in "\"'`":
        return start + 1, end - 1
    return start, end


def _is_secret(value: str, kind: Sensitivity) -> bool:
    if MARK in value or value.lower() in _NOT_VALUES or value.startswith(_STAND_INS):
        return False
    if not any(map(str.isalnum, value)):
        return False
    if kind is Sensitivity.TEXT:  # a table of words, or of counts
        return len(value) >= 6 and not value.isalpha() and not value.replace(".", "").replace("-", "").isdigit()
    return True
