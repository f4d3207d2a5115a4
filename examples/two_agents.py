"""Two agents that learn a language together: two LoRA adapters trained beside one another.

    python -m examples.two_agents                      # train both, report and audit both
    python -m examples.two_agents --versions 10 --seed 1

In each round of an episode the speaker sees a secret digit and writes a word. The listener sees
only the word, and answers a digit. The listener's reward is the share of rounds it gets right. The
speaker's is the same, less a price for each word that is not one letter long. The base model has
the form of both roles and a hint of a common language: it mostly writes and answers at random.

One run samples both from one base model. Each agent is an adapter with a trainer of its own: its
own batches, weight versions, staleness bound and reward. The trainers wait for each other only
through the rule that an episode starts once both bounds admit it.
"""

import argparse
import asyncio
import random
import string
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3ForCausalLM

import tidegate
from examples.grpo import load_trainer, train_step
from examples.imitation import Demonstration, Performance, Phase, Plan
from examples.tiny_model import Recipe, character_tokenizer, find_model
from tidegate.observability.audit.audit import audit_run, write_audit
from tidegate.observability.reports.facts import read_facts
from tidegate.observability.reports.report import write_report
from tidegate.orchestrator.trainer.adapters import AdapterTrainer

SPEAKER, LISTENER = "speaker", "listener"
BOUNDS = {SPEAKER: 1, LISTENER: 2}
"""Staleness bound of each agent, in its own weight versions."""

DIGITS, LETTERS = string.digits[:6], string.ascii_lowercase[:8]
ROUNDS = 4
TELL, HEAR = "tell ", "hear "
WORD_PRICE = 0.2
"""What a word that is not one letter long costs the speaker, as a share of a right answer."""
HINT_SHARE = 0.35
"""Share of the base model's demonstrations that use the common language, by which the letter of a
digit is the one at its place. Without it, neither agent would learn until the other has."""

ENGINES = 2
GROUP_SIZE = 8
STEP_TIME_S = 0.01
"""Minimum step time of the engines, so that they do not compete with the trainers for the CPU."""

RANK, ALPHA = 16, 32
LORA_CONFIG = {"r": RANK, "lora_alpha": ALPHA}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

SPECIAL = ("<pad>", "<eos>", "<unk>")
PHRASES = (TELL, HEAR)

Task = str
"""The secret digits of one group's episodes, one a round."""


async def play(episode: tidegate.Episode, task: Task) -> dict[str, float]:
    """Play one episode; return the reward of each agent."""
    listener = episode.agent(LISTENER)
    understood = costly = 0
    for digit in task:
        episode.append(f"{TELL}{digit}:")
        said = (await episode.generate(max_tokens=3)).text
        costly += len(said) != 1
        listener.append(f"{HEAR}{said}:")
        answer = (await listener.generate(max_tokens=2)).text
        understood += answer == digit
    share = understood / len(task)
    return {LISTENER: share, SPEAKER: share - WORD_PRICE * costly / len(task)}


def secrets(count: int, seed: int) -> list[Task]:
    """Return the tasks of a run."""
    numbers = random.Random(seed)
    return ["".join(numbers.choices(DIGITS, k=ROUNDS)) for _ in range(count)]


# ---------------------------------------------------------------- the base model


PLAN = Plan(
    skill_phase=Phase(skill_share=1.0, learning_rate=2e-3, check_steps=20),
    skill_wanted=0.95 * HINT_SHARE,
    mixed_phase=Phase(skill_share=1.0, learning_rate=2e-4, check_steps=20),
    accuracy_wanted=(0.0, 1.0),
)
"""Skill is to speak and to understand the common language as often as the demonstrations do."""


@dataclass(slots=True)
class RoundDemonstrations:
    """Source of rounds in either role, with a hint at a common language."""

    tokenizer: Tokenizer
    numbers: random.Random
    plan: Plan = PLAN

    def batch(self, skill_share: float) -> list[Demonstration]:
        """Return episodes of either role. [B]"""
        return [self._rounds() for _ in range(self.plan.batch_demonstrations)]

    def _rounds(self) -> Demonstration:
        shown = Demonstration()
        draw = self.numbers.choice
        is_speaker = draw((True, False))
        for _ in range(ROUNDS):
            digit = draw(DIGITS)
            if self.numbers.random() < HINT_SHARE:
                word = LETTERS[int(digit)]
            elif is_speaker:
                word = "".join(self.numbers.choices(LETTERS, k=draw((1, 2))))
            else:
                word = draw(LETTERS)
            prompt, action = (f"{TELL}{digit}:", word) if is_speaker else (f"{HEAR}{word}:", digit)
            shown.add(self.tokenizer, prompt, is_action=False)
            shown.add(self.tokenizer, f"{action}<eos>", is_action=True)
        return shown

    @torch.no_grad()
    def performance(self, model: Qwen3ForCausalLM) -> Performance:
        """Measure the mean probability of the common language's letters and digits."""
        chances = {TELL: 0.0, HEAR: 0.0}
        for digit, letter in zip(DIGITS, LETTERS, strict=False):
            for role, shown, wanted in ((TELL, digit, letter), (HEAR, letter, digit)):
                prompt = self.tokenizer.encode(f"{role}{shown}:").ids
                logits = model(torch.tensor([prompt])).logits[0, -1]
                chances[role] += float(logits.softmax(0)[self.tokenizer.encode(wanted).ids[0]])
        told, heard = (chance / len(DIGITS) for chance in chances.values())
        return Performance(skill=min(told, heard), accuracy=told * heard)


