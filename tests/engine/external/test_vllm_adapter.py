"""The vLLM adapter against a double: requests, answers and refusals."""

import asyncio
import base64
import io
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.external.vllm_double import VllmDouble
from tests.engine.external.vllm_weights import refusal
from tests.engine.orchestra import Models
from tests.models import make_model_directory
from tidegate.engine.external import http, vllm
from tidegate.engine.external.adapter import (
    Capabilities,
    GeneratedChunk,
    GenerationRequest,
    VersionLabel,
)
from tidegate.engine.external.vllm import VllmAdapter, event_decoder, make_adapter, to_chunk
from tidegate.errors import ConfigError, EngineGone, EngineHeld, TurnRefused, WeightsRefused
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams

pytestmark = pytest.mark.wire

PROMPT = list(range(1, 40))

FOREVER = SamplingParams(max_tokens=200)

HELD_AT = 100
"""Tokens at which a request is held, because other operations may take long."""


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[VllmDouble]:
    with VllmDouble(models.directories[0]) as double:
        yield double


@pytest.fixture
def double(server: VllmDouble) -> VllmDouble:
    server.label = "default"
    server.calls.clear()
    server.loads.clear()
    server.bodies.clear()
    server.holds = lambda prompt, sampled, label: sampled >= HELD_AT
    return server


@asynccontextmanager
async def opened(
    double: VllmDouble, model: Path
) -> AsyncIterator[tuple[VllmAdapter, Capabilities]]:
    adapter = make_adapter(double.url, model)
    try:
        yield adapter, await adapter.open("v0")
    finally:
        await adapter.close()


def _npy(values: "np.ndarray[Any, Any]") -> str:
    file = io.BytesIO()
    np.save(file, values)
    return base64.b64encode(file.getvalue()).decode()


def request(sampling: SamplingParams, salt: str = "v0") -> GenerationRequest:
    return GenerationRequest(token_ids=PROMPT, sampling=sampling, salt=salt)


async def generate(adapter: VllmAdapter, asked: GenerationRequest) -> list[GeneratedChunk]:
    async with aclosing(adapter.generate(asked)) as chunks:
        return [chunk async for chunk in chunks]


async def test_a_server_without_routes_for_training_is_refused_with_how_to_start_it(
    models: Models,
) -> None:
    model = models.directories[0]
    without_dev = await refusal(model, dev=False)
    assert "VLLM_SERVER_DEV_MODE=1" in without_dev
    assert "/pause" in without_dev
    assert "--enable-scale-out" in await refusal(model, scale_out=False)
    assert "0.19.1 is too old" in await refusal(model, version="0.19.1")
    assert "--logprobs-mode" in await refusal(model, logprobs_mode="raw_logits")


async def test_a_server_whose_environment_has_no_pip_is_refused_with_what_to_install(
    models: Models,
) -> None:
    """vLLM lists its packages for /server_info, and fails so in an environment made by uv."""
    reported = "'NoneType' object has no attribute 'splitlines'"
    why = await refusal(models.directories[0], server_info_error=reported)
    assert "uv pip install pip" in why
    assert reported in why
    assert "uv pip" not in await refusal(models.directories[0], server_info_error="no such thing")


