"""Images through whole runs: from messages to engines, into batches, forward passes and audits."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers

import tidegate
from tests.models import IMAGE_PAD_ID, data_url, make_image_model_directory
from tidegate.errors import ImageRefused
from tidegate.observability.audit.audit import audit_run
from tidegate.orchestrator.batches.batch_rows import select_rows, shards
from tidegate.orchestrator.trainer.remote.batch_wire import batch_from_wire, batch_to_wire

pytestmark = pytest.mark.wire

SMALL: dict[str, Any] = {
    "engines": 1,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 8,
    "max_staleness": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model_directory(tmp_path_factory.mktemp("vl"))


def load(model: Path) -> Any:
    auto: Any = transformers.AutoModelForImageTextToText
    return auto.from_pretrained(model, dtype=torch.float32).eval()


def shown(words: str, *urls: str) -> dict[str, Any]:
    """Make a user's message with images."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": words}, *images]}


def logprobs_of(module: Any, batch: tidegate.Batch) -> torch.Tensor:
    """Return the module's log-probs [R, T - 1] of the batch's tokens, by a plain forward pass."""
    inputs = {"input_ids": batch.token_ids, "attention_mask": batch.attention_mask}
    logits = module(**inputs, **batch.media).logits[:, :-1].clone()
    logits[..., IMAGE_PAD_ID] = -torch.inf
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(-1, batch.token_ids[:, 1:, None])
    return logprobs[..., 0]


def difference(module: Any, batch: tidegate.Batch) -> float:
    with torch.no_grad():
        found = (logprobs_of(module, batch) - batch.logprobs[:, 1:]).abs()
    return float(found[batch.loss_mask[:, 1:]].max())


async def two_turns(episode: tidegate.Episode, task: int) -> float:
    """Show an image, or for some tasks none, then two."""
    messages = [shown("what?", *([data_url(task)] if task % 3 else []))]
    turn = await episode.generate(messages=messages, max_tokens=8, stop_token_ids=[])
    messages += [turn.message or {}, shown("and?", data_url(task + 100, 16, 40), data_url(7))]
    await episode.generate(messages=messages, max_tokens=6, stop_token_ids=[])
    return float(task % 2)


async def test_a_batch_is_the_model_s_input_as_it_is_at_every_published_version(
    model: Path, tmp_path: Path
) -> None:
    module = load(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    versions = []
    async with tidegate.serve(model=model, **SMALL, run_directory=tmp_path / "run") as rollouts:
        async for batch in rollouts.batches(range(40), episode=two_turns):
            versions.append(int(batch.weight_versions.max()))
            assert difference(module, batch) < 1e-4
            optimizer.zero_grad()
            loss = -(logprobs_of(module, batch) * batch.loss_mask[:, 1:]).sum()
            torch.autograd.backward(loss)
            assert module.model.visual.patch_embed.proj.weight.grad.abs().max() > 0
            optimizer.step()
            if batch.number == 3:
                break
            await rollouts.publish(module.state_dict())
        assert rollouts.statistics().ledger.error == 0
    assert versions == [0, 1, 2]
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
    assert report.tokens_agreeing == report.tokens > 0
    assert report.version_power.unnoticed_share < 0.2
    kept = [*(tmp_path / "run" / "images").iterdir()]
    kept[0].unlink()
    lacking = audit_run(tmp_path / "run")
    assert lacking.agrees
    assert 0 < lacking.tokens_with_media == lacking.tokens_unreplayable < lacking.tokens
    assert any("follow images, audio or video" in line for line in lacking.lines())


@pytest.mark.parametrize(
    ("pause_mode", "kv_policy"), [("abort", "keep"), ("keep", "recompute"), ("keep", "keep")]
)
async def test_a_turn_that_a_publish_interrupts_has_the_log_probs_of_each_version(
    model: Path, tmp_path: Path, pause_mode: Any, kv_policy: Any
) -> None:
    old, new = load(model), load(model)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)

    async def solve(episode: tidegate.Episode, task: int) -> float:
        messages = [shown("what?", data_url(task))]
        await episode.generate(messages=messages, max_tokens=80, stop_token_ids=[])
        return 0.0

    settings = SMALL | {"max_staleness": 1, "groups_per_batch": 1, "pause_mode": pause_mode}
    settings |= {"kv_policy": kv_policy, "step_time_min_s": 0.02}
    async with tidegate.serve(model=model, **settings, run_directory=tmp_path / "run") as rollouts:
        batches = rollouts.batches(range(1), episode=solve)
        waiting = asyncio.ensure_future(anext(batches))
        while rollouts.statistics().ledger.in_flight < 8:  # noqa: ASYNC110 - steps set no event
            await asyncio.sleep(0.01)
        await rollouts.pause(pause_mode)  # or the turn may end before the weights are staged
        await rollouts.publish(new.state_dict(), batches=[])
        await rollouts.resume()
        batch = await waiting
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
    assert report.tokens_agreeing == report.tokens
    assert (report.spans_mixed > 0) is (kv_policy == "keep" and pause_mode == "keep")
    with torch.no_grad():
        found = [(logprobs_of(each, batch) - batch.logprobs[:, 1:]).abs() for each in (old, new)]
    of_version = [(batch.weight_versions[:, 1:] == version) for version in range(2)]
    assert all(each.any() for each in of_version)
    assert float(found[0][of_version[0]].max()) < 1e-4
    assert report.spans_mixed or float(found[1][of_version[1]].max()) < 1e-4
    assert float(found[0][of_version[1]].max()) > 1e-2


