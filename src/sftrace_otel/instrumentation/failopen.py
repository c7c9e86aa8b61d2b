# SPDX-License-Identifier: Apache-2.0
"""Faults of ours stay ours: a decorator for what a boundary does around the program's own call.

Decision: each step of a boundary that is not the program's call itself is marked where it is defined, so that a driver
reads as what it does, and a test can go through the steps one by one (`tests/instrumentation/test_faults.py`). Under
replay faults pass: what cannot be matched must stop, not go out. Rejected: one `try` around a whole driver, which
cannot tell a fault of ours from an exception of the program.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec, Protocol, TypeVar

from sftrace_otel import recorder as recording
from sftrace_otel.instrumentation import replaying

__all__ = ["afails_open", "fails_open"]

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")
D_co = TypeVar("D_co", covariant=True)


class _Opening(Protocol[D_co]):
    def __call__(self, function: Callable[P, T], /) -> Callable[P, T | D_co]: ...


class _AsyncOpening(Protocol[D_co]):
    def __call__(self, function: Callable[P, Awaitable[T]], /) -> Callable[P, Awaitable[T | D_co]]: ...


def fails_open(what: str, instead: D, *, replay_too: bool = False) -> _Opening[D]:
    """Give `instead` where the function raises while recording: `what` is counted as lost, and logged once.

    `replay_too`: also under replay; for what only tidies up or watches, and lets no call out.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T | D]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T | D:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if replaying._active is not None and not replay_too:
                    raise
                recording.fault(what, error)
                return instead

        return call

    return decorate


def afails_open(what: str, instead: D) -> _AsyncOpening[D]:
    """`fails_open` for coroutine functions."""

    def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T | D]]:
        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> T | D:
            try:
                return await function(*args, **kwargs)
            except Exception as error:
                if replaying._active is not None:
                    raise
                recording.fault(what, error)
                return instead

        return call

    return decorate
