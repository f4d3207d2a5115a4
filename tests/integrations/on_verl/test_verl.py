# ruff: noqa: E402
"""The plug-in with the real verl 0.9.1 and TransferQueue, on a Ray cluster of this machine.

verl's server manager, client, load balancer, agent loops, reward workers and replay buffer are its
own. Warnings are not errors here (`-W default` in `make test-verl`), because importing verl gives
some.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

verl: Any = pytest.importorskip("verl", reason="`make test-verl` has verl, in a Python of its own")

import ray
import torch
import transfer_queue as tq

# Not from tests, because verl's wheel has a package of that name.
import verl_rollouts
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry
from verl_rollouts import (
    GROUP_SIZE,
    GROUPS_PER_BATCH,
    QUESTIONS,
    Rollouts,
    ray_cluster,
    verl_config,
)

from examples.verl_grpo import make_random_model
from tidegate.errors import ConfigError
from tidegate.integrations.verl.manager import check_config, shares

# Ray's workers do not have this directory on their path.
ray.cloudpickle.register_pickle_by_value(verl_rollouts)

pytestmark = [
    pytest.mark.wire,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # Ray's workers import verl, for 10 s of CPU each
]

MAX_STALENESS = 1

PROMPT = [5, 6, 7, 8]

SLOW = "+actor_rollout_ref.rollout.engine_kwargs.tidegate.step_time_min_s=0.005"
"""Turns of hundreds of tokens then take seconds, so that tests can act while one runs."""


REWARD_SOURCE = """
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if Path({flag!r}).exists():
        raise ValueError("no reward today")
    return len(set(solution_str)) / 100
"""


@pytest.fixture(scope="module")
def flag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File that makes the reward function fail once it exists."""
    return tmp_path_factory.mktemp("flag") / "fail"


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory, flag: Path) -> Iterator[Rollouts]:
    directory = tmp_path_factory.mktemp("verl")
    make_random_model(directory / "model")
    reward = directory / "reward.py"
    reward.write_text(REWARD_SOURCE.format(flag=str(flag)))
    with ray_cluster():
        made = Rollouts(verl_config(directory / "model", reward, SLOW))
        ray.get(made.trainer.update_weights(global_steps=0))
        yield made
        made.close()


def generate(rollouts: Rollouts, **sampling: Any) -> Any:
    options = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, **sampling}
    return asyncio.run(
        rollouts.client.generate("request", prompt_ids=PROMPT, sampling_params=options)
    )


def trainer_logprobs(rollouts: Rollouts, tokens: list[int], start: int) -> torch.Tensor:
    """Return log-probs of ``tokens[start:]`` under the trainer's present weights."""

    def compute(worker: Any) -> Any:
        import torch

        with torch.no_grad():
            logits = worker.model(torch.tensor([tokens])).logits[0].float()
        logprobs = logits.log_softmax(-1)[:-1]
        return logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[start - 1 :, 0].numpy()

    (worker,) = rollouts.trainer.workers
    return torch.from_numpy(ray.get(worker.__ray_call__.remote(compute)).copy())


def assert_trainers_own(rollouts: Rollouts, output: Any) -> None:
    """Assert that an output's log-probs are those of the trainer's present weights."""
    computed = trainer_logprobs(rollouts, PROMPT + output.token_ids, len(PROMPT))
    torch.testing.assert_close(torch.tensor(output.log_probs), computed, atol=1e-4, rtol=0)


def test_verls_own_registries_find_replica_adapter_and_manager(rollouts: Rollouts) -> None:
    assert RolloutReplicaRegistry.get("tidegate").__name__ == "TidegateReplica"
    assert get_rollout_class("tidegate", "async").__module__.startswith("tidegate.")
    assert type(rollouts.manager).__module__ == "tidegate.integrations.verl.manager"
    assert rollouts.servers.server_addresses == ["tidegate_server_0_0"]


def test_a_turn_has_the_trainers_logprobs_and_the_step_of_its_weights(rollouts: Rollouts) -> None:
    output = generate(rollouts, max_tokens=16, ignore_eos=True)

    assert len(output.token_ids) == len(output.log_probs) == 16
    assert output.stop_reason == "completed"
    assert output.extra_fields == {
        "global_steps": 0,
        "min_global_steps": 0,
        "max_global_steps": 0,
    }
    assert_trainers_own(rollouts, output)


