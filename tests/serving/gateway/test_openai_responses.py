"""OpenAI's Responses API at the gateway: its items, events, errors, and the rows they make."""

import json
from typing import Any

import pytest
from httpx import AsyncClient

from tests.orchestrator.episodes.talking import CALL, Talk
from tests.orchestrator.episodes.test_tool_calls import ANSWERED, SAID
from tests.serving.gateway.gateway_clients import END
from tests.serving.gateway.test_anthropic_messages import events_of
from tidegate.serving.openai import response_store

pytestmark = pytest.mark.wire

RESPONSES = "/v1/responses"
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]


def output_of(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}


@pytest.mark.parametrize("by_id", [False, True])
async def test_items_and_answers_by_their_id_continue_one_row(
    talk: Talk, client: AsyncClient, by_id: bool
) -> None:
    talk.engine.words += [f"I add. {CALL}{END}", f"It is 3.{END}"]
    given = [{"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]}]
    body = {"input": given, "tools": TOOLS, "instructions": "Add."}
    first = (await client.post(RESPONSES, json=body)).json()
    message, call = first["output"]
    assert message["content"][0]["text"] == "I add."
    assert json.loads(call["arguments"]) == {"a": 1, "b": [2]}
    assert (first["status"], first["object"]) == ("completed", "response")
    length = len(talk.rollout.turns[0].token_ids)
    assert first["usage"]["output_tokens"] == length
    assert first["weight_versions"] == [{"version": "0", "start": 0, "end": length}]
    second_body = {"input": [*given, *first["output"], output_of(call)]}
    if by_id:
        second_body = {"input": [output_of(call)], "previous_response_id": first["id"]}
    second = (await client.post(RESPONSES, json={**body, **second_body})).json()
    assert second["output"][0]["content"][0]["text"] == "It is 3."
    assert second["previous_response_id"] == (first["id"] if by_id else None)
    assert [len(row.turns) for row in talk.rollout.rows] == [2]
    talk.check()


async def test_a_stream_has_the_events_of_each_item_numbered_from_0(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += [f"I add. {CALL}{END}"]
    body = {"input": "q", "tools": TOOLS, "stream": True}
    events = events_of(await client.post(RESPONSES, json=body))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    whole = events[-1]["response"]
    assert [events[7]["item"], events[11]["item"]] == whole["output"]


async def test_a_stream_without_text_has_the_events_of_an_empty_message(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += [END]
    events = events_of(await client.post(RESPONSES, json={"input": "q", "stream": True}))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_log_probs_and_a_cut_answer_are_reported(talk: Talk, client: AsyncClient) -> None:
    talk.engine.words += ["It is"]
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    body = {"input": "q", "include": include, "max_output_tokens": 2}
    said = (await client.post(RESPONSES, json=body)).json()
    assert said["status"] == "incomplete"
    assert said["incomplete_details"] == {"reason": "max_output_tokens"}
    logprobs = said["output"][0]["content"][0]["logprobs"]
    assert [entry["logprob"] for entry in logprobs] == [-1.0] * len(logprobs)
    assert "".join(entry["token"] for entry in logprobs) == "It is"


async def test_an_answer_of_long_ago_is_forgotten_and_named_in_the_error(
    talk: Talk, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "RESPONSES_MAX", 1)
    talk.engine.words += [f"1{END}", f"2{END}"]
    first = (await client.post(RESPONSES, json={"input": "q"})).json()
    assert (await client.post(RESPONSES, json={"input": "r"})).status_code == 200
    body = {"input": "s", "previous_response_id": first["id"]}
    answer = await client.post(RESPONSES, json=body)
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "previous_response_id"
    assert first["id"] in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "robot", "content": "q"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"tools": [{"type": "fuction", "name": "f"}]}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"background": True}, "background"),
        ({"input": [{"type": "compaction_trigger"}]}, "input"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"text": {"format": 3}}, "text"),
        ({"reasoning": {"effort": 3}}, "reasoning"),
        ({"input": [{"type": ["message"]}]}, "input"),
        ({"input": [{"type": "reasoning", "content": 3}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "namespace": 3}]}, "input"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [3]}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": 3, "tools": []}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "c", "format": []}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "c", "description": 3}]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "f", "namespace": 3}}, "tool_choice"),
    ],
)
async def test_what_can_not_be_honoured_is_refused_by_name(
    client: AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post(RESPONSES, json={"input": "q", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_what_changes_nothing_here_leaves_the_prompt_as_it_is(
    talk: Talk, client: AsyncClient
) -> None:
    question = {"role": "user", "content": "q"}
    more = {
        "input": [{"type": "compaction", "encrypted_content": "x"}, question],
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        "tools": [{"type": "web_search_preview_2025_03_11"}, {"type": "mcp", "server_label": "x"}],
    }
    talk.engine.words += [f"1{END}", f"2{END}"]
    for body in ({"input": "q"}, more):
        answer = await client.post(RESPONSES, json=body)
        assert answer.status_code == 200, answer.text
    plain, given = (context for _, context, _ in talk.engine.received)
    assert given == plain


def calls(name: str, arguments: dict[str, Any]) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>{END}"


OFFERED: list[Any] = [
    {"type": "custom", "name": "apply_patch", "format": {"syntax": "lark", "definition": "g: x"}},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Sub-agents.",
        "tools": [
            {"type": "function", "name": "spawn", "parameters": {"type": "object"}},
            {"type": "custom", "name": "tell"},
        ],
    },
    {"type": "web_search"},
]


@pytest.mark.parametrize(
    ("said", "item"),
    [
        (
            calls("apply_patch", {"input": "*** Begin"}),
            {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin"},
        ),
        (
            calls("agents__spawn", {"n": 2}),
            {
                "type": "function_call",
                "name": "spawn",
                "namespace": "agents",
                "arguments": '{"n": 2}',
            },
        ),
        (
            calls("agents__tell", {"input": "go"}),
            {"type": "custom_tool_call", "name": "tell", "namespace": "agents", "input": "go"},
        ),
    ],
)
async def test_custom_tools_and_those_of_namespaces_are_called_by_the_clients_names(
    talk: Talk, client: AsyncClient, said: str, item: dict[str, Any]
) -> None:
    talk.engine.words += [said, f"Done.{END}"]
    given: list[Any] = [{"role": "user", "content": "q"}]
    body: dict[str, Any] = {"input": given, "tools": OFFERED, "stream": True}
    events = events_of(await client.post(RESPONSES, json=body))
    [call] = events[-1]["response"]["output"]
    assert {name: call.get(name) for name in item} == item
    is_custom = item["type"] == "custom_tool_call"
    kind = "custom_tool_call_input" if is_custom else "function_call_arguments"
    text = item["input" if is_custom else "arguments"]
    sent = {e["type"]: e for e in events}
    assert sent[f"response.{kind}.delta"]["delta"] == text
    assert sent["response.output_item.done"]["item"] == call
    output = {"type": item["type"] + "_output", "call_id": call["call_id"], "output": "ok"}
    given += [call, output]
    assert (await client.post(RESPONSES, json=body)).status_code == 200
    assert [len(row.turns) for row in talk.rollout.rows] == [2]
    prompt = talk.text(talk.rollout)
    assert "agents__spawn" in prompt
    assert "Sub-agents." in prompt
    assert "g: x" in prompt
    assert "web_search" not in prompt
    talk.check()


async def test_allowed_tools_are_those_that_the_model_is_told_of_and_may_be_forced(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += [calls("agents__spawn", {})] * 2
    spawn = {"type": "function", "name": "spawn", "namespace": "agents"}
    names = [spawn, {"type": "web_search"}]
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "mode": mode, "tools": names}
        body = {"input": "q", "tools": OFFERED, "tool_choice": choice}
        assert (await client.post(RESPONSES, json=body)).status_code == 200
    free, forced = (row.turns[0].sampling for row in talk.rollout.rows)
    assert not free.logits_processors
    assert "agents__spawn" in str(forced.logits_processors)
    assert "apply_patch" not in talk.text(talk.rollout)


@pytest.mark.parametrize("template", ["minimax"])
@pytest.mark.parametrize("sends_reasoning_back", [True, False])
async def test_reasoning_is_an_item_of_its_own_which_clients_may_leave_out(
    talk: Talk, client: AsyncClient, sends_reasoning_back: bool
) -> None:
    talk.engine.words += [SAID["minimax"], ANSWERED["minimax"]]
    tools = [{"type": "function", "name": "search", "parameters": {"type": "object"}}]
    body: dict[str, Any] = {"input": [{"role": "user", "content": "q"}], "tools": tools}
    first = (await client.post(RESPONSES, json=body)).json()
    items = first["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    body["input"] += [*(items if sends_reasoning_back else items[1:]), output_of(items[-1])]
    events = events_of(await client.post(RESPONSES, json={**body, "stream": True}))
    added = [e for e in events if e["type"] == "response.output_item.added"]
    assert [(e["output_index"], e["item"]["type"]) for e in added] == [
        (0, "reasoning"),
        (1, "message"),
    ]
    done = [e for e in events if e["type"] == "response.output_item.done"]
    assert [e["item"] for e in done] == events[-1]["response"]["output"]
    [thought] = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert thought == "So."
    assert [len(row.turns) for row in talk.rollout.rows] == [2]
    talk.check()
