"""vLLM's error bodies, and which exception becomes which of them."""

import logging
from http import HTTPStatus
from typing import Any

from tidegate.errors import (
    ChatRefused,
    ConfigError,
    RunClosed,
    ScoreRefused,
    TidegateError,
    TurnRefused,
    WeightsRefused,
)
from tidegate.serving.listening import HttpRefused

log = logging.getLogger("tidegate")


class ServerError(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param

    def body(self) -> dict[str, Any]:
        """As vLLM writes it."""
        kind = _KINDS.get(self.status) or HTTPStatus(self.status).phrase.replace(" ", "")
        about = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        return {"error": about}


_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class UpdateError(ServerError):
    """A phase of a weight update went wrong; told as vLLM tells what a worker raised."""

    def __init__(self, why: str) -> None:
        super().__init__(
            500,
            f"Call to collective_rpc method failed: Worker failed with error '{why}', please check "
            f"the stack trace above for the root cause",
        )


def as_answer(error: Exception) -> ServerError:
    """Whatever a handler raised, as an answer."""
    match error:
        case ServerError():
            return error
        case HttpRefused():
            return ServerError(error.status, str(error))
        case RunClosed():
            return ServerError(503, f"the server is ending: {error}")
        case WeightsRefused():
            return UpdateError(str(error))
        case ChatRefused() | TurnRefused() | ScoreRefused() | ConfigError():
            return ServerError(400, str(error))
        case TidegateError():
            return ServerError(500, str(error))
    log.error("the server failed to answer a request", exc_info=error)
    return ServerError(500, f"{type(error).__name__}: {error}")
