"""GRPO on Hugging Face's stack: transformers, accelerate and its trackers, with Tidegate.

    pip install -e '.[examples]' accelerate tensorboard  # after a torch for CPUs
    python -m examples.hf_grpo --output runs/hf
    torchrun --nproc-per-node 2 -m examples.hf_grpo --output runs/hf  # or more processes
    python -m examples.hf_grpo --output runs/hf --resume  # continues from the newest checkpoint
    python -m examples.hf_grpo --output runs/hf --model Qwen2.5-0.5B-Instruct/ --data gsm8k.jsonl

The task is arithmetic. Without --model, the small model of tiny_model.py is made, which solves sums
with a calculator. A model with a chat template answers in words and ends with `#### 42`, as GSM8K's
reference answers do; --data has GSM8K's lines, {"question": …, "answer": "… #### 42"}.

The first process hosts the run on a thread, and all processes train on parts of its batches. Each
checkpoint is a Hugging Face directory, which `from_pretrained` and servers load, with the
optimizer's state and the run's position beside the weights. --fsdp shards the model with torch's
FSDP2, also on CPUs, where accelerate's own FSDP plugin silently falls back to DDP.
"""

import argparse
import asyncio
import json
import os
import random
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import tidegate
from examples import calculator
from examples.grpo import rows_of_like_length
from examples.tiny_model import make_model
from tidegate.policies.objectives import decoupled_ppo_loss

HELD_OUT_SEED = 11
INSTRUCTION = "\nThink step by step. End with #### and the answer as a number."
FULL_STATE_DICT = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""State dicts are whole on the first process, however the model is sharded."""


# ---------------------------------------------------------------- tasks and episodes


def sums(split: calculator.Split, seed: int) -> Iterator[dict[str, Any]]:
    """Yield endless sums as plain data, which the run's journal can keep."""
    for task in calculator.tasks(split, seed):
        yield {"question": task.question, "answer": f"#### {task.answer}", "entry": task.entry}


