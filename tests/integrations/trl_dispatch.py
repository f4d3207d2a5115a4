"""TRL's own tests of rollout_func, restated with a run in place of its mock; run by TRL's Python.

They are `TestGRPORolloutDispatch` of TRL's tests/test_grpo_trainer.py. Argument: a model directory.
Prints each test's error, or null if it passed, by the test's name, as one line of JSON.
"""

import json
import sys
import tempfile
import traceback
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import tidegate
from tidegate.errors import ConfigError

PROMPT = [{"role": "user", "content": "say something"}]


async def solve(episode: tidegate.Episode, prompt: list[dict[str, str]]) -> float:
    """Generate one answer."""
    return float(len((await episode.generate(messages=prompt, max_tokens=4)).token_ids))


def make_trainer(model: str, run: tidegate.SyncRollouts, scratch: str) -> Any:
    """Make TRL's trainer, which trains nothing."""
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(
            output_dir=scratch,
            num_generations=2,
            per_device_train_batch_size=2,
            model_init_kwargs={"dtype": "float32"},
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to="none",
        ),
        reward_funcs=lambda reward, **_: reward,
        train_dataset=Dataset.from_list([{"prompt": PROMPT}] * 4),
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=tidegate.trl_rollout_func(run, episode=solve),
    )
    trainer.model.train()
    return trainer


def prefers_rollout_func(trainer: Any, run: tidegate.SyncRollouts) -> None:
    """TRL takes the columns of the function as they are, and `env_mask` as its tool mask."""
    prompt_ids, completion_ids, tool_mask, completions, logprobs, extra, *_ = trainer._generate(
        [PROMPT, PROMPT]
    )
    assert len(prompt_ids) == len(completions) == len(completion_ids) == 2
    assert tool_mask == [[1] * len(ids) for ids in completion_ids]
    assert [len(values) for values in logprobs] == [len(ids) for ids in completion_ids]
    assert extra == {"reward": [float(len(ids)) for ids in completion_ids]}


def syncs_weights_when_needed(trainer: Any, run: tidegate.SyncRollouts) -> None:
    """Weights are published once the step has moved. vLLM beside the run is refused."""
    before = run.version
    trainer.state.global_step += 1
    trainer._generate([PROMPT, PROMPT])
    assert run.version == before + 1
    other = tidegate.trl_rollout_func(run, episode=solve)
    trainer.use_vllm = True
    try:
        with pytest.raises(ConfigError, match="use_vllm"):
            other([PROMPT, PROMPT], trainer)
    finally:
        trainer.use_vllm = False


def raises_when_keys_are_missing(trainer: Any, run: tidegate.SyncRollouts) -> None:
    """TRL misses no key of the function's, and names one that its answer omits."""
    function = trainer.rollout_func
    trainer.rollout_func = lambda *given: {
        name: column for name, column in function(*given).items() if name != "logprobs"
    }
    with pytest.raises(ValueError, match=r"rollout_func must return keys \['logprobs'\]"):
        trainer._generate([PROMPT, PROMPT])


TESTS = {
    "prefers_rollout_func": prefers_rollout_func,
    "rollout_func_syncs_vllm_weights_when_needed": syncs_weights_when_needed,
    "rollout_func_raises_when_required_keys_are_missing": raises_when_keys_are_missing,
}
"""Tests by TRL's name, without its ``test_generate_``."""


def main(model: str) -> None:
    """Run the tests."""
    shape: dict[str, Any] = {"max_staleness": 0, "group_size": 2, "groups_per_batch": 1}
    with (
        tempfile.TemporaryDirectory() as scratch,
        tidegate.serve_sync(model=model, engines=1, **shape) as run,
    ):
        trainer = make_trainer(model, run, scratch)
        errors = {name: _error_of(test, trainer, run) for name, test in TESTS.items()}
    sys.stdout.write(json.dumps(errors) + "\n")


def _error_of(test: Any, *given: Any) -> str | None:
    try:
        test(*given)
    except Exception:  # noqa: BLE001 - reported in the output
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    main(sys.argv[1])