async def test_a_server_with_a_key_is_sent_it_and_one_without_it_says_how(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.directories[0]
    with VllmDouble(model, api_key="sesame") as double:
        adapter = make_adapter(double.url, model)
        with pytest.raises(ConfigError, match=r"requires a key.*TIDEGATE_ENGINE_KEY"):
            await adapter.open("v0")
        await adapter.close()
        monkeypatch.setenv("TIDEGATE_ENGINE_KEY", "simsim")
        with pytest.raises(ConfigError, match="requires another key") as error:
            async with opened(double, model):
                pass
        assert "simsim" not in str(error.value)
        monkeypatch.setenv("TIDEGATE_ENGINE_KEY", "sesame")
        async with opened(double, model) as (adapter, _):
            assert len(await generate(adapter, request(SamplingParams(max_tokens=3)))) == 3


async def test_a_server_of_another_kind_is_refused_with_its_address(
    models: Models, double: VllmDouble
) -> None:
    for url in (f"{double.url}/v1", f"{double.url}/metrics?"):
        adapter = make_adapter(url, models.directories[0])
        with pytest.raises(ConfigError, match="check that KIND") as error:
            await adapter.open("v0")
        assert url in str(error.value)
        await adapter.close()


async def test_a_model_that_vllm_would_not_update_whole_is_refused(tmp_path: Path) -> None:
    tied = make_model_directory(tmp_path / "tied", tied=True)
    why = await refusal(tied, device="cpu")
    assert "lm_head" in why
    assert "tie_word_embeddings" in why
    mixture = make_model_directory(tmp_path / "mixture", "qwen3_moe", tied=False)
    assert "computes a mixture of experts wrongly" in await refusal(mixture, device="cpu")


async def test_capabilities_follow_the_servers_version_and_settings(
    models: Models, double: VllmDouble
) -> None:
    async with opened(double, models.directories[0]) as (_, capabilities):
        assert capabilities.engine == "vllm 0.32.0"
        assert capabilities.dtype == "float32"
        assert capabilities.keeps_kv
        assert capabilities.has_processed_logprobs
        assert capabilities.sleep_levels == set()  # started without --enable-sleep-mode
        assert (capabilities.running_turns_max, capabilities.block_tokens) == (8, 16)
        assert not capabilities.sampling & {"kept_tokens", "routed_experts"}
    with VllmDouble(models.directories[0], stream_interval=8) as collecting:
        async with opened(collecting, models.directories[0]) as (_, capabilities):
            assert not capabilities.keeps_kv
    with VllmDouble(models.directories[0], version="0.30.1", logprobs_mode="raw_logprobs") as older:
        older.config["dtype"] = "torch.bfloat16"  # as --dtype auto serves a float32 directory
        async with opened(older, models.directories[0]) as (_, capabilities):
            assert capabilities.dtype == "bfloat16"
            assert not capabilities.keeps_kv  # it has no labels that could be held against ours
            assert not capabilities.has_processed_logprobs


async def test_tokens_come_one_by_one_with_log_probs_and_their_labels_last(
    models: Models, double: VllmDouble
) -> None:
    async with opened(double, models.directories[0]) as (adapter, _):
        chunks = await generate(adapter, request(SamplingParams(max_tokens=5, top_k=7)))
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 5
    assert all(len(chunk.logprobs) == 1 and chunk.logprobs[0] <= 0 for chunk in chunks)
    assert [chunk.ended for chunk in chunks] == [None] * 4 + ["length"]
    assert chunks[-1].labels == [VersionLabel("v0", 0, 5)]
    asked = double.bodies[-1]
    assert asked["cache_salt"] == "v0"
    assert asked["sampling_params"]["ignore_eos"]
    assert (asked["sampling_params"]["top_k"], asked["sampling_params"]["logprobs"]) == (7, 0)


async def test_an_engine_collects_tokens_and_an_abort_hands_back_those_it_has_not_sent(
    models: Models, double: VllmDouble
) -> None:
    asked = replace(request(FOREVER), stream_interval_tokens=16)
    async with opened(double, models.directories[0]) as (adapter, _):
        async with aclosing(adapter.generate(asked)) as chunks:
            received = [await anext(chunks) for _ in range(1 + (HELD_AT - 1) // 16)]
            async with asyncio.timeout(10):
                while len(double.asked[0].context) < len(PROMPT) + HELD_AT:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            await adapter.pause("abort")
            received += [chunk async for chunk in chunks]
        await adapter.resume()
    lengths = [len(chunk.token_ids) for chunk in received]
    assert lengths == [1, *[16] * ((HELD_AT - 1) // 16), (HELD_AT - 1) % 16]
    assert [len(chunk.logprobs) for chunk in received] == lengths
    assert received[-1].ended == "abort"
    assert received[-1].labels == [VersionLabel("v0", 0, HELD_AT)]


async def test_foreign_weights_are_replaced_at_the_start(
    models: Models, double: VllmDouble
) -> None:
    async with opened(double, models.directories[0]):
        assert double.loads == []
    double.label = "v7 of another run"
    async with opened(double, models.directories[0]):
        assert double.loads == [str(models.directories[0])]
        assert double.label == "v0"
        assert not double.paused


async def test_a_pause_is_requested_in_the_query_and_verified(
    models: Models, double: VllmDouble
) -> None:
    async with opened(double, models.directories[0]) as (adapter, _):
        double.calls.clear()
        await adapter.pause("keep")
        assert double.paused == "all"
        await adapter.resume()
        assert double.calls == ["pause keep", "resume"]


async def test_weights_that_cannot_be_loaded_leave_those_of_before(
    models: Models, double: VllmDouble, tmp_path: Path
) -> None:
    async with opened(double, models.directories[0]) as (adapter, _):
        await adapter.load_weights(models.directories[1], "v1")
        await adapter.pause("abort")
        with pytest.raises(WeightsRefused, match="can't load"):
            await adapter.load_weights(tmp_path / "nothing", "v2")
        assert double.loads[-1] == str(models.directories[1])
        assert double.label == "v1"
        double.fails_to_load = lambda path: True
        with pytest.raises(EngineGone, match="nor the previous ones"):
            await adapter.load_weights(tmp_path / "nothing", "v3")
        double.fails_to_load = lambda path: False
        await adapter.resume()


async def test_an_adapter_that_the_server_has_no_more_counts_as_unloaded(models: Models) -> None:
    """An earlier call unloaded it, and its answer was lost."""
    with VllmDouble(models.directories[0], lora_rank_max=8) as server:
        async with opened(server, models.directories[0]) as (adapter, _):
            await adapter.unload_lora("tidegate-lora-v1")


async def test_a_request_rejected_by_a_pause_is_retried_not_refused(
    models: Models,
) -> None:
    with VllmDouble(models.directories[0], version="0.33.0") as newer:
        async with opened(newer, models.directories[0]) as (adapter, _):
            await adapter.pause("abort")
            with pytest.raises(EngineHeld):
                await generate(adapter, request(FOREVER))
            await adapter.resume()
            bad = GenerationRequest(token_ids=[96], sampling=FOREVER, salt="v0")
            with pytest.raises(TurnRefused, match="out of vocabulary"):
                await generate(adapter, bad)


async def test_a_call_that_is_never_answered_ends_at_its_deadline() -> None:
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        gone.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    engine = http.HttpEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(EngineGone, match="did not respond within"):
        await engine.call("POST", "/update_weights", {}, timeout_s=0.05)
    await engine.close()
    await gone.wait()
    server.close()


async def test_media_travel_as_references_beside_the_tokens(
    models: Models, double: VllmDouble, tmp_path: Path
) -> None:
    shutil.copytree(models.directories[0], seeing := tmp_path / "seeing")
    config = json.loads((seeing / "config.json").read_text())
    (seeing / "config.json").write_text(json.dumps({**config, "vision_config": {}}))
    shown = [Media("image", "https://host/a.png"), Media("image", "/data/b 1.png", 3)]
    async with opened(double, models.directories[0]) as (_, capabilities):
        assert capabilities.media == frozenset()
    async with opened(double, seeing) as (adapter, capabilities):
        assert capabilities.media == {"image"}
        sampling = SamplingParams(max_tokens=1)
        await generate(
            adapter, GenerationRequest(token_ids=PROMPT, sampling=sampling, salt="", media=shown)
        )
        await generate(adapter, request(sampling))
    assert double.bodies[-2]["content_parts"] == [
        {"type": "image_url", "url": "https://host/a.png"},
        {"type": "image_url", "url": "file:///data/b%201.png"},
    ]
    assert "content_parts" not in double.bodies[-1]
    with VllmDouble(seeing, body=["token_ids"]) as older:  # it would pass them over
        async with opened(older, seeing) as (_, capabilities):
            assert capabilities.media == frozenset()


async def test_a_server_that_returns_experts_and_masks_is_read_as_attachments(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "moe", "qwen3_moe")
    flags: dict[str, Any] = {"enable_return_routed_experts": True, "return_sampling_mask": True}
    sampling = SamplingParams(max_tokens=5, top_k=3, kept_tokens=True, routed_experts=True)
    with VllmDouble(model, **flags) as double:
        async with opened(double, model) as (adapter, capabilities):
            assert capabilities.sampling >= {"kept_tokens", "routed_experts"}
            chunks = await generate(adapter, request(sampling))
            plain = await generate(adapter, request(SamplingParams(max_tokens=2, top_k=3)))
    assert not any(chunk.attachments for chunk in plain)
    for chunk in chunks:
        kept = chunk.attachments[0]
        assert kept.name == "kept_ids"
        ids = np.frombuffer(kept.values, np.int32).tolist()
        assert ids == sorted(ids)
        assert len(ids) == 3
        assert set(chunk.token_ids) <= set(ids)
    [experts] = chunks[-1].attachments[1:]
    assert (experts.name, experts.start, experts.dtype) == ("routed_experts", 0, "uint8")
    assert experts.length == len(PROMPT) + 4


async def test_a_healthy_server_whose_engine_hangs_is_given_up_unless_a_call_occupies_it(
    models: Models, double: VllmDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(double, models.directories[0]) as (adapter, _):
        await adapter.check()
        monkeypatch.setattr(vllm, "PAUSE_TIMEOUT_S", 0.05)
        double.loop_answers.clear()
        try:
            async with asyncio.TaskGroup() as calls:
                call = calls.create_task(adapter._expect_paused(False))
                await asyncio.sleep(0)
                await adapter.check()
                double.loop_answers.set()
                await call
            double.loop_answers.clear()
            with pytest.raises(EngineGone, match="/is_paused did not respond within"):
                await adapter.check()
        finally:
            double.loop_answers.set()


@pytest.mark.parametrize(
    ("encoded", "why"),
    [
        ("AAAA", "no .npy file"),
        (_npy(np.zeros((2, 3))), r"shape \(2, 3\) and dtype float64"),
    ],
)
def test_experts_that_can_t_be_read_are_the_servers_fault(encoded: str, why: str) -> None:
    event = {"choices": [{"token_ids": [], "finish_reason": "stop", "routed_experts": encoded}]}
    [choice] = event_decoder.decode(json.dumps(event).encode()).choices
    with pytest.raises(EngineGone, match=why):
        to_chunk(choice, SamplingParams(max_tokens=1, routed_experts=True))


def test_the_likeliest_tokens_are_read_where_the_sampled_one_has_no_rank() -> None:
    """As from ``tidegate serve``."""
    ranks = {40: None, 7: 1, 9: 2}
    top = [{"token_id": i, "logprob": -i / 8, "rank": rank} for i, rank in ranks.items()]
    content = [{"token_id": 40, "logprob": -5.0, "top_logprobs": top}]
    event = {"choices": [{"token_ids": [40], "logprobs": {"content": content}}]}
    [choice] = event_decoder.decode(json.dumps(event).encode()).choices
    chunk = to_chunk(choice, SamplingParams(max_tokens=1, top_logprobs=2))
    ids, logprobs = (each.values for each in chunk.attachments)
    assert np.frombuffer(ids, "<i4").tolist() == [7, 9]
    assert np.frombuffer(logprobs, "<f4").tolist() == [-7 / 8, -9 / 8]
