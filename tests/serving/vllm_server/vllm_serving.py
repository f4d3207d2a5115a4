"""Client of the server in tests: httpx with timeouts, and threads where two talk at once; and what
transformers computes."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import torch

import tidegate

TIMEOUT_S = 60.0

PROMPT = [30, 41, 52, 63]

CONTEXT_TOKENS_MAX = 1024
"""More than an engine has credit for: so a request that fills it can be held up in its midst."""

LONG = {"token_ids": [3, 4, 5], "sampling_params": {"ignore_eos": True, "logprobs": 0}}
"""Fills the context."""


def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probs of all tokens after each position, by a model of transformers or its directory.
    [len(ids), vocabulary]"""
    if isinstance(model, Path):
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


def difference(
    said: Sequence[tuple[int, float]], model: Any, prompt: list[int], start: int = 0
) -> float:
    """Largest difference of sampled tokens' log-probs, from ``start`` on, to those of a model."""
    expected = logprobs_of(model, [*prompt, *(token for token, _ in said)])[len(prompt) - 1 :]
    rows = list(zip(expected, said, strict=False))[start:]
    found: float = max(abs(row[token].item() - logprob) for row, (token, logprob) in rows)
    return found


class Client:
    """One client of the server; use it in ``with``."""

    def __init__(self, server: tidegate.VLLMServer) -> None:
        headers = {"Authorization": f"Bearer {server.control_token}"}
        self.http = httpx.Client(base_url=server.url, timeout=TIMEOUT_S, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def get(self, path: str, **params: Any) -> Any:
        answer = self.http.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: Any = None, **params: Any) -> Any:
        answer = self.http.post(path, json=body, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refusal(self, path: str, body: Any = None, **params: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=body, params=params)
        assert answer.status_code >= 400, answer.text
        error: dict[str, Any] = answer.json()["error"]
        assert error["code"] == answer.status_code
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    def generate(self, **fields: Any) -> Any:
        return self.post("/inference/v1/generate", fields)

    def num_running(self) -> int:
        return int(self.get("/load")["server_load"])

    def wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def tokens_generated(self) -> float:
        """By all engines so far."""
        lines = self.http.get("/metrics").text.splitlines()
        (line,) = [one for one in lines if one.startswith("vllm:generation_tokens_total{")]
        return float(line.split()[-1])

    def begin(
        self, server: tidegate.VLLMServer, path: str, body: Any, **params: Any
    ) -> "BackgroundRequest":
        """A request that has some of its tokens by now, and not all."""
        before = self.tokens_generated()
        request = BackgroundRequest(server, path, body, **params)
        self.wait_until(lambda: self.tokens_generated() > before)
        return request


class CallInPickle:
    """An object that a pickle makes by calling a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._made_by = function, arguments

    def __reduce__(self) -> Any:
        return self._made_by


class BackgroundRequest:
    """A request whose answer is waited for elsewhere."""

    def __init__(
        self, server: tidegate.VLLMServer, path: str, body: Any = None, **params: Any
    ) -> None:
        self._answer: httpx.Response | None = None

        def ask() -> None:
            with Client(server) as client:
                self._answer = client.http.post(path, json=body, params=params)

        self._thread = threading.Thread(target=ask)
        self._thread.start()

    @property
    def is_answered(self) -> bool:
        return not self._thread.is_alive()

    @property
    def response(self) -> httpx.Response:
        """The answer with its status, whatever that is."""
        self._thread.join(TIMEOUT_S)
        assert self._answer is not None
        return self._answer

    @property
    def answer(self) -> Any:
        assert self.response.status_code == 200, self.response.text
        return self.response.json()
