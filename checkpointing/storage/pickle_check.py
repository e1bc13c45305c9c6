"""What the pickle in a file of ``torch.save`` asks for, checked before torch reads it.

``torch.load(weights_only=True)`` runs no code of the file, but it does call what it knows, with
whatever arguments the file gives: a kilobyte can ask for a byte array or a tensor of a terabyte, or
encode a text in hexadecimal forty times over. Here the instructions are followed without making
anything, and only those are let through that describe data which the file itself holds.
"""

import pickletools
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, prod
from typing import IO, Any

import torch

from checkpointing.storage.tensor_classes import is_known_class

# Called with anything, these make nothing that is larger than their arguments.
_HARMLESS = {
    "collections.OrderedDict",
    "collections.Counter",
    "builtins.set",
    "__builtin__.set",
    "builtins.complex",
    "__builtin__.complex",
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
    "torch._utils._rebuild_parameter",
}
# Pickles of protocol 2 hold bytes as text that is to be encoded so.
_BYTES = {"_codecs.encode", "builtins.bytearray", "__builtin__.bytearray"}
_LATIN1 = ("latin1", "latin-1")
_TENSOR = "torch._utils._rebuild_tensor_v2"
# The same for dtypes without a storage class of their own, such as those of 8 bits; names the dtype
# after (storage, offset, size, stride, requires_grad, hooks).
_NEWER_TENSOR = "torch._utils._rebuild_tensor_v3"
_DTYPE_ARGUMENT = 6
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_CALLABLE = {*_HARMLESS, *_BYTES, _TENSOR, _NEWER_TENSOR, _WRAPPER, _FROM_TYPE}
_NAMED_ONLY = {"torch.Tensor", "torch.nn.parameter.Parameter"}

# Bytes of an element of each storage class.
_STORAGES = {
    f"torch.{name}Storage": size
    for size, names in {
        1: ("Byte", "Char", "Bool"),
        2: ("Half", "BFloat16", "Short"),
        4: ("Float", "Int"),
        8: ("Double", "Long", "ComplexFloat"),
        16: ("ComplexDouble",),
    }.items()
    for name in names
} | {"torch.storage.UntypedStorage": 1}

# The only one that torch.load takes without running code.
_PROTOCOL = 2
# More than any tensor has; torch allows as many.
_MOST_DIMENSIONS = 64
# A 4-bit element is the smallest that there is.
_ELEMENTS_PER_BYTE = 2


@dataclass(frozen=True)
class Limits:
    """What the file holds, beside the pickle.

    Attributes:
        total: size of the file in bytes.
        records: sizes of its storages by their keys; ``None`` if only their sum is known.
    """

    total: int
    records: Mapping[str, int] | None


@dataclass(frozen=True)
class _Global:
    path: str


@dataclass(frozen=True)
class _Storage:
    nbytes: int
    item: int


class _Made:
    """A list, dictionary, tensor or the like, of which nothing more need be known."""


_MADE = _Made()


