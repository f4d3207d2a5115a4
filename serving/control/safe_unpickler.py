"""Bounded unpickler of plain values that imports nothing and calls none of the names in a pickle.

vLLM's trainers pickle a communicator's id and handles of memory on a GPU, SGLang's pickle tensors.
Python's own unpickler calls the functions that a pickle names, and 89 bytes of nested references
keep it busy for ever. This unpickler reads tuples, lists, dicts, texts, bytes and numbers; its
caller resolves all names. Its limits count a value once per reference, because comparing and
hashing visit the value once per reference.
"""

import pickletools
from collections.abc import Callable
from typing import Any

from tidegate.errors import TidegateError

PICKLE_BYTES_MAX = 64 * 2**20
"""Size of a pickle; handles of 100,000 tensors have less."""

VALUES_MAX = 8_000_000
"""Values in a pickle, each as often as it is referred to. A handle has 30 of them, so these are the
handles of 260,000 tensors."""

OPERATIONS_MAX = 2_000_000
"""Operations of a pickle: 45 for a handle or a tensor. One can take 150 bytes of memory, and all
together 300 MB."""

INTEGER_BITS_MAX = 64
"""Width of an integer; no handle has a wider one, and arithmetic with millions takes for ever."""


class UnsafePickle(TidegateError):
    """A pickle holds something else than plain values and the names that its reader resolves."""


class _Value:
    """A value on the stack, and the number of values in it."""

    __slots__ = ("count", "is_held", "value")

    def __init__(self, value: Any, count: int = 1) -> None:
        self.value = value
        self.count = count
        self.is_held = False
        """Whether a container holds it. A container that is held takes nothing more, so that its
        count is right wherever it is held, and none holds itself."""


_MARK = _Value(None)
"""Marks where on the stack the items of a container begin."""

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}

_WITH_ARGUMENT = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    )
)
"""Operations that push the value that follows them."""


class _Unpickler:
    """The stack and the memory of one pickle that is being read."""

    def __init__(self, named: Callable[[str, str], Any]) -> None:
        self._named = named
        self._stack: list[_Value] = []
        self._memory: dict[int, _Value] = {}

    def run(self, data: bytes) -> Any:
        """Return the value that is pickled."""
        for number, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if number >= OPERATIONS_MAX:
                raise UnsafePickle(f"it has more than {OPERATIONS_MAX} operations")
            if operation.name == "STOP":
                return self._pop().value
            self._do(operation.name, argument)
        raise UnsafePickle("it ends without a STOP operation")

    def _do(self, name: str, argument: Any) -> None:
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._stack.append(_MARK)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                self._push(_CONSTANTS[name])
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                size = 0 if name == "EMPTY_TUPLE" else int(name[-1])
                self._push_tuple([self._pop() for _ in range(size)][::-1])
            case "TUPLE":
                self._push_tuple(self._pop_items())
            case "EMPTY_LIST":
                self._push([])
            case "APPEND":
                self._extend([self._pop()])
            case "APPENDS":
                self._extend(self._pop_items())
            case "LIST":
                items = self._pop_items()
                self._push([])
                self._extend(items)
            case "EMPTY_DICT":
                self._push({})
            case "SETITEM":
                self._set_items([self._pop(), self._pop()][::-1])
            case "SETITEMS":
                self._set_items(self._pop_items())
            case "DICT":
                items = self._pop_items()
                self._push({})
                self._set_items(items)
            case "GLOBAL":
                module, _, attribute = argument.partition(" ")
                self._push(self._found(module, attribute))
            case "STACK_GLOBAL":
                attribute, module = self._pop().value, self._pop().value
                self._push(self._found(module, attribute))
            case "REDUCE":
                self._call()
            case "MEMOIZE":
                self._memory[len(self._memory)] = self._top()
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self._memory[argument] = self._top()
            case "GET" | "BINGET" | "LONG_BINGET":
                self._stack.append(self._memory[argument])
            case _ if name in _WITH_ARGUMENT:
                self._push_plain(argument)
            case _:
                raise UnsafePickle(f"it has the pickle operation {name}, which is not allowed")

    def _push(self, value: Any, count: int = 1) -> None:
        self._stack.append(_Value(value, count))

    def _push_plain(self, value: Any) -> None:
        if isinstance(value, int) and value.bit_length() > INTEGER_BITS_MAX:
            raise UnsafePickle(
                f"it has an integer of {value.bit_length()} bits, and the limit is "
                f"{INTEGER_BITS_MAX}"
            )
        self._push(value)

    def _push_tuple(self, items: list[_Value]) -> None:
        count = self._counted(items)
        self._push(tuple(item.value for item in items), 1 + count)

    def _extend(self, items: list[_Value]) -> None:
        container = self._open(list)
        container.count += self._counted(items)
        container.value.extend(item.value for item in items)

    def _set_items(self, items: list[_Value]) -> None:
        container = self._open(dict)
        container.count += self._counted(items)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key.value, str | int):
                raise UnsafePickle(f"a dict key must be str or int, got {type(key.value).__name__}")
            container.value[key.value] = value.value

    def _call(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(arguments.value, tuple) or not callable(function.value):
            raise UnsafePickle(
                f"it calls a {type(function.value).__name__}, and only the allowed functions may "
                "be called"
            )
        self._push(function.value(*arguments.value), 1 + arguments.count)

    def _counted(self, items: list[_Value]) -> int:
        """Count the values in the items of a container, and close these items to further values."""
        count = 0
        for item in items:
            item.is_held = True
            count += item.count
        if count > VALUES_MAX:
            raise UnsafePickle(f"it holds {count} values, and the limit is {VALUES_MAX}")
        return count

    def _open(self, kind: type) -> _Value:
        container = self._top()
        if not isinstance(container.value, kind) or container.is_held:
            raise UnsafePickle(
                f"it adds to a {type(container.value).__name__} where a {kind.__name__} that "
                "nothing else holds is allowed"
            )
        return container

    def _found(self, module: Any, attribute: Any) -> Any:
        found = None
        if isinstance(module, str) and isinstance(attribute, str):
            found = self._named(module, attribute)
        if found is None:
            raise UnsafePickle(f"it names {module!s:.100}.{attribute!s:.100}, which is not allowed")
        return found

    def _top(self) -> _Value:
        top = self._stack[-1]
        if top is _MARK:
            raise UnsafePickle("it takes a value from an empty stack")
        return top

    def _pop(self) -> _Value:
        top = self._top()
        self._stack.pop()
        return top

    def _pop_items(self) -> list[_Value]:
        """Pop the values above the newest mark, and the mark."""
        items: list[_Value] = []
        while (item := self._stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]


def read_plain_pickle(
    data: bytes, named: Callable[[str, str], Any], *, bytes_max: int = PICKLE_BYTES_MAX
) -> Any:
    """Read the value pickled in ``data``; ``named`` resolves a module and a name to an object.

    The object may be called with anything in the pickle, so ``named`` must return functions that
    only make a value of their arguments. None refuses the name.

    Raises:
        UnsafePickle: the pickle names something else, holds too much, or can't be read.
    """
    if len(data) > bytes_max:
        raise UnsafePickle(f"it has {len(data)} bytes, and the limit is {bytes_max}")
    try:
        return _Unpickler(named).run(data)
    except UnsafePickle:
        raise
    except Exception as error:  # noqa: BLE001 - bytes of a stranger: whatever they cause, they caused
        raise UnsafePickle(f"it can't be read: {error!r:.300}") from None
