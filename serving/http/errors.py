"""Error answers of the HTTP APIs: one exception, and its form in OpenAI's, Anthropic's and vLLM's
APIs.

Handlers raise :class:`ApiError`. An :class:`ErrorForm` turns it, and every other exception that a
handler raises, into an HTTP status and a JSON body.
"""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar

from typing_extensions import override

from tidegate.errors import (
    ChatRefused,
    ConfigError,
    ContextFull,
    RunClosed,
    ScoreRefused,
    TidegateError,
    TurnRefused,
    TurnTimeout,
    WeightsRefused,
)

log = logging.getLogger("tidegate")


class ApiError(Exception):
    """A request that is answered with an HTTP error status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        """``param`` names the invalid field; ``code`` replaces the status's own code."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class MalformedBody(Exception):
    """A request body that is not JSON, or does not fit the model of its request."""

    def __init__(self, message: str, *, is_json: bool) -> None:
        super().__init__(message)
        self.is_json = is_json


class UpdateError(ApiError):
    """A failed phase of a weight update, worded as vLLM words an exception of its workers."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(
            500,
            f"Call to collective_rpc method failed: Worker failed with error '{why}', please check "
            f"the stack trace above for the root cause",
        )


class ErrorForm:
    """Error form of one API: the status for each exception, and the JSON body."""

    def answer(self, error: Exception) -> tuple[dict[str, Any], int]:
        """Return body and status of the answer to an exception of a handler.

        A handler must not hold what :meth:`answer_to` returns in a local variable: it may be the
        exception itself, whose traceback refers to the handler's frame, and this cycle would keep
        the request's body until the garbage collector runs.
        """
        failure = self.answer_to(error)
        return self.body(failure), failure.status

    def answer_to(self, error: Exception) -> ApiError:
        """Return the answer to an exception of a handler; log one that no handler should raise."""
        answer = error if isinstance(error, ApiError) else self._expected(error)
        if answer is None:
            log.error("a request failed", exc_info=error)
            answer = ApiError(500, f"{type(error).__name__}: {error}")
        return answer

    def body(self, error: ApiError) -> dict[str, Any]:
        """Return the JSON body of an error answer."""
        raise NotImplementedError

    def unknown_path(self, status: int, method: str, path: str) -> dict[str, Any]:
        """Return the JSON body of the answer to a path (404) or method (405) that is not served."""
        raise NotImplementedError

    def _expected(self, error: Exception) -> ApiError | None:
        """Return the answer to an exception that requests can cause; None for all others."""
        raise NotImplementedError


class OpenAIErrors(ErrorForm):
    """Error bodies of OpenAI's API: ``type`` depends on the status, ``code`` is a word or null."""

    KINDS: ClassVar[Mapping[int, str]] = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        405: "not_found_error",
        429: "rate_limit_error",
        504: "timeout_error",
    }
    CODES: ClassVar[Mapping[int, str]] = {
        401: "invalid_api_key",
        410: "session_over",
        413: "body_too_large",
        429: "too_many_requests",
    }

    def body(self, error: ApiError) -> dict[str, Any]:
        """Return the JSON body of an error answer."""
        status = error.status
        default = "server_error" if status >= 500 else "invalid_request_error"
        about = {
            "message": str(error),
            "type": self.KINDS.get(status, default),
            "param": error.param,
            "code": error.code or self.CODES.get(status),
        }
        return {"error": about}

    def unknown_path(self, status: int, method: str, path: str) -> dict[str, Any]:
        """Return the JSON body of the answer to a path (404) or method (405) that is not served."""
        return self.body(ApiError(status, f"{method} {path} is not served"))

    def _expected(self, error: Exception) -> ApiError | None:
        match error:
            case MalformedBody():
                return ApiError(400, f"the body can't be read: {error}")
            case RunClosed():
                return ApiError(410, str(error))
            case TurnTimeout():
                return ApiError(504, str(error))
            case ContextFull():
                return self._context_full(error)
            case TidegateError() | ValueError() | OverflowError() | TypeError():
                return ApiError(400, str(error))
        return None

    def _context_full(self, error: ContextFull) -> ApiError:
        """Return the answer that tells agents to compact their messages."""
        message = (
            f"This model's maximum context length is {error.tokens_max} tokens. However, your "
            f"messages resulted in {error.tokens} tokens. Please reduce the length of the messages."
        )
        return ApiError(400, message, param="messages", code="context_length_exceeded")


class AnthropicErrors(OpenAIErrors):
    """Error bodies of Anthropic's API: ``type`` depends on the status."""

    KINDS: ClassVar[Mapping[int, str]] = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        504: "timeout_error",
    }

    def body(self, error: ApiError) -> dict[str, Any]:
        """Return the JSON body of an error answer."""
        default = "api_error" if error.status >= 500 else "invalid_request_error"
        kind = self.KINDS.get(error.status, default)
        return {"type": "error", "error": {"type": kind, "message": str(error)}}

    @override
    def _context_full(self, error: ContextFull) -> ApiError:
        why = f"prompt is too long: {error.tokens} tokens > {error.tokens_max} maximum"
        return ApiError(400, why)


class VllmErrors(ErrorForm):
    """Error bodies of vLLM's server: ``type`` is a class name, ``code`` the status."""

    KINDS: ClassVar[Mapping[int, str]] = {
        400: "BadRequestError",
        401: "AuthenticationError",
        403: "PermissionDeniedError",
        404: "NotFoundError",
        500: "InternalServerError",
        501: "NotImplementedError",
        503: "ServiceUnavailableError",
    }

    def body(self, error: ApiError) -> dict[str, Any]:
        """Return the JSON body of an error answer."""
        status = error.status
        kind = self.KINDS.get(status) or HTTPStatus(status).phrase.replace(" ", "")
        return {
            "error": {"message": str(error), "type": kind, "param": error.param, "code": status}
        }

    def unknown_path(self, status: int, method: str, path: str) -> dict[str, Any]:
        """Return the JSON body of the answer to a path (404) or method (405) that is not served."""
        return {"detail": "Method Not Allowed" if status == 405 else "Not Found"}

    def _expected(self, error: Exception) -> ApiError | None:
        match error:
            case MalformedBody(is_json=True):
                return ApiError(400, f"1 validation error: {error}")
            case MalformedBody():
                return ApiError(400, f"Invalid JSON format: {error}")
            case RunClosed():
                return ApiError(503, f"the server is ending: {error}")
            case WeightsRefused():
                return UpdateError(str(error))
            case ContextFull(tokens=tokens, tokens_max=tokens_max):
                return ApiError(
                    400,
                    f"This model's maximum context length is {tokens_max} tokens. However, your "
                    f"prompt contains {tokens} input tokens, which leaves none to generate. Please "
                    f"reduce the length of the input prompt.",
                )
            case ChatRefused() | TurnRefused() | ScoreRefused() | ConfigError():
                return ApiError(400, str(error))
            case TidegateError():
                return ApiError(500, str(error))
        return None