@dataclass
class _Machine:
    """A machine of pickle instructions that makes nothing."""

    limits: Limits
    globals: set[str] = field(default_factory=set)
    storages: dict[str, int] = field(default_factory=dict)
    claimed: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, pickle: IO[bytes]) -> Any:
        """Follows one pickle to its end, and returns what it is."""
        self.stack, self.marks, self.memo = [], [], {}
        for opcode, argument, _ in pickletools.genops(pickle):
            if opcode.name == "STOP":
                break
            self._step(opcode.name, argument)
        return self.stack.pop()

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "PROTO" if argument == _PROTOCOL:
                pass
            case "MARK":
                self.marks.append(stack)
                self.stack = []
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "BINUNICODE" | "SHORT_BINSTRING":
                stack.append(argument)
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(name == "NEWTRUE")
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_SET":
                stack.append(_MADE)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE":
                items = self._pop_mark()
                self.stack.append(tuple(items))
            case "APPENDS" | "SETITEMS":
                self._pop_mark()
                self._check_container()
            case "APPEND" | "BUILD":
                stack.pop()
                self._check_container()
            case "SETITEM":
                del stack[-2:]
                self._check_container()
            case "GLOBAL":
                stack.append(self._global(argument.replace(" ", ".", 1)))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(self._call(stack.pop(), arguments))
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case _:
                raise ValueError(f"torch.save writes no instruction {name} {argument!r:.40}")

    def _pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def _check_container(self) -> None:
        if self.stack[-1] is not _MADE:
            raise ValueError("its pickle fills what is no list or dictionary")

    def _global(self, path: str) -> _Global:
        module, _, name = path.rpartition(".")
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        known = path in _CALLABLE or path in _NAMED_ONLY or is_known_class(path)
        if not (known or is_dtype or path in _STORAGES):
            raise ValueError(f"it asks for {path}, which is no data, and is not run")
        self.globals.add(path)
        return _Global(path)

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise ValueError("its pickle calls what is no function")
        if function.path in (_TENSOR, _NEWER_TENSOR):
            storage, offset, size, stride, *_ = arguments
            if not isinstance(storage, _Storage):
                raise ValueError("its pickle has a tensor without data")
            item = storage.item
            if function.path == _NEWER_TENSOR:
                item = _dtype(arguments[_DTYPE_ARGUMENT]).itemsize
            _check_view(storage.nbytes // item, offset, size, stride)
        elif function.path == _WRAPPER:
            _check_whole(arguments[2], self.limits.total * _ELEMENTS_PER_BYTE)
        elif function.path == _FROM_TYPE:
            inner, kind, inner_arguments, *_ = arguments
            if not isinstance(inner, _Global) or not isinstance(kind, _Global):
                raise ValueError("its pickle makes a tensor of no class")
            self._call(inner, inner_arguments)
        elif function.path in _BYTES:
            text, encoding = arguments or ("", "latin1")
            if not isinstance(text, str) or encoding not in _LATIN1:
                raise ValueError(f"its pickle encodes a text as {encoding!r}")
        elif function.path not in _HARMLESS:
            raise ValueError(f"its pickle calls {function.path}")
        return _MADE

    def _storage(self, name: Any) -> _Storage:
        kind, storage_type, key, _, numel, *_ = name
        path = storage_type.path if isinstance(storage_type, _Global) else ""
        if kind != "storage" or type(numel) is not int or numel < 0 or path not in _STORAGES:
            raise ValueError("its pickle has a storage of no known kind")
        nbytes = numel * _STORAGES[path]
        self.claimed += max(0, nbytes - self.storages.get(str(key), 0))
        self.storages[str(key)] = max(nbytes, self.storages.get(str(key), 0))
        records = self.limits.records
        held = self.limits.total if records is None else records.get(str(key), 0)
        if nbytes > held or self.claimed > self.limits.total:
            raise ValueError(f"its pickle says that storage {key} has {nbytes} bytes, not {held}")
        return _Storage(nbytes, _STORAGES[path])


def _check_whole(numbers: Any, most: float) -> None:
    whole = isinstance(numbers, tuple) and all(type(n) is int and n >= 0 for n in numbers)
    if not whole or len(numbers) > _MOST_DIMENSIONS:
        raise ValueError("its pickle has a tensor whose shape is none")
    if prod(numbers) > most:
        raise ValueError(f"its pickle has a tensor of shape {list(numbers)}, more than it holds")


def _check_view(numel: int, offset: Any, size: Any, stride: Any) -> None:
    _check_whole(size, numel)
    _check_whole((offset, *stride), inf)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if prod(size) and last >= numel:
        raise ValueError(f"its pickle has a tensor of shape {list(size)}, more than it holds")


def _dtype(value: Any) -> torch.dtype:
    dtype = getattr(torch, value.path.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError("its pickle has a tensor of no dtype")
    return dtype


def check_pickles(stream: IO[bytes], count: int, limits: Limits) -> set[str]:
    """Checks the pickles that a stream begins with.

    Args:
        stream: at the start of the first.
        count: number of pickles.
        limits: what the file holds.

    Returns:
        Dotted names of the classes and functions that they ask for.

    Raises:
        Exception: of any kind, if one is not what ``torch.save`` writes of plain data.
    """
    machine = _Machine(limits)
    for _ in range(count):
        machine.run(stream)
    return machine.globals
