# SPDX-License-Identifier: Apache-2.0
"""What a pattern of `OTEL_SFTRACE_TOOLS` names, by the text of the source files.

Decision: files are found on the path and parsed; nothing is imported, since importing an agent's module may start the
agent. So what is made at run time (a function put into a module, a class made by a call) is not seen, and a module that
is no file is said to be so. Rejected: `importlib.util.find_spec` of a submodule, which imports its parents.
"""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

__all__ = ["look_up"]

_MANY = 2000
"""Modules below a package that are looked at for a wildcard."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef


def look_up(pattern: str, path: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """The callables that `pattern` names as `module:name`, and None or why there are none. `path`: as `sys.path`."""
    module, _, inside = pattern.partition(":")
    if not module or not inside:
        return (), "it is not module:callable"
    files = dict(_files(module, path))
    if not files:
        return (), f"no source file of {module} is found on the path of this interpreter"
    found: list[str] = []
    for name, file in files.items():
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            if len(files) == 1:
                return (), f"{file} cannot be read ({type(error).__name__})"
            continue
        found += [f"{name}:{one}" for one in _named(tree, inside.split("."))]
    if found:
        return tuple(found), None
    return (), f"no function {inside} is defined there" + _hint(files, inside)


def _hint(files: dict[str, Path], inside: str) -> str:
    if len(files) != 1:
        return ""
    tree = ast.parse(next(iter(files.values())).read_bytes())
    is_class = any(isinstance(node, ast.ClassDef) and node.name == inside for node in tree.body)
    return f"; it is a class: name its methods, for instance {inside}.run" if is_class else ""


def _files(module: str, path: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Name and file of each module that `module` means."""
    parts = module.split(".")
    exact = next((at for at, part in enumerate(parts) if "*" in part or "?" in part), len(parts))
    if exact == 0:
        return
    where: Sequence[str] = path
    spec = None
    for depth in range(exact):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), where)
        if spec is None:
            return
        where = list(spec.submodule_search_locations or ())
    if exact == len(parts):
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            yield module, Path(spec.origin)
        return
    below = ".".join(parts[:exact])
    for folder in where:
        for number, file in enumerate(sorted(Path(folder).rglob("*.py"))):
            if number >= _MANY:
                break
            inner = file.relative_to(folder).with_suffix("").parts
            name = ".".join((below, *(inner[:-1] if inner[-1] == "__init__" else inner)))
            if name != below and fnmatch.fnmatchcase(name, module):
                yield name, file


def _named(tree: ast.Module | ast.ClassDef, path: Sequence[str]) -> Iterator[str]:
    """Dotted names of the functions below `tree` that a path names; a wildcard means no private ones."""
    first, *rest = path
    for node in tree.body:
        if isinstance(node, ast.If | ast.Try):
            yield from _named(ast.Module(body=node.body, type_ignores=[]), path)
        elif isinstance(node, ast.ClassDef) and rest and _fits(node.name, first):
            yield from (f"{node.name}.{name}" for name in _named(node, rest))
        elif isinstance(node, _Definition) and not rest and _fits(node.name, first):
            yield node.name
        elif not rest and first in _bound(node):
            yield first


def _fits(name: str, wanted: str) -> bool:
    if "*" in wanted or "?" in wanted:
        return not name.startswith("_") and fnmatch.fnmatchcase(name, wanted)
    return name == wanted


def _bound(node: ast.stmt) -> set[str]:
    """Names that a statement gives to something: an import or an assignment, of which no more is known."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()
