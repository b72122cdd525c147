"""What a saved file must hold to be believed: the kinds of its plain values, and the axes and kinds of its arrays.

A class declares both once: plain values by the annotations of its fields, arrays by a table of `Array`. A hash says that
a file is as it was written, and not that what was written fits together: another program may have written it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from whence.results.short_repr import brief

Kind = Literal["float", "integer", "boolean", "any"]


@dataclass(frozen=True)
class Array:
    """The axes of an array, by name, as "layer head query"; "" is a single number, "a b | b" either of two.

    "*": those of the result's values. "query?" may also be 1 long, for all queries. Axes of one name are of one length
    throughout a table. `needed`: the array is there wherever any of its table is.
    """

    axes: str
    kind: Kind = "float"
    needed: bool = True

    @property
    def choices(self) -> tuple[tuple[str, ...], ...]:
        """Every order of axes that it may have."""
        return tuple(tuple(choice.split()) for choice in self.axes.split("|"))

    def check(self, name: str, tensor: Tensor, sizes: dict[str, int]) -> None:
        """A ValueError unless the tensor fits; lengths that were not known go into `sizes`."""
        if self.kind not in ("any", kind_of(tensor)):
            raise ValueError(f"{name} holds {tensor.dtype} numbers, where {_A[self.kind]} are asked for")
        for axes in self.choices:
            if len(axes) == tensor.dim() and all(map(_fits(sizes), axes, tensor.shape)):
                known = ((axis, size) for axis, size in zip(axes, tensor.shape, strict=True) if axis[-1] != "?")
                sizes.update(known)
                return
        wanted = " or ".join(" × ".join(_named(axis, sizes) for axis in axes) or "one number" for axes in self.choices)
        raise ValueError(f"{name} is {tuple(tensor.shape)}, where {wanted} is asked for")


_A = {"float": "floating-point ones", "integer": "integers", "boolean": "true and false"}


def kind_of(tensor: Tensor) -> Kind:
    """What its numbers are."""
    name = str(tensor.dtype)
    return "float" if tensor.is_floating_point() else "boolean" if name == "torch.bool" else "integer"


def _fits(sizes: Mapping[str, int]) -> Any:
    seen = dict(sizes)

    def fits(axis: str, size: int) -> bool:
        name = axis.removesuffix("?")
        if name.isdigit():
            return int(name) == size
        return (axis != name and size == 1) or seen.setdefault(name, size) == size

    return fits


def _named(axis: str, sizes: Mapping[str, int]) -> str:
    name = axis.removesuffix("?")
    return f"{sizes[name]} {name}" if name in sizes else name


def check_arrays(table: Mapping[str, Array], arrays: Mapping[str, Tensor | None], sizes: Mapping[str, int]) -> None:
    """Every array of the table is there if it is needed, and every one that is there fits; else a ValueError.

    Arrays that the table does not name are whoever's who put them there.
    """
    known = dict(sizes)
    for name, array in table.items():
        tensor = arrays.get(name)
        if tensor is not None:
            array.check(name.lstrip("_"), tensor, known)
        elif array.needed:
            raise ValueError(f"{name.lstrip('_')} is missing")


def listed(value: Any) -> tuple[Any, ...]:
    """A JSON list as a tuple; a ValueError for anything else, also for a text, which would fall into its letters."""
    if not isinstance(value, list):
        raise ValueError(f"{brief(value)} stands where a list is asked for")
    return tuple(value)


def check_kinds(thing: Any) -> None:
    """Every field of a dataclass, and of those within it, is what its annotation says; else a ValueError.

    Fields that do not count when two are compared (a model, a trace) are not saved, and not looked at.
    """
    kind: Any = type(thing)
    hints = _hints(kind)
    for name in (field.name for field in fields(thing) if field.compare):
        value = getattr(thing, name)
        if not is_kind(value, hints[name]):
            raise ValueError(f"{name.lstrip('_')} is {brief(value)}, which is no {_words(hints[name])}")
        for inner in _within(value):
            check_kinds(inner)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    unknown: dict[str, Any] = {}
    while True:
        try:
            return get_type_hints(kind, localns=unknown)
        except NameError as problem:  # a name for type checkers only: of a field that is not saved
            unknown[str(problem.name)] = Any


def _within(value: Any) -> Iterator[Any]:
    """The dataclasses in a field: itself, or the entries of a tuple or a mapping."""
    if is_dataclass(value):
        yield value
    elif isinstance(value, (tuple, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _within(one)


def is_kind(value: Any, hint: Any) -> bool:
    """Whether the value is of the annotated kind. A bool is no number here, and an int is also a float."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return type(None) in parts if value is None else any(is_kind(value, p) for p in parts if p is not type(None))
    if origin is Literal:
        return value in parts
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        each = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return len(each) == len(value) and all(map(is_kind, value, each))
    if origin is list:
        return isinstance(value, list) and all(is_kind(one, parts[0]) for one in value)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            is_kind(k, parts[0]) and is_kind(v, parts[1]) for k, v in value.items()
        )
    if hint in (int, float):
        return isinstance(value, (int,) if hint is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "").replace("collections.abc.", "")
