"""slime's rollout function over a run: episodes of two turns, and slime's loop on a CPU.

    PYTHONPATH=SLIME python -m examples.slime_rollout        # SLIME: a checkout of slime

:func:`solve` is what a user writes; slime's own command takes it by ``--custom-config-path`` with
a file that says ``tidegate: {episode: examples.slime_rollout.solve, max_staleness: 1}``. The rest
does what slime's ``train_async.py`` does around a rollout function, with slime's data source and
samples: take samples, train, write the weights, mark them. slime's own trainer is Megatron on GPUs;
here it is a torch step on a tiny random model, which learns to write tokens with small numbers.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

import tidegate
from examples.worker_grpo import LEARNING_RATE, VOCABULARY, make_model
from tidegate.integrations import slime
from tidegate.policies.objectives import decoupled_ppo_loss

GROUP_SIZE = 8
GROUPS_PER_BATCH = 4


async def solve(episode: tidegate.Episode, sample: Any) -> float:
    """Answer twice, with an observation between; the reward is the share of small tokens."""
    episode.append(sample.prompt)
    first = await episode.generate(max_tokens=4, min_tokens=4)
    episode.append("<1>")  # masked in slime's loss, because the policy has not sampled it
    second = await episode.generate(max_tokens=4, min_tokens=4)
    token_ids = [*first.token_ids, *second.token_ids]
    return sum(token < VOCABULARY // 2 for token in token_ids) / len(token_ids)


def train_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Any]]
) -> float:
    """Take one GRPO step on groups of slime's samples; return their mean reward."""
    rewards = torch.tensor([[sample.reward for sample in group] for group in groups])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    samples = [sample for group in groups for sample in group]
    tokens_in_batch = sum(sum(sample.loss_mask) for sample in samples)
    optimizer.zero_grad()
    for sample, advantage in zip(samples, advantages.reshape(-1), strict=True):
        tokens = torch.tensor([sample.tokens])
        response = slice(-sample.response_length, None)
        logits = model(input_ids=tokens).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[:, response, 0]
        loss, _ = decoupled_ppo_loss(
            logprobs,
            logprobs.detach(),
            torch.tensor([sample.rollout_log_probs]),
            advantage[None, None],
            torch.tensor([sample.loss_mask], dtype=torch.bool),
            tokens_in_batch=tokens_in_batch,
        )
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(rewards.mean())


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Run the loop; return the mean reward of each step."""
    from slime.rollout.data_source import RolloutDataSource

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args(arguments).steps
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    history: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        path, weights = Path(directory) / "model", Path(directory) / "weights"
        make_model(path)
        args = slime_arguments(path, weights, Path(directory) / "prompts.jsonl")
        source = RolloutDataSource(args)
        model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        with tidegate.serve_sync(
            model=path, group_size=GROUP_SIZE, groups_per_batch=GROUPS_PER_BATCH, max_staleness=1
        ) as run:
            slime.use_run(run, episode=solve)
            for step in range(steps):
                groups = slime.generate_rollout(args, step, source).samples
                versions = {
                    version for group in groups for s in group for version in s.weight_versions
                }
                history.append(train_step(model, optimizer, groups))
                version_directory = weights / f"weight_v{step + 1:06d}"
                model.save_pretrained(version_directory)
                slime.mark_weights(args, str(version_directory), [])
                print(
                    f"step {step}: reward {history[-1]:.3f}, sampled by v{sorted(versions)}",
                    flush=True,
                )
            print(f"most stale token: {run.statistics().max_staleness_seen} versions", flush=True)
    return history


def slime_arguments(model: Path, weights: Path, prompts: Path) -> SimpleNamespace:
    """Write prompts, and return the arguments that slime's command line gives its rollout side."""
    rows = [{"prompt": f"<{number}>"} for number in range(VOCABULARY)]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return SimpleNamespace(
        hf_checkpoint=str(model),
        update_weight_disk_dir=str(weights),
        n_samples_per_prompt=GROUP_SIZE,
        rollout_global_dataset=True,
        prompt_data=str(prompts),
        rollout_max_prompt_len=None,
        rollout_shuffle=True,
        rollout_seed=0,
        input_key="prompt",
        label_key=None,
        metadata_key="metadata",
        multimodal_keys=None,
        tool_key=None,
        apply_chat_template=False,
        apply_chat_template_kwargs={},
        dump_details=None,
        reward_key=None,
    )


if __name__ == "__main__":
    main()
