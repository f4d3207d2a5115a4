"""Sampler of the SGLang double: a real model with a KV cache that is really kept.

With ``samples_ahead`` it works like the overlap scheduler, SGLang's default: one step is in
progress while the previous one is reported, under the label that the weights have at that time.
"""

import asyncio
import base64
import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import tidegate
from tests.engine.external.sglang_double_loras import Loras
from tidegate.engine.execution.block_cache import cache_argument


@dataclass(eq=False)
class Running:
    """One request in flight."""

    rid: str
    body: dict[str, Any]
    tokens: list[int]
    prompt_tokens: int
    draw: torch.Generator
    cached: int = 0
    cache: Any = None
    """KV of all tokens but the last."""
    reported: list[tuple[float, int, None]] = field(default_factory=list)
    top: list[list[tuple[float, int, None]]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    ahead: tuple[int, torch.Tensor] | None = None
    """Sampled but unreported: a token, and all log-probs beside it."""
    is_to_abort: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    def abort(self) -> None:
        self.finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        self.changed.set()


class Sampler:
    """A model, its KV, and how it reports log-probs."""

    def __init__(self, model: Any, *, is_raw: bool, samples_ahead: bool) -> None:
        self.model = model
        self.is_raw = is_raw
        self.samples_ahead = samples_ahead
        self.prefixes: list[tuple[str | None, list[int], Any]] = []
        self.loras: Loras | None = None

    def step(self, request: Running, label: str) -> None:
        """Sample one more token, reported under ``label``."""
        if not self.samples_ahead:
            self._send_replies(request, *self._sampled(request), label)
            return
        if request.ahead is not None:
            self._send_replies(request, *request.ahead, label)
        request.ahead = self._sampled(request) if request.finish is None else None

    def retract(self, request: Running) -> None:
        """Drop the request's KV and unreported token."""
        request.cache = request.ahead = None

    @torch.no_grad()
    def _sampled(self, request: Running) -> tuple[int, torch.Tensor]:
        if request.cache is None:
            self.find_prefix(request)
        have = request.cache.get_seq_length() if request.cache is not None else 0
        assert self.loras is not None
        with self.loras.added(request.body.get("lora_path")):
            if request.cache is None:
                request.cache = transformers.DynamicCache()
            tokens = torch.tensor([request.tokens[have:]])
            out = self.model(tokens, use_cache=True, **cache_argument(self.model, request.cache))
        sampling = request.body["sampling_params"]
        temperature = sampling.get("temperature", 1.0)
        logits = out.logits[0, -1] / (temperature or 1.0)
        probabilities = torch.softmax(logits, 0)
        if top_k := sampling.get("top_k"):
            keep = torch.topk(probabilities, top_k).indices
            probabilities = torch.zeros_like(probabilities).index_put((keep,), probabilities[keep])
        token = int(
            logits.argmax()
            if temperature == 0
            else torch.multinomial(probabilities, 1, generator=request.draw)
        )
        return token, torch.log_softmax(out.logits[0, -1] if self.is_raw else logits, 0)

    def _send_replies(
        self, request: Running, token: int, logprobs: torch.Tensor, label: str
    ) -> None:
        request.tokens.append(token)
        request.reported.append((float(logprobs[token]), token, None))
        if (k := request.body.get("top_logprobs_num", 0)) > 0:
            best = torch.topk(logprobs, k)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            request.top.append([(logprob, token_id, None) for logprob, token_id in pairs])
        made = len(request.output)
        if request.spans and request.spans[-1]["version"] == label:
            request.spans[-1]["end"] = made
        else:
            request.spans.append({"version": label, "start": made - 1, "end": made})
        sampling = request.body["sampling_params"]
        stops = sampling.get("stop_token_ids", [])
        if made >= sampling.get("max_new_tokens", 128):
            request.finish = {"type": "length", "length": made}
        elif not sampling.get("ignore_eos") and token in [*stops, self.model.config.eos_token_id]:
            request.finish = {"type": "stop", "matched": token}
        if request.finish is not None:
            self.prefixes.append(
                (request.body.get("extra_key"), request.tokens[:-1], request.cache)
            )

    def find_prefix(self, request: Running) -> None:
        """Take the longest context computed before, by any weights."""
        best, longest = None, 0
        for key, tokens, cache in self.prefixes:
            pairs = zip(tokens, request.tokens[:-1], strict=False)
            shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if key == request.body.get("extra_key") and shared > longest:
                best, longest = cache, shared
        if best is not None:
            request.cache = copy.deepcopy(best)
            if surplus := request.cache.get_seq_length() - longest:
                request.cache.crop(-surplus)  # so many are taken off its end
        request.cached = longest

    @torch.no_grad()
    def routed_experts(self, request: Running) -> str:
        """Return base64 of int32 [P, layers, k], of all positions but the last token's."""
        with tidegate.record_routed_experts(self.model) as recorder:
            self.model(torch.tensor([request.tokens[:-1]]))
        chosen = recorder.routed_experts()
        layers = self.model.model.layers
        every = torch.zeros(len(chosen), len(layers), chosen.shape[2], dtype=torch.int32)
        mixtures = [n for n, layer in enumerate(layers) if hasattr(layer.mlp, "experts")]
        every[:, mixtures] = chosen.to(torch.int32)  # dense layers have rows, too
        return base64.b64encode(every.numpy().tobytes()).decode()

    @torch.no_grad()
    def scored(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor(body["input_ids"])
        logprobs = torch.log_softmax(self.model(ids[None]).logits[0], -1)
        reported = logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist()
        pairs = zip(reported, ids[1:].tolist(), strict=True)
        entries = [(None, int(ids[0]), None), *((logprob, token, None) for logprob, token in pairs)]
        meta: dict[str, Any] = {"input_token_logprobs": entries, "weight_versions": []}
        if k := body.get("top_logprobs_num", 0):
            best = torch.topk(logprobs[:-1], k)
            rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            meta["input_top_logprobs"] = [
                None, *([(p, t, None) for p, t in zip(*row, strict=True)] for row in rows)
            ]  # fmt: skip
        return {"text": "", "output_ids": [], "meta_info": meta | {"finish_reason": None}}
