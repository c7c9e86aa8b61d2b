# SPDX-License-Identifier: Apache-2.0
"""The clock and chance, as the program asks for them: recorded if that is asked for, and given back under replay.

Decision: what is asked of `time`, `datetime.now`, `random` and `uuid` by code of the program is recorded; what others
ask goes by. The one who asks is the nearest Python frame that is not in `random.py`, pydantic or a generated
`__init__`; it is of the program where its file is neither of the standard library, nor in a folder of installed
packages, nor ours. So OpenTelemetry's ids, asyncio's loop, logging, TLS and the SDKs' retries see the real clock and
real chance, also under replay. A replacement is an object and no function, so that `timer = time.time` in a class body
still is no method; it is put on only while somebody records or replays such reads.

`datetime.datetime` keeps its identity: its method is exchanged in the dictionary of the type, which CPython lets one
reach through `gc`. Draws of the module `random` are recorded at the two methods that all others use, on its shared
instance; of the program's own instances the seed that they were not given. `secrets`, `os.urandom` and
`random.SystemRandom` are never touched.

Rejected: a subclass in place of `datetime` (pydantic, pickle and `type(x) is datetime` see it), and asking
`inspect.stack()` (a thousand times the cost).
"""

from __future__ import annotations

import datetime
import gc
import os
import random
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable
from functools import partial
from sys import _getframe
from types import FrameType, ModuleType
from typing import Any

from sftrace_otel import recorder as recording
from sftrace_otel.core.draws import NONE
from sftrace_otel.errors import ReplayExhaustedError
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.recorder import current_scope

__all__ = ["install", "patched", "uninstall"]

