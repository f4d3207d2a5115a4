"""RolloutWorker over real engines: generation, scores, weights, sleep, under frameworks' names."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import tidegate
from tests.forked_programs import children
from tests.models import make_model_directory
from tidegate.errors import ConfigError, EpisodeError

pytestmark = pytest.mark.wire

PROMPTS = [[10, 11, 12], [20, 21]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def worker(model: Path) -> Iterator[tidegate.RolloutWorker]:
    with tidegate.RolloutWorker(str(model), max_running_turns=8) as worker:
        yield worker
    assert children(recursive=True) == []


def test_samples_come_by_prompt_with_the_log_probs_that_scoring_them_gives(
    worker: tidegate.RolloutWorker,
) -> None:
    groups = worker.generate(PROMPTS, {"max_tokens": 6}, n=2)
    assert [[sample.prompt_token_ids for sample in group] for group in groups] == [
        [prompt] * 2 for prompt in PROMPTS
    ]
    for sample in [sample for group in groups for sample in group]:
        (scored,) = worker.compute_log_probs(
            [sample.prompt_token_ids + sample.token_ids], len(sample.prompt_token_ids)
        )
        torch.testing.assert_close(scored, sample.logprobs, atol=1e-4, rtol=0)
        assert sample.versions == [worker.version] * len(sample.token_ids)


def test_each_call_draws_anew_and_what_is_asked_for_by_vllms_names_is_understood(
    worker: tidegate.RolloutWorker,
) -> None:
    params = SimpleNamespace(n=1, temperature=1.0, top_k=-1, max_tokens=12, stop=[], seed=None)
    drawn = []
    for _ in range(2):
        worker.add_requests(params, PROMPTS)
        drawn.append([sample.token_ids for sample in worker.get_responses()])
    assert drawn[0] != drawn[1]
    greedy = SimpleNamespace(temperature=0.0, max_tokens=4)
    first, second = (worker.generate(PROMPTS, greedy) for _ in range(2))
    assert [g[0].token_ids for g in first] == [g[0].token_ids for g in second]
    with pytest.raises(ConfigError, match="get_responses"):
        worker.get_responses()
    with pytest.raises(ConfigError, match="n=0"):
        worker.generate(PROMPTS, n=0)
    with pytest.raises(EpisodeError, match="1 of 1 samples could not be generated"):
        worker.generate([[]])


def test_a_seed_makes_the_same_group_again_whose_samples_differ(
    worker: tidegate.RolloutWorker,
) -> None:
    params = SimpleNamespace(n=3, temperature=1.0, max_tokens=12, stop="never said", seed=7)
    groups, again = (
        [[s.token_ids for s in g] for g in worker.generate(PROMPTS, params)] for _ in "ab"
    )
    assert groups == again
    for group in groups:
        assert len({tuple(token_ids) for token_ids in group}) == 3


def test_weights_change_what_is_generated_and_so_do_verls_pairs(
    worker: tidegate.RolloutWorker, model: Path
) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 8}
    before = worker.generate(PROMPTS, greedy)[0][0]
    state = load_file(model / "model.safetensors")
    other = {name: tensor.flip(0) for name, tensor in state.items()}
    version = worker.version
    assert worker.update_weights(other) == version + 1
    after = worker.generate(PROMPTS, greedy)[0][0]
    assert after.logprobs != before.logprobs
    assert set(after.versions) == {version + 1}
    assert worker.update_weights(iter(state.items())) == version + 2
    worker.reset_prefix_cache()
    assert worker.generate(PROMPTS, greedy)[0][0].token_ids == before.token_ids


def test_it_sleeps_and_wakes_by_either_name_and_is_one_process_in_a_group(
    worker: tidegate.RolloutWorker,
) -> None:
    assert worker.sleep() > 0
    worker.wake_up()
    worker.release()
    worker.resume()
    assert worker.generate(PROMPTS, {"max_tokens": 2})
    assert worker.health()
    assert worker.get_world_size() == 1


TRAINER = """
import sys, torch, torch.distributed as dist
from safetensors.torch import load_file
dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=2)
for tensor in load_file(sys.argv[2]).values():
    dist.broadcast(tensor.flip(0).contiguous(), 0)
dist.destroy_process_group()
"""


def test_weights_that_a_trainer_broadcasts_are_served_once_the_last_has_come(
    worker: tidegate.RolloutWorker, model: Path
) -> None:
    path = model / "model.safetensors"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConfigError, match="init_weights_update_group"):
        worker.update_weight("a", "float32", [1])
    with pytest.raises(ConfigError, match="backend='gloo'"):
        worker.init_process_group("127.0.0.1", port, 1, 2, backend="nccl")
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, f"tcp://127.0.0.1:{port}", str(path)]
    )
    try:
        worker.init_weights_update_group("127.0.0.1", port, 1, 2)
        state = load_file(path)
        before = worker.version
        reported = [
            worker.update_weight(name, tensor.dtype, tensor.shape, empty_cache=name == last)
            for last in [[*state][-1]]
            for name, tensor in state.items()
        ]
        assert trainer.wait(60) == 0
    finally:
        trainer.kill()
        trainer.wait()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert reported == [None] * (len(state) - 1) + [before + 1]
    broadcast = worker.generate(PROMPTS, {"temperature": 0.0, "max_tokens": 4})
    worker.update_weights({name: tensor.flip(0) for name, tensor in state.items()})
    handed = worker.generate(PROMPTS, {"temperature": 0.0, "max_tokens": 4})
    assert [g[0].token_ids for g in broadcast] == [g[0].token_ids for g in handed]
