"""Tests of sampling options in a whole run, from the episode to the audit."""

from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.models import make_model_directory
from tidegate.errors import TurnRefused
from tidegate.observability.audit.audit import audit_run

pytestmark = pytest.mark.wire

SMALL: dict[str, Any] = {
    "engines": 1,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 8,
}


async def test_every_sampling_option_reaches_the_engine_and_its_tokens_are_audited(
    tmp_path: Path,
) -> None:
    asked: tidegate.SamplingOptions = {
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {40: 1.5},
        "min_tokens": 3,
        "stop_strings": ["e", "ab"],
        "top_logprobs": 2,
        "raw_logprobs": True,
        "logits_processors": [tidegate.LogitsProcessor("disallowed_tokens", {"token_ids": [50]})],
    }
    turns: list[tidegate.GeneratedTurn] = []

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append([10 + task, 11, 12])
        turns.append(await episode.generate(max_tokens=12, top_k=40, **asked))
        own = tidegate.LogitsProcessor("once")
        once = await episode.generate(max_tokens=8, logits_processors=[own])
        assert len({*once.token_ids}) == len(once.token_ids)
        failing = tidegate.LogitsProcessor("raising", {"after": 2})
        with pytest.raises(TurnRefused, match="'raising' failed after 2 tokens: RuntimeError"):
            await episode.generate(max_tokens=8, stop_token_ids=[], logits_processors=[failing])
        return 0.0

    model, run = make_model_directory(tmp_path / "qwen3"), tmp_path / "run"
    async with tidegate.serve(
        model=model,
        **SMALL,
        run_directory=run,
        logits_processors=("tests.engine.sampling.own_processors",),
    ) as rollouts:
        async for _ in rollouts.batches(range(2), episode=solve):
            pass
    for turn in turns:
        count = len(turn.token_ids)
        assert 50 not in turn.token_ids
        assert turn.raw_logprobs is not None
        assert turn.top_logprobs is not None
        assert len(turn.raw_logprobs) == len(turn.top_logprobs) == count
        for token_id, logprob, top in zip(
            turn.token_ids, turn.logprobs, turn.top_logprobs, strict=True
        ):
            assert top.get(token_id, logprob) == logprob <= max(top.values())
        if turn.finish_reason == "stop" and turn.token_ids[-1] != 0:
            assert turn.text.endswith(("e", "ab"))
    report = audit_run(run)
    assert report.agrees, report.lines()
    assert report.tokens_unreplayable > 0
