"""Turns with images on the transformers fallback: parity, prefix sharing, swaps, refusals."""

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.models import IMAGE_PAD_ID, data_url, make_image_model_directory
from tidegate.engine.drafts.lookup import LookupDrafts
from tidegate.engine.execution.images import SequenceImages
from tidegate.engine.execution.served_model import open_model
from tidegate.engine.models.fallback_weights import FallbackWeights, load_fallback
from tidegate.engine.sampling.scoring import ScoringCapabilities
from tidegate.engine.scheduling.scheduler import EngineScheduler
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.errors import ImageRefused, ScoreRefused, TurnRefused
from tidegate.transport.images import IMAGE_PIXELS_MAX, ImageReader
from tidegate.transport.media import Media, Placeholders
from tidegate.transport.messages import FinishWeightUpdate, SamplingParams, SubmitTurn
from tidegate.transport.scoring import ScoreTokens

TOLERANCE_NATS = 1e-4
BLOCK_TOKENS = 4
PAD = IMAGE_PAD_ID


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Make two models that differ in all weights."""
    return [
        make_image_model_directory(tmp_path_factory.mktemp(f"vl{seed}"), seed=seed)
        for seed in range(2)
    ]


class Engine:
    """A scheduler and its runner, without a process; collects what they report of each turn."""

    def __init__(self, path: Path, *, num_blocks: int = 96, drafts: bool = False) -> None:
        model = open_model(path, "float32")
        assert model.images is not None
        self.reader = model.images
        self.runner = model.make_runner(num_blocks=num_blocks, block_tokens=BLOCK_TOKENS)
        limits = EngineLimits(
            max_running_turns=8,
            max_step_tokens=16,
            num_blocks=num_blocks,
            block_tokens=BLOCK_TOKENS,
            context_tokens_max=512,
            vocab_size=102,
        )
        self.scheduler = EngineScheduler(
            limits,
            images=SequenceImages(self.reader),
            scoring=model.scoring,
            drafts=LookupDrafts() if drafts else None,
        )
        self.drafted = 0
        """Draft tokens that were verified."""
        self.media: dict[int, list[Media]] = {}
        self.prompts: dict[int, int] = {}
        self.contexts: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.cached: dict[int, int] = {}
        """Positions that each turn's prefills took from the prefix cache."""

    def submit(self, turn: int, prompt: list[int], urls: Sequence[str] = (), **more: Any) -> None:
        given = [Media("image", url) for url in urls]
        context, media = self.reader.expand(prompt, given, 0)
        sampling = SamplingParams(seed=turn, **({"temperature": 1.0, "max_tokens": 12} | more))
        self.scheduler.submit(
            SubmitTurn(
                turn=turn,
                token_ids=np.array(context, np.int32).tobytes(),
                sampling=sampling,
                media=media,
            )
        )
        self.media[turn], self.contexts[turn] = media, context
        self.prompts[turn], self.logprobs[turn] = len(context), []
        self.cached[turn] = 0

    def run(self, between: Callable[[int], None] = lambda step: None) -> None:
        """Run until no turn is left; ``between`` is called after each step."""
        step = 0
        while rows := self.scheduler.plan():
            columns = self.scheduler.complete(self.runner.step(rows))
            if columns is not None:
                for prefill in columns.prefills:
                    self.cached[prefill.turn] += prefill.cached_tokens
                handles = np.frombuffer(columns.turns, "<u4").tolist()
                tokens = np.frombuffer(columns.token_ids, "<i4").tolist()
                logprobs = np.frombuffer(columns.logprobs, "<f4").tolist()
                counts = np.frombuffer(columns.counts, "<u4").tolist() or [1] * len(handles)
                self.drafted += columns.drafted_tokens
                handles = [h for h, n in zip(handles, counts, strict=True) for _ in range(n)]
                for handle, token, logprob in zip(handles, tokens, logprobs, strict=True):
                    self.contexts[handle].append(token)
                    self.logprobs[handle].append(logprob)
            self.scheduler.check()
            step += 1
            between(step)

    def check(self, turn: int, path: Path) -> None:
        """Compare a turn's log-probs with those of transformers."""
        assert self.logprobs[turn]
        expected = plain_logprobs(self.reader, self.contexts[turn], self.media[turn], path)
        sampled = expected[self.prompts[turn] - 1 :]
        assert self.logprobs[turn] == pytest.approx(sampled.tolist(), abs=TOLERANCE_NATS)


