"""TRL's GRPOTrainer, unmodified, with rollouts of several turns from Tidegate.

    pip install -e '.[trl,examples]'  # after a torch for CPUs
    python -m examples.trl_rollout_func --steps 12
    torchrun --nproc-per-node 2 -m examples.trl_rollout_func --model DIR

TRL's `rollout_func` is a Tidegate run: the episode of calculator.py solves a sum with a calculator,
turn by turn. TRL computes advantages and loss, evaluates and saves checkpoints as always; tokens
that the calculator wrote carry no loss. Without --model, the small model of tiny_model.py is made.
"""

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import tidegate
from examples import calculator
from examples.tiny_model import make_model

HELD_OUT_SEED = 11


def sums(split: calculator.Split, seed: int, count: int) -> dict[str, calculator.Task]:
    """Return distinct sums by their question, which is TRL's prompt."""
    found: dict[str, calculator.Task] = {}
    for task in calculator.tasks(split, seed):
        found[task.question] = task
        if len(found) == count:
            break
    return found


class Solver:
    """Episodes for TRL, which gives them a prompt only."""

    def __init__(self, tasks: dict[str, calculator.Task]) -> None:
        self._tasks = tasks

    async def solve(self, episode: tidegate.Episode, prompt: str) -> dict[str, float]:
        """Play the calculator's episode; TRL's reward function gets what this returns."""
        reward = await calculator.solve(episode, self._tasks[prompt])
        return {"reward": reward, "turns": float(len(episode.turns))}


def episode_reward(reward: list[float], **_: Any) -> list[float]:
    """Return the rewards of the episodes, as TRL's reward function."""
    return reward


def main() -> None:
    """Evaluate, train and evaluate again; print the results as one line of JSON."""
    options = _arguments()
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    if options.model is None:
        with state.main_process_first():
            options.model = Path("runs/model-0")
            make_model(options.model)
    training = sums("train", 0, options.tasks)
    held_out = sums("held_out", HELD_OUT_SEED, options.held_out)
    solver = Solver(training | held_out)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        run = None
        if state.is_main_process:  # TRL's other processes get their part from the first one's run
            run = stack.enter_context(
                tidegate.serve_sync(
                    model=options.model,
                    engines=options.engines,
                    max_staleness=0,
                    group_size=options.num_generations,
                    groups_per_batch=options.prompts,
                    run_directory=options.run_directory,
                )
            )
        trainer = GRPOTrainer(
            model=str(options.model),
            args=_config(options, scratch, state.num_processes),
            reward_funcs=episode_reward,
            train_dataset=Dataset.from_list([{"prompt": question} for question in training]),
            eval_dataset=Dataset.from_list([{"prompt": question} for question in held_out]),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            peft_config=_lora() if options.lora else None,
            rollout_func=tidegate.trl_rollout_func(run, episode=solver.solve),
        )
        before = _evaluated(trainer) if options.evaluates else None
        trainer.train(resume_from_checkpoint=options.resume)
        after = _evaluated(trainer) if options.evaluates else None
        if run is None:
            return
        results = _results(trainer, run) | {"before": before, "after": after}
    print(json.dumps(results))


def _evaluated(trainer: Any) -> float:
    """Evaluate, and return the mean reward as TRL logs it; old releases do not return it."""
    trainer.evaluate()
    rewards = [log["eval_reward"] for log in trainer.state.log_history if "eval_reward" in log]
    return float(rewards[-1])


def _results(trainer: Any, run: tidegate.SyncRollouts) -> dict[str, Any]:
    statistics = run.statistics()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "steps": trainer.state.global_step,
        "version": run.version,
        "rewards": [round(entry["reward"], 4) for entry in history],
        "mean_length": history[-1]["completions/mean_length"] if history else None,
        "rollouts": statistics.trained_rollouts,
        "trained_tokens": statistics.ledger.trained,
        "evaluation_tokens": statistics.evaluation_ledger.generated,
        "staleness": statistics.max_staleness_seen,
    }


def _config(options: argparse.Namespace, scratch: str, processes: int) -> GRPOConfig:
    rows = options.num_generations * options.prompts
    return GRPOConfig(
        output_dir=str(options.checkpoints or scratch),
        max_steps=options.steps,
        num_generations=options.num_generations,
        per_device_train_batch_size=rows // processes,
        per_device_eval_batch_size=max(1, options.held_out // processes),
        num_generations_eval=options.num_generations_eval,
        num_iterations=options.iterations,
        gradient_accumulation_steps=options.accumulate,
        steps_per_generation=1,
        learning_rate=options.learning_rate,
        adam_beta2=0.95,
        lr_scheduler_type="constant",
        logging_steps=1,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="steps" if options.checkpoints else "no",
        save_steps=1,
        report_to="none",
    )


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--model", type=Path, help="a Hugging Face directory; default: create a small model")
    add("--engines", type=int, default=2)
    add("--steps", type=int, default=12)
    add("--num-generations", type=int, default=8, help="completions of each prompt")
    add("--num-generations-eval", type=int, default=1)
    add("--prompts", type=int, default=16, help="prompts of one generation")
    add("--iterations", type=int, default=1, help="optimizer steps on each generation")
    add("--accumulate", type=int, default=1, help="generations of one optimizer step")
    add("--tasks", type=int, default=1024, help="sums to train on")
    add("--held-out", type=int, default=256, help="sums to evaluate on")
    add("--no-evaluation", dest="evaluates", action="store_false")
    add("--learning-rate", type=float, default=3e-4)
    add("--lora", action="store_true", help="train a LoRA adapter")
    add("--run-directory", type=Path, help="where the run is recorded, for `tidegate audit`")
    add("--checkpoints", type=Path, help="where TRL saves its checkpoints")
    add("--resume", help="one of TRL's checkpoints, to continue from")
    return parser.parse_args()


if __name__ == "__main__":
    main()
