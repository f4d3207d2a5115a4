"""vLLM's paths that generate, abort, tokenise and detokenise.

How a request becomes choices is decided in :mod:`completing`.
"""

from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tidegate.serving.http_server import off_loop, unless_gone
from tidegate.serving.vllm_server import protocol
from tidegate.serving.vllm_server.answering import answer
from tidegate.serving.vllm_server.failures import ServerError
from tidegate.serving.vllm_server.model_info import limits_of
from tidegate.serving.vllm_server.paths import Answer, Paths, is_large, read, request_name

if TYPE_CHECKING:
    from tidegate.serving.vllm_server.desks import Desks

TOKEN_ID_MAX = 2**32 - 1
"""What a tokenizer can be asked for at all."""

PATHS = Paths()


@PATHS.on("POST", "/v1/completions")
async def complete(desks: "Desks", http: HttpRequest) -> Answer:
    """Text or tokens, gone on with."""
    desks.control.refuse_if_paused()
    request = await read(http, protocol.CompletionRequest)
    begins = desks.completer.complete(request, request_name(http))
    begun, bodies = await unless_gone(http, begins)
    return await answer(http, desks, request, begun, bodies)


@PATHS.on("POST", "/v1/chat/completions")
async def chat(desks: "Desks", http: HttpRequest) -> Answer:
    """A conversation, gone on with."""
    desks.control.refuse_if_paused()
    request = await read(http, protocol.ChatRequest)
    begins = desks.completer.chat(request, request_name(http), is_large=is_large(http))
    begun, bodies = await unless_gone(http, begins)
    return await answer(http, desks, request, begun, bodies)


@PATHS.on("POST", "/v1/chat/completions/batch")
async def chat_batch(desks: "Desks", http: HttpRequest) -> Answer:
    """Several conversations, each gone on with."""
    desks.control.refuse_if_paused()
    request = await read(http, protocol.BatchChatRequest)
    begins = desks.completer.chat_batch(request, request_name(http), is_large=is_large(http))
    begun, bodies = await unless_gone(http, begins)
    return await answer(http, desks, request, begun, bodies)


@PATHS.on("POST", "/inference/v1/generate")
async def generate(desks: "Desks", http: HttpRequest) -> Answer:
    """Tokens in, tokens out."""
    desks.control.refuse_if_paused()
    request = await read(http, protocol.GenerateRequest)
    begins = desks.completer.generate(request, request_name(http))
    begun, bodies = await unless_gone(http, begins)
    return await answer(http, desks, request, begun, bodies)


@PATHS.on("POST", "/abort_requests", is_control=True)
async def abort(desks: "Desks", http: HttpRequest) -> Answer:
    """End requests with the tokens that they have."""
    request: protocol.AbortRequest = await read(http, protocol.AbortRequest)
    ids, open_now = request.request_ids, len(desks.requests)
    desks.requests.abort(ids or None)
    return {"status": "aborted", "aborted": len(ids) if ids else open_now}


@PATHS.on("POST", "/inference/v1/abort_requests", is_control=True)
async def abort_named(desks: "Desks", http: HttpRequest) -> Answer:
    """The same, with the ids that it was asked with."""
    request: protocol.AbortRequest = await read(http, protocol.AbortRequest)
    if request.request_ids is None:
        raise ServerError(400, "request_ids is missing", param="body.request_ids")
    desks.requests.abort(request.request_ids)
    return None


@PATHS.on("POST", "/tokenize")
async def tokenize(desks: "Desks", http: HttpRequest) -> Answer:
    """A text or a conversation as tokens."""
    request: protocol.TokenizeRequest = await read(http, protocol.TokenizeRequest)
    desks.info.adapter_of(request.model)
    completer, words = desks.completer, desks.completer.words
    if request.messages is not None:
        ids = await unless_gone(
            http,
            completer.chat_tokens(
                request.messages,
                request.tools,
                begins=request.add_generation_prompt is not False,
                options=request.chat_template_kwargs,
                is_large=is_large(http),
            ),
        )
    else:
        adds = request.add_special_tokens is not False
        encoding = words.encode(request.prompt or "", adds_special_tokens=adds)
        ids = await unless_gone(http, encoding)
    body = {
        "count": len(ids),
        "max_model_len": limits_of(desks.scheduler).context_tokens_max,
        "tokens": ids,
        "token_strs": None,
    }

    def told() -> bytes:
        strings = [words.token(i) for i in ids] if request.return_token_strs else None
        return msgspec.json.encode(body | {"token_strs": strings})

    content = await off_loop(told) if is_large(http) else told()
    return Response(content, media_type="application/json")


@PATHS.on("POST", "/detokenize")
async def detokenize(desks: "Desks", http: HttpRequest) -> Answer:
    """Tokens as text."""
    request: protocol.DetokenizeRequest = await read(http, protocol.DetokenizeRequest)
    words = desks.completer.words
    if strange := next((i for i in request.tokens if not 0 <= i <= TOKEN_ID_MAX), None):
        raise ServerError(400, f"Token id {strange} is out of vocabulary", param="tokens")

    def text() -> str:
        return words.decode(request.tokens, skips_special_tokens=False)

    return {"prompt": await off_loop(text) if is_large(http) else text()}
