"""A whole run of verl on one machine without a GPU: its own trainer, over Tidegate's rollouts.

    make .venv-verl/.ready
    .venv-verl/bin/python -m examples.verl_grpo --steps 12

verl's command trains a tiny random model by GRPO with its FSDP2 engine, asynchronously
(``trainer_mode=colocate_async``), with rollouts from Tidegate's manager. Only the platform is not
verl's: verl has none for CPUs (`verl_cpu_platform.py`). The reward is the share of the digit 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.tiny_model import TOKENIZER_CONFIG, make_tokenizer

GROUP_SIZE, GROUPS_PER_BATCH = 8, 4

MAX_STALENESS = 1

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

REWARD_SOURCE = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Return the share of one character in an answer."""
    return solution_str.count(ground_truth) / max(1, len(solution_str))
'''


def make_random_model(directory: Path) -> None:
    """Write a tiny Llama of random weights, with a token for each character."""
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.token_to_id(TOKENIZER_CONFIG["eos_token"]),
        pad_token_id=tokenizer.token_to_id(TOKENIZER_CONFIG["pad_token"]),
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def tidegate_lines() -> list[str]:
    """Return the lines of a verl configuration that choose Tidegate's replica and manager."""
    rollout = "actor_rollout_ref.rollout"
    tidegate = f"+{rollout}.engine_kwargs.tidegate"
    return [
        f"{rollout}.name=tidegate",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.calculate_log_probs=true",
        f"+{rollout}.agent.agent_loop_manager_class=tidegate.integrations.verl.Manager",
        f"{tidegate}.max_staleness={MAX_STALENESS}",
        f"{tidegate}.groups_per_batch=${{data.train_batch_size}}",
        f"{tidegate}.device=cpu",
        f"{tidegate}.threads_per_engine=1",
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.v1.sampler.max_off_policy_threshold=null",
    ]


def small_lines(model: Path, reward: Path) -> list[str]:
    """Return the lines for a small model on one CPU."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"actor_rollout_ref.model.path={model}",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.model.use_remove_padding=False",
        f"{rollout}.dtype=float32",
        f"{rollout}.n={GROUP_SIZE}",
        f"{rollout}.prompt_length=64",
        f"{rollout}.response_length=24",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.dtype=float32",
        f"{actor}.optim.lr=0.003",
        f"{actor}.ppo_mini_batch_size={GROUPS_PER_BATCH}",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"data.train_batch_size={GROUPS_PER_BATCH}",
        "data.dataloader_num_workers=0",
        "algorithm.adv_estimator=grpo",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={reward}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.n_gpus_per_node=1",
    ]


def main() -> None:
    """Write a model, prompts and a reward function, and run verl's command on them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    steps: int = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        make_random_model(directory / "model")
        (directory / "reward.py").write_text(REWARD_SOURCE)
        prompts = directory / "prompts.parquet"
        pandas.DataFrame([_row(a, b) for a in range(1, 9) for b in range(1, 9)]).to_parquet(prompts)
        command = [
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            *tidegate_lines(),
            *small_lines(directory / "model", directory / "reward.py"),
            f"data.train_files={prompts}",
            f"data.val_files={prompts}",
            "trainer.device=cpu",
            f"trainer.total_training_steps={steps}",
            "trainer.total_epochs=1000",
            "trainer.logger=[console]",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.resume_mode=disable",
            "+ray_kwargs.ray_init.num_gpus=1",  # verl's resource pools count GPUs
            "ray_kwargs.ray_init.num_cpus=6",
            f"hydra.run.dir={directory / 'hydra'}",
            "+ray_kwargs.ray_init.include_dashboard=False",
        ]
        environment = {
            **os.environ,
            "VERL_USE_EXTERNAL_MODULES": "tidegate.integrations.verl,examples.verl_cpu_platform",
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)


def _row(a: int, b: int) -> dict[str, object]:
    return {
        "data_source": "ones",
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"index": 8 * a + b},
    }


if __name__ == "__main__":
    main()