_HERE = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep  # noqa: PTH120
_LIBRARIES = tuple(
    {
        os.path.join(os.path.realpath(sysconfig.get_paths()[name]), "")  # noqa: PTH118
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_PROGRAM, _LIBRARY, _THROUGH = 1, 0, 2
_known: dict[str, int] = {random.__file__: _THROUGH}


def _kind_of(path: str) -> int:
    """Whose code is in a file; remembered."""
    known = _known.get(path)
    if known is None:
        place = os.path.realpath(path)
        if f"{os.sep}pydantic{os.sep}" in place and any(one in place for one in _INSTALLED):
            known = _THROUGH
        elif place.startswith((_HERE, *_LIBRARIES)) or any(one in place for one in _INSTALLED) or path[0] == "<":
            known = _LIBRARY
        else:
            known = _PROGRAM
        if len(_known) < 65536:
            _known[path] = known
    return known


def _asks(frame: FrameType | None) -> bool:
    """Whether code of the program asks."""
    while frame is not None:
        path = frame.f_code.co_filename
        kind = _known.get(path)
        if kind is None:
            if path[:1] == "<" or not path:  # typed in, or generated: whose it is stands in its globals
                scope = frame.f_globals
                path = scope.get("__file__") or ""
                kind = _kind_of(path) if path else (_PROGRAM if scope.get("__name__") == "__main__" else _LIBRARY)
            else:
                kind = _kind_of(path)
        if kind != _THROUGH:
            return kind == _PROGRAM
        frame = frame.f_back
    return False


def _read(source: str, frame: FrameType | None, real: Callable[[], Any], codec: _Codec, bits: int | None = None) -> Any:
    """What `source` gives the program here: the recorded value, else the real one, which is recorded if asked for."""
    replay, recorder = replaying._active, recording._active
    draws = None if replay is None else replay.session.draws
    records = recorder is not None and recorder.draws
    if (draws is None and not records) or not _asks(frame):
        return real()
    found: Any = NONE
    lineage = None
    try:
        scope = current_scope()
        lineage = scope.where()
        if (
            draws is not None
            and replay is not None
            and not scope.live
            and (not draws.of_block or lineage or replaying.in_block.get())
        ):
            found = draws.take(source, lineage, bits)
            if found is NONE and replay.session.order == "strict":
                text = f"the program asks {source} more often, or otherwise, than was recorded"
                replay.session.latch(ReplayExhaustedError(text))
            if found is not NONE:
                found = codec[1](found)
    except Exception as error:
        recording.fault("giving a recorded clock or draw", error)
        found = NONE
    value = real() if found is NONE else found
    if records and recorder is not None:
        try:
            recorder.draw(scope, tracing.current_ids()[1], source, lineage, codec[0](value), bits)
        except Exception as error:
            recording.fault("recording a clock or draw", error)
    return value


_Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def _same(value: Any) -> Any:
    return value


_FLOAT: _Codec = (_same, float)
_INT: _Codec = (str, int)
_UUID: _Codec = (str, uuid.UUID)


def _from_datetime(value: datetime.datetime) -> str:
    if value.tzinfo is not None:
        value = value.astimezone(datetime.UTC)
    return value.isoformat(timespec="microseconds") + (";fold=1" if value.fold else "")


class _Source:
    """Stands for a function of the standard library that takes no arguments, or for `getrandbits`."""

    def __init__(self, name: str, original: Callable[..., Any], codec: _Codec, *, bits: bool = False) -> None:
        self.__wrapped__ = original
        self.__name__ = self.__qualname__ = name.rpartition(".")[2]
        self.__module__ = name.rpartition(".")[0]
        self.__doc__ = original.__doc__
        self._source = name
        self._codec = codec
        self._bits = bits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._bits and len(args) == 1 and type(args[0]) is int and not kwargs:
            bits = args[0]
            return _read(self._source, _getframe(1), lambda: self.__wrapped__(bits), self._codec, bits)
        if args or kwargs or self._bits:  # a wrong call, or uuid1 with a node: as it is
            return self.__wrapped__(*args, **kwargs)
        return _read(self._source, _getframe(1), self.__wrapped__, self._codec)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __reduce__(self) -> str:
        return self.__name__


_TIMES = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
_UUIDS = ("uuid1", "uuid4", "uuid6", "uuid7")


def _sources() -> list[tuple[ModuleType, str, _Source]]:
    found = []
    for name in _TIMES:
        codec = _INT if name.endswith("_ns") else _FLOAT
        found.append((time, name, _Source(f"time.{name}", getattr(time, name), codec)))
    for name in _UUIDS:
        if hasattr(uuid, name):
            found.append((uuid, name, _Source(f"uuid.{name}", getattr(uuid, name), _UUID)))
    found.append((random, "random", _Source("random.random", random.random, _FLOAT)))
    found.append((random, "getrandbits", _Source("random.getrandbits", random.getrandbits, _INT, bits=True)))
    return found


class _Off:
    """How what was put on is taken off."""

    def __init__(self) -> None:
        self.sources: list[tuple[ModuleType, str, _Source]] = []
        self.undo: list[Callable[[], object]] = []


_wanted = False
_on: _Off | None = None


def install() -> None:
    """Watch for a recorder that wants reads recorded, or a replay that gives them back. Twice is once."""
    global _wanted
    if not _wanted:
        _wanted = True
        recording.watchers.append(_look)
        replaying.watchers.append(_look)
    _look()


def uninstall() -> None:
    """Put everything back."""
    global _wanted
    if _wanted:
        _wanted = False
        recording.watchers.remove(_look)
        replaying.watchers.remove(_look)
    _take_off()


def patched() -> list[str]:
    """What is replaced now."""
    if _on is None:
        return []
    return [one._source for _, _, one in _on.sources] + ["datetime.datetime.now", "random.Random.seed"]


def _look() -> None:
    """Put the replacements on where somebody needs them."""
    recorder, replay = recording._active, replaying._active
    if _wanted and _on is None:
        try:
            if (recorder is not None and recorder.draws) or (replay is not None and replay.session.draws is not None):
                _put_on()
        except Exception as error:
            recording.fault("putting the boundary on the clock", error)


def _put_on() -> None:
    global _on
    _on = off = _Off()
    off.sources = _sources()
    for module, name, source in off.sources:
        setattr(module, name, source)
    shared: Any = vars(random)["_inst"]
    for _, name, source in off.sources[-2:]:
        shared.__dict__[name] = source  # uniform, choice, shuffle and all others call these two of it
        off.undo.append(partial(shared.__dict__.pop, name, None))
    _put_on_seed(off)
    _put_on_datetime(off)
    by_original = {id(source.__wrapped__): source for _, _, source in off.sources}
    _exchange(by_original, only_program=True)


def _take_off() -> None:
    global _on
    off, _on = _on, None
    if off is None:
        return
    for undo in reversed(off.undo):
        undo()
    for module, name, source in off.sources:
        if vars(module).get(name) is source:
            setattr(module, name, source.__wrapped__)
    _exchange({id(source): source.__wrapped__ for _, _, source in off.sources}, only_program=False)


def _exchange(known: dict[int, Any], *, only_program: bool) -> None:
    """Exchange what modules took with `from time import time`: in those of the program, or, to undo it, in all."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if type(module) is not ModuleType:
            continue
        if only_program and not (_kind_of(path) == _PROGRAM if path else name == "__main__"):
            continue
        members = vars(module)
        for key, value in list(members.items()):
            instead = known.get(id(value))
            if instead is not None and module not in (time, random, uuid):
                members[key] = instead


def _put_on_seed(off: _Off) -> None:
    """An instance of the program's own that was given no seed: it gets one that is known."""
    kind: Any = random.Random
    original = kind.__dict__["seed"]

    def seed(self: Any, a: Any = None, version: int = 2) -> None:
        if a is None and _asks(frame := _getframe(1)):
            a = _read("random.Random.seed", frame, lambda: int.from_bytes(os.urandom(32), "big"), _INT)
        original(self, a, version)

    seed.__doc__ = original.__doc__
    seed.__wrapped__ = original  # type: ignore[attr-defined]
    kind.seed = seed
    off.undo.append(lambda: setattr(kind, "seed", original))


def _put_on_datetime(off: _Off) -> None:
    """`datetime.now` and `utcnow`; `today` of both classes asks `time.time` by itself."""
    if sys.implementation.name != "cpython":
        return
    kind = datetime.datetime
    members = gc.get_referents(kind.__dict__)[0]
    import ctypes

    def changed() -> None:
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))

    for name in ("now", "utcnow"):
        original = members[name]
        members[name] = classmethod(_now(original) if name == "now" else _utcnow(original))
        off.undo.append(lambda name=name, original=original: members.__setitem__(name, original))  # type: ignore[misc]
    off.undo.insert(0, changed)  # undone last
    changed()


def _now(original: Any) -> Any:
    def now(cls: Any, tz: Any = None) -> Any:
        def decoded(text: str) -> Any:
            value = cls.fromisoformat(text.partition(";")[0])
            if tz is not None:
                return value.astimezone(tz)
            return value.replace(fold=1) if text.endswith(";fold=1") else value

        source = "datetime.now" if tz is None else "datetime.now(tz)"
        return _read(source, _getframe(1), lambda: original.__get__(None, cls)(tz), (_from_datetime, decoded))

    now.__doc__ = original.__doc__
    return now


def _utcnow(original: Any) -> Any:
    def utcnow(cls: Any) -> Any:
        codec = (_from_datetime, cls.fromisoformat)
        return _read("datetime.utcnow", _getframe(1), original.__get__(None, cls), codec)

    utcnow.__doc__ = original.__doc__
    return utcnow
