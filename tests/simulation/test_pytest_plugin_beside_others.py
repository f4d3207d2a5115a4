"""The pytest plugin beside other plugins and in any mode; other tests run unchanged."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.wire

pytest_plugins = ["pytester"]

ASYNC_TESTS = """
import asyncio, time
import pytest
import tidegate

MARK

@pytest.fixture(params=[1, 2])
def engines(request):
    return request.param

async def one_turn(episode, task):
    episode.append("?")
    await episode.generate()
    return 1.0

async def test_hours_pass_at_once(tidegate_serve, engines):
    async with tidegate_serve(engines=engines) as rollouts:
        await asyncio.sleep(3600.0)
        assert (await rollouts.evaluate([1], episode=one_turn)).rewards == [1.0]
    assert asyncio.get_running_loop().time() > 3600.0

class TestInAClass:
    @pytest.fixture(autouse=True)
    def set_up(self):
        self.is_set_up = True

    async def test_it_works_too(self, tidegate_serve):
        assert self.is_set_up
        async with tidegate_serve():
            pass

def test_it_stands_in_for_the_real_one(tidegate_serve, tidegate_virtual_time, monkeypatch):
    monkeypatch.setattr(tidegate, "serve", tidegate_serve)

    async def my_program():
        async with tidegate.serve(
            model="my/model", engines=2, max_running_turns=4, run_directory="runs/x", resume=None
        ) as rollouts:
            return rollouts.statistics().admissible_groups

    assert tidegate_virtual_time.run(my_program()) > 0
"""

FIXTURE_LOOPS = ["-o", "asyncio_default_fixture_loop_scope=function"]
"""pytest-asyncio warns without this."""

REAL_TIME_TEST = """
async def test_tests_without_the_fixtures_are_unchanged():
    before_s = time.monotonic()
    await asyncio.sleep(0.01)
    assert time.monotonic() - before_s > 0.009
"""


@pytest.mark.parametrize(
    ("options", "mark", "others"),
    [
        ([*FIXTURE_LOOPS, "-o", "asyncio_mode=auto"], "", REAL_TIME_TEST),
        ([*FIXTURE_LOOPS, "-o", "asyncio_mode=strict"], "pytestmark = pytest.mark.asyncio", ""),
        ([*FIXTURE_LOOPS, "-o", "asyncio_mode=strict"], "", ""),
        (["-p", "no:asyncio"], "", ""),
    ],
    ids=["auto", "strict, marked", "strict, unmarked", "without pytest-asyncio"],
)
def test_async_tests_run_in_virtual_time_whatever_pytest_asyncio_does(
    options: list[str], mark: str, others: str, pytester: pytest.Pytester
) -> None:
    tests = ASYNC_TESTS.replace("MARK", mark) + others
    if "asyncio" in mark:  # it says so itself of a test that isn't async
        tests = tests.replace("def test_it_stands", "def not_a_test")
    pytester.makepyfile(tests)
    result = pytester.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider", *options)
    result.assert_outcomes(passed=4 - ("asyncio" in mark) + bool(others))


def test_the_documented_example_runs_unchanged(pytester: pytest.Pytester) -> None:
    page = Path(__file__).parents[2] / "docs" / "testing.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    pytester.makepyfile("\n".join(blocks))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=4)


def test_a_failed_test_reports_its_engines_and_their_last_messages_without_raw_bytes(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        async def ask(episode, task):
            episode.append(task)
            await episode.generate(max_tokens=8)
            return 1.0

        async def test_that_fails(tidegate_serve):
            async with tidegate_serve(engines=2) as rollouts:
                await rollouts.evaluate(["1+1="] * 6, episode=ask)
                assert False
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*engines and the last messages, in virtual seconds*", "engine-0: *", "engine-1: *"]
    )
    messages = [line for line in result.outlines if re.search(r" engine-[01] (->|<-) ", line)]
    assert 0 < len(messages) <= 8
    assert max(map(len, messages)) < 160
    assert not any("\\x" in line for line in result.outlines)


def test_a_session_without_the_fixtures_imports_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing_is_loaded():
            ours = {name for name in sys.modules if name.startswith("tidegate")}
            rooms = {"tidegate", "tidegate.simulation", "tidegate.transport"}
            modules = {"tidegate.simulation.pytest_plugin", "tidegate.transport.printable"}
            assert ours == rooms | modules
            assert not {"torch", "zmq", "msgspec", "pydantic"} & sys.modules.keys()
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