def test_without_a_limit_a_turn_has_the_length_that_verls_own_servers_allow(
    rollouts: Rollouts,
) -> None:
    assert len(generate(rollouts, ignore_eos=True).token_ids) == 24


def test_logprobs_are_omitted_unless_requested(rollouts: Rollouts) -> None:
    assert generate(rollouts, max_tokens=2, logprobs=False).log_probs is None


def test_published_weights_change_what_is_generated_and_its_step(rollouts: Rollouts) -> None:
    before = generate(rollouts, max_tokens=16, temperature=0, ignore_eos=True)
    rollouts.trainer.train(0.05)
    ray.get(rollouts.trainer.update_weights(global_steps=3))
    after = generate(rollouts, max_tokens=16, temperature=0, ignore_eos=True)

    assert after.token_ids != before.token_ids
    assert after.extra_fields["global_steps"] == 3
    sampled = generate(rollouts, max_tokens=16, ignore_eos=True)
    assert_trainers_own(rollouts, sampled)


def while_running(rollouts: Rollouts, act: Callable[[Any], Any]) -> Any:
    """Return a turn of 300 tokens, and call ``act(server)`` while it runs."""
    (server,) = rollouts.servers.server_handles
    sampling = {"max_tokens": 300, "ignore_eos": True, "logprobs": True}
    running = server.generate.remote(
        prompt_ids=PROMPT, sampling_params=sampling, request_id="running"
    )
    ready, _ = ray.wait([running], timeout=0.5)
    assert not ready
    act(server)
    return ray.get(running)


def test_a_turn_continues_over_an_update_and_reports_both_steps(rollouts: Rollouts) -> None:
    def update(server: Any) -> None:
        ray.get(server.abort_all_requests.remote())  # as verl does around an update
        ray.get(rollouts.trainer.update_weights(global_steps=4))
        ray.get(server.resume_generation.remote())

    output = while_running(rollouts, update)

    assert len(output.token_ids) == 300
    assert output.stop_reason == "completed"
    assert output.extra_fields == {
        "global_steps": 3,
        "min_global_steps": 3,
        "max_global_steps": 4,
    }


def test_a_standalone_replica_decodes_on_while_verl_updates_its_weights(
    rollouts: Rollouts,
) -> None:
    (server,) = rollouts.servers.server_handles

    def set_mode(actor: Any, mode: RolloutMode) -> None:
        actor._mode = mode

    def begin_update(server: Any) -> None:
        ray.get([server.abort_all_requests.remote(), server.release_kv_cache.remote()])

    ray.get(server.__ray_call__.remote(set_mode, RolloutMode.STANDALONE))
    try:
        assert len(while_running(rollouts, begin_update).token_ids) == 300
    finally:
        ray.get(server.__ray_call__.remote(set_mode, RolloutMode.HYBRID))


def test_a_replica_that_leaves_the_balancer_aborts_running_and_new_requests(
    rollouts: Rollouts,
) -> None:
    output = while_running(
        rollouts, lambda server: ray.get(server.abort_all_requests.remote(reject_request=True))
    )
    assert output.stop_reason == "aborted"
    assert 0 < len(output.token_ids) < 300
    assert len(output.log_probs) == len(output.token_ids)
    assert generate(rollouts, max_tokens=4).stop_reason == "aborted"

    (server,) = rollouts.servers.server_handles
    ray.get(server.resume_generation.remote())
    assert generate(rollouts, max_tokens=4).stop_reason == "completed"


def test_a_replica_sleeps_and_serves_the_weights_that_wake_it(rollouts: Rollouts) -> None:
    (replica,) = rollouts.servers.get_replicas()
    asyncio.run(replica.sleep())
    rollouts.trainer.train(0.01)
    ray.get(rollouts.trainer.update_weights(global_steps=5))

    output = generate(rollouts, max_tokens=8, ignore_eos=True)
    assert output.extra_fields["global_steps"] == 5
    assert_trainers_own(rollouts, output)


