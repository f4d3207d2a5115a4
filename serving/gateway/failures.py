"""Translation of exceptions into OpenAI's error answers. Unexpected ones are logged."""

import logging

from starlette.requests import ClientDisconnect

from tidegate.errors import RunClosed, TidegateError, TurnTimeout
from tidegate.serving.gateway.replies import GatewayError
from tidegate.serving.listening import HttpRefused

log = logging.getLogger("tidegate")


def failure_of(error: Exception) -> GatewayError:
    """The answer to a request that ended so."""
    match error:
        case GatewayError():
            return error
        case HttpRefused(status=413):
            return GatewayError(413, "invalid_request_error", str(error), "body_too_large")
        case HttpRefused(status=status):
            return GatewayError(status, "server_error", str(error))
        case ClientDisconnect():
            return GatewayError(499, "client_closed", "the client has gone")
        case RunClosed():
            return GatewayError(410, "invalid_request_error", str(error), "session_over")
        case TurnTimeout():
            return GatewayError(504, "timeout_error", str(error))
        case TidegateError() | ValueError() | OverflowError() | TypeError():
            return GatewayError(400, "invalid_request_error", str(error))
    log.error("the gateway failed to answer a request", exc_info=error)
    return GatewayError(500, "server_error", f"{type(error).__name__}: {error}")
