"""GRPO on Hugging Face's stack: transformers, accelerate and its trackers, with Tidegate.

    pip install -e '.[examples]' accelerate tensorboard  # after a torch
    python -m examples.hf_grpo --output runs/hf
    torchrun --nproc-per-node 2 -m examples.hf_grpo --output runs/hf  # or more processes
    python -m examples.hf_grpo --output runs/hf --resume  # continues from the newest checkpoint
    python -m examples.hf_grpo --output runs/qwen --model DIRECTORY --dataset gsm8k.jsonl
    python -m examples.hf_grpo --output runs/words --model DIRECTORY --task words \\
        --engine-url vllm+http://127.0.0.1:8000  # a vLLM server that serves DIRECTORY

The task is arithmetic. Without --model, the small model of tiny_model.py is made, which solves sums
with a calculator in several turns. A model with a chat template answers in words and ends with
`#### 42`, as GSM8K's reference answers do; --dataset has GSM8K's lines,
{"question": …, "answer": "… #### 42"}, every tenth of which is held out for evaluations.
`--task words` is `make demo-real`'s: words to list that begin with a letter.

The first process hosts the run on a thread, and all processes train on parts of its batches. The
output directory gets:

    run/                  the run's journal and records, for `tidegate audit` and `dashboard`
    checkpoints/batch-N/  a directory for `from_pretrained` and servers, with the optimizer's state
                          (optimizer.pt) and the position in the run's journal (rollouts.json)
    metrics.jsonl         a line for each batch and each evaluation

A resumed run trains again what it had trained after its newest checkpoint, because those weights
are lost; what is in the checkpoint is not trained again. --fsdp shards the model with torch's
FSDP2, also on CPUs, where accelerate's own FSDP plugin silently falls back to DDP.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.util
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
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import tidegate
from examples import calculator
from examples.grpo import first_trained, rows_of_like_length
from examples.tiny_model import make_model
from examples.word_lists import WordTask, list_words, word_tasks
from tidegate.policies.objectives import decoupled_ppo_loss

HELD_OUT_SEED = 11
INSTRUCTION = "\nThink step by step. End with #### and the answer as a number."
WHOLE_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""The first process gets whole state dicts, however the model is sharded; the others empty ones."""


# ---------------------------------------------------------------- tasks and episodes


