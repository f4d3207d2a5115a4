"""An unchanged agent with OpenAI's client trains a model in a whole run."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

import tidegate
from tests.models import make_model_directory
from tests.orchestrator.episodes.chat_templates import add_chat_template, chat_tokenizer
from tests.orchestrator.episodes.talking import TOOLS
from tidegate.observability.audit.audit import audit_run
from tidegate.observability.records.trajectories import read_trajectories

pytestmark = pytest.mark.wire

SMALL: dict[str, Any] = {
    "engines": 1,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 16,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = make_model_directory(
        tmp_path / "model", vocab_size=chat_tokenizer().get_vocab_size(), dtype="float32"
    )
    return add_chat_template(path, "chatml")


class TestedAgent:
    """Three turns, the last one streamed; a sub-agent meanwhile; a reward of its own making."""

    __test__ = False

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.refused = ""

    async def __call__(self, endpoint: tidegate.Endpoint, task: Any) -> float:
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
        ) as client:
            messages: list[Any] = [{"role": "user", "content": f"task {task}?"}]
            for number in range(2):
                answer = await self.ask(client, messages)
                messages += [answer.choices[0].message, {"role": "user", "content": f"{number}?"}]
            sub = [{"role": "system", "content": "help"}, {"role": "user", "content": "hm?"}]
            await asyncio.gather(self.ask(client, sub), self.stream(client, messages))
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=[])
            self.refused = str(refused.value.message)
            return len(messages) + 0.25 * len(self.tokens)

    async def ask(self, client: openai.AsyncOpenAI, messages: list[Any]) -> Any:
        answer: Any = await client.chat.completions.create(
            model="m",
            messages=messages,
            tools=TOOLS,
            max_tokens=12,
            logprobs=True,
            top_logprobs=2,
            extra_body={"return_token_ids": True},
        )
        (choice,) = answer.choices
        assert len(choice.logprobs.content) == len(choice.token_ids)
        self.tokens += choice.token_ids
        return answer

    async def stream(self, client: openai.AsyncOpenAI, messages: list[Any]) -> None:
        stream = await client.chat.completions.create(
            model="m",
            messages=messages,
            tools=TOOLS,  # without them the template would show another beginning: a fork
            max_tokens=10,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                self.tokens += getattr(choice, "token_ids", None) or []


async def test_an_agent_with_openais_client_becomes_audited_rollouts(
    model: Path, tmp_path: Path
) -> None:
    gateway, agents = tidegate.Gateway(), []

    async def play(endpoint: tidegate.Endpoint, task: int) -> float:
        agents.append(TestedAgent())
        return await agents[-1](endpoint, task)

    run = tmp_path / "run"
    async with tidegate.serve(model=model, **SMALL, run_directory=run) as rollouts:
        async for batch in rollouts.batches(range(2), episode=gateway.episode(play)):
            reported = sum(len(agent.tokens) for agent in agents)
            assert batch.sampled_tokens == reported > 0
            assert len(set(batch.rollout_ids.tolist())) == 4
        ledger = rollouts.statistics().ledger
        assert (ledger.error, ledger.trained) == (0, ledger.generated)
    gateway.close()
    assert {agent.refused for agent in agents} == {
        "Error code: 400 - messages must be a list of at least one message"
    }
    rows = list(read_trajectories(run))
    whole = [r for r in rows if r.branch_of is None]
    assert [len(r.turns) for r in whole] == [3, 3, 3, 3]
    reasons = [r.fork_reason.partition(":")[0] for r in rows if r.branch_of is not None]
    assert reasons == ["new_conversation"] * 4
    report = audit_run(run)
    assert report.agrees, report.lines()


async def by_responses(endpoint: tidegate.Endpoint, task: int) -> int:
    """Two turns by OpenAI's Responses API, the second streamed; return the sampled tokens."""
    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
    ) as client:
        first = await client.responses.create(
            model="m", instructions="Help.", input=f"task {task}?", max_output_tokens=12
        )
        assert first.usage is not None
        async with client.responses.stream(
            model="m",
            instructions="Help.",
            input="And?",
            max_output_tokens=10,
            previous_response_id=first.id,
        ) as stream:
            async for event in stream:
                if event.type in {"response.completed", "response.incomplete"}:
                    usage = event.response.usage  # of the last event, also if its text is cut
        assert usage is not None
        return first.usage.output_tokens + usage.output_tokens


async def by_messages(endpoint: tidegate.Endpoint, task: int) -> int:
    """Two turns by Anthropic's Messages API; return the sampled tokens."""
    import httpx

    headers = {"x-api-key": endpoint.api_key, "anthropic-version": "2023-06-01"}
    messages: list[Any] = [{"role": "user", "content": f"task {task}?"}]
    tokens = 0
    async with httpx.AsyncClient(base_url=endpoint.base_url, headers=headers, timeout=60) as http:
        for _ in range(2):
            body = {"model": "m", "max_tokens": 12, "system": "Help.", "messages": messages}
            said = (await http.post("/messages", json=body)).json()
            tokens += said["usage"]["output_tokens"]
            messages += [
                {"role": "assistant", "content": said["content"]},
                {"role": "user", "content": [{"type": "text", "text": "And?"}]},
            ]
    return tokens


async def test_turns_of_each_api_are_trained_on_once_in_one_row_and_audited(
    model: Path, tmp_path: Path
) -> None:
    gateway, tokens = tidegate.Gateway(), []

    async def play(endpoint: tidegate.Endpoint, task: int) -> float:
        tokens.append(await (by_responses, by_messages)[task](endpoint, task))
        return float(task)

    run = tmp_path / "run"
    async with tidegate.serve(model=model, **SMALL, run_directory=run) as rollouts:
        async for batch in rollouts.batches(range(2), episode=gateway.episode(play)):
            assert batch.sampled_tokens == sum(tokens) > 0
            assert sorted(batch.rewards.tolist()) == [0.0, 0.0, 1.0, 1.0]
    gateway.close()
    assert [len(row.turns) for row in read_trajectories(run)] == [2, 2, 2, 2]
    report = audit_run(run)
    assert report.agrees, report.lines()
