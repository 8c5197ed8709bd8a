"""Reads the data in a pickle stream without running anything that it asks for.

Python's `pickle` is a small machine whose programs may call any function; that is why opening a
foreign `.pth` with it is dangerous. Here the opcodes are decoded by `pickletools` (a disassembler)
and replayed by a table of plain stack moves. A name such as `torch._utils._rebuild_tensor_v2` is
kept as text (`Name`) and never looked up; a call is kept as a record (`Call`) and never made.
"""

import dataclasses
import pickletools
from collections.abc import Callable, Iterator
from typing import IO, Any

MAX_CHUNK = 64 << 20
MAX_OPERATIONS = 10_000_000
MAX_ARGUMENTS = 1000
MAX_COPIED = 16 << 20  # items and characters that calls may copy, all together
_MARK = object()
_FAULTS = (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError,
           RecursionError)
_SIZED = (str, bytes, list, tuple, dict)
_PLAIN = (str, int, float, bool, bytes, type(None))


class BadPickle(Exception):
    """The stream is damaged or uses an opcode outside the subset; the message is a phrase."""


@dataclasses.dataclass(eq=False)
class Name:
    """A dotted name that the stream mentions. It stays text."""

    text: str
    position: int


@dataclasses.dataclass(eq=False)
class Call:
    """A request to call `function`; recorded, not made. `state` is what BUILD attached."""

    function: Any
    arguments: tuple
    state: Any = None


@dataclasses.dataclass(eq=False)
class Persistent:
    """A reference to something stored outside the stream (torch: a storage)."""

    identity: Any


@dataclasses.dataclass
class Program:
    """The outcome of one stream: its value and every name that it mentioned."""

    value: Any
    names: list[Name]


