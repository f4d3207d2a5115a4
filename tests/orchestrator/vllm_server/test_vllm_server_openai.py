"""Do clients that nobody here wrote get on with the server: OpenAI's, and what vLLM's docs ask?"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import tidegate

# ---------------------------------------------------------------- OpenAI's client


@pytest.fixture
def open_ai(server: tidegate.VLLMServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def test_openais_client_completes_texts_and_tokens(open_ai: openai.OpenAI) -> None:
    (listed,) = open_ai.models.list().data
    answer: Any = open_ai.completions.create(
        model=listed.id,
        prompt=["A robot may not", "injure"],
        n=2,
        max_tokens=5,
        logprobs=3,
        extra_body={"return_token_ids": True, "return_weight_versions": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].prompt_token_ids == answer.choices[1].prompt_token_ids
    for choice in answer.choices:
        count = len(choice.token_ids)
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == count
        starts = itertools.accumulate(map(len, choice.logprobs.tokens[:-1]), initial=0)
        assert choice.logprobs.text_offset == list(starts)
        assert choice.weight_versions == [{"version": "default", "start": 0, "end": count}]
    told = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert told == answer.usage.total_tokens

    with pytest.raises(openai.NotFoundError, match="does not exist"):
        open_ai.completions.create(model="no", prompt="x")


def test_openais_client_streams_a_conversation(open_ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Who won the world series in 2020?"}],
        "max_tokens": 24,
        "seed": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"return_token_ids": True},
    }
    whole: Any = open_ai.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert len(choice.logprobs.content) == len(choice.token_ids)
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    said = ""
    ids: list[int] = []
    for chunk in open_ai.chat.completions.create(**asked, stream=True):
        delta: Any = chunk.choices[0]
        said += delta.delta.content or ""
        ids += delta.token_ids or []
    assert (said, ids) == (choice.message.content, choice.token_ids)


def test_a_schema_is_kept_to(open_ai: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = open_ai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "?"}],
        max_tokens=60,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "ok", "schema": schema},
        },
    )
    said = answer.choices[0].message.content or ""
    assert re.match(r'\s*\{\s*"ok"', said)  # a model of random weights may never get to its end
