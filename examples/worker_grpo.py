"""GRPO in the shape of OpenRLHF's trainer, with Tidegate's engines in place of its vLLM actors.

    python -m examples.worker_grpo            # workers in this process
    python -m examples.worker_grpo --ray      # as Ray actors, needs pip install ray

Generate, score, train and send weights, one after the other, with `tidegate.RolloutWorker` where
such a trainer has its `LLMRayActor`s. The model is random and tiny, and learns within seconds to
write tokens with small numbers. For asynchronous rollouts, see async_grpo.py.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import tidegate
from tidegate.integrations.rollout_worker import Sample
from tidegate.policies.objectives import decoupled_ppo_loss

VOCABULARY = 64
PROMPTS = 4
SAMPLES = 8
TOKENS_MAX = 8
LEARNING_RATE = 3e-3


class Call(Protocol):
    """Calls a method of every worker concurrently and returns their results."""

    def __call__(self, method: str, *arguments: Any) -> list[Any]:
        """Call the method of this name on each worker, with the same arguments."""


def make_model(path: Path, seed: int = 0) -> None:
    """Create a random Qwen3 of 60,000 parameters, with a placeholder tokenizer."""
    from tokenizers import Tokenizer, models

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    vocabulary = {f"<{token}>": token for token in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=backend).save_pretrained(path)


def reward(sample: Sample) -> float:
    """Return the share of tokens with ids in the lower half of the vocabulary."""
    return sum(token < VOCABULARY // 2 for token in sample.token_ids) / len(sample.token_ids)


def train_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Sample]]
) -> float:
    """Take one GRPO step on groups of equally long samples; return their mean reward."""
    rewards = torch.tensor([[reward(sample) for sample in group] for group in groups])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    samples = [sample for group in groups for sample in group]
    tokens = torch.tensor([sample.prompt_token_ids + sample.token_ids for sample in samples])
    behaviour = torch.tensor([sample.logprobs for sample in samples])
    logits = model(input_ids=tokens).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    logprobs = logprobs[:, -behaviour.shape[1] :]
    loss, _ = decoupled_ppo_loss(
        logprobs,
        logprobs.detach(),
        behaviour,
        advantages.reshape(-1, 1),
        torch.ones_like(behaviour, dtype=torch.bool),
        tokens_in_batch=behaviour.numel(),
    )
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(rewards.mean())


def train(path: Path, call: Call, steps: int) -> list[float]:
    """Generate, train and send the weights in turn; return the mean reward of each step."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    sampling = {"n": SAMPLES, "max_tokens": TOKENS_MAX, "min_tokens": TOKENS_MAX}
    history = []
    for step in range(steps):
        prompts = torch.randint(VOCABULARY, (PROMPTS, 3)).tolist()
        groups = [group for groups in call("generate", prompts, sampling) for group in groups]
        history.append(train_step(model, optimizer, groups))
        versions = call("update_weights", dict(model.state_dict()))
        print(f"step {step}: reward {history[-1]:.3f}, engines serve v{versions[0]}", flush=True)
    return history


def with_workers(path: Path, workers: int, steps: int) -> list[float]:
    """Train with workers in this process."""
    local_workers = [tidegate.RolloutWorker(str(path), seed=seed) for seed in range(workers)]
    try:
        return train(
            path, lambda name, *given: [getattr(w, name)(*given) for w in local_workers], steps
        )
    finally:
        for worker in local_workers:
            worker.shutdown()


def with_ray(path: Path, workers: int, steps: int) -> list[float]:
    """Train with workers that are Ray actors, each in a process of its own."""
    try:
        import ray
    except ImportError:
        raise tidegate.TidegateError("--ray needs Ray: pip install ray") from None
    ray.init(num_cpus=workers, include_dashboard=False, ignore_reinit_error=True)
    actor: Any = ray.remote(num_cpus=1)(tidegate.RolloutWorker)
    actors = [actor.remote(str(path), seed=seed) for seed in range(workers)]

    def call(method: str, *arguments: Any) -> list[Any]:
        return list(ray.get([getattr(each, method).remote(*arguments) for each in actors]))

    try:
        history = train(path, call, steps)
        call("shutdown")
        return history
    finally:
        ray.shutdown()


def main(arguments: list[str] | None = None) -> int:
    """Run the example; exit status 1 if nothing was learned, 2 for a user error."""
    parser = argparse.ArgumentParser(
        description="GRPO in OpenRLHF's shape, with Tidegate's engines."
    )
    parser.add_argument("--ray", action="store_true", help="have Ray start the workers")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    try:
        with tempfile.TemporaryDirectory() as directory:
            make_model(Path(directory))
            run = with_ray if options.ray else with_workers
            history = run(Path(directory), options.workers, options.steps)
    except tidegate.TidegateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"mean reward {history[0]:.3f} at first, {history[-1]:.3f} at last")
    return 0 if history[-1] > history[0] else 1


if __name__ == "__main__":
    sys.exit(main())
