# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: recorded failures as tests that run offline.

`sftrace_replay("refund.sftrace")` is a `with` block under replay; `@pytest.mark.sftrace_replay("refund.sftrace")` puts
the whole test function under one, and the fixture of that name then gives it. Both end with the check that nothing
diverged, that every recorded call was made, and that the output is the recorded one where both gave one.

Decision: pytest loads this module in every run of every project that has the package, so it imports nothing of ours
until a test asks. A path is looked for beside the test file, then in pytest's root folder. Rejected: a replay around
setup and teardown of fixtures too, which would freeze the connections of everything that a test needs around it.

Source: `design.md`, "Result".
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sftrace_otel.core.trajectory import Trajectory
    from sftrace_otel.replay import ReplayReport, ReplaySession

__all__ = ["Replayed", "Replayer"]

_KEY = pytest.StashKey["Replayed"]()
_MARK = "sftrace_replay"


class Replayed:
    """A block under replay. Leaving it checks the replay; `check=False` leaves that to `verify`."""

    def __init__(self, item: pytest.Item, bundle: Path, options: dict[str, Any]) -> None:
        self._item = item
        self._check = options.pop("check", True)
        self.bundle = bundle
        from sftrace_otel.replay import ReplaySession

        self.session: ReplaySession = ReplaySession.from_trace(bundle, **options)

    @property
    def trajectory(self) -> Trajectory:
        """What the program has done so far, with assertions about it."""
        return self.session.trajectory

    def report(self) -> ReplayReport:
        """What the replay came to."""
        return self.session.report()

    def verify(self) -> None:
        """Raise what stopped the replay, a ReplayMismatchError where recorded calls were never made, and an
        AssertionError where the output is another one than the recorded."""
        __tracebackhide__ = True
        self.session.verify_complete()
        report = self.session.report()
        if report.outcome_differences:
            raise AssertionError(report.text())

    def __enter__(self) -> Replayed:
        self.session.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        from sftrace_otel.errors import ReplayError

        self.session.__exit__(None, None, None) if error is None else self.session.stop(self.session.failed(error))
        if error is not None:
            if self.session.latched is not None and not isinstance(error, ReplayError):
                self._item.add_report_section("call", "sftrace", str(self.session.latched))
        elif self._check:
            self.verify()

    async def __aenter__(self) -> Replayed:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        self.__exit__(kind, error, traceback)


class Replayer:
    """What the fixture gives: called with a bundle, a `Replayed`; under a marker also the marker's replay itself."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    def __call__(self, bundle: str | Path, **options: Any) -> Replayed:
        """A replay of `bundle`: `with sftrace_replay("refund.sftrace") as replay: …`.

        `options` are those of `ReplaySession.from_trace`, and `check=False`. Raises what `from_trace` raises.
        """
        return Replayed(self._item, _found(self._item, Path(bundle)), options)

    def __getattr__(self, name: str) -> Any:
        marked = self._item.stash.get(_KEY, None)
        if marked is None or name.startswith("__"):
            raise AttributeError(f"{name}: the test has no marker {_MARK}; say sftrace_replay(BUNDLE).{name}")
        return getattr(marked, name)


def _found(item: pytest.Item, bundle: Path) -> Path:
    places = (item.path.parent / bundle, item.config.rootpath / bundle)
    return next((place for place in places if place.exists()), places[0])


@pytest.fixture
def sftrace_replay(request: pytest.FixtureRequest) -> Replayer:
    """Replays recorded runs: `with sftrace_replay("refund.sftrace") as replay: …`."""
    return Replayer(request.node)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{_MARK}(bundle, **options): run the test function under replay of a recorded run, offline"
    )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    mark = pyfuncitem.get_closest_marker(_MARK)
    if mark is None:
        return (yield)
    if len(mark.args) != 1:
        raise pytest.UsageError(f"{pyfuncitem.nodeid}: @pytest.mark.{_MARK} takes one bundle, got {len(mark.args)}")
    replayed = Replayer(pyfuncitem)(mark.args[0], **mark.kwargs)
    pyfuncitem.stash[_KEY] = replayed
    with replayed:
        return (yield)
