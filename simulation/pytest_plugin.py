"""pytest plugin for code that uses Tidegate: fixtures without GPU, engine processes or waiting.

pytest loads this module in every run where Tidegate is installed, so it imports nothing but pytest
until a test requests one of the fixtures. An async test that uses a fixture runs in virtual time,
with or without pytest-asyncio, in either mode of pytest-asyncio. See docs/testing.md. pytest finds
the plugin through an entry point.
"""

import inspect
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from tidegate.simulation.engine.scripted import ScriptedEngine
    from tidegate.simulation.run.serve import ServeInTests
    from tidegate.simulation.run.virtual_time import VirtualTime

TIME, SERVE = "tidegate_virtual_time", "tidegate_serve"
FIXTURES = frozenset({TIME, SERVE, "tidegate_serve_sync", "tidegate_engine"})

TIME_LIMIT_S = 7200.0
"""Longest duration of a test in virtual seconds. A limit is needed because heartbeats of engines
never end; two hours of heartbeats cost two real seconds."""

_STORY = pytest.StashKey["Callable[[], str]"]()
"""Stash key of the function that describes the engines and messages of the test's newest run."""


@pytest.fixture
def tidegate_virtual_time() -> "Iterator[VirtualTime]":
    """Virtual clock of the test: ``run`` a coroutine, ``sleep``, or read ``now_s``.

    Waiting advances the clock at once and takes no real time.
    """
    from tidegate.simulation.run.virtual_time import VirtualTime

    time = VirtualTime(limit_s=TIME_LIMIT_S)
    yield time
    time.close()


@pytest.fixture
def tidegate_serve(
    request: pytest.FixtureRequest, tidegate_virtual_time: "VirtualTime"
) -> "ServeInTests":
    """Stand-in for ``tidegate.serve`` over simulated engines, in virtual time."""
    from tidegate.simulation.run.serve import ServeInTests

    serve = ServeInTests(tidegate_virtual_time)
    request.node.stash[_STORY] = serve.story
    return serve


@pytest.fixture
def tidegate_serve_sync(tidegate_serve: "ServeInTests") -> "Callable[..., Any]":
    """Stand-in for ``tidegate.serve_sync`` over simulated engines, in virtual time."""
    return tidegate_serve.sync


@pytest.fixture
def tidegate_engine() -> "type[ScriptedEngine]":
    """Class :class:`ScriptedEngine`: call it to make an engine with a given speed and faults.

    Examples are engines that are slow, crash at a given token or refuse weights.
    """
    from tidegate.simulation.engine.scripted import ScriptedEngine

    return ScriptedEngine


class VirtualTimeTest(pytest.Function):
    """An async test, run in virtual time."""

    def runtest(self) -> None:
        """Run the test's coroutine in virtual time. Pytest has already set up its fixtures."""
        time = cast("VirtualTime", self._request.getfixturevalue(TIME))
        names = self._fixtureinfo.argnames
        time.run(self.obj(**{name: self.funcargs[name] for name in names}))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pycollect_makeitem() -> Generator[None, object, object]:
    """Turn async tests that use the fixtures into :class:`VirtualTimeTest` items.

    ``tryfirst`` makes this the outermost wrapper: it converts what other plugins for async tests
    have made of these tests, so those plugins don't run them.
    """
    made = yield
    if isinstance(made, list):
        return [_in_virtual_time(item) for item in made]
    return _in_virtual_time(made)


def _in_virtual_time(item: object) -> object:
    if not isinstance(item, pytest.Function) or FIXTURES.isdisjoint(item.fixturenames):
        return item
    if not inspect.iscoroutinefunction(item.obj):
        return item
    assert item.parent is not None
    test: VirtualTimeTest = VirtualTimeTest.from_parent(
        item.parent,
        name=item.name,
        callspec=getattr(item, "callspec", None),
        fixtureinfo=item._fixtureinfo,
        keywords=item.keywords,
        originalname=item.originalname,
    )
    test.own_markers = item.own_markers
    return test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the engines' states and last messages to the report of a failed test."""
    report = yield
    story = item.stash.get(_STORY, None)
    if story is not None and report.failed and call.when == "call" and (text := story()):
        report.sections.append(("engines and the last messages, in virtual seconds", text))
    return report
