"""trl_rollout_func over a real run, with a double of TRL's trainer: rows, versions and refusals."""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import tidegate
from tests.models import make_model_directory
from tests.smollm2 import DIRECTORY, needs_smollm2
from tidegate.errors import ConfigError, EpisodeError

pytestmark = pytest.mark.wire

GROUP_SIZE, GROUPS = 2, 3
OBSERVATION = "<42>"
PROMPTS = [prompt for prompt in ("one", "two", "three") for _ in range(GROUP_SIZE)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def run(path: Path) -> Iterator[tidegate.SyncRollouts]:
    with serve(path) as run:
        yield run


def serve(path: Path, **settings: Any) -> tidegate.SyncRollouts:
    shape = {"group_size": GROUP_SIZE, "groups_per_batch": GROUPS, "max_staleness": 0}
    return tidegate.serve_sync(model=path, engines=1, max_running_turns=8, **(shape | settings))


class Accelerator(SimpleNamespace):
    """Double of accelerate's, of a single process by default."""

    process_index = 0
    num_processes = 1
    distributed_type = "DistributedType.NO"

    def unwrap_model(self, model: Any) -> Any:
        return model


def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def trainer_of(model: Any, path: Path, **fields: Any) -> Any:
    model.train()
    default = {
        "accelerator": Accelerator(),
        "model": model,
        "state": SimpleNamespace(global_step=0),
        "use_vllm": False,
        "tools": None,
        "num_generations": GROUP_SIZE,
        "temperature": 1.0,
        "processing_class": tokenizer(path),
    }
    return SimpleNamespace(**(default | fields))


async def two_turns(episode: tidegate.Episode, prompt: str) -> dict[str, Any]:
    """Generate, read an observation, and generate again."""
    episode.append(prompt)
    first = await episode.generate(max_tokens=4, stop_token_ids=[])
    episode.append(OBSERVATION)
    second = await episode.generate(max_tokens=3, stop_token_ids=[])
    episode.append("never read")
    return {"reward": 0.5, "texts": [first.text, second.text], "seen": prompt}


def text_of(path: Path, token_ids: list[int]) -> str:
    return str(tokenizer(path).decode(token_ids))


async def answer(episode: tidegate.Episode, row: dict[str, Any]) -> dict[str, Any]:
    episode.append(row["prompt"])
    await episode.generate(max_tokens=2)
    return {"reward": 1.0, "expected": row["answer"]}


def test_an_episode_gets_its_prompts_whole_row_of_the_dataset(
    run: tidegate.SyncRollouts, model: Any, path: Path
) -> None:
    dataset = [{"prompt": prompt, "answer": prompt.upper()} for prompt in PROMPTS]
    rollouts = tidegate.trl_rollout_func(run, episode=answer, dataset=dataset)
    columns = rollouts(PROMPTS, trainer_of(model, path))
    assert columns["expected"] == [prompt.upper() for prompt in PROMPTS]


def test_a_dataset_whose_prompts_do_not_tell_rows_apart_is_refused(
    run: tidegate.SyncRollouts,
) -> None:
    dataset = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "answer": "10"}]
    with pytest.raises(ConfigError, match=r"the prompt '1\+1=' and differ in other columns"):
        tidegate.trl_rollout_func(run, episode=answer, dataset=dataset)


def test_each_prompt_gets_one_completion_whose_observations_are_masked(
    run: tidegate.SyncRollouts, model: Any, path: Path
) -> None:
    before = run.statistics()
    rollouts = tidegate.trl_rollout_func(run, episode=two_turns)
    columns = rollouts(PROMPTS, trainer_of(model, path))
    assert [text_of(path, ids) for ids in columns["prompt_ids"]] == PROMPTS
    assert columns["seen"] == PROMPTS
    assert columns["reward"] == [0.5] * len(PROMPTS)
    mask = [1] * 4 + [0] * len(OBSERVATION) + [1] * 3
    assert columns["env_mask"] == [mask] * len(PROMPTS)
    for index, completion in enumerate(columns["completion_ids"]):
        first, second = columns["texts"][index]
        assert text_of(path, completion) == first + OBSERVATION + second
    for group in range(0, len(PROMPTS), GROUP_SIZE):
        rows = columns["completion_ids"][group : group + GROUP_SIZE]
        assert len({tuple(row) for row in rows}) == GROUP_SIZE  # sampled by seeds of their own
    after = run.statistics()
    assert after.trained_rollouts - before.trained_rollouts == len(PROMPTS)
    assert after.ledger.trained - before.ledger.trained == 7 * len(PROMPTS)


