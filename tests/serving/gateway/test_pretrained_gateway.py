"""A tool-using agent by OpenAI's SDK over the gateway, on a pretrained model's real text."""

import asyncio
import contextlib
import gc
import json
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

import tidegate
from tests.orchestrator.episodes.chat_templates import CHATML
from tests.smollm2 import DIRECTORY, needs_smollm2
from tidegate.observability.audit.audit import audit_run
from tidegate.observability.records.recording import read_trajectories
from tidegate.orchestrator.episodes.episode import Episode

pytestmark = [pytest.mark.wire, needs_smollm2]

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


TEMPLATE = CHATML.replace(
    "{%- endif %}\n{%- for message",
    "{%- else %}{{- '<|im_start|>system\\n" + DEFAULT_SYSTEM + "<|im_end|>\\n' }}\n"
    "{%- endif %}\n{%- for message",
)
"""SmolLM2's template with what it lacks: tools, and calls of them."""


class Agent:
    """Asks for text, plain and streamed; or calls a tool. Keeps what it got, by name."""

    def __init__(self, endpoint: tidegate.Endpoint) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
        )
        self.answers: dict[str, Any] = {}

    async def _ask(self, messages: list[Any], **options: Any) -> Any:
        return await self._client.chat.completions.create(model="m", messages=messages, **options)

    async def chat(self) -> float:
        messages: list[Any] = [{"role": "user", "content": "Who are you?"}]
        said = await self._ask(messages, max_tokens=12, logprobs=True)
        self.answers["text"] = said.choices[0]
        messages = [
            {"role": "system", "content": DEFAULT_SYSTEM},  # the template writes it by itself
            *messages,
            said.choices[0].message.model_dump(),
            {"role": "user", "content": "Count to ten: 1, 2, 3"},
        ]
        stream = await self._ask(messages, max_tokens=24, stop=[" "], stream=True, temperature=0.3)
        text = self.answers["streamed"] = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            self.answers["finish_reason"] = chunk.choices[0].finish_reason
        self.answers["streamed"] = text
        return 0.0

    async def add(self) -> float:
        messages: list[Any] = [{"role": "user", "content": "What is 20 + 1?"}]
        call = await self._ask(messages, tools=[ADD], tool_choice="required", max_tokens=60)
        self.answers["call"] = call.choices[0]
        [wanted] = call.choices[0].message.tool_calls
        messages += [
            call.choices[0].message.model_dump(),  # its content is None
            {"role": "tool", "tool_call_id": wanted.id, "content": "21"},
        ]
        two_digits = {"structured_outputs": {"regex": r"\d{2}"}}
        last = await self._ask(messages, tools=[ADD], max_tokens=12, extra_body=two_digits)
        self.answers["number"] = last.choices[0].message.content
        return float(self.answers["number"] == "21")

    async def play(self, task: str) -> float:
        async with self._client:
            return await (self.chat() if task == "chat" else self.add())


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class Played:
    """A run that has ended."""

    agents: dict[str, list[Agent]]
    episodes: int
    episodes_left: int
    """Number of episodes not freed at the run's end, without the garbage collector."""
    directory: Path


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    directory = tmp_path_factory.mktemp("gateway")
    model = directory / "model"
    model.mkdir()
    for file in DIRECTORY.iterdir():
        if file.name != "chat_template.jinja":
            (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    agents: dict[str, list[Agent]] = {"chat": [], "add": []}
    episodes: list[weakref.ref[Episode]] = []
    gateway = tidegate.Gateway()

    async def play(endpoint: tidegate.Endpoint, task: str) -> float:
        agents[task].append(Agent(endpoint))
        return await agents[task][-1].play(task)

    through_gateway = gateway.episode(play)

    async def watched(episode: Episode, task: str) -> Any:
        episodes.append(weakref.ref(episode))
        return await through_gateway(episode, task)

    async def run() -> int:
        async with tidegate.serve(
            model=model,
            engines=1,
            group_size=2,
            groups_per_batch=2,
            num_kv_blocks=64,
            run_directory=directory / "run",
        ) as rollouts:
            with without_collector():
                async for _ in rollouts.batches(list(agents), episode=watched):
                    pass
                return sum(episode() is not None for episode in episodes)

    with contextlib.closing(gateway):
        left = asyncio.run(run())
    return Played(agents, len(episodes), left, directory / "run")


def test_log_probs_of_real_text_join_to_the_message(played: Played) -> None:
    for agent in played.agents["chat"]:
        text = agent.answers["text"]
        assert len(text.logprobs.content) == 12
        assert "".join(each.token for each in text.logprobs.content) == text.message.content


def test_a_streamed_answer_ends_before_its_stop_string(played: Played) -> None:
    for agent in played.agents["chat"]:
        assert agent.answers["finish_reason"] == "stop"
        assert " " not in agent.answers["streamed"]


def test_a_forced_call_has_the_tools_arguments_and_an_expression_matches_ascii_digits(
    played: Played,
) -> None:
    for agent in played.agents["add"]:
        call = agent.answers["call"]
        assert call.finish_reason == "tool_calls"
        assert call.message.content is None
        arguments = json.loads(call.message.tool_calls[0].function.arguments)
        assert {name: type(value) for name, value in arguments.items()} == {"a": int, "b": int}
        assert re.fullmatch("[0-9]{2}", agent.answers["number"])


def test_chat_and_tools_stay_in_one_row_whose_tags_are_audited(played: Played) -> None:
    rows = list(read_trajectories(played.directory))
    assert [(len(row.turns), row.fork_reason) for row in rows] == [(2, "")] * 4
    report = audit_run(played.directory)
    assert report.agrees, report.lines()


def test_episodes_of_chat_are_freed_when_they_end(played: Played) -> None:
    assert (played.episodes, played.episodes_left) == (4, 0)
