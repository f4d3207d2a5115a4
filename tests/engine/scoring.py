"""Scoring requests for tests, and their comparison with transformers."""

from typing import Any

import numpy as np
import torch

from tests.engine.external.fake_engine import FakeEngine
from tidegate.transport.scoring import ScoreFailed, ScoreKind, ScoreResult, ScoreTokens


class ScoreClient:
    """Sends scoring requests to a driven engine, and keeps the answers."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.asked: dict[int, ScoreTokens] = {}

    def ask(
        self,
        tokens: list[int],
        want: ScoreKind = "logprobs",
        *,
        start: int | None = None,
        top_logprobs: int = 0,
        temperature: float = 1.0,
        priority: int = 0,
        adapter: str = "",
    ) -> int:
        request = len(self.asked)
        message = ScoreTokens(
            request_id=request,
            token_ids=np.array(tokens, "<i4").tobytes(),
            score_kind=want,
            start=(1 if want == "logprobs" else 0) if start is None else start,
            top_logprobs=top_logprobs,
            temperature=temperature,
            priority=priority,
            adapter=adapter,
        )
        self.engine.scheduler.score(message)
        self.asked[request] = message
        return request

    def answers(self, request: int) -> list[ScoreResult]:
        text = self.engine.answers
        return [a for a in text if isinstance(a, ScoreResult) and a.request_id == request]

    def refusals(self) -> list[ScoreFailed]:
        return [a for a in self.engine.answers if isinstance(a, ScoreFailed)]

    def check(self, request: int, peers: list[Any], *, tolerance: float = 1e-4) -> None:
        """Compare the answer with transformers on the version that it names."""
        parts, message = self.answers(request), self.asked[request]
        assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
        assert len({part.version for part in parts}) == 1
        check_answer(parts, message, peers[parts[0].version], tolerance=tolerance)


def check_answer(
    parts: list[ScoreResult], message: ScoreTokens, peer: Any, *, tolerance: float = 1e-4
) -> None:
    """Compare an answer with one forward pass of transformers."""
    tokens = np.frombuffer(message.token_ids, "<i4").astype(np.int64)
    if message.score_kind == "logprobs":
        _check_logprobs(parts, message, peer, tokens, tolerance)
        return
    values = np.concatenate([np.frombuffer(part.values, "<f4") for part in parts])
    with torch.no_grad():
        output = peer(torch.from_numpy(tokens)[None], output_hidden_states=True)
    hidden = output.hidden_states[-1][0].float().numpy()
    expected = {
        "embedding": lambda: hidden[-1],
        "mean_embedding": lambda: hidden[message.start :].mean(0),
        "hidden_states": lambda: hidden[message.start :],
        "rewards": lambda: output.logits[0].float().numpy(),
    }[message.score_kind]()
    np.testing.assert_allclose(values, expected.reshape(-1), atol=tolerance, rtol=1e-4)


def _check_logprobs(
    parts: list[ScoreResult], message: ScoreTokens, peer: Any, tokens: Any, tolerance: float
) -> None:
    with torch.no_grad():
        logits = peer(torch.from_numpy(tokens)[None]).logits[0].float()
    expected = torch.log_softmax(logits / message.temperature, -1)[message.start - 1 : -1]
    chosen = expected.gather(1, torch.from_numpy(tokens[message.start :])[:, None])[:, 0]
    reported = np.concatenate([np.frombuffer(part.logprobs, "<f4") for part in parts])
    np.testing.assert_allclose(reported, chosen, atol=tolerance)
    k = message.top_logprobs
    ids = np.concatenate([np.frombuffer(p.top_ids, "<i4") for p in parts]).reshape(len(reported), k)
    top = np.concatenate([np.frombuffer(part.top_logprobs, "<f4") for part in parts])
    np.testing.assert_allclose(
        top.reshape(len(reported), k), expected.topk(k, -1).values, atol=tolerance
    )
    at_ids = expected.gather(1, torch.from_numpy(ids.astype(np.int64)))
    np.testing.assert_allclose(at_ids, expected.topk(k, -1).values, atol=tolerance)