def questions(path: Path, split: calculator.Split, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the questions of a file in GSM8K's form endlessly; each tenth one is held out."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    part = [line for n, line in enumerate(lines) if (n % 10 == 0) == (split == "held_out")]
    while True:
        random.Random(seed).shuffle(part)
        yield from part
        seed += 1


async def solve_with_calculator(episode: tidegate.Episode, task: dict[str, Any]) -> float:
    """Play the calculator's episode, of several turns."""
    entry = task["entry"]
    expression = entry["metadata"]["expression"]
    return await calculator.solve(episode, calculator.Task(task["question"], expression, entry))


async def solve_in_words(episode: tidegate.Episode, task: dict[str, Any]) -> float:
    """Ask a chat model; the reward is 1.0 if its answer is the reference answer."""
    turn = await episode.generate(
        messages=[{"role": "user", "content": task["question"] + INSTRUCTION}]
    )
    number = final_number(turn.text)
    return float(number is not None and number == final_number(task["answer"]))


def final_number(text: str) -> float | None:
    """Return the number after the last ``####``; None if there is none."""
    found = re.findall(r"####\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)", text)
    return float(found[-1].replace(",", "")) if found else None


# ---------------------------------------------------------------- the run


class RunHost:
    """A run on a thread of the first process, which listens for all processes of the trainer."""

    def __init__(self, options: argparse.Namespace, address: str, resume: Any) -> None:
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._main, args=(options, address, resume), name="run host", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for the run's end, and raise its failure."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _main(self, *given: Any) -> None:
        try:
            asyncio.run(self._host(*given))
        except BaseException as error:  # noqa: BLE001 - raised again by join()
            self._failure = error

    async def _host(self, options: argparse.Namespace, address: str, resume: Any) -> None:
        async with tidegate.serve(
            model=options.model,
            engines=options.engines,
            max_staleness=options.max_staleness,
            group_size=options.group_size,
            groups_per_batch=options.groups_per_batch,
            max_tokens=options.max_tokens,
            run_directory=options.output / "run",
            journal=True,
            resume=resume,
            seed=options.seed,
        ) as rollouts:
            episode = solve_in_words if is_chat_model(options.model) else solve_with_calculator
            await tidegate.listen(
                rollouts, address, tasks=make_tasks(options, "train"), episode=episode
            )


def make_tasks(options: argparse.Namespace, split: calculator.Split) -> Iterator[dict[str, Any]]:
    """Return the endless tasks of a split."""
    seed = HELD_OUT_SEED if split == "held_out" else options.seed
    return sums(split, seed) if options.data is None else questions(options.data, split, seed)


def is_chat_model(model: Path) -> bool:
    """Return whether a model directory has a chat template."""
    return AutoTokenizer.from_pretrained(model).chat_template is not None


# ---------------------------------------------------------------- training


class Trainer:
    """The model, its optimizer and its checkpoints, in each process."""

    def __init__(self, options: argparse.Namespace, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._output = options.output
        source = options.checkpoint or options.model
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(options.model)
        self._bare = model
        """The transformers model, which saves checkpoints."""
        if options.fsdp:
            from torch.distributed.fsdp import fully_shard

            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        self.model = model if options.fsdp else accelerator.prepare(model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        if options.checkpoint is not None:
            saved = torch.load(options.checkpoint / "optimizer.pt", weights_only=True)
            set_optimizer_state_dict(self._bare, self.optimizer, saved, options=FULL_STATE_DICT)

    def step(self, batch: tidegate.Batch) -> dict[str, float]:
        """Take one optimizer step on this process's part of a batch; return the whole's metrics."""
        accelerator, shard = self._accelerator, batch.shard  # None: one process has it all
        tokens_total = batch.sampled_tokens if shard is None else shard.sampled_tokens_total
        rows_total = len(batch.rewards) if shard is None else shard.rows_total
        parts = list(rows_of_like_length(batch, torch.arange(len(batch.rewards))))
        # A pass of a distributed model waits for all processes: all take as many.
        passes = int(accelerator.gather(torch.tensor([len(parts)])).max())
        self.optimizer.zero_grad()
        loss = torch.zeros(())
        for number in range(passes):
            rows = parts[min(number, len(parts) - 1)]
            part = self._loss(batch, rows, tokens_total) * (number < len(parts))
            # Gradients are averaged over processes, and the loss is a sum over their tokens.
            accelerator.backward(part * accelerator.num_processes)
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        sums = torch.tensor([[float(loss), float(batch.rewards.sum()), batch.sampled_tokens]])
        sums = accelerator.gather(sums).sum(0)
        return {
            "loss": float(sums[0]),
            "reward": float(sums[1]) / rows_total,
            "grad_norm": float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm),
            "tokens": int(sums[2]),
            "staleness": int(accelerator.gather(batch.staleness.max()[None]).max()),
        }

    def _loss(self, batch: tidegate.Batch, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        longest = int(batch.attention_mask[rows].sum(1).max())
        token_ids = batch.token_ids[rows, :longest]
        # Padding is at the end, where no counted token attends to it: no attention_mask is needed.
        logits = self.model(input_ids=token_ids, use_cache=False).logits[:, :-1].float()
        logprobs = -torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), token_ids[:, 1:], reduction="none"
        )
        loss, _ = decoupled_ppo_loss(
            logprobs,
            logprobs.detach(),
            batch.logprobs[rows, 1:longest],
            batch.advantages[rows, None],
            batch.loss_mask[rows, 1:longest],
            tokens_in_batch=tokens,
        )
        return loss

    def weights(self) -> dict[str, Any]:
        """Return the whole model's weights in the first process. Every process calls this."""
        return get_model_state_dict(self._bare, options=FULL_STATE_DICT)

    def save(self, weights: dict[str, Any], number: int, position: dict[str, Any]) -> Path:
        """Write the checkpoint of batch ``number``. Every process calls this."""
        directory: Path = self._output / "checkpoints" / f"batch-{number:06d}"
        optimizer = get_optimizer_state_dict(self._bare, self.optimizer, options=FULL_STATE_DICT)
        if self._accelerator.is_main_process:
            partial = directory.with_suffix(".partial")
            self._bare.save_pretrained(partial, state_dict=weights)
            self._tokenizer.save_pretrained(partial)
            torch.save(optimizer, partial / "optimizer.pt")
            (partial / "rollouts.json").write_text(json.dumps(position))
            partial.rename(directory)  # so that a crash leaves no half checkpoint
        self._accelerator.wait_for_everyone()
        return directory


def newest_checkpoint(output: Path) -> Path | None:
    """Return the newest complete checkpoint's directory; None if there is none."""
    return max((output / "checkpoints").glob("batch-??????"), default=None)


def train(options: argparse.Namespace, accelerator: Accelerator) -> dict[str, Any]:
    """Train, evaluate and save; return what was seen."""
    position = None
    if options.checkpoint is not None:
        position = json.loads((options.checkpoint / "rollouts.json").read_text())
    address = [f"ipc://{tempfile.mkdtemp(prefix='tidegate-')}/run"]
    broadcast_object_list(address)
    host = None
    if accelerator.is_main_process:
        host = RunHost(options, address[0], position["journal"] if position else None)
    trainer = Trainer(options, accelerator)
    held_out = make_tasks(options, "held_out")
    evaluation_tasks = [next(held_out) for _ in range(options.held_out)]
    local = [getattr(each, "_local_tensor", each) for each in trainer.model.parameters()]
    seen: dict[str, Any] = {"evaluations": {}, "steps": [], "rows": []}
    seen["local_parameters"] = sum(each.numel() for each in local)
    with tidegate.connect_sync(
        address[0],
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        resume=position,
    ) as rollouts:

        def evaluate(number: int) -> None:
            if accelerator.is_main_process:
                reward = rollouts.evaluate(evaluation_tasks).mean_reward
                accelerator.log({"evaluation/reward": reward}, step=number)
                print(f"batch {number}: held-out reward {reward:.3f}", flush=True)
                seen["evaluations"][number] = reward

        if rollouts.is_resumed:
            publish(rollouts, trainer.weights(), accelerator)
        else:
            evaluate(0)
        for batch in rollouts.batches():
            metrics = trainer.step(batch)
            weights = trainer.weights()
            is_last = batch.number >= options.batches
            saves = is_last or batch.number % options.checkpoint_every == 0
            if saves:
                trainer.save(weights, batch.number, rollouts.state_dict())
                rollouts.ack(rollouts.state_dict())
            publish(rollouts, weights, accelerator)
            accelerator.log({f"train/{name}": each for name, each in metrics.items()}, batch.number)
            seen["steps"].append({"batch": batch.number} | metrics)
            seen["rows"].append(len(batch.rewards))
            if is_last or batch.number % options.evaluate_every == 0:
                evaluate(batch.number)
            if is_last:
                break
    if host is not None:
        host.join()
    return seen


def publish(rollouts: Any, weights: dict[str, Any], accelerator: Accelerator) -> None:
    """Publish the first process's weights; the other processes take part."""
    rollouts.publish(weights if accelerator.is_main_process else None)


def main() -> None:
    """Run the recipe; the first process prints what it saw as one line of JSON."""
    options = _arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    trackers = None if options.report_to == "none" else options.report_to
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), log_with=trackers, project_dir=options.output
    )
    torch.manual_seed(options.seed)
    if options.model is None:
        options.model = options.output / "model"
        if accelerator.is_main_process:
            make_model(options.model, seed=options.seed)
        accelerator.wait_for_everyone()
    options.checkpoint = newest_checkpoint(options.output) if options.resume else None
    if options.resume and options.checkpoint is None:
        raise SystemExit(f"error: {options.output}/checkpoints has no checkpoint to resume from")
    config = {
        name: value for name, value in vars(options).items() if isinstance(value, int | float)
    }
    accelerator.init_trackers("hf_grpo", config=config)
    seen = train(options, accelerator)
    accelerator.end_training()
    if accelerator.is_main_process:
        print(json.dumps(seen))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="for the run, checkpoints and trackers")
    add("--model", type=Path, help="a Hugging Face directory; left out, a small one is made")
    add("--data", type=Path, help="questions and answers in GSM8K's JSON lines")
    add("--resume", action="store_true", help="continue from the newest checkpoint")
    add("--batches", type=int, default=24, help="optimizer steps")
    add("--engines", type=int, default=2)
    add("--max-staleness", type=int, default=2)
    add("--group-size", type=int, default=8)
    add("--groups-per-batch", type=int, default=16)
    add("--max-tokens", type=int, default=256, help="of a turn; the calculator's are shorter")
    add("--learning-rate", type=float, default=3e-4)
    add("--evaluate-every", type=int, default=8, help="batches between two evaluations")
    add("--held-out", type=int, default=256, help="tasks of an evaluation")
    add("--checkpoint-every", type=int, default=8, help="batches between two checkpoints")
    add("--report-to", choices=("none", "tensorboard", "wandb", "mlflow"), default="none")
    add("--fsdp", action="store_true", help="shard the model over the processes (FSDP2)")
    add("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
