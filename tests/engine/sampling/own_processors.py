"""A user's module of logits processors, which the tests' engines import."""

from typing import Any

import torch

from tidegate.engine.sampling.logits import ProcessorSetup, TurnLogitsProcessor, TurnTokens


def once(arguments: dict[str, Any], setup: ProcessorSetup) -> TurnLogitsProcessor:
    """Exclude tokens that have been sampled."""

    def ban(logits: torch.Tensor, turn: TurnTokens) -> None:
        logits[turn.output.tolist()] = -torch.inf

    return ban


def raising(arguments: dict[str, Any], setup: ProcessorSetup) -> TurnLogitsProcessor:
    """Raise after some tokens."""

    def fail(logits: torch.Tensor, turn: TurnTokens) -> None:
        if len(turn.output) == arguments["after"]:
            raise {"exit": SystemExit}.get(arguments.get("by", ""), RuntimeError)("what a pity")

    return fail


def silencing(arguments: dict[str, Any], setup: ProcessorSetup) -> TurnLogitsProcessor:
    """Exclude all tokens after some tokens."""

    def silence(logits: torch.Tensor, turn: TurnTokens) -> None:
        if len(turn.output) == arguments["after"]:
            logits.fill_(float(arguments["with"]))

    return silence


def nosy(arguments: dict[str, Any], setup: ProcessorSetup) -> TurnLogitsProcessor:
    """Raise, at the third call, an error that contains what the processor was given."""
    seen: list[Any] = []

    def count(logits: torch.Tensor, turn: TurnTokens) -> None:
        seen.append((turn.prompt.tolist(), turn.output.tolist(), logits.shape[0]))
        if len(seen) == 3:
            raise RuntimeError(repr(seen))

    return count


PROCESSORS = {"once": once, "raising": raising, "silencing": silencing, "nosy": nosy}
