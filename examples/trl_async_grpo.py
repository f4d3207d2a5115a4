"""TRL's asynchronous trainer, unmodified, on a CPU with a Tidegate server in place of vLLM.

    # In a Python with Tidegate; TRL sends no token, and writes weights below /tmp:
    tidegate serve --model DIR --engines 2 --port 8000 --no-control-token --weight-directory /tmp
    python examples/trl_async_grpo.py --model DIR --server http://127.0.0.1:8000 --steps 4

TRL's Python needs no Tidegate: `pip install trl==1.16.0 aiohttp requests peft`, after a torch for
CPUs. With --lora TRL's own code syncs adapters; without, weights go through a directory that both
sides can read, because TRL's own transfer needs NCCL. The reward is the share of the letter `e`.
"""

import argparse
import importlib.util
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo import async_grpo_trainer as trl_trainer
from trl.experimental.async_grpo import async_rollout_worker as trl_worker
from trl.experimental.async_grpo import packing as trl_packing

TIMEOUT_S = 300.0
MAX_STALENESS = 2

QUESTIONS = ("say something", "and then?", "who goes there?", "once more")


def letter_reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Return the letter's share of each completion. At module level, because TRL pickles it."""
    texts = [completion[-1]["content"] or "" for completion in completions]
    return [text.count("e") / max(1, len(text)) for text in texts]


class DirectoryTransfer:
    """TRL ``weight_transfer`` to a vLLM server with the `disk` backend: safetensors in a shared
    directory."""

    def __init__(self, server: str, directory: Path) -> None:
        self._server, self._directory = server, directory
        self.versions = 0
        """Number of versions sent so far."""

    def init_weight_transfer(self) -> None:
        """Initialise the server's weight transfer."""
        self._post("init_weight_transfer_engine", json={"init_info": {}})

    def pause(self) -> None:
        """Freeze running generations."""
        self._post("pause", params={"mode": "keep"})

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send one version through vLLM's four update phases."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in iterator}
        path = self._directory / "weights.safetensors"
        save_file(tensors, path)
        self.versions += 1
        self._post("start_weight_update")
        self._post("update_weights", json={"update_info": {"path": str(path)}})
        self._post("finish_weight_update", json={"weight_version": str(self.versions)})

    def resume(self) -> None:
        """Resume generation."""
        self._post("resume")

    def destroy(self) -> None:
        """No-op: nothing to release."""

    def _post(self, path: str, **about: Any) -> None:
        response = requests.post(f"{self._server}/{path}", timeout=TIMEOUT_S, **about)
        if response.status_code != 200:
            raise RuntimeError(f"{path}: {response.status_code} {response.text}")


class _CPUAttention:
    """Torch replacement of the GPU-only kernel that TRL uses: each segment of queries attends
    causally to its own keys, both ending at the same token."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
        *_: object,
        softmax_scale: float | None = None,
        **__: object,
    ) -> torch.Tensor:
        repeats = query.shape[1] // key.shape[1]
        q_ends, k_ends = query_ends.tolist(), key_ends.tolist()
        parts = []
        for n in range(len(q_ends) - 1):
            q = query[q_ends[n] : q_ends[n + 1]].transpose(0, 1)
            k = key[k_ends[n] : k_ends[n + 1]].transpose(0, 1).repeat_interleave(repeats, 0)
            v = value[k_ends[n] : k_ends[n + 1]].transpose(0, 1).repeat_interleave(repeats, 0)
            shape = (q.shape[1], k.shape[1])
            mask = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
            attend = torch.nn.functional.scaled_dot_product_attention
            parts.append(attend(q, k, v, attn_mask=mask, scale=softmax_scale).transpose(0, 1))
        return torch.cat(parts)


def run_on_cpu() -> None:
    """Patch out TRL's checks for vLLM's package and a GPU kernel, which this setup does not
    need."""
    if importlib.util.find_spec("vllm") is None:
        trl_worker.is_vllm_available = lambda **_: True
    if not torch.cuda.is_available():
        trl_packing._flash_attn = _CPUAttention
        trl_trainer.get_peak_flops_per_device = lambda *_: None  # None stands for unknown devices


class StalenessSeen(TrainerCallback):
    """Histogram of how many versions behind the trainer its consumed rollouts are."""

    def __init__(self) -> None:
        self.ages: Counter[int] = Counter()

    def watch(self, trainer: Any) -> None:
        """Hook the trainer's queue, to see every sample it takes."""
        queue, take = trainer.rollout_queue, trainer.rollout_queue.get

        def get(*args: Any, **kwargs: Any) -> Any:
            sample = take(*args, **kwargs)
            self.ages[trainer.model_version - sample.model_version] += 1
            return sample

        queue.get = get


def main() -> None:
    """Train for a few steps, and print the results as one line of JSON."""
    arguments = _arguments()
    run_on_cpu()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    template = Path(trl_worker.__file__).parents[2] / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text()  # TRL parses only its own templates
    prompts = [{"prompt": [{"role": "user", "content": q}]} for q in QUESTIONS * 64]
    seen = StalenessSeen()
    with tempfile.TemporaryDirectory() as scratch:
        transfer = None if arguments.lora else DirectoryTransfer(arguments.server, Path(scratch))
        trainer = AsyncGRPOTrainer(
            model=str(arguments.model),
            args=_config(arguments, scratch),
            reward_funcs=[letter_reward],
            train_dataset=Dataset.from_list(prompts),
            processing_class=tokenizer,
            weight_transfer=transfer,
            peft_config=_lora() if arguments.lora else None,
        )
        seen.watch(trainer)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    results = {
        "steps": trainer.state.global_step,
        "versions": trainer.model_version,
        "staleness": dict(sorted(seen.ages.items())),
        "rewards": [round(entry["reward"], 4) for entry in history],
        # The first step's rollouts are of the current weights: ratio 1 and KL 0 are expected.
        "first_ratio": history[0]["ratio"],
        "first_kl": history[0]["kl"],
    }
    print(json.dumps(results))


def _config(arguments: argparse.Namespace, scratch: str) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(
        output_dir=scratch,
        vllm_server_base_url=arguments.server,
        max_steps=arguments.steps,
        max_staleness=MAX_STALENESS,
        num_generations=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_completion_length=24,
        max_inflight_tasks=16,
        queue_maxsize=32,
        learning_rate=arguments.learning_rate,
        logging_steps=1,
        dtype="float32",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
    )


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, required=True, help="the server's model directory")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--lora", action="store_true", help="train an adapter; TRL syncs it itself")
    return parser.parse_args()


if __name__ == "__main__":
    main()