def training_tasks(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield tasks endlessly, in the same order for a seed, so that a resumed run gets the same."""
    if options.dataset is None:
        yield from made_tasks(options, "train", options.seed)  # endless
    rows = [row for number, row in enumerate(options.rows) if number % 10]
    order = random.Random(options.seed)
    while True:
        yield from order.sample(rows, len(rows))


def held_out_tasks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the tasks of each evaluation, none of which is trained on."""
    if options.dataset is None:
        held_out = made_tasks(options, "held_out", HELD_OUT_SEED)
        return [next(held_out) for _ in range(options.held_out)]
    return [*options.rows[::10]][: options.held_out]


def made_tasks(
    options: argparse.Namespace, split: calculator.Split, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield endless tasks as plain data, which the run's journal can keep."""
    if options.task == "words":
        yield from map(dataclasses.asdict, word_tasks(split, seed))
    for task in calculator.tasks(split, seed):
        yield {"question": task.question, "answer": f"#### {task.answer}", "entry": task.entry}


async def solve_with_calculator(episode: tidegate.Episode, task: dict[str, Any]) -> float:
    """Solve a sum in several turns, between which a calculator answers."""
    entry = task["entry"]
    expression = entry["metadata"]["expression"]
    return await calculator.solve(episode, calculator.Task(task["question"], expression, entry))


async def solve_in_words(episode: tidegate.Episode, task: dict[str, Any]) -> float:
    """Ask a chat model; the reward is 1.0 if its number is the reference answer's."""
    turn = await episode.generate(
        messages=[{"role": "user", "content": task["question"] + INSTRUCTION}]
    )
    number = final_number(turn.text)
    return float(number is not None and number == final_number(task["answer"]))


async def solve_words(episode: tidegate.Episode, task: dict[str, Any]) -> float:
    """Ask a chat model for a list of words."""
    return await list_words(episode, WordTask(**task))


def final_number(text: str) -> float | None:
    """Return the number after the last ``####``; None if there is none."""
    found = re.findall(r"####\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)", text)
    return float(found[-1].replace(",", "")) if found else None


# ---------------------------------------------------------------- the run


class RunHost:
    """A run on a thread of the first process; each process of the trainer connects to its address.

    On a thread, a train step stalls no rollout. The block begins once engines have loaded the
    model. An error in it is often only a lost connection, so the run's own error, if there is one,
    is raised in its place.
    """

    def __init__(self, options: argparse.Namespace, address: str, position: Any) -> None:
        self._options = options
        self._address = address
        self._position = position
        self._error: BaseException | None = None
        self._is_up_or_failed = threading.Event()
        # A daemon, so that a failed trainer ends at once instead of waiting for its run.
        self._thread = threading.Thread(target=self._main, name="run host", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        self._is_up_or_failed.wait()
        if self._error is not None:
            raise self._error

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._thread.join(timeout=None if error is None else 1.0)
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        try:
            asyncio.run(self._host())
        except BaseException as error:  # noqa: BLE001 - raised again by __exit__
            self._error = error
        finally:
            self._is_up_or_failed.set()

    async def _host(self) -> None:
        options = self._options
        async with tidegate.serve(
            model=options.model,
            engines=options.engines,
            engine_urls=options.engine_url,
            max_staleness=options.max_staleness,
            group_size=options.group_size,
            groups_per_batch=options.groups_per_batch,
            max_tokens=options.max_tokens,
            run_directory=options.output / "run",
            journal=True,
            resume=self._position,
            seed=options.seed,
        ) as rollouts:
            self._is_up_or_failed.set()
            episode = solve_in_words if is_chat_model(options.model) else solve_with_calculator
            if options.task == "words":
                episode = solve_words
            # Returns once every process has left its connection.
            await tidegate.listen(
                rollouts, self._address, tasks=training_tasks(options), episode=episode
            )


def is_chat_model(model: Path) -> bool:
    """Return whether a model directory has a chat template."""
    return AutoTokenizer.from_pretrained(model).chat_template is not None


# ---------------------------------------------------------------- training


class Trainer:
    """The model, its optimizer and its checkpoints, in each process."""

    def __init__(self, options: argparse.Namespace, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._output = options.output
        self._tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(
            options.checkpoint or options.model, dtype=torch.float32
        )
        if options.last_layers is not None:
            model.requires_grad_(False)
            layers: Any = model.base_model.layers
            layers[-options.last_layers :].requires_grad_(True)
        self._model = model
        """The transformers model, whose parameters have the names that engines accept."""
        if options.fsdp:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        self._forward = model if options.fsdp else accelerator.prepare(model)
        """The model as it is called: in DDP's wrapper if there are several processes."""
        self._optimizer = torch.optim.AdamW(
            [each for each in model.parameters() if each.requires_grad],
            lr=options.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )
        if options.checkpoint is not None:
            saved = torch.load(options.checkpoint / "optimizer.pt", weights_only=True)
            set_optimizer_state_dict(model, self._optimizer, saved, options=WHOLE_STATE)

    def step(self, batch: tidegate.Batch) -> dict[str, float]:
        """Take one optimizer step on this process's part of a batch; return the whole's metrics."""
        accelerator = self._accelerator
        shard = batch.shard  # None: this process has the whole batch
        tokens_total = batch.sampled_tokens if shard is None else shard.sampled_tokens_total
        rows_total = len(batch.rewards) if shard is None else shard.rows_total
        passes = list(rows_of_like_length(batch, torch.arange(len(batch.rewards))))
        # Every backward pass of a distributed model waits for all processes, so all take as many.
        # A process that has fewer repeats its last one, with a weight of 0.
        count = int(max(self._gathered(len(passes))))
        self._optimizer.zero_grad()
        loss_sum = 0.0
        for number in range(count):
            rows, weight = passes[min(number, len(passes) - 1)], float(number < len(passes))
            loss = weight * self._loss(batch, rows, tokens_total)
            loss_sum += loss.item()
            # Distributed gradients are means over processes. `loss` is this process's part of the
            # sum over all tokens, divided by their number, so gradients have to be summed.
            accelerator.backward(loss * accelerator.num_processes)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        if isinstance(norm, torch.distributed.tensor.DTensor):  # under FSDP2
            norm = norm.full_tensor()
        self._optimizer.step()
        return {
            "loss": sum(self._gathered(loss_sum)),
            "reward": sum(self._gathered(float(batch.rewards.sum()))) / rows_total,
            "grad_norm": float(norm),
            "tokens": tokens_total,
            "staleness": int(max(self._gathered(int(batch.staleness.max())))),
        }

    def _loss(self, batch: tidegate.Batch, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the loss of some rows' tokens, divided by the number of tokens of all rows."""
        longest = int(batch.attention_mask[rows].sum(1).max())
        first = first_trained(batch, rows)
        device = self._accelerator.device

        def column(values: torch.Tensor) -> torch.Tensor:
            return values[rows, first:longest].to(device)

        # Padding is at the end, where no counted token attends to it: no attention_mask is needed.
        logits = self._forward(
            input_ids=batch.token_ids[rows, :longest].to(device),
            # No logits of the prompt that all rows begin with.
            logits_to_keep=torch.arange(first - 1, longest - 1, device=device),
            use_cache=False,
        ).logits
        sampled = column(batch.token_ids)
        logprobs = -torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), sampled.flatten(), reduction="none"
        ).view_as(sampled)
        loss, _ = decoupled_ppo_loss(
            logprobs=logprobs,
            proximal_logprobs=logprobs.detach(),  # one step per batch: the current policy
            behaviour_logprobs=column(batch.logprobs),
            advantages=batch.advantages[rows, None].to(self._accelerator.device),
            loss_mask=column(batch.loss_mask),
            tokens_in_batch=tokens,
        )
        return loss

    def _gathered(self, number: float) -> list[float]:
        """Return every process's number."""
        mine = torch.tensor([number], dtype=torch.float64, device=self._accelerator.device)
        return [float(each) for each in self._accelerator.gather(mine)]

    def weights(self) -> dict[str, Any] | None:
        """Return the whole model's weights in the first process, None in the others.

        Every process calls this, because FSDP's parts are gathered.
        """
        weights = get_model_state_dict(self._model, options=WHOLE_STATE)
        return weights if self._accelerator.is_main_process else None

    def save(self, weights: dict[str, Any] | None, number: int, position: Any) -> None:
        """Write the checkpoint of batch ``number``. Every process calls this."""
        optimizer = get_optimizer_state_dict(self._model, self._optimizer, options=WHOLE_STATE)
        if weights is not None:
            directory: Path = self._output / "checkpoints" / f"batch-{number:06d}"
            partial = directory.with_suffix(".partial")
            self._model.save_pretrained(partial, state_dict=weights)
            self._tokenizer.save_pretrained(partial)
            torch.save(optimizer, partial / "optimizer.pt")
            (partial / "rollouts.json").write_text(json.dumps(position))
            partial.rename(directory)  # in one piece: a crash leaves no half checkpoint
        self._accelerator.wait_for_everyone()


class Metrics:
    """Figures of the first process: printed, appended to metrics.jsonl, sent to the tracker."""

    def __init__(self, options: argparse.Namespace, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._path = options.output / "metrics.jsonl"

    def add(self, kind: str, number: int, figures: dict[str, float]) -> None:
        """Record figures of batch ``number``."""
        self._accelerator.log({f"{kind}/{name}": each for name, each in figures.items()}, number)
        if self._accelerator.is_main_process:
            with self._path.open("a") as file:
                file.write(json.dumps({"kind": kind, "batch": number} | figures) + "\n")
            shown = ", ".join(f"{name} {each:.4g}" for name, each in figures.items())
            print(f"batch {number}: {kind}: {shown}", flush=True)


def train(options: argparse.Namespace, accelerator: Accelerator, address: str) -> None:
    """Train, evaluate and save."""
    # Both parts of the position: the run's, to continue its journal, and this trainer's.
    position = None
    if options.checkpoint is not None:
        position = json.loads((options.checkpoint / "rollouts.json").read_text())
    host: Any = contextlib.nullcontext()
    if accelerator.is_main_process:
        host = RunHost(options, address, position and position["journal"])
    trainer = Trainer(options, accelerator)
    metrics = Metrics(options, accelerator)
    held_out = held_out_tasks(options)
    with contextlib.ExitStack() as stack:
        stack.enter_context(host)
        accelerator.wait_for_everyone()  # engines of a large model take minutes to load it
        rollouts = stack.enter_context(
            tidegate.connect_sync(
                address,
                rank=accelerator.process_index,
                world_size=accelerator.num_processes,
                resume=position,
            )
        )
        if rollouts.is_resumed:
            rollouts.publish(trainer.weights())  # engines have begun with those of --model
        elif accelerator.is_main_process:
            metrics.add("evaluation", 0, {"reward": rollouts.evaluate(held_out).mean_reward})
        for batch in rollouts.batches():
            figures = trainer.step(batch)
            weights = trainer.weights()
            is_last = batch.number >= options.batches
            if is_last or batch.number % options.checkpoint_every == 0:
                # Before the publish, so that every served version is in a checkpoint that a resume
                # can load.
                trainer.save(weights, batch.number, rollouts.state_dict())
                rollouts.ack(rollouts.state_dict())
            rollouts.publish(weights)
            metrics.add("train", batch.number, figures)
            evaluates = is_last or batch.number % options.evaluate_every == 0
            if evaluates and accelerator.is_main_process:
                reward = rollouts.evaluate(held_out).mean_reward
                metrics.add("evaluation", batch.number, {"reward": reward})
            if is_last:
                break


def main() -> None:
    """Run the recipe."""
    options = _arguments()
    _check(options)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        log_with=None if options.report_to == "none" else options.report_to,
        project_dir=options.output,
    )
    torch.manual_seed(options.seed)
    if options.model is None:
        options.model = options.output / "model"
        if accelerator.is_main_process and not options.resume:
            print("making the small model, if it is not there: a minute", flush=True)
            make_model(options.model, seed=options.seed)
        accelerator.wait_for_everyone()
    simple = {n: each for n, each in vars(options).items() if isinstance(each, int | float)}
    # TensorBoard and MLflow get project_dir and MLFLOW_TRACKING_URI; W&B would write to ./wandb.
    accelerator.init_trackers("hf_grpo", simple, {"wandb": {"dir": options.output}})
    with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
        address = [f"ipc://{folder}/run"]
        broadcast_object_list(address)  # the first process's, for all
        train(options, accelerator, address[0])
    accelerator.end_training()


# ---------------------------------------------------------------- options, and what is refused


def newest_checkpoint(output: Path) -> Path | None:
    """Return the newest complete checkpoint's directory; None if there is none."""
    return max((output / "checkpoints").glob("batch-??????"), default=None)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a dataset of GSM8K's lines; exit with an error if it has others."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.append({"question": row["question"], "answer": row["answer"]})
            is_number = final_number(row["answer"]) is not None
        except (ValueError, TypeError, KeyError) as error:
            raise SystemExit(
                f'error: line {number} of {path} is not {{"question": TEXT, "answer": TEXT}} '
                f"({type(error).__name__}: {error}): {line[:80]}"
            ) from None
        _require(
            is_number,
            f"the answer in line {number} of {path} has no '#### NUMBER', which is what answers "
            f"are compared to: {row['answer'][-80:]!r}",
        )
    _require(len(rows) >= 10, f"{path} has {len(rows)} lines: give 10, as every 10th is held out")
    return rows


def _check(options: argparse.Namespace) -> None:
    """Complete the options; exit with an error if they do not fit one another or the files."""
    output, processes = options.output, int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
    _require(
        options.model is None or (options.model / "config.json").is_file(),
        f"--model {options.model} has no config.json: give a directory in Hugging Face's format",
    )
    _require(
        options.task != "words" or (options.model is not None and is_chat_model(options.model)),
        "--task words needs a --model with a chat template",
    )
    _require(
        options.task != "words" or options.dataset is None,
        f"--task words makes its tasks, but --dataset {options.dataset} has others: leave one out",
    )
    if options.engines is None:
        options.engines = 0 if options.engine_url else 2
    options.rows = []
    if options.dataset is not None:
        _require(options.dataset.is_file(), f"--dataset {options.dataset} is no file")
        _require(
            options.model is not None and is_chat_model(options.model),
            "--dataset needs a --model with a chat template; others can be given sums only",
        )
        options.rows = read_rows(options.dataset)
    options.checkpoint = None
    if options.resume:
        options.checkpoint = newest_checkpoint(output)
        _require(
            options.checkpoint is not None,
            f"{output}/checkpoints has no checkpoint to resume from: begin anew, in another "
            "--output and without --resume",
        )
        _require(
            (output / "run" / "journal.db").is_file(),
            f"{output}/run has no journal.db, which {options.checkpoint} continues: begin anew, in "
            f"another --output and with --model {options.checkpoint}",
        )
        _require(
            int(options.checkpoint.name[-6:]) < options.batches,
            f"{options.checkpoint} is the last of --batches {options.batches}: give more",
        )
    else:
        has_run = (output / "run").exists()
        _require(not has_run, f"{output} has a run: add --resume, or give another --output")
    _require(
        options.report_to == "none" or importlib.util.find_spec(options.report_to) is not None,
        f"--report-to {options.report_to} needs its package: pip install {options.report_to}",
    )
    _require(
        not options.fsdp or processes > 1,
        "--fsdp shards the model over processes, and this is the only one: start it by "
        "`torchrun --nproc-per-node 2 -m examples.hf_grpo …`",
    )
    _require(
        options.group_size * options.groups_per_batch >= processes,
        f"a batch of {options.groups_per_batch} groups of {options.group_size} has no row for each "
        f"of {processes} processes: start fewer, or give larger batches",
    )
    if options.learning_rate is None:
        options.learning_rate = 3e-4 if options.model is None else 1e-6


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SystemExit(f"error: {message}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory of the run, checkpoints and metrics")
    add("--model", type=Path, help="a Hugging Face directory (default: a small one is made)")
    add("--dataset", type=Path, help="GSM8K's JSON lines: question, answer (default: sums)")
    add("--task", choices=("sums", "words"), default="sums", help="without --dataset")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --output")
    add("--batches", type=_count, default=24, help="optimizer steps, those resumed from included")
    add("--engines", type=_count, help="of Tidegate's own (default: 2, or none with --engine-url)")
    add("--engine-url", action="append", default=[], help="vllm+http://HOST:PORT; may be repeated")
    add("--max-staleness", type=int, default=2, help="in versions; each batch makes one")
    add("--group-size", type=_count, default=8, help="rollouts of a task")
    add("--groups-per-batch", type=_count, default=16)
    add("--max-tokens", type=_count, default=256, help="of a turn; the calculator's are shorter")
    add("--last-layers", type=_count, help="train these layers only (default: the whole model)")
    add("--learning-rate", type=float, help="default: 3e-4, and 1e-6 with --model")
    add("--evaluate-every", type=_count, default=8, help="versions between two evaluations")
    add("--held-out", type=_count, default=256, help="tasks of an evaluation, at most")
    add("--checkpoint-every", type=_count, default=8, help="versions between two checkpoints")
    add("--report-to", choices=("none", "tensorboard", "wandb", "mlflow"), default="none")
    add("--fsdp", action="store_true", help="shard the model over the processes (FSDP2)")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count


if __name__ == "__main__":
    main()