def test_log_probs_are_the_trainers_own_under_the_weights_that_it_has(
    run: tidegate.SyncRollouts, model: Any, path: Path
) -> None:
    trainer = trainer_of(model, path)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.01 * torch.randn_like(weights))  # not those of the directory
    columns = tidegate.trl_rollout_func(run, episode=two_turns)(PROMPTS, trainer)
    check_logprobs(columns, model, atol=1e-4)


@needs_smollm2
def test_log_probs_of_a_pretrained_model_are_the_trainers_own() -> None:
    model = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
    trainer = trainer_of(model, DIRECTORY)
    with serve(DIRECTORY, dtype="float32", groups_per_batch=1, num_kv_blocks=64) as run:
        columns = tidegate.trl_rollout_func(run, episode=two_turns)(["Name a river."] * 2, trainer)
    check_logprobs(columns, model, atol=5e-4)  # of 49,152 tokens: 3e-4 were seen


def check_logprobs(columns: dict[str, Any], model: Any, *, atol: float) -> None:
    """Check that sampled tokens have the model's log-probs, and observations none."""
    for row in range(len(columns["prompt_ids"])):
        start = len(columns["prompt_ids"][row])
        token_ids = torch.tensor([columns["prompt_ids"][row] + columns["completion_ids"][row]])
        with torch.no_grad():
            logprobs = model(token_ids).logits[0].log_softmax(-1)
        own = logprobs[start - 1 : -1].gather(1, token_ids[0, start:, None])[:, 0]
        sampled = torch.tensor(columns["env_mask"][row], dtype=torch.bool)
        logprobs_returned = torch.tensor(columns["logprobs"][row])
        torch.testing.assert_close(logprobs_returned[sampled], own[sampled], atol=atol, rtol=0)
        assert not logprobs_returned[~sampled].any()


def test_weights_are_published_first_and_whenever_the_step_has_moved(
    run: tidegate.SyncRollouts, model: Any, path: Path
) -> None:
    trainer = trainer_of(model, path)
    rollouts = tidegate.trl_rollout_func(run, episode=two_turns)
    before = run.version
    model.eval()
    rollouts(PROMPTS, trainer)  # an evaluation before training
    assert run.version == before + 1
    model.train()
    rollouts(PROMPTS, trainer)
    assert run.version == before + 1  # the same weights
    trainer.state.global_step = 1
    rollouts(PROMPTS, trainer)
    assert run.version == before + 2
    rollouts(PROMPTS, trainer)  # a step of several generations: each batch of a run ends a version
    assert run.version == before + 3
    assert run.statistics().max_staleness_seen == 0


def test_evaluations_take_any_number_of_prompts_and_do_not_count_as_training(
    run: tidegate.SyncRollouts, model: Any, path: Path
) -> None:
    trainer = trainer_of(model, path)
    model.eval()
    prompts = ["one", "two", "two", "two"]  # no whole groups
    before = run.statistics()
    columns = tidegate.trl_rollout_func(run, episode=two_turns)(prompts, trainer)
    assert [text_of(path, ids) for ids in columns["prompt_ids"]] == prompts
    after = run.statistics()
    assert after.trained_rollouts == before.trained_rollouts
    generated = after.evaluation_ledger.generated - before.evaluation_ledger.generated
    assert generated == 7 * len(prompts)


async def plain_reward(episode: tidegate.Episode, prompt: str) -> float:
    episode.append(prompt)
    await episode.generate(max_tokens=2)
    return 0.25


def test_a_plain_reward_goes_to_the_reward_functions_by_that_name(
    run: tidegate.SyncRollouts, model: Any, path: Path
) -> None:
    columns = tidegate.trl_rollout_func(run, episode=plain_reward)(PROMPTS, trainer_of(model, path))
    assert columns["reward"] == [0.25] * len(PROMPTS)


async def failing(episode: tidegate.Episode, prompt: str) -> float:
    if prompt == "two":
        raise ValueError("no such tool")
    return await plain_reward(episode, prompt)


async def silent(episode: tidegate.Episode, prompt: str) -> float:
    return 1.0


async def forking(episode: tidegate.Episode, prompt: str) -> float:
    reward = await plain_reward(episode, prompt)
    await episode.fork().generate(max_tokens=2)
    return reward


async def reserving(episode: tidegate.Episode, prompt: str) -> dict[str, Any]:
    return {"reward": await plain_reward(episode, prompt), "logprobs": []}


async def forgetful(episode: tidegate.Episode, prompt: str) -> Any:
    await plain_reward(episode, prompt)


def synchronous(episode: tidegate.Episode, prompt: str) -> float:
    return 1.0


