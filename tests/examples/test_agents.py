"""Tests of the agent demo in a short form, and of its warm-up demonstrations."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.agent_demo import main
from examples.agent_model import agent_tokenizer
from examples.agent_tools import calculate
from examples.calculator import tasks
from examples.frozen_lake import MOVES_MAX, Lake
from examples.lake_demonstrations import LakeDemonstrations, lake_of, lakes, surveyed
from examples.tiny_model import make_model
from examples.tool_agent import TURN_TOKENS_MAX, TURNS_MAX, ToolAgent
from examples.tool_demonstrations import TOOL_AGENT, AgentDemonstrations, sums, tool_call_text
from tests.forked_programs import children
from tidegate import EnvironmentPool, environment_episode
from tidegate.environments.tools import ToolAnswer
from tidegate.observability.audit.audit import AUDIT_FILE
from tidegate.testing import ServeInTests

pytestmark = pytest.mark.wire

SCHEMAS: list[Any] = [{"type": "function", "function": {"name": "calculate"}}]


@pytest.fixture(scope="module")
def hardly_warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with hardly any warm-up, which both agents can use."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(path, recipe=TOOL_AGENT, steps_max=3)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("task", "counted"), [("tool", "tool calls"), ("lake", "moves")])
def test_an_agent_trains_within_its_bound_and_every_token_agrees(
    hardly_warm: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    task: str,
    counted: str,
) -> None:
    common = ["--model", str(hardly_warm), "--runs", str(tmp_path), "--name", "run"]
    short = ["--versions", "2", "--groups-per-batch", "2", "--held-out", "4"]
    assert main(["--task", task, *common, *short]) == 0
    report = json.loads((tmp_path / f"run-{task}" / "report.json").read_text())
    assert report["versions"] == 2
    assert report["staleness_bound"] == 2
    assert report["max_staleness"] <= 2
    assert report["discarded_rollouts"] == {}
    audit = json.loads((tmp_path / f"run-{task}" / AUDIT_FILE).read_text())
    assert audit["tokens_agreeing"] == audit["tokens"]
    assert not audit["problems"]
    output = capsys.readouterr().out
    assert f"tokens agree; {audit['verdict']}" in output
    assert f"  {counted} " in output
    assert children(recursive=True) == []


def test_a_missing_model_directory_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "nowhere", "--runs", str(tmp_path), "--task", "lake"]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err


# ---------------------------------------------------------------- the agent with a tool


async def called_here(name: str, arguments: Any) -> ToolAnswer:
    """Call the tool in the test's own process, because a worker's time is not virtual."""
    assert name == "calculate"
    try:
        return ToolAnswer(calculate(**arguments))
    except ValueError as error:
        return ToolAnswer(f"error: {error}", is_error=True)


async def test_demonstrations_equal_the_context_of_an_agent_with_these_calls(
    hardly_warm: Path, tidegate_serve: ServeInTests
) -> None:
    """The demonstration equals the recorded context of such an agent, token for token."""
    demonstrations = AgentDemonstrations(agent_tokenizer(), 0)
    task = next(task for task in tasks("train", 1) if len(task.expression.split()) == 5)
    script = [*map(tool_call_text, sums(task)), task.answer]
    contexts: list[list[int]] = []

    async def scripted(episode: Any, task: Any) -> float:
        reward = await ToolAgent(called_here, SCHEMAS)(episode, task)
        contexts.append(episode.token_ids)
        return reward

    async with tidegate_serve(model=hardly_warm, says=script) as rollouts:
        evaluation = await rollouts.evaluate([task], episode=scripted)

    assert evaluation.rewards == [1.0]
    assert contexts == [demonstrations.demonstrate(task, sums(task)).token_ids]


async def test_a_failed_call_is_answered_and_may_be_retried(
    hardly_warm: Path, tidegate_serve: ServeInTests
) -> None:
    task = next(task for task in tasks("train", 1) if len(task.expression.split()) == 3)
    agent = ToolAgent(called_here, SCHEMAS)
    script = [tool_call_text("3+"), tool_call_text(sums(task)[0]), task.answer]
    async with tidegate_serve(model=hardly_warm, says=script) as rollouts:
        evaluation = await rollouts.evaluate([task], episode=agent)
    assert evaluation.rewards == [1.0]
    assert (agent.counts.made, agent.counts.failed) == (2, 1)


async def test_an_episode_of_calls_without_an_answer_has_no_reward(
    hardly_warm: Path, tidegate_serve: ServeInTests
) -> None:
    agent = ToolAgent(called_here, SCHEMAS)
    async with tidegate_serve(model=hardly_warm, says=tool_call_text("1+1")) as rollouts:
        evaluation = await rollouts.evaluate([next(tasks("train", 1))], episode=agent)
    assert evaluation.rewards == [0.0]
    assert agent.counts.made == TURNS_MAX


async def test_the_calculator_in_a_pool_is_described_and_answers() -> None:
    async with EnvironmentPool(processes=1) as pool:
        agent = await ToolAgent.with_tools(pool)
        assert await agent.use_tool("calculate", {"expression": "12-14"}) == ToolAnswer("-2")
        wrong = await agent.use_tool("calculate", {"expression": "2**9999"})
    assert [schema["function"]["name"] for schema in agent.schemas] == ["calculate"]
    assert wrong.is_error
    assert "not a sum of two numbers" in wrong.text


def test_the_chat_template_renders_as_in_transformers(hardly_warm: Path) -> None:
    expected: Any = AutoTokenizer.from_pretrained(hardly_warm)
    demonstrations = AgentDemonstrations(agent_tokenizer(), 0)
    task = next(tasks("train", 1))
    messages = [{"role": "user", "content": task.question}]
    prompt = expected.apply_chat_template(
        messages, tools=SCHEMAS, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert demonstrations.demonstrate(task, []).token_ids[: len(prompt)] == prompt


def test_every_useful_turn_fits_its_limit() -> None:
    tokenizer = agent_tokenizer()
    for task in islice(tasks("train", 2), 100):
        for output in (*map(tool_call_text, sums(task)), task.answer):
            assert len(tokenizer.encode(output).ids) < TURN_TOKENS_MAX


# ---------------------------------------------------------------- the FrozenLake player


async def test_demonstrated_walks_are_valid_episodes(
    hardly_warm: Path, tidegate_serve: ServeInTests
) -> None:
    """Lake, observations and reward equal the environment's, token for token."""
    tokenizer = agent_tokenizer()
    demonstrations = LakeDemonstrations(tokenizer, 0)
    task = next(lakes("held_out", 3))
    shown = demonstrations.walk(surveyed(lake_of(task)), 1.0).demonstration
    pairs = zip(shown.token_ids, shown.is_action, strict=True)
    moves = tokenizer.decode([token for token, is_action in pairs if is_action])
    contexts: list[list[int]] = []
    walk = environment_episode(Lake, max_turns=MOVES_MAX, max_tokens=2)

    async def play(episode: Any, task: Any) -> float:
        reward = await walk(episode, task)
        contexts.append(episode.token_ids)
        return reward

    async with tidegate_serve(model=hardly_warm, says=list(moves)) as rollouts:
        evaluation = await rollouts.evaluate([task], episode=play)

    assert evaluation.rewards == [1.0]
    assert contexts == [shown.token_ids]


def test_no_lake_is_both_trained_on_and_held_out() -> None:
    train = {"".join(lake_of(task)) for task in islice(lakes("train", 0), 300)}
    held_out = {"".join(lake_of(task)) for task in islice(lakes("held_out", 0), 100)}
    assert not train & held_out