def image_inputs(reader: ImageReader, media: Sequence[Media]) -> dict[str, torch.Tensor]:
    images = [reader.process(each, reader.read(each)) for each in media]
    if not images:
        return {}
    grids = torch.from_numpy(np.stack([each.grid for each in images]))
    pixels = torch.from_numpy(np.concatenate([each.pixel_values for each in images]))
    return {"pixel_values": pixels, "image_grid_thw": grids}


def load_peer(path: Path) -> Any:
    auto: Any = transformers.AutoModelForImageTextToText
    return auto.from_pretrained(path, dtype=torch.float32).eval()


def logprobs_of(logits: torch.Tensor, context: list[int]) -> torch.Tensor:
    """Return the log-prob of each token after the first; placeholders are never sampled."""
    logits[:, PAD] = -torch.inf
    return logits[:-1].log_softmax(-1).gather(-1, torch.tensor(context)[1:, None])[:, 0]


def plain_logprobs(
    reader: ImageReader, context: list[int], media: Sequence[Media], path: Path
) -> torch.Tensor:
    """Return the log-prob of each token after the first, by a plain forward pass."""
    ids = torch.tensor([context])
    with torch.no_grad():
        inputs = image_inputs(reader, media)
        output = load_peer(path)(ids, **inputs, mm_token_type_ids=(ids == PAD).int())
    return logprobs_of(output.logits[0], context)


