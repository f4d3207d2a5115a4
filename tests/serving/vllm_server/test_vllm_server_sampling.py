"""Sampling fields of vLLM's API: seeds, what is refused by name, and the model's own defaults."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.serving.vllm_server.vllm_serving import PROMPT, Client
from tidegate.errors import ModelError
from tidegate.serving.openai.model_info import read_sampling_defaults

pytestmark = pytest.mark.wire

MESSAGES = [{"role": "user", "content": "hi"}]


def ids(client: Client, **fields: Any) -> list[list[int]]:
    body = {"max_tokens": 8, "return_token_ids": True, "ignore_eos": True, **fields}
    choices = client.post("/v1/completions", {"prompt": PROMPT, **body})["choices"]
    return [choice["token_ids"] for choice in choices]


# ---------------------------------------------------------------- seeds


def test_a_seed_of_minus_one_is_none_so_requests_of_a_group_differ(client: Client) -> None:
    drawn = [ids(client, seed=-1)[0] for _ in range(4)]
    assert len({tuple(each) for each in drawn}) > 1
    sampling = {"max_tokens": 8, "seed": -1, "ignore_eos": True}
    generated = [client.generate(token_ids=PROMPT, sampling_params=sampling) for _ in range(4)]
    assert len({tuple(each["choices"][0]["token_ids"]) for each in generated}) > 1


def test_each_prompt_of_a_request_begins_with_the_requests_seed(client: Client) -> None:
    one, two = ids(client, prompt=[PROMPT, PROMPT], seed=7)
    assert one == two == ids(client, seed=7)[0]
    first, second = ids(client, seed=7, n=2)
    assert first != second
    assert ids(client, prompt=[PROMPT, PROMPT], seed=7, n=2) == [first, second] * 2
    talks = client.post(
        "/v1/chat/completions/batch",
        {"messages": [MESSAGES] * 2, "seed": 7, "max_tokens": 8, "return_token_ids": True},
    )["choices"]
    assert talks[0]["token_ids"] == talks[1]["token_ids"]


# ---------------------------------------------------------------- other fields


def test_a_completion_keeps_to_a_response_format(client: Client) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "response_format": wanted}
    (choice,) = client.post("/v1/completions", body)["choices"]
    assert choice["text"].strip() in ("true", "false")


def test_further_names_for_the_chat_template_reach_it(client: Client, model: Path) -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}
    reported = client.refusal("/v1/chat/completions", body)
    assert "multiple values for keyword argument 'messages'" in reported["message"]
    client.post("/v1/chat/completions", {**body, "max_tokens": 1, "chat_template_kwargs": {"a": 1}})


def test_a_message_is_continued_where_it_ends(client: Client) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": " It is "}]
    prefilled = {"messages": begun, "continue_final_message": True}
    body = {**prefilled, "max_tokens": 1, "return_token_ids": True, "return_prompt_text": True}
    answer = client.post("/v1/chat/completions", {**body, "add_generation_prompt": False})
    assert answer["prompt_text"].endswith("It is ")
    assert client.post("/tokenize", prefilled)["tokens"] == answer["prompt_token_ids"]
    plain = {**body, "continue_final_message": False}
    text = client.post("/v1/chat/completions", plain)["prompt_text"]
    assert text.startswith(answer["prompt_text"])
    assert text.endswith("assistant\n")
    batch = {"messages": [begun, begun], "continue_final_message": True, "max_tokens": 1}
    client.post("/v1/chat/completions/batch", batch)
    refused = client.refusal("/v1/chat/completions", {**prefilled, "add_generation_prompt": True})
    assert "Cannot set both" in refused["message"]
    nothing = [*MESSAGES, {"role": "assistant", "content": ""}]
    refused = client.refusal("/v1/chat/completions", {**prefilled, "messages": nothing})
    assert "continue_final_message continues the last message's text" in refused["message"]


def test_a_bad_word_is_never_completed_but_its_parts_are_written(client: Client) -> None:
    tokens = client.post("/tokenize", {"prompt": "cdx", "add_special_tokens": False})["tokens"]
    asked = {"prompt": "go", "max_tokens": 200, "seed": 3, "allowed_token_ids": tokens}

    def written(**fields: Any) -> str:
        (choice,) = client.post("/v1/completions", {**asked, **fields})["choices"]
        return str(choice["text"])

    assert "cd" in written()
    kept = written(bad_words=["cd", "xx"])
    assert "cd" not in kept
    assert "xx" not in kept
    assert {"dc", "cx"} <= {kept[i : i + 2] for i in range(len(kept))}
    assert "x" not in written(bad_words=["x"])
    sampling = {"max_tokens": 200, "allowed_token_ids": tokens, "bad_words": ["x", "cc"]}
    (choice,) = client.generate(token_ids=PROMPT, sampling_params=sampling)["choices"]
    assert tokens[2] not in choice["token_ids"]
    refused = client.refusal("/v1/completions", {**asked, "bad_words": [" "]})
    assert "a word must have at least one token, got ' '" in refused["message"]


def test_a_prompt_is_truncated_to_its_last_tokens_or_its_first(client: Client) -> None:
    ids, limit = list(range(30, 60)), client.get("/v1/models")["data"][0]["max_model_len"]

    def prompt(**fields: Any) -> Any:
        body = {"prompt": ids, "max_tokens": 1, "return_token_ids": True, **fields}
        return client.post("/v1/completions", body)["choices"][0]["prompt_token_ids"]

    assert prompt(truncate_prompt_tokens=4) == ids[-4:]
    assert prompt(truncate_prompt_tokens=4, truncation_side="right") == ids[:4]
    assert prompt(truncate_prompt_tokens=99) == ids
    long = [40] * (limit + 5)
    assert prompt(prompt=long, truncate_prompt_tokens=-1) == long[: limit - 1]
    chat = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    whole = client.post("/v1/chat/completions", chat)["prompt_token_ids"]
    short = client.post("/v1/chat/completions", {**chat, "truncate_prompt_tokens": 3})
    assert short["prompt_token_ids"] == whole[-3:]
    for wrong in (-2, limit + 1):
        body = {"prompt": ids, "truncate_prompt_tokens": wrong}
        refused = client.refusal("/v1/completions", body)
        assert refused["param"] == "truncate_prompt_tokens"
    none = client.refusal("/v1/completions", {"prompt": ids, "truncate_prompt_tokens": 0})
    assert "the prompt has no token" in none["message"]


def test_usage_comes_with_each_chunk_of_a_stream_if_asked_for(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPT, "max_tokens": 9, "ignore_eos": True, "stream": True}
    answer = client.http.post("/v1/completions", json={**body, "stream_options": options})
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    usages = [json.loads(line.removeprefix("data: "))["usage"] for line in lines]
    assert all(each["prompt_tokens"] == len(PROMPT) for each in usages)
    counts = [each["completion_tokens"] for each in usages]
    assert counts == sorted(counts)
    assert counts[-2:] == [9, 9]  # the last chunk of the choice, and the usage of all


# ---------------------------------------------------------------- the model's own defaults


def test_the_models_generation_config_says_how_to_sample_what_a_request_leaves_open(
    model: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    defaults = {"temperature": 0.5, "top_k": 1, "max_new_tokens": 5, "repetition_penalty": 1.1}
    (directory / "generation_config.json").write_text(json.dumps(defaults))
    with tidegate.vllm_server(model=directory) as server:
        client = Client(server)
        greedy = ids(client, temperature=0, repetition_penalty=1.1)
        assert ids(client) == ids(client, seed=3) == greedy  # top_k is 1
        assert ids(client, top_k=0, seed=3) != greedy
        chat = {"messages": MESSAGES, "ignore_eos": True}
        usage = client.post("/v1/chat/completions", chat)["usage"]
        assert usage["completion_tokens"] == 5
        usage = client.post("/v1/chat/completions", chat | {"max_tokens": 9})["usage"]
        assert usage["completion_tokens"] == 9
        # As vLLM: of tokens in and out only max_tokens is filled in.
        drawn = [
            tuple(client.generate(token_ids=PROMPT, sampling_params={"ignore_eos": True})["choices"]
                  [0]["token_ids"]) for _ in range(4)
        ]  # fmt: skip
        assert {len(each) for each in drawn} == {5}
        assert len(set(drawn)) > 1
        client.http.close()


def test_the_models_generation_config_can_be_left_alone(model: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    (directory / "generation_config.json").write_text(json.dumps({"top_k": 1}))
    with tidegate.vllm_server(model=directory, generation_config="vllm") as server:
        client = Client(server)
        assert len({tuple(ids(client)[0]) for _ in range(4)}) > 1
        client.http.close()


@pytest.mark.parametrize(
    "content", ["[", "[]", '{"temperature": "hot"}', '{"top_k": 1.5}', '{"top_p": true}']
)
def test_a_generation_config_that_says_no_numbers_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        read_sampling_defaults(tmp_path)


def test_null_and_other_fields_of_a_generation_config_say_nothing(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    content = {"temperature": None, "top_p": 0.9, "do_sample": True, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert read_sampling_defaults(tmp_path) == {"top_p": 0.9}
