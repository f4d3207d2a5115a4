"""Requests of NeMo-Gym's ``vllm_model`` (0.5): token ids of conversations, and prefixes kept.

Restates what its client sends, and what NeMo-RL's vLLM makes of ``required_prefix_token_ids``.
"""

from typing import Any

import pytest

from tests.serving.vllm_server.vllm_serving import Client

pytestmark = pytest.mark.wire

CHAT = "/v1/chat/completions"
CAPTURE = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
"""Fields that its server adds to every request when it trains."""

QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]
MORE = {"role": "user", "content": "Sure?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Gym:
    """Calls as ``VLLMModel`` makes them: a conversation, and where needed ``/tokenize``."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def prompt(self, messages: list[Any], **fields: Any) -> list[int]:
        body = {"model": "tiny", "messages": messages, **fields}
        ids: list[int] = self.client.post("/tokenize", body)["tokens"]
        return ids

    def say(self, messages: list[Any], **fields: Any) -> dict[str, Any]:
        """The assistant's message with its tokens and log-probs."""
        body = {"model": "tiny", "messages": messages, "max_tokens": 6, **CAPTURE}
        answer = self.client.post(CHAT, {**body, **fields})
        (choice,) = answer["choices"]
        entries = choice["logprobs"]["content"]
        assert all(entry["top_logprobs"] == [] for entry in entries)
        return {
            "role": "assistant",
            "content": choice["message"]["content"],
            "prompt_token_ids": self.prompt(messages, **fields),
            "generation_token_ids": [int(e["token"].removeprefix("token_id:")) for e in entries],
            "generation_log_probs": [entry["logprob"] for entry in entries],
        }


@pytest.fixture
def gym(client: Client) -> Gym:
    return Gym(client)


def stop_token(client: Client) -> int:
    (stop,) = client.post("/tokenize", {"prompt": "<|im_end|>", "add_special_tokens": False})[
        "tokens"
    ]
    return int(stop)


def test_tokens_of_an_answer_are_those_of_the_engine_and_of_tokenize(
    gym: Gym, client: Client
) -> None:
    body = {"messages": QUESTION, "max_tokens": 6, "seed": 5, "tools": TOOLS, **CAPTURE}
    answer = client.post(CHAT, {**body, "return_token_ids": True})
    (choice,) = answer["choices"]
    reported = [int(e["token"].removeprefix("token_id:")) for e in choice["logprobs"]["content"]]
    assert reported == choice["token_ids"]
    assert gym.prompt(QUESTION, tools=TOOLS) == answer["prompt_token_ids"]


@pytest.mark.parametrize("sends", ["a prefix", "messages with tokens"])
@pytest.mark.parametrize("stops", [False, True])
def test_a_turns_tokens_stay_as_they_were_sampled_whatever_its_message_is_tokenised_to(
    gym: Gym, client: Client, sends: str, stops: bool
) -> None:
    stop = stop_token(client)
    first = gym.say(QUESTION, logit_bias={str(stop): 1e4} if stops else {str(stop): -1e4})
    sampled = [*first["prompt_token_ids"], *first["generation_token_ids"]]
    assert (sampled[-1] == stop) == stops
    plain = {"role": "assistant", "content": "retokenised otherwise"}
    if sends == "a prefix":
        messages, fields = [*QUESTION, plain, MORE], {"required_prefix_token_ids": sampled}
    else:
        messages, fields = [*QUESTION, first | plain, MORE], {}
    prompt_ids = gym.prompt([MORE])
    tail = [stop, *client.post("/tokenize", {"prompt": "\n"})["tokens"], *prompt_ids]
    expected = [*sampled[: len(sampled) - stops], *tail]
    assert gym.prompt(messages, **fields) == expected
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, **fields}
    assert client.post(CHAT, body)["prompt_token_ids"] == expected
    # An empty prefix is none, and a prefix of the request's own is before those of messages.
    empty = gym.prompt(messages, required_prefix_token_ids=[])
    assert empty == gym.prompt([*QUESTION, plain, MORE])


def test_a_prefix_that_no_message_follows_is_refused(client: Client) -> None:
    said = [*QUESTION, {"role": "assistant", "content": "3"}]
    body: dict[str, Any] = {"messages": said, "required_prefix_token_ids": [5, 6]}
    refused = client.refusal(CHAT, {**body, "add_generation_prompt": False})
    assert refused["param"] == "required_prefix_token_ids"
    wrong = {"messages": [*QUESTION, {**said[1], "prompt_token_ids": ["x"]}]}
    assert "prompt_token_ids" in client.refusal(CHAT, wrong)["message"]


@pytest.mark.parametrize("token", [-1, 2**40])
def test_a_prefix_that_cannot_be_honoured_is_refused(client: Client, token: int) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "required_prefix_token_ids": [5, token]}
    assistant = {"role": "assistant", "content": "3"}
    longer = body | {"messages": [*QUESTION, assistant, MORE], "return_token_strs": True}
    refused = client.refusal("/tokenize", longer)
    assert refused["message"] == f"Token id {token} is out of vocabulary"
    refused = client.refusal(f"{CHAT}/batch", body | {"messages": [QUESTION]})
    assert refused["param"] == "required_prefix_token_ids"