def text(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(1, 96, length).tolist()
    return tokens


# ---------------------------------------------------------------- parity


def test_turns_with_and_without_images_in_one_batch_equal_a_plain_forward(
    paths: list[Path],
) -> None:
    engine = Engine(paths[0])
    engine.submit(0, text(9), [])
    engine.submit(1, [*text(3), PAD, *text(4)], [data_url(1)])
    wide, tall = data_url(2, 64, 16), data_url(3, 16, 60, "jpeg")
    engine.submit(2, [PAD, 5, PAD, *text(2, 1), PAD], [wide, tall, wide])
    engine.submit(3, [*text(21, 2), PAD, *text(1)], [data_url(4)])
    engine.run()
    for turn in range(4):
        engine.check(turn, paths[0])
        assert PAD not in engine.contexts[turn][engine.prompts[turn] :]


def test_draft_tokens_change_nothing_after_images(paths: list[Path]) -> None:
    engine = Engine(paths[0], drafts=True)
    prompt = [*text(3), PAD, *[7, 8, 9] * 4, PAD, *text(2)]
    for turn in range(4):
        repeats = {"temperature": 0.0, "max_tokens": 60} if turn else {}
        engine.submit(turn, prompt, [data_url(1), data_url(turn)], **repeats)
    engine.run()
    assert engine.drafted > 0
    for turn in range(4):
        engine.check(turn, paths[0])


def test_preempted_turns_read_their_images_again(paths: list[Path]) -> None:
    engine = Engine(paths[0], num_blocks=16)
    for turn in range(4):
        engine.submit(turn, [*text(3, turn), PAD, *text(2)], [data_url(turn)], max_tokens=30)
    engine.run()
    for turn in range(4):
        engine.check(turn, paths[0])


# ---------------------------------------------------------------- prefix cache


def test_prompts_of_equal_tokens_share_blocks_only_if_their_images_are_equal(
    paths: list[Path],
) -> None:
    engine = Engine(paths[0])
    prompt = [*text(6), PAD, *text(9)]  # an image of 6 tokens: positions 6 to 12
    for turn, seed in enumerate((1, 2, 1)):
        engine.submit(turn, prompt, [data_url(seed)])
        engine.run()
    assert engine.contexts[0][:21] == engine.contexts[1][:21]
    assert [engine.cached[turn] for turn in range(3)] == [0, 4, 20]
    for turn in range(3):
        engine.check(turn, paths[0])


def test_an_engine_that_forgets_an_image_only_reads_it_again(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.engine.execution.images.DIGESTS_KEPT_MAX", 1)
    monkeypatch.setattr("tidegate.transport.images.PROCESSED_BYTES_KEPT", 1)
    monkeypatch.setattr("tidegate.engine.execution.fallback.FEATURE_TOKENS_KEPT", 1)
    engine = Engine(paths[0])
    for turn, seed in enumerate((1, 2, 1)):
        engine.submit(turn, [PAD, *text(9)], [data_url(seed)])
        engine.run()
        engine.check(turn, paths[0])
    assert engine.cached[2] == 0


# ---------------------------------------------------------------- weights


def swap_to(engine: Engine, path: Path, kv_policy: Any, weights: FallbackWeights) -> None:
    engine.runner.swap(weights)
    update = FinishWeightUpdate(version=1, pause_mode="keep", kv_policy=kv_policy)
    engine.scheduler.weights_swapped(update)


def test_new_weights_with_recompute_see_the_images_by_their_own_vision_layers(
    paths: list[Path],
) -> None:
    engine = Engine(paths[0])
    new = load_fallback(paths[1], torch.float32)
    engine.submit(0, [*text(3), PAD, *text(4)], [data_url(1)])
    sampled_before = []

    def swap(step: int) -> None:
        if step == 5:
            sampled_before.extend(engine.logprobs[0])
            swap_to(engine, paths[1], "recompute", new)

    engine.run(swap)
    kept = len(sampled_before)
    assert 0 < kept < 12
    for path, part in ((paths[0], slice(0, kept)), (paths[1], slice(kept, None))):
        expected = plain_logprobs(engine.reader, engine.contexts[0], engine.media[0], path)
        expected = expected[engine.prompts[0] - 1 :]
        assert engine.logprobs[0][part] == pytest.approx(
            expected[part].tolist(), abs=TOLERANCE_NATS
        )


@pytest.mark.parametrize("swap_after", [1, 5])
def test_kept_images_stay_those_of_the_old_weights(paths: list[Path], swap_after: int) -> None:
    """After one step, the second image's first token is computed; the others have new weights."""
    engine = Engine(paths[0])
    new = load_fallback(paths[1], torch.float32)
    prompt = [*text(3), PAD, *text(6, 1), PAD, *text(4)]
    engine.submit(0, prompt, [data_url(1), data_url(2)])
    computed = 0

    def swap(step: int) -> None:
        nonlocal computed
        if step == swap_after:
            computed = 16 if step == 1 else len(engine.contexts[0]) - 1
            swap_to(engine, paths[1], "keep", new)

    engine.run(swap)
    sampled = plain_logprobs_of_two(engine, paths, computed)
    assert engine.logprobs[0] == pytest.approx(sampled, abs=TOLERANCE_NATS)


def plain_logprobs_of_two(engine: Engine, paths: list[Path], computed: int) -> list[float]:
    """Return log-probs where the first directory's model computed the first positions.

    ``get_placeholder_mask`` refuses half an image, so embeddings and positions are given.
    """
    context = engine.contexts[0]
    ids, types = torch.tensor([context]), (torch.tensor([context]) == PAD).int()
    pixels, grids = image_inputs(engine.reader, engine.media[0]).values()
    logits, cache = [], None
    for path, part in ((paths[0], slice(0, computed)), (paths[1], slice(computed, None))):
        peer = load_peer(path)
        with torch.no_grad():
            embeddings = peer.get_input_embeddings()(ids)
            features = torch.cat(tuple(peer.get_image_features(pixels, grids).pooler_output))
            embeddings[types.bool()] = features
            positions, _ = peer.model.get_rope_index(ids, types, grids)
            output = peer(
                inputs_embeds=embeddings[:, part],
                position_ids=positions[:, :, part],
                past_key_values=cache,
                use_cache=True,
            )
        logits.append(output.logits[0])
        cache = output.past_key_values
    sampled: list[float] = logprobs_of(torch.cat(logits), context)[engine.prompts[0] - 1 :].tolist()
    return sampled


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://host/cat.png", "fetch nothing; read it in the episode"),
        ("/etc/hostname", "none of the directories .* image_directories"),
        ("data:image/png,AAAA", "not in base64"),
        ("data:image/png;base64,AAAA", "can't be read as an image"),
        ("data:image/png;base64,A", "can't be read as an image"),
        (data_url(1)[:-40] + "A" * 40, "can't be read as an image"),
        (data_url(1, 8, 2000), "aspect ratio"),
    ],
)
def test_an_image_that_cannot_be_read_ends_its_turn_and_no_other(
    paths: list[Path], url: str, reason: str
) -> None:
    engine = Engine(paths[0])
    tokens = np.array([1, *[PAD] * 6, 2], np.int32)
    message = SubmitTurn(
        turn=7,
        token_ids=tokens.tobytes(),
        sampling=SamplingParams(max_tokens=3),
        media=[Media("image", url, 1)],
    )
    engine.submit(0, [PAD], [data_url(3)])
    with pytest.raises(TurnRefused, match=reason):
        engine.scheduler.submit(message)
    engine.run()
    engine.check(0, paths[0])


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert IMAGE_PIXELS_MAX == 16_777_216
    monkeypatch.setattr("tidegate.transport.images.IMAGE_PIXELS_MAX", 100)
    with pytest.raises(ImageRefused, match="384 pixels, and may have 100"):
        ImageReader(paths[0]).read(Media("image", data_url(1)))


