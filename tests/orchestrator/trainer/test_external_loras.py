"""Tests of LoRA adapters on other engines: runs over doubles, each token audited.

The doubles compute with real adapters, so a token of an old one under a new one's tag shows.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors.torch import load_file

import tidegate
from tests.engine.external import sglang_double_loras, vllm_double_loras
from tests.engine.external.sglang_double import SglangDouble, make_app
from tests.engine.external.vllm_double import VllmDouble
from tests.models import make_model_directory
from tests.orchestrator.trainer.test_adapters_served import CONFIG, random_adapter, solve
from tests.served_app import served
from tidegate.errors import TurnRefused, WeightsRefused
from tidegate.observability.audit.audit import audit_run
from tidegate.orchestrator.episodes.runner import EpisodeFunction

pytestmark = pytest.mark.wire

Kind = Literal["vllm", "sglang"]

Server = vllm_double_loras.Loras | sglang_double_loras.Loras

RANK_MAX = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "untied", tied=False)


@pytest.fixture
def serve(model: Path) -> Iterator[Callable[[Kind], tuple[str, Server]]]:
    """Start a server; return its URL, and its record of adapters."""
    with ExitStack() as stack:

        def start(kind: Kind) -> tuple[str, Server]:
            if kind == "vllm":
                vllm = stack.enter_context(VllmDouble(model, lora_rank_max=RANK_MAX))
                return f"vllm+{vllm.url}", vllm.loras
            settings = {"enable_lora": True, "max_lora_rank": RANK_MAX}
            sglang = SglangDouble(model, settings=settings)
            url = stack.enter_context(served(lambda: (make_app(sglang), sglang.sample_for_ever)))
            return f"sglang+{url}", sglang.loras

        yield start


async def train(
    model: Path, run: Path, url: str, *, episode: EpisodeFunction = solve, **settings: Any
) -> Any:
    """Two adapters, one of which changes, and the model's own weights once."""
    policy = random_adapter(model, 0)
    async with tidegate.serve(
        model=model,
        engine_urls=[url],
        group_size=2,
        groups_per_batch=2,
        max_staleness=1,
        adapter="policy",
        run_directory=run,
        **settings,
    ) as rollouts:
        await rollouts.publish_adapter("critic", random_adapter(model, 1), config=CONFIG)
        await rollouts.publish_adapter("policy", policy, config=CONFIG)
        async for batch in rollouts.batches(range(12), episode=episode):
            for tensor in policy.values():
                tensor *= 1.1
            if batch.trainer_version == 4:  # the model's own weights, under the same adapters
                state: Any = load_file(model / "model.safetensors")
                await rollouts.publish({name: t * 1.05 for name, t in state.items()})
            else:
                await rollouts.publish_adapter("policy", policy, batches=[batch], config=CONFIG)
    return audit_run(run)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_all_tokens_are_of_the_adapters_that_their_tags_say_and_none_is_left_behind(
    model: Path,
    tmp_path: Path,
    serve: Callable[[Kind], tuple[str, Server]],
    kind: Kind,
) -> None:
    url, server = serve(kind)
    report = await train(model, tmp_path / "run", url, kv_policy="keep")
    assert report.agrees, report.lines()
    assert (report.tokens_unreplayable, report.tokens_unknown) == (0, 0)
    assert report.versions >= 3
    assert report.version_power.unnoticed_share < 0.5
    assert server.paths == {}
    assert server.most < server.loads  # because old ones go during the run
    assert not list((tmp_path / "run").rglob("tidegate-lora-*"))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_adapters_serve_until_they_are_unloaded_and_those_that_do_not_fit_change_nothing(
    model: Path, serve: Callable[[Kind], tuple[str, Server]], kind: Kind
) -> None:
    url, server = serve(kind)
    adapter = random_adapter(model, 2)
    answers: dict[str, list[int]] = {}

    async def greedy(episode: tidegate.Episode, name: str) -> float:
        episode.append([7, 8, 9])
        try:
            turn = await episode.generate(max_tokens=12, temperature=0.0, adapter=name)
        except TurnRefused as error:
            return float("no adapter" in str(error))
        return float(answers.setdefault(name, turn.token_ids) != turn.token_ids)

    async with tidegate.serve(model=model, engine_urls=[url], group_size=2) as rollouts:
        assert (await rollouts.evaluate(["a"], episode=greedy)).rewards == [1.0]
        await rollouts.publish_adapter("a", adapter, config=CONFIG)
        await rollouts.publish_adapter("b", {n: 2 * t for n, t in adapter.items()}, config=CONFIG)
        assert (await rollouts.evaluate(["a", "b", ""], episode=greedy)).rewards == [0.0] * 3
        large = {n: t.repeat(*((4, 1) if "lora_A" in n else (1, 4))) for n, t in adapter.items()}
        with pytest.raises(WeightsRefused, match="rank 8 at most, and this one has 16"):
            await rollouts.publish_adapter("a", large, config={"r": 16, "lora_alpha": 8})
        assert (await rollouts.evaluate(["a", "b", ""], episode=greedy)).rewards == [0.0] * 3
        assert len({tuple(answer) for answer in answers.values()}) == 3
        assert len(server.paths) == 2
        await rollouts.unload_adapter("a")
        assert (await rollouts.evaluate(["a", "b"], episode=greedy)).rewards == [1.0, 0.0]
    assert server.paths == {}


