"""Random conversations in whole runs: each row is exactly the tokens that engines read and wrote.

Turns are aborted, kept and lost, in virtual time. The scripted model's output follows from its
context, so that the correct tokens of a row can be computed from the row alone.
"""

import asyncio
import random
import zlib
from array import array
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.orchestrator.episodes.chat_templates import ENDS, add_chat_template
from tests.orchestrator.episodes.talking import CALL, TOOLS, tool, user
from tidegate.errors import TurnTimeout
from tidegate.simulation.engine.scripted import TurnRequest, files_of
from tidegate.simulation.run.serve import SimulatedRollouts
from tidegate.testing import ScriptedEngine, ServeInTests

TASKS = 8
TEMPLATES = ("chatml", "chatml_thinking", "gemma")


class Model:
    """Generates a fixed text for each context."""

    def __init__(self, path: Path, template: str) -> None:
        self._files = files_of(path)
        self._end = ENDS[template]

    def says(self, context: tuple[int, ...]) -> list[int]:
        """Return the output for a context; it ends with a stop token."""
        chance = random.Random(zlib.crc32(array("i", context).tobytes()))
        words = "".join(chance.choice("ab in\n.{}") for _ in range(chance.randrange(1, 12))) + "."
        thought = "<think>\nhm\n</think>\n\n" if chance.random() < 0.3 else ""
        call = CALL if chance.random() < 0.3 else ""
        said = f"{thought}{words}{call}{self._end}"
        ids: list[int] = self._files.tokenizer.encode(said, add_special_tokens=False).ids
        return ids

    def decoded(self, token_ids: list[int]) -> str:
        """Return the text of tokens, as a scripted engine reports it."""
        return str(self._files.tokenizer.decode(token_ids))


async def talk(episode: tidegate.Episode, task: int) -> float:
    """Hold several turns; some are cut off or cancelled, some pasts are rewritten or left."""
    chance = random.Random(f"{task} {episode.index}")
    threads: list[list[dict[str, Any]]] = [[user(f"q{task}")]]
    for _ in range(chance.randrange(1, 6)):
        messages = chance.choice(threads)
        try:
            turn = await episode.generate(
                messages=messages,
                tools=TOOLS,
                max_tokens=chance.choice((5, 400)),
                timeout_s=chance.choice((None, None, None, 0.05)),
            )
        except TurnTimeout:
            continue
        said = turn.message or {}
        new = tool("3") if "tool_calls" in said else user(chance.choice(["ab", " x\n", "why?"]))
        grown = [*messages, said, new]
        if chance.random() < 0.2:
            grown[chance.randrange(len(grown))] = user("otherwise")
        threads.append(grown)
        await asyncio.sleep(chance.choice((0.0, 0.0, 0.05, 0.5)))
    return 1.0


async def trouble(
    rollouts: SimulatedRollouts, engines: list[ScriptedEngine], chance: random.Random
) -> None:
    """Kill and pause engines; turns of lost engines continue elsewhere."""
    for _ in range(12):
        await asyncio.sleep(chance.choice((0.02, 0.05, 0.2)))
        engine = chance.choice(engines)
        match chance.randrange(4):
            case 0:
                engine.crash()
            case 1:
                engine.hang(chance.choice((0.1, 3.0)))
            case 2:
                engine.cut(chance.choice((0.1, 3.0)))
            case 3:
                await rollouts.pause(chance.choice(("abort", "keep")))
                await rollouts.resume()


def check_row(
    model: Model, row: list[int], mask: list[bool], contexts: set[tuple[int, ...]]
) -> int:
    """Check that each trained segment is the model's output for the context before it, which an
    engine read; return the number of trained tokens."""
    edges = [n for n in range(len(row)) if mask[n] != (n > 0 and mask[n - 1])]
    if len(edges) % 2:
        edges.append(len(row))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        context = tuple(row[:start])
        assert context in contexts, "no engine was shown this context"
        assert row[start:end] == model.says(context)[: end - start]
    return sum(mask)


@pytest.mark.parametrize("pause_mode", ["abort", "keep", "wait"])
@pytest.mark.parametrize("seed", range(4))
async def test_each_segment_is_what_an_engine_read_and_wrote_and_is_trained_once(
    tidegate_serve: ServeInTests,
    tidegate_engine: type[ScriptedEngine],
    tmp_path: Path,
    pause_mode: Any,
    seed: int,
) -> None:
    chance = random.Random(f"{seed} {pause_mode}")
    template = TEMPLATES[seed % len(TEMPLATES)]
    path = add_chat_template(tmp_path / "model", template)
    (path / "config.json").write_text("{}")
    model = Model(path, template)
    engines = [tidegate_engine(step_s=0.005, restart_s=0.5) for _ in range(3)]

    def says(request: TurnRequest) -> list[int]:
        return model.says(request.token_ids)

    trained = 0
    async with tidegate_serve(
        model=path,
        engines=engines,
        says=says,
        group_size=2,
        groups_per_batch=2,
        max_staleness=2,
        pause_mode=pause_mode,
        kv_policy=chance.choice(("keep", "recompute")),
        engine_timeout_s=1.0,
        heartbeat_interval_s=0.25,
    ) as rollouts:
        troubled = asyncio.create_task(trouble(rollouts, engines, chance))
        async for batch in rollouts.batches(range(TASKS), episode=talk):
            contexts = {request.token_ids for engine in engines for request in engine.requests}
            for row, mask, is_token in zip(
                batch.token_ids, batch.loss_mask, batch.attention_mask, strict=True
            ):
                length = int(is_token.sum())
                tokens, trained_here = row[:length].tolist(), mask[:length].tolist()
                trained += check_row(model, tokens, trained_here, contexts)
            await rollouts.publish({})
        await troubled
        ledger = rollouts.statistics().ledger
    assert (ledger.error, ledger.trained) == (0, trained)
    assert trained
    for request in (request for engine in engines for request in engine.requests):
        said = model.says(request.token_ids)
        assert request.said in {model.decoded(said[:n]) for n in range(len(said) + 1)}
