"""The SGLang adapter against SGLang's recorded faults, with a double that keeps KV."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tidegate
from tests.engine.external.sglang_streams import LONG, PROMPT, TOLERANCE, off_by, sglang
from tests.models import EOS_TOKEN_ID, make_model_directory
from tidegate.engine.external.adapter import GenerationRequest, ScoreRequest
from tidegate.errors import ConfigError, EngineGone, ScoreRefused, TurnRefused, WeightsRefused
from tidegate.transport.messages import SamplingParams

pytestmark = pytest.mark.wire


async def test_each_token_of_a_cumulative_stream_is_returned_once_with_its_log_prob(
    directories: list[Path],
) -> None:
    async with sglang(directories[0]) as engine:
        stream = await engine.stream(SamplingParams(max_tokens=30, temperature=0.7)).end()
        cool = await engine.stream(SamplingParams(max_tokens=3, top_logprobs=2)).end()
    assert len(stream.tokens) == len(stream.logprobs) == 30
    assert [chunk.ended for chunk in stream.chunks if chunk.ended] == ["length"]
    assert stream.labels == [("v0", 0, 30)]
    assert engine.capabilities.has_processed_logprobs
    assert engine.capabilities.keeps_kv
    assert off_by(directories, cool, [(0, 3)]) < TOLERANCE
    tops = [chunk.attachments for chunk in cool.chunks if chunk.attachments]
    assert [ids.length for ids, _ in tops] == [len(c.token_ids) for c in cool.chunks]
    columns = [np.frombuffer(logprobs.values, np.float32) for _, logprobs in tops]
    assert all(a >= b for column in columns for a, b in pairwise(column[:2]))


async def test_a_server_with_a_key_is_sent_it_with_every_call(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"requires a key.*TIDEGATE_ENGINE_KEY"):
        async with sglang(directories[0], api_key="sesame"):
            pass
    monkeypatch.setenv("TIDEGATE_ENGINE_KEY", "sesame")
    async with sglang(directories[0], api_key="sesame") as engine:
        await engine.adapter.pause("abort")
        await engine.adapter.load_weights(directories[1], "v1")
        await engine.adapter.resume()
        stream = await engine.stream(SamplingParams(max_tokens=3), salt="v1").end()
    assert stream.labels == [("v1", 0, 3)]


async def test_only_the_turns_own_stop_tokens_end_it(directories: list[Path]) -> None:
    """``ignore_eos`` makes SGLang ignore stop_token_ids; without it, the model's
    EOS ends a turn."""
    async with sglang(directories[0]) as engine:
        free = await engine.stream(SamplingParams(max_tokens=60, temperature=3.0)).end()
        stop = free.tokens[0]
        stopped = await engine.stream(
            SamplingParams(max_tokens=200, temperature=3.0, stop_token_ids=list(range(1, 60)))
        ).end()
        engine.double.model.config.eos_token_id = stop
        await engine.stream(SamplingParams(max_tokens=5, temperature=0.0)).end()
    assert free.chunks[-1].ended == "length"
    assert stopped.chunks[-1].ended == "stop"
    assert EOS_TOKEN_ID not in range(1, 60)
    assert stopped.tokens[-1] in range(1, 60)
    assert not any(token in range(1, 60) for token in stopped.tokens[:-1])


@pytest.mark.parametrize("dense", [[], [0]])
@pytest.mark.parametrize("stops", [[], list(range(1, 60))])
async def test_routed_experts_of_all_positions_but_the_last_come_with_a_turns_end(
    tmp_path: Path, dense: list[int], stops: list[int]
) -> None:
    """A turn that is cut off at a stop token gets them from its aborted request."""
    model = make_model_directory(tmp_path / "moe", "qwen3_moe", mlp_only_layers=dense)
    sampling = SamplingParams(
        max_tokens=40, temperature=3.0, stop_token_ids=stops, routed_experts=True
    )
    async with sglang(model, settings={"enable_return_routed_experts": True}) as engine:
        assert "routed_experts" in engine.capabilities.sampling
        stream = await engine.stream(sampling).end()
        plain = await engine.stream(SamplingParams(max_tokens=3)).end()
        with tidegate.record_routed_experts(engine.double.model) as recorder, torch.no_grad():
            engine.double.model(torch.tensor([[*PROMPT, *stream.tokens[:-1]]]))
    assert not any(chunk.attachments for chunk in plain.chunks)
    *before, last = stream.chunks
    assert last.ended == ("stop" if stops else "length")
    assert not any(chunk.attachments for chunk in before)
    [experts] = last.attachments
    expected = recorder.routed_experts()
    assert (experts.name, experts.start, experts.dtype) == ("routed_experts", 0, "uint8")
    assert experts.shape == list(expected.shape[1:])
    assert experts.values == expected.to(torch.uint8).numpy().tobytes()


async def test_kv_that_is_kept_over_an_update_is_old_and_labels_change_at_the_token(
    directories: list[Path],
) -> None:
    async with sglang(directories[0]) as engine:
        stream = engine.stream()
        await stream.has(5)
        await engine.adapter.pause("keep")
        before = len(engine.double.running[next(iter(engine.double.running))].output)
        await engine.adapter.load_weights(directories[1], "v1")
        info = engine.double.info_label
        await engine.adapter.resume()
        await stream.end()
    assert info == "v1"
    assert stream.labels == [("v0", 0, before), ("v1", before, 200)]
    assert off_by(directories, stream, [(0, before), (1, 200 - before)]) < TOLERANCE
    updates = [body for path, body in engine.double.calls if path == "/update_weights_from_disk"]
    assert [body["flush_cache"] for body in updates] == [True, False]  # at the start, and frozen


async def test_a_new_salt_finds_no_kv_of_old_weights(directories: list[Path]) -> None:
    """The KV is still in the cache, because frozen requests forbid a flush."""
    async with sglang(directories[0]) as engine:
        await engine.stream(SamplingParams(max_tokens=2)).end()
        frozen = engine.stream()
        await frozen.has(1)
        await engine.adapter.pause("keep")
        await engine.adapter.load_weights(directories[1], "v1")
        await engine.adapter.resume()
        stale = await engine.stream(SamplingParams(max_tokens=8), salt="v0").end()
        fresh = await engine.stream(SamplingParams(max_tokens=8), salt="v1").end()
        await frozen.end()
    assert off_by(directories, fresh, [(1, 8)]) < TOLERANCE
    assert off_by(directories, stale, [(1, 8)]) > 0.1  # the trap is there


async def test_an_abort_hands_back_what_there_is_and_labels_it(directories: list[Path]) -> None:
    async with sglang(directories[0]) as engine:
        stream = engine.stream()
        await stream.has(3)
        await engine.adapter.pause("abort")
        await stream.end()
        await engine.adapter.load_weights(directories[1], "v1")
        await engine.adapter.resume()
        again = await engine.stream(SamplingParams(max_tokens=4), salt="v1").end()
    assert stream.chunks[-1].ended == "abort"
    assert stream.labels == [("v0", 0, len(stream.tokens))]
    assert off_by(directories, stream, [(0, len(stream.tokens))]) < TOLERANCE
    assert off_by(directories, again, [(1, 4)]) < TOLERANCE


async def test_collected_tokens_come_at_once_at_an_abort_and_at_the_end(
    directories: list[Path],
) -> None:
    async with sglang(directories[0]) as engine:
        stream = engine.stream(interval_tokens=16)
        await stream.has(17)
        await engine.adapter.pause("abort")
        await stream.end()
        await engine.adapter.resume()
        whole = await engine.stream(SamplingParams(max_tokens=30), interval_tokens=16).end()
    assert stream.chunks[-1].ended == "abort"
    assert stream.labels == [("v0", 0, len(stream.tokens))]
    assert off_by(directories, stream, [(0, len(stream.tokens))]) < TOLERANCE
    assert [len(chunk.token_ids) for chunk in whole.chunks] == [1, 16, 13]
    assert off_by(directories, whole, [(0, 30)]) < TOLERANCE


async def test_a_turn_with_stop_tokens_is_read_more_often_than_the_interval(
    directories: list[Path],
) -> None:
    """Because SGLang samples on until the adapter has read the stop token."""
    sampling = SamplingParams(max_tokens=30, stop_token_ids=[EOS_TOKEN_ID])
    async with sglang(directories[0]) as engine:
        stream = await engine.stream(sampling, interval_tokens=16).end()
    assert [len(chunk.token_ids) for chunk in stream.chunks[:3]] == [1, 4, 4]


async def test_a_request_aborted_before_its_first_token_has_no_label(
    directories: list[Path],
) -> None:
    """SGLang reports an empty span for it."""
    async with sglang(directories[0]) as engine:
        sampler = engine.double.sampler
        sampler.step = lambda request, label: None  # type: ignore[method-assign]  # too busy
        stream = engine.stream()
        async with asyncio.timeout(60):
            while not engine.double.running:  # noqa: ASYNC110 - the double is in another thread
                await asyncio.sleep(0.002)
        await engine.adapter.pause("abort")
        await stream.end()
    assert [(chunk.ended, chunk.labels) for chunk in stream.chunks] == [("abort", [])]


async def test_frozen_requests_can_be_aborted_though_sglang_would_wait_for_them_for_ever(
    directories: list[Path],
) -> None:
    async with sglang(directories[0]) as engine:
        stream = engine.stream()
        await stream.has(3)
        await engine.adapter.pause("keep")
        async with asyncio.timeout(60):
            await engine.adapter.pause("abort")
        await stream.end()
        assert engine.double.paused == "abort"
        assert not engine.double.running
    assert stream.chunks[-1].ended == "abort"


async def test_an_update_reported_as_failed_after_changing_the_weights_counts_as_done(
    directories: list[Path],
) -> None:
    """Another client's request is paused in place, so SGLang does not flush:
    400, and two labels."""
    async with sglang(directories[0]) as engine:
        stranger = engine.stream()
        await stranger.has(1)
        await engine.double.pause({"mode": "in_place"})  # not by the adapter
        await engine.adapter.load_weights(directories[1], "v1")
        assert (engine.double.label, engine.double.info_label) == ("v1", "v1")
        await engine.adapter.resume()
        assert len((await stranger.end()).tokens) == 200  # relabelling aborts by default
        fresh = await engine.stream(SamplingParams(max_tokens=4), salt="v1").end()
    assert off_by(directories, fresh, [(1, 4)]) < TOLERANCE


async def test_weights_that_fail_halfway_are_put_back_before_they_are_refused(
    directories: list[Path], tmp_path: Path
) -> None:
    """SGLang rolls back to the path that failed."""
    narrow = make_model_directory(tmp_path / "narrow", seed=1, intermediate_size=48)
    async with sglang(directories[0]) as engine:
        await engine.adapter.pause("abort")
        with pytest.raises(WeightsRefused, match="Rolling back"):
            await engine.adapter.load_weights(narrow, "v1")
        with pytest.raises(WeightsRefused, match="--weights-directory"):
            await engine.adapter.load_weights(tmp_path / "elsewhere", "v1")
        await engine.adapter.resume()
        after = await engine.stream(SamplingParams(max_tokens=8)).end()
    assert after.labels == [("v0", 0, 8)]
    assert off_by(directories, after, [(0, 8)]) < TOLERANCE


async def test_weights_loaded_by_another_client_are_detected(directories: list[Path]) -> None:
    async with sglang(directories[0]) as engine:
        await engine.adapter.pause("abort")
        loaded = engine.double.update

        async def meddled(body: dict[str, Any]) -> Any:
            reply = await loaded(body)
            engine.double.info_label = "theirs"
            return reply

        engine.double.posts["/update_weights_from_disk"] = meddled
        with pytest.raises(EngineGone, match="'theirs'"):
            await engine.adapter.load_weights(directories[1], "v1")


async def test_a_token_id_outside_the_vocabulary_never_reaches_the_server(
    directories: list[Path],
) -> None:
    async with sglang(directories[0]) as engine:
        for token in (96, -1):
            request = GenerationRequest(token_ids=[1, token], sampling=LONG, salt="v0")
            with pytest.raises(TurnRefused, match="tokenizer"):
                await anext(engine.adapter.generate(request))
        requested = ScoreRequest(
            token_ids=[1, 96], score_kind="logprobs", start=1, top_logprobs=0, temperature=1.0
        )
        with pytest.raises(ScoreRefused, match="tokenizer"):
            await engine.adapter.score(requested)
        await engine.adapter.check()
        assert not engine.double.is_dead


async def test_closing_a_stream_aborts_its_request_in_the_engine(directories: list[Path]) -> None:
    async with sglang(directories[0]) as engine:
        stream = engine.stream()
        await stream.has(2)
        stream.task.cancel()
        async with asyncio.timeout(60):
            while engine.double.running:  # noqa: ASYNC110 - the double is in another thread
                await asyncio.sleep(0.002)


async def test_a_server_that_dies_is_gone_for_streams_and_checks(directories: list[Path]) -> None:
    async with sglang(directories[0]) as engine:
        engine.double.is_dead = True
        with pytest.raises(EngineGone):
            await engine.adapter.check()
        with pytest.raises(EngineGone):
            await engine.stream().end()


async def test_given_tokens_are_scored_without_cached_kv(directories: list[Path]) -> None:
    async with sglang(directories[0]) as engine:
        sampled = await engine.stream(SamplingParams(max_tokens=6)).end()
        requested = ScoreRequest(
            token_ids=PROMPT + sampled.tokens,
            score_kind="logprobs",
            start=len(PROMPT),
            top_logprobs=2,
            temperature=1.0,
        )
        scores = await engine.adapter.score(requested)
        assert scores.logprobs == pytest.approx(sampled.logprobs, abs=TOLERANCE)
        assert scores.top is not None
        assert len(scores.top.token_ids) == 12


async def test_capabilities_follow_the_servers_start_options(
    directories: list[Path], tmp_path: Path
) -> None:
    async with sglang(directories[0], is_raw=True) as engine:
        assert not engine.capabilities.has_processed_logprobs
        assert engine.capabilities.dtype == ""
        assert "routed_experts" not in engine.capabilities.sampling
    async with sglang(directories[0], settings={"version": "0.5.22", "dtype": "half"}) as engine:
        assert engine.capabilities.engine == "sglang 0.5.22"
        assert engine.capabilities.keeps_kv
        assert engine.capabilities.dtype == "float16"
    settings = {"disable_overlap_schedule": False, "dtype": "auto"}
    async with sglang(directories[0], settings=settings) as engine:
        assert not engine.capabilities.keeps_kv  # its labels come a token early
        assert engine.capabilities.dtype == ""
    with pytest.raises(ConfigError, match="without --preferred-sampling-params"):
        async with sglang(directories[0], preferred={"top_p": 0.8}):
            pass
    llama = make_model_directory(tmp_path / "llama", "llama")
    with pytest.raises(ConfigError, match="serves a Qwen3ForCausalLM"):
        async with sglang(directories[0], run_model=llama):
            pass
