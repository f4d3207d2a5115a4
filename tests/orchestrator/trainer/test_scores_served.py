"""Tests that trainers get log-probs, embeddings and rewards from real engines during a run."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import tidegate
from tests.forked_programs import children
from tests.models import make_model_directory
from tests.segments import weights_open
from tidegate.errors import ScoreRefused, TurnRefused

pytestmark = pytest.mark.wire

SMALL: dict[str, Any] = {
    "engines": 1,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 8,
}

SEQUENCES = [np.random.default_rng(n).integers(0, 96, 3 + 7 * n).tolist() for n in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    before = weights_open()
    yield
    assert children(recursive=True) == []
    assert weights_open() <= before


def peer_of(path: Path, kind: str = "AutoModelForCausalLM") -> Any:
    return getattr(transformers, kind).from_pretrained(path, dtype=torch.float32).eval()


def logprobs_of(peer: Any, tokens: list[int], start: int = 1) -> Any:
    with torch.no_grad():
        logprobs = peer(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[start - 1 :, 0].numpy()


async def one_turn(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    turn = await episode.generate(max_tokens=30)
    return float(turn.token_ids[0] % 2)


async def test_a_trainer_scores_beside_rollouts_and_an_engine_that_is_killed_costs_no_answer(
    model: Path,
) -> None:
    versions: dict[int, Any] = {0: peer_of(model)}
    state = load_file(model / "model.safetensors")
    settings = {**SMALL, "engines": 2, "max_staleness": 2}
    async with tidegate.serve(model=model, **settings) as rollouts:
        async for _ in rollouts.batches(range(6), episode=one_turn):
            scores = asyncio.create_task(rollouts.score(SEQUENCES, start=2, top_logprobs=2))
            if rollouts.version == 1:
                children(recursive=True)[0].kill()
            state = {name: tensor * 1.05 for name, tensor in state.items()}
            await rollouts.publish(state)
            peer = versions[rollouts.version] = peer_of(model)
            peer.load_state_dict(state, strict=False)
            for tokens, score in zip(SEQUENCES, await scores, strict=True):
                expected = logprobs_of(versions[score.version], tokens, start=2)
                np.testing.assert_allclose(score.logprobs, expected, atol=1e-4)
                assert score.top_ids.shape == (len(tokens) - 2, 2)
        with pytest.raises(ScoreRefused, match="outside the model's vocabulary"):
            await rollouts.score([[1, 2], [1, 200]])
    assert rollouts.statistics().ledger.error == 0


async def test_a_reference_model_is_served_beside_the_policy_and_asked_by_episodes_too(
    model: Path, tmp_path: Path
) -> None:
    other = make_model_directory(tmp_path / "reference", seed=5)

    async def compare(episode: tidegate.Episode, task: int) -> float:
        episode.append([10, 11, 12])
        turn = await episode.generate(max_tokens=8, temperature=1.0)
        context = episode.token_ids
        (mine,) = await episode.score([context], start=3)
        np.testing.assert_allclose(mine.logprobs, turn.logprobs, atol=1e-4)
        (theirs,) = await episode.score([context], start=3, by=reference)
        np.testing.assert_allclose(
            theirs.logprobs, logprobs_of(peer_of(other), context, start=3), atol=1e-4
        )
        return 1.0

    async with (
        tidegate.serve(model=model, **SMALL) as rollouts,
        tidegate.score_server(model=other) as reference,
    ):
        by_policy, by_reference = await rollouts.score(SEQUENCES), await reference.score(SEQUENCES)
        assert (await rollouts.evaluate([0], episode=compare)).rewards == [1.0]
    for path, scores in ((model, by_policy), (other, by_reference)):
        peer = peer_of(path)
        for tokens, score in zip(SEQUENCES, scores, strict=True):
            np.testing.assert_allclose(score.logprobs, logprobs_of(peer, tokens), atol=1e-4)


def test_a_reward_model_judges_and_does_not_speak(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "llama", labels=1)

    async def speak(episode: tidegate.Episode, task: int) -> float:
        episode.append([1, 2])
        with pytest.raises(TurnRefused, match="classification head of 1 labels"):
            await episode.generate(max_tokens=2)
        (by_itself,) = await episode.reward(SEQUENCES[task : task + 1])
        (by_judge,) = await episode.reward(SEQUENCES[task : task + 1], by=judge)
        np.testing.assert_allclose(by_judge.values, by_itself.values, atol=1e-5)
        return float(by_judge.values[0])

    with (
        tidegate.score_server_sync(model=path) as judge,
        tidegate.serve_sync(model=path, **SMALL) as rollouts,
    ):
        rewards = judge.reward(SEQUENCES)
        judged = np.array(rollouts.evaluate([0, 1], episode=speak).rewards, float)
        np.testing.assert_allclose(judged, [one.values[0] for one in rewards[:2]], atol=1e-4)
        vectors = judge.embed(SEQUENCES, pooling="none", start=1)
        with pytest.raises(ScoreRefused, match="no engine of this run computes logprobs"):
            judge.score(SEQUENCES)
    peer = peer_of(path, "AutoModelForSequenceClassification")
    for tokens, reward, vector in zip(SEQUENCES, rewards, vectors, strict=True):
        with torch.no_grad():
            output = peer(torch.tensor([tokens]), output_hidden_states=True)
        np.testing.assert_allclose(reward.values, output.logits[0], atol=1e-4)
        hidden = output.hidden_states[-1][0, 1:]
        np.testing.assert_allclose(vector.values, hidden, atol=1e-4, rtol=1e-4)