async def test_parts_of_a_batch_have_their_own_rows_images(model: Path) -> None:
    module = load(model)
    async with tidegate.serve(model=model, **SMALL) as rollouts:
        batch = await anext(rollouts.batches(range(40), episode=two_turns))
    backwards = select_rows(batch, [3, 1])
    assert difference(module, backwards) < 1e-4
    assert len(backwards.media["image_grid_thw"]) == 6 - 1  # the first task begins without one
    for part in shards(batch, 2):
        assert difference(module, part) < 1e-4
    received = batch_from_wire(*batch_to_wire(batch))
    assert received.media.keys() == batch.media.keys()
    assert all(torch.equal(received.media[name], batch.media[name]) for name in batch.media)


async def test_images_are_read_by_path_within_the_named_directories(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "cats").mkdir()
    content = base64.b64decode(data_url(1).partition(",")[2])
    (tmp_path / "cats" / "cat.png").write_bytes(content)
    refusals: list[str] = []

    async def solve(episode: tidegate.Episode, task: int) -> float:
        for url in ("/etc/hostname", "data:image/png;base64,AAAA", "https://host/cat.png"):
            with pytest.raises(ImageRefused) as refused:
                await episode.generate(messages=[shown("?", url)], max_tokens=2)
            refusals.append(str(refused.value))
        await episode.generate(messages=[shown("?", f"{tmp_path}/cats/cat.png")], max_tokens=4)
        await episode.fork().generate(max_tokens=3)
        return 1.0

    settings = SMALL | {"image_directories": [tmp_path / "cats"]}
    async with tidegate.serve(model=model, **settings) as rollouts:
        batch = await anext(rollouts.batches(range(2), episode=solve))
    assert "the image '/etc/hostname' is in none of the directories" in refusals[0]
    assert "can't be read as an image" in refusals[1]
    assert "fetch nothing" in refusals[2]
    assert len(batch.media["image_grid_thw"]) == len(batch.token_ids) == 8  # with the branches
    assert difference(load(model), batch) < 1e-4


async def test_a_resumed_run_hands_over_again_what_was_sampled_from_images(
    model: Path, tmp_path: Path
) -> None:
    settings = SMALL | {"model": model, "run_directory": tmp_path / "run", "journal": True}
    tasks = [1, 2]  # of one batch, so that the resumed run samples nothing else
    async with tidegate.serve(**settings) as rollouts:
        before = await anext(rollouts.batches(tasks, episode=two_turns))
    async with tidegate.serve(**settings, resume=True) as rollouts:
        await rollouts.publish(load(model).state_dict())
        again = await anext(rollouts.batches(tasks, episode=two_turns))
        assert rollouts.statistics().ledger.generated == before.sampled_tokens
    assert torch.equal(again.token_ids, before.token_ids)
    assert all(torch.equal(again.media[name], before.media[name]) for name in before.media)
    assert difference(load(model), again) < 1e-4
    assert audit_run(tmp_path / "run").agrees


async def test_agents_show_images_through_the_gateway_in_openai_s_and_anthropic_s_form(
    model: Path,
) -> None:
    gateway = tidegate.Gateway()
    url = data_url(5)
    refused: list[str] = []

    async def agent(endpoint: tidegate.Endpoint, task: int) -> float:
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
        ) as client:
            messages: Any = [shown("what?", url)]
            await client.chat.completions.create(model="m", messages=messages, max_tokens=4)
            bad: Any = [shown("what?", "data:image/png;base64,AAAA")]
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(model="m", messages=bad, max_tokens=4)
            refused.append(str(error.value))
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        content = [{"type": "text", "text": "what?"}, {"type": "image", "source": source}]
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        async with httpx.AsyncClient(headers={"x-api-key": endpoint.api_key}) as http:
            counted = await http.post(
                f"{endpoint.anthropic_base_url}/v1/messages/count_tokens", json=body, timeout=60
            )
            answer = await http.post(
                f"{endpoint.anthropic_base_url}/v1/messages", json=body, timeout=60
            )
        usage = answer.raise_for_status().json()["usage"]
        assert counted.json()["input_tokens"] == usage["input_tokens"]
        return 1.0

    async with tidegate.serve(model=model, **SMALL) as rollouts:
        batch = await anext(rollouts.batches(range(4), episode=gateway.episode(agent)))
    gateway.close()
    assert all("can't be read as an image" in each for each in refused)
    assert refused
    assert len(batch.media["image_grid_thw"]) == len(batch.token_ids) == 8
    assert difference(load(model), batch) < 1e-4