FAILURES = [
    (forgetful, "6 of 6 .*must return its reward as a finite number, .* got None"),
    (synchronous, "6 of 6 .*the episode synchronous is not async"),
    (failing, r"2 of 6 episodes have no completion, .*'two': ValueError: no such tool\. TRL"),
    (silent, "6 of 6 .*without a generated token"),
    (forking, "6 of 6 .*forked into several contexts"),
    (reserving, r"6 of 6 .*returned \['logprobs'\], which TRL uses"),
]


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("episode", "why"), FAILURES, ids=lambda each: getattr(each, "__name__", "")
)
def test_episodes_that_give_trl_no_completion_are_named(
    run: tidegate.SyncRollouts, model: Any, path: Path, episode: Any, why: str, is_training: bool
) -> None:
    trainer = trainer_of(model, path)
    model.train(is_training)
    with pytest.raises(EpisodeError, match=why) as raised:
        tidegate.trl_rollout_func(run, episode=episode)(PROMPTS, trainer)
    assert raised.value.__cause__ is not None


SHIFTED = {"<|end|>": 0, " ": 2, "!": 1}

UNFIT = [
    ({"use_vllm": True}, "give GRPOConfig use_vllm=False"),
    ({"tools": [print]}, "neither tools nor environment_factory"),
    ({"num_generations": 4}, "num_generations is 4 and the run's group_size 2"),
    ({"temperature": 0.7}, "TRL's temperature is 0.7 and the run's 1.0"),
    (
        {"accelerator": Accelerator(distributed_type="DistributedType.FSDP")},
        "runs under FSDP, where no process has all weights",
    ),
    (
        {"processing_class": SimpleNamespace(get_vocab=lambda: SHIFTED)},
        r"has id \d+ in the run's tokenizer \(.*\) and (None|\d+) in TRL's",
    ),
    ({"accelerator": Accelerator(process_index=1, num_processes=2)}, "process 1 of 2"),
]


@pytest.mark.parametrize(("fields", "why"), UNFIT, ids=lambda each: "".join(each)[:30])
def test_a_trainer_that_does_not_fit_the_run_is_refused_by_name(
    run: tidegate.SyncRollouts, model: Any, path: Path, fields: dict[str, Any], why: str
) -> None:
    trainer = trainer_of(model, path, **fields)
    before = run.version
    with pytest.raises(ConfigError, match=why):
        tidegate.trl_rollout_func(run, episode=plain_reward)(PROMPTS, trainer)
    assert run.version == before


def test_the_first_process_without_a_run_is_refused_with_the_rank_that_has_it(
    model: Any, path: Path
) -> None:
    with pytest.raises(ConfigError, match="the first process has the run"):
        tidegate.trl_rollout_func(None, episode=plain_reward)(PROMPTS, trainer_of(model, path))


@pytest.mark.parametrize("prompts", [PROMPTS * 2, PROMPTS[1:], PROMPTS[:-1]])
def test_prompts_that_are_no_batch_of_the_run_are_refused(
    run: tidegate.SyncRollouts, model: Any, path: Path, prompts: list[str]
) -> None:
    rollouts = tidegate.trl_rollout_func(run, episode=plain_reward)
    with pytest.raises(ConfigError, match=f"asks for {len(prompts)} completions at once"):
        rollouts(prompts, trainer_of(model, path))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"group_filter": tidegate.DynamicSampling()}, "may drop some: leave both out"),
        (
            {"max_staleness": 2, "max_uses": 2},
            "max_uses=2 would hand over groups of earlier prompts",
        ),
    ],
)
def test_a_run_that_hands_over_other_groups_than_those_asked_for_is_refused(
    model: Any, path: Path, settings: dict[str, Any], why: str
) -> None:
    with serve(path, **settings) as run:
        rollouts = tidegate.trl_rollout_func(run, episode=plain_reward)
        with pytest.raises(ConfigError, match=why):
            rollouts(PROMPTS, trainer_of(model, path))


def test_a_run_for_async_trainers_is_refused(path: Path) -> None:
    run: Any = tidegate.serve(model=path)
    with pytest.raises(ConfigError, match=r"needs a run of tidegate.serve_sync\(\), got Rollouts"):
        tidegate.trl_rollout_func(run, episode=plain_reward)


@pytest.mark.parametrize("installed", ["0.24.0", "0.29.0"])
def test_a_trl_that_calls_no_such_function_is_refused_with_the_release_that_does(
    monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    with pytest.raises(ConfigError, match=f"TRL {installed} does not .* releases since 0.29.1 do"):
        tidegate.trl_rollout_func(None, episode=plain_reward)


@pytest.mark.parametrize("installed", ["0.29.1", "1.0.0rc1", "1.16.0", "2.0.0.dev0"])
def test_later_releases_of_trl_are_accepted(
    monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    assert callable(tidegate.trl_rollout_func(None, episode=plain_reward))
