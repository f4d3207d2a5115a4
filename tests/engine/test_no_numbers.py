"""Weights that give NaN or infinity for some contexts end only those turns, with the reason."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.external.fake_engine import DrivenEngine
from tests.engine.orchestra import Orchestra, Publisher
from tests.engine.ranks.ranked import ranked_engine
from tests.engine.replaying import assert_replays
from tests.engine.scheduling.driving import GREEDY, DrivenTurn, drive
from tests.models import make_model_directory
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights, load_directory
from tidegate.engine.scheduling.drafts import DraftSource, Tokens
from tidegate.engine.scheduling.sequences import EngineSequence
from tidegate.kernels.native import native
from tidegate.transport.messages import SamplingParams, TurnFailed

pytestmark = pytest.mark.wire

POISON = 7
"""Token for which the weights give NaN."""

SOUND = [[1, 2, 3, 4, 5, 6], [9, 8], [11, 12, 13], [21] * 19]
"""Contexts of different lengths: their rows are padded to each other."""

POISONED = [[1, 2, 3, POISON, 5, 6], [POISON], [9, 8] * 9 + [POISON]]


def make_overflowing(path: Path, *, makes_no_numbers: bool = True, **fields: Any) -> Path:
    """Make a model whose first layer squares 1e30 for one token only, by a column of its own.

    With ``makes_no_numbers`` False the column is absent, so all other outputs are the same.
    """
    make_model_directory(path, "llama", tied=False, **fields)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][:, -1] = 0
    tensors["model.embed_tokens.weight"][POISON, -1] = 1
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[-1] = 0  # no layer writes to that column
        if makes_no_numbers and name.endswith(
            ("0.self_attn.q_proj.weight", "0.self_attn.k_proj.weight")
        ):
            tensor[:, -1] = 1e30
    save_file(tensors, file, {"format": "pt"})
    return path


def loaded(path: Path) -> Weights:
    return load_directory(path, ModelConfig.from_directory(path), torch.float32)


def refusals(engine: DrivenEngine) -> dict[int, str]:
    return {
        output.turn: output.message for output in engine.answers if isinstance(output, TurnFailed)
    }


def submit_all(engine: DrivenEngine, prompts: Sequence[list[int]]) -> list[int]:
    return [engine.submit(prompt, 8, stop=[POISON]) for prompt in prompts]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_turns_with_nan_logits_fail_and_the_others_are_unaffected(
    is_compiled: bool, tmp_path: Path
) -> None:
    weights = loaded(make_overflowing(tmp_path))
    compiled = native(torch.float32) if is_compiled else None
    engine = DrivenEngine([weights], native=compiled, max_step_tokens=64, num_blocks=64)
    # Twice: the second time with the blocks that the first has left behind.
    for _ in range(2):
        before = len(engine.turns)
        turns = submit_all(engine, [*POISONED[:2], *SOUND, *POISONED[2:]])
        engine.run()
        engine.scheduler.check()
        assert [turn for turn in turns if turn in refusals(engine)] == [
            before,
            before + 1,
            before + 6,
        ]
        for turn in turns[2:6]:
            alone = DrivenEngine([weights], native=compiled, max_step_tokens=64, num_blocks=64)
            alone.submit(engine.turns[turn].prompt, 8, stop=[POISON])
            alone.run()
            assert engine.turns[turn].token_ids == alone.turns[0].token_ids
            assert engine.turns[turn].logprobs == pytest.approx(alone.turns[0].logprobs, abs=1e-5)
    assert all("weights v0 compute NaN or infinity" in why for why in refusals(engine).values())
    assert engine.scheduler.free_blocks == 64


class PoisonousDrafts(DraftSource):
    """Draft source that drafts one token for ever."""

    def propose(self, turns: Sequence[EngineSequence], counts: Sequence[int]) -> list[Tokens]:
        return [np.full(count, POISON, np.int32) for count in counts]


def test_a_draft_token_with_nan_logits_fails_only_turns_that_sample_it(tmp_path: Path) -> None:
    weights = loaded(make_overflowing(tmp_path, vocab_size=12))
    engines = [
        DrivenEngine([weights], drafts=drafts, max_step_tokens=64, num_blocks=64)
        for drafts in (None, PoisonousDrafts())
    ]
    for engine in engines:
        for seed in range(8):
            engine.submit([1, 2, 3], 12, seed=seed, temperature=2.0)
        engine.run()
        engine.scheduler.check()
    plain, speculating = engines
    assert speculating.drafted_tokens
    assert 0 < len(refusals(plain)) < 8
    assert refusals(plain) == refusals(speculating)
    for turn, seen in plain.turns.items():
        assert speculating.turns[turn].token_ids == seen.token_ids
        assert (turn in refusals(plain)) == (seen.token_ids[-1] == POISON)


def test_ranks_with_nan_logits_of_one_turn_continue_with_the_others(tmp_path: Path) -> None:
    prompts = [*POISONED[:2], *SOUND, *POISONED[2:]]
    with ranked_engine(make_overflowing(tmp_path)) as engine:
        for _ in range(2):
            turns = [DrivenTurn(prompt, GREEDY, (64,)) for prompt in prompts]
            drive(engine.runner, turns, new_tokens=4)
            is_finite = [bool(np.isfinite(turn.logprobs).all()) for turn in turns]
            assert is_finite == [False, False, True, True, True, True, False]


def test_a_worker_survives_nan_weights_and_recovers_with_finite_ones(
    tmp_path: Path,
) -> None:
    sound = make_overflowing(tmp_path / "sound", makes_no_numbers=False)
    unsound = make_overflowing(tmp_path / "unsound")
    options = ["--max-running-turns", "8", "--max-step-tokens", "64", "--num-kv-blocks", "64"]
    weights = {0: loaded(sound), 1: loaded(unsound), 2: loaded(sound)}
    sampling = SamplingParams(max_tokens=6, seed=3, stop_token_ids=[POISON])
    with Orchestra(tmp_path, sound, options) as engine:
        engine.welcome(credit_steps=64)
        publisher = Publisher(engine)
        for version, directory in ((1, unsound), (2, sound)):
            publisher.stage(version, directory)
            publisher.swap(version, "abort", "recompute")
            bad = engine.submit_together(POISONED, sampling)
            good = engine.submit_together(SOUND, sampling)
            for turn in good if version == 1 else [*good, *bad]:
                engine.finish(turn)
                assert_replays(turn, engine, weights)
            if version == 1:
                reported = [engine.await_one(TurnFailed) for _ in bad]
                assert sorted(refused.turn for refused in reported) == bad
                assert all(
                    "weights v1 compute NaN or infinity" in refused.message for refused in reported
                )
        publisher.close()
