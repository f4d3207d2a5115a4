"""TRL's GRPOTrainer on a CPU, with Tidegate in place of `vllm serve`.

    # In a Python with Tidegate; TRL sends no token:
    tidegate serve --model DIR --port 8000 --weight-transfer gloo --no-control-token
    python examples/trl_grpo_server.py --model DIR --server http://127.0.0.1:8000 --steps 2

In `vllm_mode="server"` TRL 1.16 uses vLLM's own HTTP API to generate and to send weights in four
phases. It requires CUDA in one place, `VLLMClient.init_communicator`, because vLLM's transfer is
NCCL. This script replaces that method and the one that sends tensors by gloo versions; all else is
TRL's. The reward is the share of the letter `e`.
"""

import argparse
import datetime
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client, vllm_generation

TIMEOUT_S = 300.0
QUESTIONS = ("say something", "and then?", "who goes there?", "once more")


class GlooClient(vllm_client.VLLMClient):  # type: ignore[misc]
    """TRL's client, with gloo in place of NCCL."""

    updates = 0
    """Number of weight updates sent so far."""

    def init_communicator(self, device: object = 0) -> None:
        """Create the process group; the server joins as rank 1 while it handles the request."""
        if self.get_world_size() != 1:
            raise RuntimeError("a Tidegate server is one process, whatever stands behind it")
        init_info = {
            "master_address": "127.0.0.1",  # address of this process, as seen from the server
            "master_port": self.group_port,
            "rank_offset": 1,
            "world_size": 2,
        }
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        with ThreadPoolExecutor(max_workers=1) as pool:
            url = f"{self.base_url}/init_weight_transfer_engine"
            response = pool.submit(self._post, url, json={"init_info": init_info})
            store = TCPStore("127.0.0.1", self.group_port, 2, is_master=True, timeout=timeout)
            self.communicator: Any = ProcessGroupGloo(store, 0, 2, timeout)
            response.result()

    def update_named_params(
        self,
        metadata: list[tuple[str, str, list[int]]],
        named_params: Iterator[tuple[str, torch.Tensor]],
    ) -> None:
        """Send one version in TRL's phases; tensors are broadcast in the announced order."""
        names, dtypes, shapes = (list(column) for column in zip(*metadata, strict=True))
        update_info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        self._start_weight_update()
        with ThreadPoolExecutor(max_workers=1) as pool:
            url = f"{self.base_url}/update_weights"
            response = pool.submit(self._post, url, json={"update_info": update_info})
            for _, tensor in named_params:
                self.communicator.broadcast(tensor.detach().cpu().contiguous(), 0).wait()
            response.result()
        self._finish_weight_update()
        GlooClient.updates += 1

    def close_communicator(self) -> None:
        """Drop the process group."""
        self.communicator = None


def run_on_cpu() -> None:
    """Make TRL use this client, and patch out its check for vLLM's package."""
    if importlib.util.find_spec("vllm") is None:
        vllm_client.is_vllm_available = lambda **_: True
        vllm_generation.is_vllm_available = lambda **_: True
    vllm_generation.VLLMClient = GlooClient


def letter_reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Return the letter's share of each completion."""
    texts = [completion[-1]["content"] or "" for completion in completions]
    return [text.count("e") / max(1, len(text)) for text in texts]


def main() -> None:
    """Train for a few steps, and print the results as one line of JSON."""
    arguments = _arguments()
    run_on_cpu()
    prompts = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS * 16]
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=str(arguments.model),
            args=_config(arguments, scratch),
            reward_funcs=[letter_reward],
            train_dataset=Dataset.from_list(prompts),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
        )
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    results = {
        "steps": trainer.state.global_step,
        "updates": GlooClient.updates,
        "rewards": [round(entry["reward"], 4) for entry in history],
        # The server's sampling log-probs against the trainer's.
        "logprobs_differ": [entry["sampling/sampling_logp_difference/max"] for entry in history],
    }
    print(json.dumps(results))


def _config(arguments: argparse.Namespace, scratch: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=scratch,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=arguments.server,
        vllm_group_port=arguments.group_port,
        max_steps=arguments.steps,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=24,
        learning_rate=arguments.learning_rate,
        logging_steps=1,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, required=True, help="the server's model directory")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--group-port", type=int, default=51216, help="where tensors are sent")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