def test_kv_caches_are_cleared_released_and_taken_again(rollouts: Rollouts) -> None:
    (replica,) = rollouts.servers.get_replicas()
    for call in (
        replica.clear_kv_cache,
        replica.release_kv_cache,
        replica.resume_kv_cache,
        replica.start_profile,
        replica.stop_profile,
    ):
        asyncio.run(call())
    assert len(generate(rollouts, max_tokens=4, ignore_eos=True).token_ids) == 4


def adapter(rollouts: Rollouts) -> Any:
    """Return a server adapter of this process."""
    config = rollouts.config.actor_rollout_ref
    return get_rollout_class("tidegate", "async")(
        config=config.rollout, model_config=config.model, device_mesh=None, replica_rank=0
    )


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(rollouts: Rollouts) -> None:
    wrong = [("model.norm.weight", torch.zeros(3))]
    with pytest.raises(ray.exceptions.RayTaskError, match=r"model\.norm\.weight"):
        asyncio.run(adapter(rollouts).update_weights(iter(wrong), global_steps=6))

    output = generate(rollouts, max_tokens=4, ignore_eos=True)
    assert output.extra_fields["global_steps"] == 5
    assert_trainers_own(rollouts, output)


def test_deltas_and_lora_adapters_are_refused_by_name(rollouts: Rollouts) -> None:
    with pytest.raises(ConfigError, match=r"'delta_flush'.*another .*backend than delta_sharded"):
        asyncio.run(adapter(rollouts).update_weights(iter([]), "delta_flush"))
    with pytest.raises(ConfigError, match=r"model\.lora\.merge=True"):
        asyncio.run(adapter(rollouts).update_weights(iter([]), peft_config={"r": 4}))


def test_verls_replay_buffer_gets_rows_within_the_bound_and_the_ledger_counts_them(
    rollouts: Rollouts,
) -> None:
    first = 10
    ray.get(rollouts.trainer.update_weights(global_steps=first - 1))
    submitted = rollouts.submit(list(QUESTIONS[:GROUPS_PER_BATCH]), first)  # a batch ahead
    trained_tokens = 0
    for step in range(first, first + 3):
        submitted += rollouts.submit(list(QUESTIONS[:GROUPS_PER_BATCH]), step)
        batch, metrics = rollouts.buffer.sample(step, "train", GROUPS_PER_BATCH)
        rows = tq.kv_batch_get(keys=batch.keys, partition_id="train")

        assert metrics == {}
        assert len(batch.keys) == GROUPS_PER_BATCH * GROUP_SIZE
        assert {key.split("_")[0] for key in batch.keys} <= set(submitted)
        for number, tag in enumerate(batch.tags):
            assert tag["status"] == "success"
            assert (step - 1) - tag["min_global_steps"] <= MAX_STALENESS
            assert tag["min_global_steps"] <= tag["max_global_steps"] <= step - 1
            tokens = rows["input_ids"][number].tolist()
            prompt = rows["prompts"][number].tolist()
            response = rows["responses"][number].tolist()
            assert tokens == prompt + response
            assert (tag["prompt_len"], tag["response_len"]) == (len(prompt), len(response))
            assert rows["response_mask"][number].tolist() == [1] * len(response)
            assert rows["loss_mask"][number].tolist() == [1] * len(response)
            trained_tokens += len(response)
            if tag["min_global_steps"] == step - 1:  # the trainer still has these weights
                torch.testing.assert_close(
                    rows["rollout_log_probs"][number],
                    trainer_logprobs(rollouts, tokens, len(prompt)),
                    atol=1e-4,
                    rtol=0,
                )
        assert_advantages_are_tidegates(rollouts, batch.keys, rows)
        rollouts.trainer.train(0.01)
        ray.get(rollouts.trainer.update_weights(global_steps=step))
        tq.kv_clear(keys=batch.keys, partition_id="train")

    (statistics,) = rollouts.manager.statistics()
    assert statistics.max_staleness_seen <= statistics.staleness_bound == MAX_STALENESS
    # A batch more than was sampled: it is handed over as soon as the last weights are live.
    assert statistics.ledger.trained >= trained_tokens


