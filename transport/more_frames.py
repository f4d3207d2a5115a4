"""Does the message go on behind the frame that was read last? libzmq itself is asked, for speed.

Reading a frame as bytes is quick, but doesn't tell. Reading it as a ``Frame`` does, and takes three
times as long; so does pyzmq's own way of asking. One call of libzmq's, with its arguments made
beforehand, adds a third.
"""

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import zmq

Socket: TypeAlias = "zmq.Socket[bytes]"


@dataclass(frozen=True, slots=True)
class MoreFrames:
    """After reading a frame call :attr:`ask`; then ``answer.value`` is true if more follow."""

    ask: Callable[[], object]
    """Only while the socket is open: libzmq would look where it was."""
    answer: ctypes.c_int


def more_frames(socket: Socket) -> MoreFrames:
    """The question for one socket, to be asked by the thread that reads from it."""
    answer = ctypes.c_int()
    libzmq = _libzmq()
    if libzmq is None:
        return MoreFrames(partial(_ask_pyzmq, socket, answer), answer)
    ask = libzmq.zmq_getsockopt
    ask.restype = None  # it can't fail: the socket is open, the option exists, the size is right
    size = ctypes.c_size_t(ctypes.sizeof(answer))
    handle = ctypes.c_void_p(socket.underlying)
    option = ctypes.c_int(zmq.RCVMORE)
    call = partial(ask, handle, option, ctypes.byref(answer), ctypes.byref(size))
    return MoreFrames(call, answer)


def _ask_pyzmq(socket: Socket, answer: ctypes.c_int) -> None:
    answer.value = int(socket.getsockopt(zmq.RCVMORE))


def _libzmq() -> Any:
    """The library that pyzmq uses; None where it can't be reached (another build, no CPython)."""
    try:
        # Found by way of the module that is linked with it: its own name differs with each build.
        # It keeps the interpreter's lock, for the call is shorter than letting go of it.
        library = ctypes.PyDLL(str(importlib.import_module("zmq.backend.cython._zmq").__file__))
        return library if hasattr(library, "zmq_getsockopt") else None
    except (ImportError, OSError):
        return None