async def test_a_vllm_on_a_cpu_is_asked_for_no_turn_that_another_turns_adapter_would_spoil(
    model: Path,
) -> None:
    is_begun, may_continue = threading.Event(), threading.Event()

    def holds(prompt: list[int], sampled: int, label: str) -> bool:
        if sampled == 3:
            is_begun.set()
        return sampled >= 3 and not may_continue.is_set()

    async def plain(episode: tidegate.Episode, task: int) -> float:
        episode.append([7, 8, 9])
        try:
            await episode.generate(max_tokens=12, stop_token_ids=[], adapter="a" if task else "")
        except TurnRefused as error:
            return float(
                "applies LoRA adapters to turns without one in the same step" in str(error)
            )
        return 0.0

    with VllmDouble(model, lora_rank_max=RANK_MAX, device="cpu") as double:
        double.holds = holds
        async with tidegate.serve(model=model, engine_urls=[f"vllm+{double.url}"]) as rollouts:
            half_done = asyncio.create_task(rollouts.evaluate([0], episode=plain))
            assert await asyncio.to_thread(is_begun.wait, 60)
            await rollouts.publish_adapter("a", random_adapter(model, 2), config=CONFIG)
            assert (await half_done).rewards == [1.0]  # it would be spoiled from now on
            may_continue.set()
            assert (await rollouts.evaluate([0, 1], episode=plain)).rewards == [1.0, 0.0]
            await rollouts.unload_adapter("a")
            assert (await rollouts.evaluate([0], episode=plain)).rewards == [0.0]
            assert rollouts.statistics().engines  # and it has lost none by it


async def test_what_the_server_says_of_an_adapter_is_said_and_the_old_one_serves_on(
    model: Path,
) -> None:
    why = ["", "out of slots", ""]
    with VllmDouble(model, lora_rank_max=RANK_MAX) as double:
        double.loras.fails = lambda: why.pop(0)
        async with tidegate.serve(model=model, engine_urls=[f"vllm+{double.url}"]) as rollouts:
            await rollouts.publish_adapter("a", random_adapter(model, 2), config=CONFIG)
            first = list(double.loras.paths)
            with pytest.raises(WeightsRefused, match="out of slots"):
                await rollouts.publish_adapter("a", random_adapter(model, 3), config=CONFIG)
            assert list(double.loras.paths) == first
            await rollouts.publish_adapter("a", random_adapter(model, 3), config=CONFIG)
            assert set(double.loras.paths) - set(first)


async def test_a_server_that_was_started_without_is_refused_with_the_flags_that_help(
    model: Path,
) -> None:
    with VllmDouble(model) as double:
        async with tidegate.serve(model=model, engine_urls=[f"vllm+{double.url}"]) as rollouts:
            with pytest.raises(WeightsRefused, match=r"--enable-lora .*LORA_UPDATING=True"):
                await rollouts.publish_adapter("a", random_adapter(model, 2), config=CONFIG)