def test_paths_are_read_within_the_named_directories_only(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    content = base64.b64decode(data_url(1).partition(",")[2])
    (allowed / "cat.png").write_bytes(content)
    (tmp_path / "secret.png").write_bytes(content)
    (allowed / "link.png").symlink_to(tmp_path / "secret.png")
    reader = ImageReader(paths[0], [allowed])
    assert reader.read(Media("image", str(allowed / "cat.png"))).content == content
    assert reader.read(Media("image", f"file://{allowed}/cat.png")).tokens == 6
    for name in ("link.png", "../secret.png"):
        with pytest.raises(ImageRefused, match="in none of the directories"):
            reader.read(Media("image", str(allowed / name)))
    monkeypatch.setattr("tidegate.transport.images.IMAGE_BYTES_MAX", 100)
    with pytest.raises(ImageRefused, match="more than 100 bytes"):
        reader.read(Media("image", str(allowed / "cat.png")))


def test_images_that_other_engines_may_read_keep_one_placeholder(paths: list[Path]) -> None:
    reader = ImageReader(paths[0], leaves_others=True)
    urls = ["https://host/cat.png", data_url(1), "/data/cat.png"]
    context, media = reader.expand([PAD, 5, PAD, 5, PAD], [Media("image", u) for u in urls], 10)
    assert context == [PAD, 5, *[PAD] * 6, 5, PAD]
    assert [(each.token_offset, each.tokens) for each in media] == [(10, 0), (12, 6), (19, 0)]
    again, same = reader.expand(context, media, 10)
    assert (again, same) == (context, media)
    with pytest.raises(ImageRefused, match="has no placeholder token 100"):
        reader.expand([PAD], [Media("image", url) for url in urls], 0)


def test_placeholders_and_images_must_agree(paths: list[Path]) -> None:
    engine = Engine(paths[0])
    url = data_url(1)
    digest = engine.reader.read(Media("image", url)).digest

    def submit(tokens: list[int], *media: Media) -> None:
        message = SubmitTurn(
            turn=1,
            token_ids=np.array(tokens, np.int32).tobytes(),
            sampling=SamplingParams(max_tokens=3),
            media=list(media),
        )
        engine.scheduler.submit(message)

    with pytest.raises(ImageRefused, match="1 tokens of the context are the placeholder 100"):
        submit([1, PAD])
    with pytest.raises(ImageRefused, match="6 tokens, which must be the placeholder 100"):
        submit([1, PAD], Media("image", url, 1))
    with pytest.raises(ImageRefused, match="from position 0 on"):
        submit([1, *[PAD] * 6], Media("image", url, Placeholders(0, 6, digest)))
    whole = Media("image", url, Placeholders(1, 6, digest))
    beside = Media("image", url, Placeholders(7, 6, digest))
    with pytest.raises(ImageRefused, match="no token is between two images, at position 7"):
        submit([1, *[PAD] * 12], whole, beside)
    with pytest.raises(ImageRefused, match="has changed"):
        submit([1, *[PAD] * 6], Media("image", url, Placeholders(1, 6, "0" * 64)))
    with pytest.raises(ImageRefused, match="reads no video"):
        submit([1, *[PAD] * 6], Media("video", url, Placeholders(1, 6, digest)))
    with pytest.raises(ImageRefused, match="may have 64 images, got 65"):
        submit([1], *[whole] * 65)


def test_scoring_refuses_contexts_with_images(paths: list[Path]) -> None:
    engine = Engine(paths[0])
    tokens = np.array([1, PAD, 2], np.int32).tobytes()
    with pytest.raises(ScoreRefused, match="scoring reads no images"):
        engine.scheduler.score(ScoreTokens(request_id=1, token_ids=tokens))
    assert ScoringCapabilities(hidden_size=1).image_token_id is None
