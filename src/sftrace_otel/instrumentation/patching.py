# SPDX-License-Identifier: Apache-2.0
"""One table of patches: what was wrapped, by which handle, and how it is taken off again.

Decision: wrapt's deferred hooks, so that nothing is imported that the program does not import, and `unwrap_object`,
which takes our wrapper out of the middle of a chain when others wrapped on top. A patch is keyed by the object that
owns the attribute, not by a module's name: `httpx2.alias_httpx()` makes two names of one class. Rejected: popping the
outermost wrapper, which removes whatever is there.

Where a microsecond counts, a plain function takes the place of a wrapper of wrapt's, which alone costs one.

A wrapper that stays behind (somebody kept a reference) passes through, since every wrapper asks what is active first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from sftrace_otel import recorder as recording
from sftrace_otel.instrumentation.failopen import fails_open

__all__ = ["Patches"]

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
Put = Callable[[Any, str], Any]
"""Wraps an attribute of an owner and gives the handle by which it is taken off."""


class Patches:
    """A group of patches that is put on and taken off together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._wanted: dict[str, list[tuple[str, Put]]] = {}
        self._optional: set[tuple[str, str]] = set()
        self._handles: list[tuple[Any, str, Any]] = []
        self._hooked: set[str] = set()
        self._installed = False

    def add(self, module: str, path: str, wrapper: Wrapper, *, optional: bool = False) -> None:
        """Want `module.path` (for instance `HTTPTransport.handle_request`) wrapped once the module is imported.

        `optional`: only some versions of the library have it there.
        """
        self._wanted.setdefault(module, []).append(
            (path, lambda owner, attribute: wrapt.wrap_function_wrapper(owner, attribute, wrapper))
        )
        if optional:
            self._optional.add((module, path))

    def add_plain(self, module: str, path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Want `module.path` replaced by the function that `make` gives for it."""
        self._wanted.setdefault(module, []).append((path, functools.partial(_replace, make)))

    @fails_open("putting a boundary on", None)
    def install(self) -> None:
        """Wrap what is imported now; the rest when it is imported. Twice is once."""
        self._installed = True
        for module in self._wanted:
            if module in self._hooked:
                loaded = sys.modules.get(module)
                if loaded is not None:
                    self._patch(loaded, module)
            else:
                self._hooked.add(module)
                wrapt.register_post_import_hook(self._hook(module), module)

    def also(self, owner: Any, attribute: str, wrapper: Wrapper) -> None:
        """Wrap `owner.attribute` now, in whatever was put there by others."""
        if not self.has(owner, attribute):
            self._handles.append((owner, attribute, wrapt.wrap_function_wrapper(owner, attribute, wrapper)))

    def uninstall(self) -> None:
        """Take our wrappers off, wherever they are in a chain."""
        self._installed = False
        while self._handles:
            owner, attribute, handle = self._handles.pop()
            try:
                wrapt.unwrap_object(owner, attribute, handle, missing_ok=True)
            except Exception as error:
                recording.fault(f"taking the boundary off {owner.__name__}.{attribute}", error)

    @property
    def on(self) -> bool:
        """Whether the group is put on."""
        return self._installed

    def installed(self) -> list[str]:
        """`owner.attribute` of every wrapper in place."""
        return [f"{getattr(owner, '__module__', owner.__name__)}.{attribute}" for owner, attribute, _ in self._handles]

    def _hook(self, name: str) -> Callable[[ModuleType], None]:
        def hook(module: ModuleType) -> None:
            if self._installed:
                self._patch(module, name)

        return hook

    def _patch(self, module: ModuleType, name: str) -> None:
        for path, put in self._wanted[name]:
            try:
                owner, attribute = _owner(module, path)
                if self.has(owner, attribute):
                    continue
                self._handles.append((owner, attribute, put(owner, attribute)))
            except Exception as error:  # an import must not fail because of us
                if isinstance(error, AttributeError) and (name, path) in self._optional:
                    continue
                recording.fault(f"putting the boundary on {name}.{path}", error)

    def has(self, owner: Any, attribute: str) -> bool:
        """Whether a wrapper of ours is somewhere in the chain on `owner.attribute`."""
        return any(
            have is owner and name == attribute and _wrapped(owner, attribute, handle)
            for have, name, handle in self._handles
        )


def _owner(module: ModuleType, path: str) -> tuple[Any, str]:
    owner: Any = module
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    if attribute not in vars(owner):  # gevent puts a class of the same name on top of that of the standard library
        twins = [kind for kind in getattr(owner, "__mro__", ()) if kind.__name__ == owner.__name__]
        owner = next((kind for kind in twins if attribute in vars(kind)), None)
        if owner is None:
            raise AttributeError(path)
    return owner, attribute


def _replace(make: Callable[[Callable[..., Any]], Callable[..., Any]], owner: Any, attribute: str) -> Any:
    original = vars(owner)[attribute]
    made = functools.wraps(original)(make(original))
    setattr(owner, attribute, made)
    return made


def _wrapped(owner: Any, attribute: str, handle: Any) -> bool:
    """True while `handle` is somewhere in the chain of wrappers on the attribute."""
    found = vars(owner).get(attribute)
    while found is not None:
        if found is handle:
            return True
        found = getattr(found, "__wrapped__", None)
    return False
