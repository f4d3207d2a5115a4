"""The SGLang double mislabels tokens as SGLang 0.5.23 was recorded to; other tests rely on it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.external.sglang_double import SglangDouble

PROMPT = [30, 41, 52, 63]


@contextlib.asynccontextmanager
async def sampling(double: SglangDouble) -> AsyncIterator[None]:
    task = asyncio.create_task(double.sample_for_ever())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def answer_over_an_update(
    directories: list[Path], mode: str, *, samples_ahead: bool
) -> tuple[dict[str, Any], list[int]]:
    """Return the answer to a request whose weights change after three tokens or more."""
    settings = {"disable_overlap_schedule": not samples_ahead}
    double = SglangDouble(directories[0], settings=settings)
    sampled = {"max_new_tokens": 200, "temperature": 1.0, "sampling_seed": 5, "ignore_eos": True}
    body = {"rid": "one", "input_ids": PROMPT, "sampling_params": sampled, "return_logprob": True}
    async with sampling(double):
        request_of = asyncio.create_task(double.generate(body))
        while "one" not in double.running or len(double.running["one"].output) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        request = double.running["one"]
        await double.pause({"mode": mode})
        update = {"model_path": str(directories[1]), "weight_version": "new"}
        await double.update(update | {"flush_cache": mode == "retract"})
        await double.continue_generation({})
        await request_of
    return double.message(request)["meta_info"], request.tokens


def logprob_of(model: Path, tokens: list[int], at: int) -> float:
    """Return the log-prob of the token at that place, with these weights throughout."""
    import transformers

    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        logits = reference(torch.tensor([tokens[: at + 1]])).logits[0, at - 1]
    return float(torch.log_softmax(logits.float(), -1)[tokens[at]])


@pytest.mark.parametrize("samples_ahead", [False, True])
async def test_a_step_under_way_is_labelled_with_the_new_weights(
    directories: list[Path], samples_ahead: bool
) -> None:
    meta, tokens = await answer_over_an_update(directories, "in_place", samples_ahead=samples_ahead)
    old, new = meta["weight_versions"]
    assert (old["version"], new["version"], new["end"]) == ("default", "new", 200)
    reported = meta["output_token_logprobs"][new["start"]][0]
    by_old_weights = logprob_of(directories[0], tokens, len(PROMPT) + new["start"])
    assert (abs(reported - by_old_weights) < 1e-4) == samples_ahead


async def test_a_retracted_request_is_sampled_by_the_new_weights_as_its_label_says(
    directories: list[Path],
) -> None:
    meta, tokens = await answer_over_an_update(directories, "retract", samples_ahead=True)
    start = meta["weight_versions"][1]["start"]
    reported = meta["output_token_logprobs"][start][0]
    assert abs(reported - logprob_of(directories[1], tokens, len(PROMPT) + start)) < 1e-4
