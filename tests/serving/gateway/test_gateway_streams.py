"""A stream of the gateway has the same text as an answer in one piece."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from httpx import AsyncClient
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.orchestrator.episodes.talking import CALL, TOOLS, Talk, user
from tests.orchestrator.episodes.test_tool_calls import SAID
from tests.orchestrator.episodes.test_tool_calls import TOOLS as SEARCH_TOOLS
from tests.serving.gateway.gateway_clients import CHAT, END, events_of
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.incremental_detokenizer import IncrementalDetokenizer
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams

pytestmark = pytest.mark.wire


def token_by_token(talk: Talk, tokens: Sequence[int]) -> Callable[..., Coroutine[Any, Any, Turn]]:
    """Return a :meth:`Engine.generate` that samples these tokens, each in a step of its own."""

    async def generate(
        rollout: Rollout, sampling: SamplingParams, media: tuple[Media, ...] = ()
    ) -> Turn:
        turn = Turn(rollout, sampling)
        rollout.turns.append(turn)
        for token in tokens:
            turn.append(token, -1.0, 0, "engine-0")
            if (subscribed := talk.engine.pending.new_tokens.get(rollout.rollout_id)) is not None:
                subscribed.set()
            for _ in range(3):
                await asyncio.sleep(0)
        turn.finish_reason = "stop"
        return turn

    return generate


async def test_a_stream_says_the_same_in_parts(talk: Talk, client: AsyncClient) -> None:
    whole = talk.engine.generate
    tokens = talk.model.tokenizer.encode(f"in der ab{END}").ids
    talk.engine.generate = token_by_token(talk, tokens)  # type: ignore[method-assign]
    body = {"messages": [user("q")], "stream": True, "stream_options": {"include_usage": True}}
    chunks = events_of(await client.post(CHAT, json=body))
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == "in der ab"
    assert len([d for d in deltas if d.get("content")]) > 1
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == talk.rollout.turns[0].length
    body = {"messages": [user("p")], "stream": True, "tools": TOOLS, "stop": ["never"]}
    chunks = events_of(await client.post(CHAT, json=body))
    said = [c["choices"][0]["delta"].get("content") for c in chunks]
    assert "".join(filter(None, said)) == "in der ab"
    assert len(list(filter(None, said))) > 1
    talk.engine.generate = whole  # type: ignore[method-assign]
    talk.engine.words.append(f"I add.{CALL}{END}")
    body = {"messages": [user("r")], "stream": True, "tools": TOOLS}
    last = events_of(await client.post(CHAT, json=body))[-1]["choices"][0]
    assert last["finish_reason"] == "tool_calls"
    assert last["delta"]["tool_calls"][0]["function"]["name"] == "add"


@pytest.mark.parametrize("template", ["kimi", "minimax", "glm", "harmony"])
async def test_a_stream_has_neither_reasoning_nor_marks_of_calls_in_its_content(
    talk: Talk, client: AsyncClient, template: str
) -> None:
    reasons = template != "kimi"

    tokens = talk.model.encoder.encode(SAID[template])
    talk.engine.generate = token_by_token(talk, tokens)  # type: ignore[method-assign]
    body = {"messages": [user("q")], "tools": SEARCH_TOOLS}
    chunks = events_of(await client.post(CHAT, json={**body, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    said = "I look." if template != "harmony" else ""
    assert "".join(delta.get("content", "") for delta in deltas) == said
    [call] = deltas[-1]["tool_calls"]
    assert call["function"]["name"] == "search"
    reasoned = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    assert len(reasoned) == reasons
    message = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]
    assert message["content"] == (said or None)
    assert message.get("reasoning_content", "") == "".join(reasoned)


def byte_tokenizer() -> Tokenizer:
    """A token a byte: most characters of Unicode are several."""
    bytes_known = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: n for n, byte in enumerate(bytes_known)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_tokenizer() -> Tokenizer:
    """Writes a space between words, and none before the first."""
    tokenizer = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "n": 2}, unk_token="n"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


TEXTS = st.text(alphabet="abé漢🙂 n", max_size=40).map(lambda text: (byte_tokenizer(), text))
SPACED = st.lists(st.sampled_from("ab"), max_size=20).map(lambda w: (word_tokenizer(), " ".join(w)))


@given(said=TEXTS | SPACED, cuts=st.lists(st.integers(1, 9), max_size=12), is_cut_off=st.booleans())
def test_text_that_grows_is_the_whole_text_up_to_its_last_whole_character(
    said: tuple[Tokenizer, str], cuts: list[int], is_cut_off: bool
) -> None:
    tokenizer, words = said
    ids = tokenizer.encode(words).ids
    whole = len(ids)
    if is_cut_off:
        ids += tokenizer.encode("漢").ids[:-1]  # half a character, or nothing
    detokenizer, at = IncrementalDetokenizer(tokenizer.decode), 0
    for tokens in [*cuts, len(ids)]:
        at = min(at, whole)
        detokenizer.add(ids[at : min(at + tokens, whole)])
        at += tokens
        assert tokenizer.decode(ids[:at]).startswith(detokenizer.text)
    assert detokenizer.text == words
    detokenizer.add(ids[whole:])
    assert detokenizer.text == words
    assert detokenizer.tokens == len(ids)


def test_a_token_of_a_stream_is_decoded_only_twice() -> None:
    decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return "x" * len(token_ids)

    detokenizer = IncrementalDetokenizer(decode)
    for _ in range(1000):
        detokenizer.add([1] * 10)
    assert detokenizer.text == "x" * 10_000
    assert decoded < 3 * 10_000