def make_tokenizer() -> Tokenizer:
    """Create a tokenizer of characters, with a token for each role's word."""
    vocabulary = [*SPECIAL, *PHRASES, *string.ascii_lowercase, *string.digits, ":"]
    return character_tokenizer(vocabulary, special=SPECIAL, phrases=PHRASES)


TWO_ROLES = Recipe(
    tokenizer=make_tokenizer,
    source=lambda tokenizer, seed: RoundDemonstrations(tokenizer, random.Random(seed)),
    sources=("two_agents.py",),
    context_tokens=64,
)


# ---------------------------------------------------------------- the trainers


class LoraLinear(nn.Module):
    """A frozen linear layer, with a trained product of two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the product's share to the frozen layer's output."""
        added = hidden @ self.lora_A.T @ self.lora_B.T
        output: Tensor = self.base(hidden) + ALPHA / RANK * added
        return output


def add_lora(model: PreTrainedModel) -> list[nn.Parameter]:
    """Freeze a model and put LoRA matrices on its projections; return these."""
    model.requires_grad_(False)
    trained: list[nn.Parameter] = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in PROJECTIONS and isinstance(child, nn.Linear):
                lora = LoraLinear(child)
                setattr(module, name, lora)
                trained += [lora.lora_A, lora.lora_B]
    return trained


def lora_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the adapter's tensors by the names that PEFT gives them."""
    return {
        f"base_model.model.{name}.weight": parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


async def learn(trainer: AdapterTrainer, model: Path, learning_rate: float) -> list[float]:
    """Train one agent on its own batches until the tasks end; return each batch's mean reward."""
    policy, _ = load_trainer(model, learning_rate)
    optimizer = torch.optim.AdamW(add_lora(policy), lr=learning_rate, weight_decay=0.0)
    rewards: list[float] = []
    await trainer.publish(lora_tensors(policy), config=LORA_CONFIG)
    while (batch := await trainer.next_batch()) is not None:
        rewards.append(float(batch.rewards.mean()))
        await asyncio.to_thread(train_step, policy, optimizer, batch)
        version = await trainer.publish(lora_tensors(policy), config=LORA_CONFIG)
        if batch.number % 10 == 0:
            staleness = float(batch.staleness.float().mean())
            print(
                f"{trainer.name}: version {version}, reward {rewards[-1]:.3f}, "
                f"mean staleness {staleness:.2f}",
                flush=True,
            )
    return rewards


async def train(options: argparse.Namespace, run_directory: Path) -> dict[str, list[float]]:
    """Train both agents in one run; return the rewards by agent."""
    made_at = options.runs / f"model-two-agents-{options.seed}"
    model, _ = find_model(options.model, made_at, recipe=TWO_ROLES, seed=options.seed)
    async with tidegate.serve(
        model=model,
        engines=ENGINES,
        group_size=GROUP_SIZE,
        groups_per_batch=options.groups_per_batch,
        step_time_min_s=options.step_time_s,
        run_directory=run_directory,
        seed=options.seed,
    ) as rollouts:
        trainers = [
            await rollouts.train_adapter(name, max_staleness=bound)
            for name, bound in BOUNDS.items()
        ]
        tasks = secrets(options.versions * options.groups_per_batch, options.seed)
        await trainers[0].offer(tasks, episode=play, agents=[LISTENER])
        rewards = await asyncio.gather(
            *(learn(trainer, model, options.learning_rate) for trainer in trainers)
        )
    return dict(zip(BOUNDS, rewards, strict=True))


def by_tenth(rewards: Sequence[float]) -> Iterator[float]:
    """Yield the mean reward of each tenth of the run; of each batch if there are fewer than ten."""
    parts = min(10, len(rewards))
    for part in range(parts):
        begin, end = (len(rewards) * bound // parts for bound in (part, part + 1))
        yield sum(rewards[begin:end]) / (end - begin)


def summarise(name: str, rewards: Sequence[float], directory: Path) -> bool:
    """Audit and report one agent's records, and print its curve; return whether all agrees."""
    audit = audit_run(directory)
    write_audit(directory, audit)
    page = write_report(directory)
    facts = read_facts(directory)
    print(f"\n{name}: reward by tenth of the run")
    print("  " + " ".join(f"{mean:.2f}" for mean in by_tenth(rewards)))
    print(
        f"  {facts.versions} versions, {facts.rollouts_trained} rollouts trained, "
        f"{facts.mixed_version_share:.1%} of two or more versions; staleness "
        f"{facts.mean_staleness:.2f}, highest {facts.max_staleness}, bound {facts.staleness_bound}"
    )
    print(f"  audit: {audit.tokens_agreeing} of {audit.tokens} tokens agree; report: {page}")
    return audit.agrees


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train two agents that learn a language.")
    add = parser.add_argument
    add("--model", type=Path, help="model that such a run has made; default: make one")
    add("--versions", type=int, default=48, help="number of batches of each agent")
    add("--groups-per-batch", type=int, default=12)
    add("--learning-rate", type=float, default=1.5e-3)
    add("--step-time-s", type=float, default=STEP_TIME_S, help="minimum time of an engine's step")
    add("--seed", type=int, default=0)
    add("--runs", type=Path, default=Path("runs"), help="directory of the runs and the model")
    add("--name", default="two-agents-%Y%m%d-%H%M%S", help="the run's name")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; exit status 1 if an audit disagrees, 2 for a user error, 130 for Ctrl-C."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    directory = options.runs / time.strftime(options.name)
    started = time.perf_counter()
    try:
        rewards = asyncio.run(train(options, directory))
        print(f"trained in {time.perf_counter() - started:.0f} s")
        agrees = [summarise(name, rewards[name], directory / "adapters" / name) for name in rewards]
    except tidegate.TidegateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0 if all(agrees) else 1


if __name__ == "__main__":
    sys.exit(main())
