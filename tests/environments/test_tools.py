"""Tools in worker processes: every failure becomes text for the model."""

import asyncio
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tidegate import EnvironmentPool, Tools
from tidegate.errors import ConfigError

pytestmark = pytest.mark.wire

MODULE = "tests.environments.unruly"


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(processes=1, call_timeout_s=30.0) as pool:
        yield pool


@pytest.fixture
def tools(pool: EnvironmentPool) -> Tools:
    return Tools(
        pool, {tool: f"{MODULE}:{tool}" for tool in ("add", "wait", "misbehave", "nothing")}
    )


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("add", {"left": 2, "right": 3}, "5"),
        ("add", {"left": 2}, "3"),
        (
            "add",
            {"left": "2"},
            "error: add was called with wrong arguments: Expected `int`, got `str`",
        ),
        (
            "add",
            {"right": 2},
            "error: add was called with wrong arguments: .*missing required field `left`",
        ),
        ("add", {"left": 2, "middle": 3}, "error: add was called with wrong arguments: .*`middle`"),
        ("add", "2", "error: add takes its arguments by name, as one JSON object"),
        ("add", {"left": object()}, "error: add: the arguments can't be sent"),
        ("subtract", {}, "error: there is no tool 'subtract'; the tools are: add, misbehave"),
        ("nothing", {}, "error: nothing failed: ImportError"),
        ("misbehave", {"how": "raise"}, "error: misbehave failed: LookupError: no such door"),
        ("misbehave", {"how": "exit"}, "error: misbehave crashed: exit status 7$"),
        ("misbehave", {"how": "memory"}, "error: misbehave failed: MemoryError"),
    ],
)
async def test_a_tools_result_or_error_is_text(
    tools: Tools, name: str, arguments: Any, says: str
) -> None:
    text = await tools.call(name, arguments)
    assert re.match(says, text), text


@pytest.mark.parametrize(
    ("name", "arguments"), [("misbehave", {"how": "hang"}), ("wait", {"seconds": 60.0})]
)
async def test_a_tool_that_times_out_is_killed_and_the_next_call_succeeds(
    tools: Tools, name: str, arguments: dict[str, Any]
) -> None:
    late, other = await asyncio.gather(
        tools.answer(name, arguments, timeout_s=0.3), tools.answer("add", {"left": 1})
    )
    assert (late.text, late.is_error) == (f"error: {name} did not return within 0.3 s", True)
    assert (other.text, other.is_error) == ("2", False)


async def test_an_awaiting_tool_does_not_delay_other_tools(pool: EnvironmentPool) -> None:
    """Fifty calls that wait 0.2 s each would take ten seconds one after another."""
    tools = Tools(pool, {"wait": f"{MODULE}:wait"})
    async with asyncio.timeout(8.0):
        answers = await asyncio.gather(*(tools.call("wait", {"seconds": 0.2}) for _ in range(50)))
    assert answers == ["awake"] * 50


async def test_tools_are_described_in_the_format_of_chat_templates(
    tools: Tools, pool: EnvironmentPool
) -> None:
    described = await Tools(pool, {"plus": f"{MODULE}:add"}).describe()
    assert described == [
        {
            "type": "function",
            "function": {
                "name": "plus",
                "description": "The sum of two whole numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "left": {"type": "integer"},
                        "right": {"type": "integer", "default": 1},
                    },
                    "required": ["left"],
                    "additionalProperties": False,
                },
            },
        }
    ]
    with pytest.raises(ConfigError, match=r"'any' can't be described: TypeError: .*\*things"):
        await Tools(pool, {"any": f"{MODULE}:takes_anything"}).describe()


async def test_a_worker_process_that_fails_to_start_gives_an_error_result_with_the_reason(
    tmp_path: Any,
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -S -c 'import msgspec'\n")
    python.chmod(0o755)
    async with EnvironmentPool(processes=1, python=python) as pool:
        tools = Tools(pool, {"add": f"{MODULE}:add"})
        assert await tools.call("add", {"left": 1}) == "error: add crashed: exit status 1"
        with pytest.raises(ConfigError, match="No module named 'msgspec'"):
            await tools.describe()