def assert_advantages_are_tidegates(rollouts: Rollouts, keys: list[str], rows: Any) -> None:
    """Have verl compute advantages by the estimators ``tidegate`` and ``grpo``, and compare."""
    padded = rows.select("rm_scores", "response_mask").to_padded_tensor()

    def computed(estimator: str) -> Any:
        data = DataProto(batch=padded.clone())
        data.batch["token_level_rewards"] = data.batch["rm_scores"]
        data.non_tensor_batch["uid"] = _objects([str(uid) for uid in rows["uid"]])
        done = compute_advantage_for_multi_trajectories(
            data, batch_keys=keys, adv_estimator=estimator, config=rollouts.config.algorithm
        )
        return done.batch["advantages"]

    own, grpo = computed("tidegate"), computed("grpo")
    # They differ in the epsilon that is added to the standard deviation.
    torch.testing.assert_close(own, grpo, rtol=0.05, atol=0.01)


def _objects(values: list[Any]) -> Any:
    import numpy as np

    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def test_validation_rows_reach_verls_buffer_and_are_not_trained_on(rollouts: Rollouts) -> None:
    (before,) = rollouts.manager.statistics()
    uids = rollouts.submit(["7+2="], 20, validate=True)
    batch, _ = rollouts.buffer.sample(20, "val", 1)

    assert batch.keys == [f"{uids[0]}_0_0"]
    rows = tq.kv_batch_get(keys=batch.keys, partition_id="val")
    assert len(rows["rm_scores"][0]) == len(rows["responses"][0])
    tq.kv_clear(keys=batch.keys, partition_id="val")
    (after,) = rollouts.manager.statistics()
    assert after.evaluation_ledger.generated > before.evaluation_ledger.generated
    assert after.ledger.generated == before.ledger.generated


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("actor_rollout_ref.rollout.name", "vllm", "needs .*rollout.name=tidegate, got vllm"),
        ("trainer.v1.sampler.max_off_policy_threshold", 8, "set it to null"),
        ("algorithm.filter_groups", {"enable": True}, "set it to False"),
        ("trainer.v1.trainer_mode", "sync", "sync_refill_failed_groups=True"),
        ("trainer.v1.trainer_mode", "separate_async", "hybrid_engine=False"),
        ("data.train_batch_size", 6, "groups_per_batch to 6"),
        (
            "actor_rollout_ref.rollout.engine_kwargs.tidegate.deadline_policy",
            "split",
            "deadline_policy=split .*choose wait, mask or drop",
        ),
        (
            "actor_rollout_ref.rollout.engine_kwargs.tidegate.max_uses",
            2,
            "max_uses=2 hands over groups again, .*ppo_epochs",
        ),
    ],
)
def test_settings_of_verl_that_do_not_fit_are_refused_by_name(
    rollouts: Rollouts, name: str, value: Any, message: str
) -> None:
    config: Any = OmegaConf.create(OmegaConf.to_container(rollouts.config))
    OmegaConf.update(config, name, value, force_add=True)
    with pytest.raises(ConfigError, match=message):
        check_config(config, replicas=1, rewards=[object()])


def test_a_failed_prompt_is_replaced_on_the_replica_that_lost_it() -> None:
    assert shares(4, [0, 0]) == [2, 2]
    assert shares(1, [2, 1]) == [0, 1]
    assert shares(6, [0, 0, 0, 0]) == [2, 2, 1, 1]


def test_a_colocated_reward_model_is_refused(rollouts: Rollouts) -> None:
    with pytest.raises(ConfigError, match="enable_resource_pool=True"):
        check_config(rollouts.config, replicas=1, rewards=None)


def test_an_error_of_the_run_reaches_verls_trainer(rollouts: Rollouts, flag: Path) -> None:
    flag.touch()
    for step in range(40, 48):
        rollouts.submit(list(QUESTIONS), step)

    def train() -> None:
        for step in range(40, 46):  # groups that ended before are handed over first
            rollouts.buffer.sample(step, "train", GROUPS_PER_BATCH)
            ray.get(rollouts.trainer.update_weights(global_steps=step))

    with pytest.raises(ValueError, match=r"(?s)Unknown status: the run failed: .*no reward today"):
        train()
