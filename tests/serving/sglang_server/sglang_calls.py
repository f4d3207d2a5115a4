"""Calls of SGLang's clients, and what their answers differ in.

The same calls go to the server under test, and to a real SGLang of the same model, whose answers
are recorded in ``sglang_0_5_23.json``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

RECORDED = Path(__file__).parent / "sglang_0_5_23.json"

PROMPT = [30, 41, 52, 63]

GREEDY = {"max_new_tokens": 3, "temperature": 0}

NORM = "model.norm.weight"


class Call(NamedTuple):
    name: str
    method: str
    path: str
    body: Any = None


def _generate(name: str, **fields: Any) -> Call:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, **fields}
    return Call(name, "POST", "/generate", body)


def _sampled(name: str, **params: Any) -> Call:
    return _generate(name, sampling_params=GREEDY | params)


CALLS = [
    Call("health", "GET", "/health"),
    Call("health_generate", "GET", "/health_generate"),
    Call("model_info", "GET", "/model_info"),
    Call("get_model_info", "GET", "/get_model_info"),
    Call("models", "GET", "/v1/models"),
    Call("loads", "GET", "/v1/loads?include=core"),
    _generate("tokens", rid="rid-1", return_logprob=True),
    _generate("without log-probs"),
    _generate(
        "all log-probs",
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    ),
    _generate("log-probs from 2", return_logprob=True, logprob_start_len=2, top_logprobs_num=1),
    _generate("top of the output alone", return_logprob=True, top_logprobs_num=2),
    _generate(
        "a score",
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        logprob_start_len=0,
    ),
    _generate("a batch", input_ids=[PROMPT, PROMPT[:2]], rid=["b1", "b2"]),
    _generate("a batch of one", input_ids=[PROMPT]),
    _generate(
        "a batch with fields of its own",
        input_ids=[PROMPT, PROMPT[:2]],
        sampling_params=[GREEDY, GREEDY | {"max_new_tokens": 1}],
        return_logprob=[True, False],
    ),
    # Recorded without ignore_eos, and no answer had ended early: here one in twenty would.
    _sampled("n of 2", n=2, temperature=1, ignore_eos=True),
    Call("a text", "POST", "/generate", {"text": "abc", "sampling_params": GREEDY}),
    Call(
        "two texts", "POST", "/generate", {"text": ["abc", "d"], "sampling_params": GREEDY}
    ),
    _generate("the prompt's tokens", return_prompt_token_ids=True),
    _generate("a stream", stream=True, return_logprob=True),
    _generate("a stream of a batch", input_ids=[PROMPT, PROMPT[:2]], stream=True),
    _sampled("a stop token", stop_token_ids=list(range(0, 90))),
    _sampled("ignored stops", stop_token_ids=list(range(0, 90)), ignore_eos=True),
    _sampled("a stop string", stop=list("abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJ")[:32]),
    _sampled(
        "a kept stop string",
        stop=list("abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJ")[:32],
        no_stop_trim=True,
    ),
    _sampled("no default parameter", top_p=0.9, top_k=20, min_p=0.1, frequency_penalty=0.1,
             presence_penalty=0.1, repetition_penalty=1.1, min_new_tokens=2, temperature=1,
             sampling_seed=3, skip_special_tokens=False, spaces_between_special_tokens=False,
             logit_bias={"5": 1.0}),
    _sampled("all tokens as top_k", top_k=1 << 30),
    _sampled("an unknown parameter", bogus=1),
    _generate("an unknown field", bogus=1),
    _generate("no token", input_ids=[]),
    Call("no prompt", "POST", "/generate", {"sampling_params": GREEDY}),
    _generate("a long prompt", input_ids=[5] * 600),
    _sampled("too many tokens", max_new_tokens=99999),
    Call("flush_cache", "POST", "/flush_cache"),
    Call("flush_cache by GET", "GET", "/flush_cache?timeout=1"),
    Call("a name", "POST", "/update_weight_version",
         {"new_version": "3", "abort_all_requests": False}),
    Call("abort of nothing", "POST", "/abort_request", {"rid": "nope"}),
    Call("abort of all", "POST", "/abort_request", {"abort_all": True}),
    Call("abort without a name", "POST", "/abort_request", {}),
    Call("a pause of no mode", "POST", "/pause_generation", {"mode": "bogus"}),
    Call("a pause", "POST", "/pause_generation", {}),
    Call("health while paused", "GET", "/health"),
    Call("continue", "POST", "/continue_generation", {}),
    Call("a pause in place", "POST", "/pause_generation", {"mode": "in_place"}),
    Call("continue again", "POST", "/continue_generation", {"torch_empty_cache": False}),
    Call("a retraction", "POST", "/pause_generation", {"mode": "retract"}),
    Call("flush_cache while retracted", "POST", "/flush_cache"),
    Call("weights under a pause", "POST", "/update_weights_from_disk",
         {"model_path": "MODEL", "weight_version": "4"}),
    Call("continue at last", "POST", "/continue_generation", {}),
    _generate("under new weights", return_logprob=True),
    Call("model_info of new weights", "GET", "/model_info"),
    Call("weights from nowhere", "POST", "/update_weights_from_disk", {"model_path": "/nope"}),
    Call("weights without a name", "POST", "/update_weights_from_disk", {"model_path": "MODEL"}),
    Call("begin", "POST", "/begin_weight_update", {}),
    Call("begin twice", "POST", "/begin_weight_update", {}),
    Call("end", "POST", "/end_weight_update", {}),
    Call("end twice", "POST", "/end_weight_update", {}),
    Call("no such group", "POST", "/destroy_weights_update_group", {"group_name": "g"}),
    Call("release of the cache", "POST", "/release_memory_occupation", {"tags": ["kv_cache"]}),
    Call("resume of the cache", "POST", "/resume_memory_occupation", {"tags": ["kv_cache"]}),
    Call("release", "POST", "/release_memory_occupation", {}),
    Call("resume", "POST", "/resume_memory_occupation", {}),
    _generate("after the release", return_logprob=True),
    Call("tokenize", "POST", "/tokenize", {"prompt": "abc"}),
]  # fmt: skip


def answers(url: str, model: Path, key: str) -> dict[str, Any]:
    """Make all calls; return the status and the body of each, by its name."""
    found = {}
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=300) as http:
        for call in CALLS:
            body = call.body
            if isinstance(body, dict) and body.get("model_path") == "MODEL":
                body = body | {"model_path": str(model)}
            try:
                answer = http.request(call.method, call.path, json=body)
            except httpx.TransportError as error:
                error.add_note(f"in the call {call.name!r}: {call.method} {call.path}")
                raise
            found[call.name] = {"status": answer.status_code, "body": _decoded(answer)}
    return found


def _decoded(answer: httpx.Response) -> Any:
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = answer.text.strip().split("\n\n")
        assert events.pop() == "data: [DONE]"
        return [msgspec.json.decode(event.removeprefix("data: ")) for event in events]
    try:
        return msgspec.json.decode(answer.content)
    except msgspec.DecodeError:
        return answer.text


VOLATILE = frozenset(
    (
        *("id", "created", "owned_by", "e2e_latency", "response_sent_to_client_ts"),
        *("model_path", "served_model_name", "tokenizer_path", "root", "message", "embedding"),
        *("max_total_num_tokens", "max_running_requests", "cached_tokens", "cached_tokens_details"),
    )
)
"""Fields whose values differ from server to server; their names are compared."""

SAMPLED = frozenset(("n of 2", "no default parameter"))
"""Calls whose tokens each server draws by its own random numbers."""

OTHER_FORM = frozenset(("a pause of no mode", "an unknown parameter"))
"""Calls that are refused in another form; their status is compared."""

TOLERANCE = 1e-3
"""Nats. On a CPU SGLang is off transformers' log-probs by up to 4e-4 here, and ours by 2e-6."""


