"""Turns of verl's clients in Tidegate's terms: sampling options, and outputs with global steps."""

from collections.abc import Iterable, Mapping
from typing import Any

from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from tidegate.integrations.rollout_worker import vllm_sampling
from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn


def turn_options(
    config: RolloutConfig, prompt_tokens: int, sampling: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert verl's sampling parameters to options of ``Episode.generate``.

    Without a ``max_tokens`` (or SGLang's ``max_new_tokens``) the limit is that of verl's own
    servers: what prompt and response may have together, and at most ``response_length``.
    """
    options, _ = vllm_sampling(sampling)
    limit = options.pop("max_new_tokens", None) or options.get("max_tokens")
    if limit is None:
        total = config.prompt_length + config.response_length
        limit = min(config.response_length, total - prompt_tokens)
    options["max_tokens"] = max(1, limit)
    if options.pop("ignore_eos", config.ignore_eos):
        options["stop_token_ids"] = []
    return options


class GlobalSteps:
    """The trainer's global step of each weight version."""

    def __init__(self) -> None:
        self._steps = {0: 0}
        self.newest = 0
        """Step of the newest weights, which may be on their way to the engines."""

    def published(self, version: int) -> None:
        """Record that ``version`` has the weights of the newest step."""
        self._steps[version] = self.newest

    def of(self, versions: Iterable[int]) -> dict[str, int]:
        """Return verl's fields for the steps whose weights sampled some tokens.

        ``global_steps`` is the oldest: verl's ``FullyAsyncLLMServerClient`` reads only this, and
        tokens must not count as newer than they are.
        """
        steps = [self._steps.get(version, self.newest) for version in versions] or [self.newest]
        return {
            "global_steps": min(steps),
            "min_global_steps": min(steps),
            "max_global_steps": max(steps),
        }


def token_output(
    turn: GeneratedTurn | None, sampling: Mapping[str, Any], steps: GlobalSteps, *, aborted: bool
) -> TokenOutput:
    """Return a turn as verl's client expects it; None is a turn that never began."""
    return TokenOutput(
        token_ids=[] if turn is None else turn.token_ids,
        log_probs=turn.logprobs if turn is not None and sampling.get("logprobs") else None,
        routed_experts=None if turn is None else turn.routed_experts,
        stop_reason="aborted" if aborted else "completed",
        extra_fields=steps.of([] if turn is None else [span.version for span in turn.spans]),
    )
