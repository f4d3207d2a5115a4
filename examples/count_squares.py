"""Trains a tiny Qwen2.5-VL to count the squares in a picture, from pixels and rewards alone.

The model has 0.1 million parameters and random weights; the run makes it. Pictures travel as
``data:`` URLs in messages, and batches bring the processed ones to the trainer.

    python -m examples.count_squares [--seed N] [--versions N]
"""

import argparse
import asyncio
import base64
import io
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import tidegate
from tidegate.engine.models.quiet_transformers import quiet_transformers
from tidegate.policies.objectives import decoupled_ppo_loss

COUNTS = (1, 2, 3, 4)
SIDE, CELL = 32, 8
"""Pixels of a picture's side, and of the cells that have at most one square."""

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
VOCABULARY = ("<eos>", *map(str, COUNTS), "?", *MARKS)
IMAGE_PAD = VOCABULARY.index("<|image_pad|>")

CHAT_TEMPLATE = """
{%- for message in messages %}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}{%- endfor %}"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A task: a picture, and the number of its squares."""

    url: str
    count: int


def draw(seed: int) -> Picture:
    """Draw squares of random colours and places on black."""
    rng = random.Random(seed)
    count = rng.choice(COUNTS)
    image = Image.new("RGB", (SIDE, SIDE))
    for cell in rng.sample(range((SIDE // CELL) ** 2), count):
        row, column = divmod(cell, SIDE // CELL)
        left, top = column * CELL + rng.randrange(3), row * CELL + rng.randrange(3)
        colour = tuple(rng.randrange(150, 256) for _ in range(3))
        ImageDraw.Draw(image).rectangle((left, top, left + 5, top + 5), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return Picture(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}", count)


def make_model(directory: Path, seed: int) -> None:
    """Write a model directory: random weights, an image processor, a tokenizer, a template."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(VOCABULARY),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [2, 3, 3],
            },
            "bos_token_id": None,
            "eos_token_id": 0,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [0],
            "out_hidden_size": 64,
        },
        image_token_id=IMAGE_PAD,
        video_token_id=len(VOCABULARY),
        vision_start_token_id=VOCABULARY.index("<|vision_start|>"),
        vision_end_token_id=VOCABULARY.index("<|vision_end|>"),
    )
    config.eos_token_id = 0
    with quiet_transformers(), torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)
    size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    Qwen2VLImageProcessorPil(patch_size=4, size=size).save_pretrained(directory)
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}, "<eos>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>", *MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


async def count(episode: tidegate.Episode, picture: Picture) -> float:
    """Show a picture and ask for a number; the reward is 1 if it is right."""
    content = [
        {"type": "image_url", "image_url": {"url": picture.url}},
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "user", "content": content}]
    turn = await episode.generate(messages=messages, max_tokens=1, stop_token_ids=[])
    return float(turn.text == str(picture.count))


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: tidegate.Batch) -> None:
    """Take one optimizer step. ``batch.media`` has the images' inputs of the forward pass."""
    inputs = {"input_ids": batch.token_ids, "attention_mask": batch.attention_mask}
    logits = model(**inputs, **batch.media).logits[:, :-1].clone()
    logits[..., IMAGE_PAD] = -torch.inf  # engines never sample the placeholder
    logprobs = logits.log_softmax(-1).gather(-1, batch.token_ids[:, 1:, None])[..., 0]
    mask = batch.loss_mask[:, 1:]
    loss, _ = decoupled_ppo_loss(
        logprobs.where(mask, 0.0),
        logprobs.detach().where(mask, 0.0),
        batch.logprobs[:, 1:],
        batch.advantages[:, None],
        mask,
    )
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


async def learn(
    rollouts: tidegate.Rollouts, directory: Path, pictures: Sequence[Picture], versions: int
) -> list[float]:
    """Train for so many versions; return the mean reward of each batch."""
    with quiet_transformers():
        model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, versions)
    rewards = []
    async for batch in rollouts.batches(pictures, episode=count):
        train_step(model, optimizer, batch)
        decay.step()
        await rollouts.publish(model.state_dict())
        rewards.append(float(batch.rewards.mean()))
        if len(rewards) % 20 == 0:
            recent = sum(rewards[-20:]) / 20
            print(f"version {len(rewards):3d}  reward of the last 20: {recent:.3f}", flush=True)
    return rewards


async def main(seed: int, versions: int) -> tuple[float, float]:
    """Train for so many versions; return the accuracy on unseen pictures before and after."""
    groups = 16
    held_out = [draw(-1 - number) for number in range(200)]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "model"
        make_model(directory, seed)
        async with tidegate.serve(
            model=directory,
            engines=1,
            group_size=8,
            groups_per_batch=groups,
            max_staleness=1,
            max_running_turns=64,
            seed=seed,
        ) as rollouts:
            before = (await rollouts.evaluate(held_out, episode=count)).mean_reward
            training = [draw(seed * 1_000_000 + number) for number in range(versions * groups)]
            await learn(rollouts, directory, training, versions)
            after = (await rollouts.evaluate(held_out, episode=count)).mean_reward
    print(
        f"right on {len(held_out)} unseen pictures: {before:.3f} before, {after:.3f} after "
        f"{versions} versions, {time.perf_counter() - began:.0f} s"
    )
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny model to count squares.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--versions", type=int, default=120)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.seed, arguments.versions))