class _Bounded:
    """Passes reads on, so that a forged length cannot ask for more memory than MAX_CHUNK."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.tell = file.tell

    def read(self, count: int) -> bytes:
        if count > MAX_CHUNK:
            raise BadPickle(f"it announces a single item of {count} bytes")
        return self._file.read(count)

    def readline(self) -> bytes:
        return self._file.readline(MAX_CHUNK)


def run(file: IO[bytes], construct: Callable[[Call], Any]) -> Program:
    """Replays the pickle that starts at the file's position; stops just behind it.

    Args:
      file: binary file.
      construct: turns the record of a call into plain data, or returns it as it is. It must not
        call anything named by the stream.
    Raises:
      BadPickle: damaged stream, or an opcode outside the subset.
    """
    machine = _Machine(construct)
    for count, (name, argument, position) in enumerate(_operations(file)):
        if count >= MAX_OPERATIONS:
            raise BadPickle(f"its pickle has more than {MAX_OPERATIONS:,} instructions")
        step = getattr(machine, f"op_{name}", None)
        if step is None:
            raise BadPickle(f"it holds the instruction {name}, which weight files do not use")
        try:
            step(argument, position)
        except _FAULTS as error:
            raise BadPickle(f"its pickle is damaged at byte {position} ({name})") from error
    return Program(machine.value, machine.names)


def key_of(value: Any) -> Any:
    """`value`, if it may be a key of a dict: plain, a record, or a flat tuple of such.

    A key that is nested deeply enough would end the process when it is hashed.
    """
    flat = value if type(value) is tuple else (value,)
    if not all(type(item) in _PLAIN or isinstance(item, Name | Call) for item in flat):
        raise TypeError("no key")
    return value


def _operations(file: IO[bytes]) -> Iterator[tuple[str, Any, int]]:
    try:
        for opcode, argument, position in pickletools.genops(_Bounded(file)):
            yield opcode.name, argument, position
    except (ValueError, UnicodeDecodeError, OverflowError) as error:
        raise BadPickle("its pickle is cut short or damaged") from error


class _Machine:
    """The stack, the memo and one method per opcode of the subset."""

    def __init__(self, construct: Callable[[Call], Any]):
        self._construct = construct
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0
        self.names: list[Name] = []
        self.value: Any = None

    def _push(self, argument, position):
        self._stack.append(argument)

    op_INT = op_BININT = op_BININT1 = op_BININT2 = op_LONG = op_LONG1 = op_LONG4 = _push
    op_FLOAT = op_BINFLOAT = _push
    op_STRING = op_BINSTRING = op_SHORT_BINSTRING = _push
    op_UNICODE = op_BINUNICODE = op_SHORT_BINUNICODE = op_BINUNICODE8 = _push
    op_BINBYTES = op_SHORT_BINBYTES = op_BINBYTES8 = op_BYTEARRAY8 = _push

    def _skip(self, argument, position):
        """Framing only."""

    op_PROTO = op_FRAME = _skip

    def op_NONE(self, argument, position):
        self._stack.append(None)

    def op_NEWTRUE(self, argument, position):
        self._stack.append(True)

    def op_NEWFALSE(self, argument, position):
        self._stack.append(False)

    def op_MARK(self, argument, position):
        self._stack.append(_MARK)

    def _since_mark(self) -> list[Any]:
        start = len(self._stack) - 1
        while self._stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise IndexError("no mark")
        items = self._stack[start + 1:]
        del self._stack[start:]
        return items

    def op_POP(self, argument, position):
        self._stack.pop()

    def op_POP_MARK(self, argument, position):
        self._since_mark()

    def op_DUP(self, argument, position):
        self._stack.append(self._stack[-1])

    def op_EMPTY_DICT(self, argument, position):
        self._stack.append({})

    def _empty_list(self, argument, position):
        self._stack.append([])

    op_EMPTY_LIST = op_EMPTY_SET = _empty_list

    def op_EMPTY_TUPLE(self, argument, position):
        self._stack.append(())

    def op_TUPLE(self, argument, position):
        self._stack.append(tuple(self._since_mark()))

    op_FROZENSET = op_TUPLE

    def _tuple_of(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError("stack too short")
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._stack.append(items)

    def op_TUPLE1(self, argument, position):
        self._tuple_of(1)

    def op_TUPLE2(self, argument, position):
        self._tuple_of(2)

    def op_TUPLE3(self, argument, position):
        self._tuple_of(3)

    def op_LIST(self, argument, position):
        self._stack.append(self._since_mark())

    def op_DICT(self, argument, position):
        items = self._since_mark()
        self._stack.append({})
        self._set_items(self._stack[-1], items)

    def op_APPEND(self, argument, position):
        item = self._stack.pop()
        self._extend(self._stack[-1], [item])

    def op_APPENDS(self, argument, position):
        items = self._since_mark()
        self._extend(self._stack[-1], items)

    op_ADDITEMS = op_APPENDS

    def op_SETITEM(self, argument, position):
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items(self._stack[-1], [key, value])

    def op_SETITEMS(self, argument, position):
        items = self._since_mark()
        self._set_items(self._stack[-1], items)

    def _extend(self, target, items: list[Any]) -> None:
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Call):
            raise TypeError("not a list")

    def _set_items(self, target, items: list[Any]) -> None:
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, dict):
            for key, value in pairs:
                if key_of(key) in target:
                    raise BadPickle(f"its pickle names {str(key)[:80]!r} twice in one table")
                target[key] = value
        elif not isinstance(target, Call):
            raise TypeError("not a dict")

    def _remember(self, argument, position):
        self._memo[argument] = self._stack[-1]

    op_PUT = op_BINPUT = op_LONG_BINPUT = _remember

    def op_MEMOIZE(self, argument, position):
        self._memo[len(self._memo)] = self._stack[-1]

    def _recall(self, argument, position):
        self._stack.append(self._memo[argument])

    op_GET = op_BINGET = op_LONG_BINGET = _recall

    def _name(self, text: str, position: int) -> None:
        self.names.append(Name(text, position))
        self._stack.append(self.names[-1])

    def op_GLOBAL(self, argument, position):
        self._name(argument.replace(" ", "."), position)

    def op_STACK_GLOBAL(self, argument, position):
        name, module = self._stack.pop(), self._stack.pop()
        self._name(f"{module}.{name}", position)

    def op_REDUCE(self, argument, position):
        arguments, function = self._stack.pop(), self._stack.pop()
        self._pay(arguments)
        self._stack.append(self._construct(Call(function, tuple(arguments))))

    op_NEWOBJ = op_REDUCE

    def _pay(self, arguments) -> None:
        """A short stream may pass one long list to many calls, each of which copies it."""
        if len(arguments) > MAX_ARGUMENTS:
            raise BadPickle(f"its pickle calls something with {len(arguments):,} arguments")
        self._copied += sum(len(item) for item in arguments if isinstance(item, _SIZED))
        if self._copied > MAX_COPIED:
            raise BadPickle("its pickle copies the same data again and again")

    def op_NEWOBJ_EX(self, argument, position):
        keywords, arguments, function = (self._stack.pop() for _ in range(3))
        self._pay(arguments)
        self._stack.append(self._construct(Call(function, (*arguments, keywords))))

    def op_BUILD(self, argument, position):
        state = self._stack.pop()
        # A dict keeps its items; attributes of a torch state dict (_metadata) are of no use here.
        if isinstance(self._stack[-1], Call):
            self._stack[-1].state = state

    def op_BINPERSID(self, argument, position):
        self._stack.append(Persistent(self._stack.pop()))

    def op_STOP(self, argument, position):
        self.value = self._stack.pop()
