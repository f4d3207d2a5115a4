"""Anthropic's Messages API at the gateway: its blocks, events, errors, and the rows they make."""

import json
from typing import Any

import httpx
import pytest
from httpx import AsyncClient

from tests.orchestrator.episodes.talking import CALL, Talk
from tests.orchestrator.episodes.test_tool_calls import ANSWERED, SAID
from tests.serving.gateway.gateway_clients import CHAT, END
from tidegate.serving.gateway.sessions import Session

pytestmark = pytest.mark.wire

MESSAGES = "/v1/messages"
TOOLS = [{"name": "add", "input_schema": {"type": "object"}}]
ASK: dict[str, Any] = {"model": "m", "max_tokens": 300}


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return a stream's events, each of which has its type as its name, too."""
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def test_blocks_sent_back_continue_the_row_of_the_same_conversation_in_openais_form(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += [f"I add. {CALL}{END}", f"It is 3.{END}", f"Yes.{END}"]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1+2?"}]}]
    body = {**ASK, "system": "Add.", "messages": messages, "tools": TOOLS}
    first = (await client.post(MESSAGES, json=body)).json()
    text, use = first["content"]
    assert text == {"type": "text", "text": "I add."}
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "add", {"a": 1, "b": [2]})
    assert (first["stop_reason"], first["role"]) == ("tool_use", "assistant")
    length = len(talk.rollout.turns[0].token_ids)
    assert first["usage"]["output_tokens"] == length
    assert first["weight_versions"] == [{"version": "0", "start": 0, "end": length}]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "3"}
    ask = {"type": "text", "text": "So?"}
    messages += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, ask]},
    ]
    second = (await client.post(MESSAGES, json=body)).json()
    assert second["content"] == [{"type": "text", "text": "It is 3."}]
    assert second["stop_reason"] == "end_turn"
    function = {"name": "add", "arguments": json.dumps(use["input"])}
    call = {"id": use["id"], "type": "function", "function": function}
    chat = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": use["id"], "content": "3"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": "Sure?"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    third = await client.post(CHAT, json={"messages": chat, "tools": tools})
    assert third.json()["choices"][0]["message"]["content"] == "Yes."
    assert [len(row.turns) for row in talk.rollout.rows] == [3]
    talk.check()


async def test_a_stream_has_the_blocks_of_the_whole_message(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += [f"I add. {CALL}{END}"]
    body = {**ASK, "messages": [{"role": "user", "content": "q"}], "tools": TOOLS}
    events = events_of(await client.post(MESSAGES, json={**body, "stream": True}))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[2]["delta"] == {"type": "text_delta", "text": "I add."}
    assert events[4]["content_block"]["input"] == {}
    assert json.loads(events[5]["delta"]["partial_json"]) == {"a": 1, "b": [2]}
    assert [event["index"] for event in events[1:7]] == [0, 0, 0, 1, 1, 1]
    assert events[7]["delta"]["stop_reason"] == "tool_use"


async def test_a_number_that_json_lacks_is_null_whole_and_streamed(
    talk: Talk, client: AsyncClient
) -> None:
    said = '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>'
    talk.engine.words += [f"{said}{END}"] * 2
    body = {**ASK, "messages": [{"role": "user", "content": "q"}], "tools": TOOLS}
    [use] = (await client.post(MESSAGES, json=body)).json()["content"]
    events = events_of(await client.post(MESSAGES, json={**body, "stream": True}))
    [delta] = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert delta["partial_json"] == '{"a":null}'
    assert use["input"] == {"a": None}


async def test_an_assistants_message_at_the_end_is_continued(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += [f" 3.{END}"]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is"}]
    await client.post(MESSAGES, json={**ASK, "messages": turns})
    assert talk.text(talk.rollout).endswith(f"It is 3.{END}")


@pytest.mark.parametrize(
    ("words", "stop_sequences", "reason", "sequence"),
    [
        ("It is 3,", ["or", ","], "stop_sequence", ","),
        ("It is", None, "max_tokens", None),
        (f"It is{END}", ["?"], "end_turn", None),
    ],
)
async def test_the_reason_of_an_end_is_reported(
    talk: Talk,
    client: AsyncClient,
    words: str,
    stop_sequences: list[str] | None,
    reason: str,
    sequence: str | None,
) -> None:
    talk.engine.words += [words]
    body = {**ASK, "messages": [{"role": "user", "content": "q"}]}
    said = (await client.post(MESSAGES, json={**body, "stop_sequences": stop_sequences})).json()
    assert (said["stop_reason"], said["stop_sequence"]) == (reason, sequence)


async def test_tool_choices_thinking_and_structured_output_reach_the_engine(
    talk: Talk, client: AsyncClient
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    talk.engine.words += ['{"n": 3}' + END, f"3{END}"]
    ask = {**ASK, "messages": [{"role": "user", "content": "q"}], "top_k": 5}
    form = {"type": "json_schema", "schema": schema}
    answer = await client.post(MESSAGES, json={**ask, "output_config": {"format": form}})
    assert answer.status_code == 200, answer.text
    (processor,) = talk.rollout.turns[0].sampling.logits_processors
    assert json.loads(processor)["arguments"]["schema"] == schema
    assert talk.rollout.turns[0].sampling.top_k == 5
    body = {**ask, "tools": TOOLS, "tool_choice": {"type": "none"}}
    assert (await client.post(MESSAGES, json=body)).status_code == 200
    assert "add" not in talk.text(list(talk.rollout.rows)[-1])


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "must not be empty"),
        ({"messages": [{"role": "user", "content": []}]}, "must have content"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not served"),
        ({"tools": [{"type": "web_saerch", "name": "w"}]}, "'web_saerch'"),
        ({"tool_choice": {"type": "all"}}, "auto, any, tool or none, got 'all'"),
        ({"tool_choice": {"type": ["auto"]}}, "Expected `str`, got `array`"),
        ({"output_config": {"format": 3}}, "Expected `object | null`, got `int`"),
        ({"thinking": {"type": "deep"}}, "got 'deep'"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "'video'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": PDF}]}]},
            "type 'base64': text and content are served",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": 3}]}]},
            "type None: text and content are served",
        ),
        ({"messages": [{"role": "user", "content": [3]}]}, "without a type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "without text"),
        ({"messages": [{"role": "robot", "content": "q"}]}, "needs a role and content"),
        ({"system": [{"type": "text"}]}, "without text"),
        ({"system": [3]}, "Expected `object`, got `int`"),
    ],
)
async def test_what_can_not_be_honoured_is_refused_in_anthropics_form(
    client: AsyncClient, fields: dict[str, Any], why: str
) -> None:
    body = {**ASK, "messages": [{"role": "user", "content": "q"}], **fields}
    answer = await client.post(MESSAGES, json=body)
    assert answer.status_code == 400
    reported = answer.json()
    assert (reported["type"], reported["error"]["type"]) == ("error", "invalid_request_error")
    assert why in reported["error"]["message"]