def differences(name: str, theirs: Any, ours: Any) -> list[str]:
    """Return how an answer differs from SGLang's; fields that only ours has are no difference."""
    if theirs["status"] != ours["status"]:
        return [f"status is {ours['status']}, SGLang's {theirs['status']}"]
    if name in OTHER_FORM:
        return []
    bodies = theirs["body"], ours["body"]
    if "stream" in name:  # how many tokens an event has is a matter of time
        bodies = tuple({e.get("index", 0): e for e in body} for body in bodies)  # type: ignore[assignment]
    return list(_differences(*bodies, "", values=name not in SAMPLED))


def _differences(theirs: Any, ours: Any, path: str, *, values: bool) -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name, each in theirs.items():
            if name not in ours:
                yield f"{path}.{name} is missing"
            elif name not in VOLATILE:
                yield from _differences(each, ours[name], f"{path}.{name}", values=values)
    elif isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            yield f"{path} has {len(ours)} entries, SGLang's {len(theirs)}"
        for index, (one, other) in enumerate(zip(theirs, ours, strict=False)):
            yield from _differences(one, other, f"{path}[{index}]", values=values)
    elif isinstance(theirs, float) and isinstance(ours, float):
        if values and abs(theirs - ours) > TOLERANCE:
            yield f"{path} is {ours}, SGLang's {theirs}"
    elif type(theirs) is not type(ours) or (values and theirs != ours):
        yield f"{path} is {ours!r}, SGLang's {theirs!r}"