async def test_documents_and_search_results_are_shown_as_their_text(
    talk: Talk, client: AsyncClient
) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "A tide."}
    found: dict[str, Any] = {
        "type": "search_result",
        "source": "u/1",
        "title": "Gates",
        "content": [],
    }
    found["content"] = [{"type": "text", "text": "A gate."}]
    blocks = [
        {"type": "document", "title": "Notes", "source": plain},
        {"type": "document", "source": {"type": "content", "content": [found]}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": blocks}
    talk.engine.words += [f"3{END}", f"4{END}"]
    for content in (blocks, [result]):
        body = {**ASK, "messages": [{"role": "user", "content": content}]}
        assert (await client.post(MESSAGES, json=body)).status_code == 200
    for row in talk.rollout.rows:
        assert "Notes\nA tide.Gates\nu/1\nA gate." in talk.text(row)


async def test_what_changes_nothing_here_leaves_the_prompt_as_it_is(
    talk: Talk, client: AsyncClient
) -> None:
    """Hosted tools, edits of the context, and the block with Claude Code's version."""
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f;"}
    more = {
        "context_management": edits,
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "system": [header, {"type": "text", "text": "Add."}],
    }
    talk.engine.words += [f"1{END}", f"2{END}", f"3{END}"]
    body = {**ASK, "messages": [{"role": "user", "content": "q"}], "system": "Add."}
    assert "context_management" not in (await client.post(MESSAGES, json=body)).json()
    said = (await client.post(MESSAGES, json={**body, **more})).json()
    assert said["context_management"] == {"applied_edits": []}
    streamed = await client.post(MESSAGES, json={**body, **more, "stream": True})
    delta = events_of(streamed)[-2]
    assert delta["context_management"] == {"applied_edits": []}
    plain, given, again = (context for _, context, _ in talk.engine.received)
    assert plain == given == again


async def test_the_key_is_read_from_x_api_key(
    talk: Talk, session: Session, client: AsyncClient
) -> None:
    talk.engine.words += [f"3{END}"]
    del client.headers["Authorization"]
    body = {**ASK, "messages": [{"role": "user", "content": "q"}]}
    refused = await client.post(MESSAGES, json=body, headers={"x-api-key": "tg-other"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (
        401,
        "authentication_error",
    )
    headers = {"x-api-key": session.api_key}
    assert (await client.post(MESSAGES, json=body, headers=headers)).status_code == 200


async def test_counted_tokens_are_those_of_the_prompt(talk: Talk, client: AsyncClient) -> None:
    talk.engine.words += [f"3{END}"]
    body = {"messages": [{"role": "user", "content": "q"}], "tools": TOOLS, "system": "s"}
    counted = (await client.post(f"{MESSAGES}/count_tokens", json=body)).json()
    said = (await client.post(MESSAGES, json={**ASK, **body})).json()
    assert counted["input_tokens"] == said["usage"]["input_tokens"]


SEARCH = [{"name": "search", "input_schema": {"type": "object"}}]


@pytest.mark.parametrize("template", ["minimax"])
@pytest.mark.parametrize("asks_for_thinking", [True, False])
async def test_reasoning_is_a_block_where_it_is_asked_for_and_continues_the_row_in_any_case(
    talk: Talk, client: AsyncClient, asks_for_thinking: bool
) -> None:
    talk.engine.words += [SAID["minimax"], ANSWERED["minimax"], ANSWERED["minimax"]]
    body = {**ASK, "messages": [{"role": "user", "content": "q"}], "tools": SEARCH}
    if asks_for_thinking:
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    first = (await client.post(MESSAGES, json=body)).json()
    kinds = [block["type"] for block in first["content"]]
    assert kinds == ["thinking"] * asks_for_thinking + ["text", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "3"}
    body["messages"] += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    events = events_of(await client.post(MESSAGES, json={**body, "stream": True}))
    starts = [e for e in events if e["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == list(range(1 + asks_for_thinking))
    assert [event["content_block"]["type"] for event in starts] == (
        ["thinking"] * asks_for_thinking + ["text"]
    )
    thought = [e["delta"]["thinking"] for e in events if "thinking" in e.get("delta", {})]
    assert thought == ["So."] * asks_for_thinking
    assert [len(row.turns) for row in talk.rollout.rows] == [2]
    talk.check()
