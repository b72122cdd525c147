"""What a measure gives back: a tensor with named axes, its tokens, and where it came from."""

from __future__ import annotations

import html
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from whence.errors import InputError, MissingExtraError
from whence.results.declared import Array, check_arrays, check_kinds, listed
from whence.results.files import as_plain
from whence.results.labels import Tokens
from whence.results.provenance import Provenance
from whence.results.tensor_file import load_tensors, savable, save_tensors, understood

if TYPE_CHECKING:
    import pandas as pd

ROW_AXES = ("query", "hidden", "explained")
COLUMN_AXES = ("key", "input")


@dataclass(frozen=True)
class Result:
    """Values stored like attention, [layer, (head,) hidden or query, input or key].

    `axes` names the dimensions of `values`; `tokens` label the rows, `key_tokens` the columns (the same tokens, but
    for cross-attention). `layers` and `heads` say which of the model's were kept.
    """

    kind: ClassVar[str] = "result"
    arrays: ClassVar[Mapping[str, Array]] = {}  # the axes and kinds of `values` and of what is in `extra`

    values: Tensor
    axes: tuple[str, ...]
    tokens: Tokens
    provenance: Provenance
    key_tokens: Tokens | None = None
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # further tensors of this measure, by name

    def __init_subclass__(cls) -> None:
        # @dataclass writes a repr with every number of every tensor into each subclass that has none of its own.
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        sizes = " × ".join(f"{n} {axis}" for axis, n in zip(self.axes, self.values.shape, strict=True))
        return f"{type(self).__name__}({self.provenance.method} of {self.provenance.model}: {sizes})"

    def __post_init__(self) -> None:
        if len(self.axes) != self.values.dim():
            raise InputError(
                f"{len(self.axes)} axes {self.axes} were named for values of shape {tuple(self.values.shape)}."
            )
        for name in ("layer", "head"):
            if name in self.axes and not getattr(self, f"{name}s"):
                object.__setattr__(self, f"{name}s", tuple(range(self.values.shape[self.axes.index(name)])))

    @classmethod
    def of_stack(
        cls,
        stack: Any,
        values: Tensor,
        provenance: Provenance,
        *,
        axes: tuple[str, ...] = ("layer", "hidden", "input"),
        layers: tuple[int, ...] | None = None,
        key_tokens: Tokens | None = None,
        extra: Mapping[str, Tensor] | None = None,
        **more: Any,
    ) -> Self:
        """The result of one stack of a trace, labelled as the stack is. layers: those kept; None: all of them.

        key_tokens: what labels the keys, where that is not the stack's own. more: fields that a class has besides.
        """
        if key_tokens is None and "key" in axes and stack.key_tokens is not stack.tokens:
            key_tokens = stack.key_tokens
        return cls(
            values=values,
            axes=axes,
            tokens=stack.tokens,
            provenance=provenance,
            key_tokens=None if key_tokens is stack.tokens else key_tokens,
            layers=tuple(layer.index for layer in stack) if layers is None else layers,
            heads=stack.layers[0].heads if "head" in axes else (),
            extra=extra or {},
            **more,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def _labels(self, axis: str) -> list[Any]:
        if axis == "layer":
            return list(self.layers)
        if axis == "head":
            return list(self.heads)
        return list(range(self.values.shape[self.axes.index(axis)]))

    def select(self, *, layer: int | list[int] | None = None, head: int | list[int] | None = None) -> Self:
        """Only these layers and heads (by the model's numbering); the axis stays."""
        values, changes = self.values, dict[str, Any]()
        for axis, wanted in (("layer", layer), ("head", head)):
            if wanted is None:
                continue
            have = getattr(self, f"{axis}s")
            wanted = [wanted] if isinstance(wanted, int) else list(wanted)
            missing = [w for w in wanted if w not in have]
            if axis not in self.axes or missing:
                raise InputError(
                    f"{axis} {missing or wanted} is not in this result; it has {axis}s {list(have) or 'none'}."
                )
            places = torch.tensor([have.index(w) for w in wanted], device=values.device)
            values = values.index_select(self.axes.index(axis), places)
            changes[f"{axis}s"] = tuple(wanted)
        return replace(self, values=values, **changes, extra={})

    def to(self, device: str | torch.device) -> Self:
        return replace(self, values=self.values.to(device), extra={k: v.to(device) for k, v in self.extra.items()})

    def words(self) -> Self:
        """Sub-words gathered into words: what goes to a word is summed, what comes from it is averaged."""
        values = self.values
        keys = self.key_tokens or self.tokens
        for i, axis in enumerate(self.axes):
            if axis in ROW_AXES:
                values = gather(values, i, self.tokens.groups(), mean=True)
            elif axis in COLUMN_AXES:
                values = gather(values, i, keys.groups(), mean=False)
        key_tokens = None if self.key_tokens is None else self.key_tokens.by_word()
        return replace(self, values=values, tokens=self.tokens.by_word(), key_tokens=key_tokens, extra={})

    def to_frame(self) -> pd.DataFrame:
        """A tidy frame: one line per value, a column per axis, and the tokens beside their positions."""
        import pandas as pd

        index = pd.MultiIndex.from_product([self._labels(axis) for axis in self.axes], names=list(self.axes))
        frame = pd.DataFrame({"value": self.values.detach().cpu().reshape(-1).numpy()}, index=index).reset_index()
        for axis in self.axes:
            tokens = self.tokens if axis in ROW_AXES else self.key_tokens or self.tokens
            if axis in ROW_AXES + COLUMN_AXES:
                frame.insert(list(frame.columns).index(axis) + 1, f"{axis}_token", [tokens[i] for i in frame[axis]])
        return frame

    def numpy(self) -> np.ndarray[Any, Any]:
        """The values as a NumPy array (half precision as float32, since NumPy has no bfloat16)."""
        values = self.values.detach().cpu()
        return np.asarray(values.float() if values.dtype in (torch.bfloat16, torch.float16) else values)

    def to_xarray(self) -> Any:
        """The values as an `xarray.DataArray`: layers and heads by the model's numbers, tokens beside their positions."""
        try:
            xarray = importlib.import_module("xarray")
        except ImportError as problem:
            raise MissingExtraError("to_xarray needs the package xarray: pip install xarray") from problem
        coordinates: dict[str, Any] = {axis: self._labels(axis) for axis in self.axes}
        for axis in self.axes:
            if axis in ROW_AXES + COLUMN_AXES:
                tokens = self.tokens if axis in ROW_AXES else self.key_tokens or self.tokens
                coordinates[f"{axis}_token"] = (axis, list(tokens))
        about = {"model": self.provenance.model, "method": self.provenance.method, **self.provenance.settings}
        return xarray.DataArray(self.numpy(), coords=coordinates, dims=self.axes, name=self.kind, attrs=about)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**self._header(), "values": as_plain(self.values)}

    def _header(self) -> dict[str, Any]:
        return {
            "axes": list(self.axes),
            "tokens": self.tokens.to_dict(),
            "key_tokens": None if self.key_tokens is None else self.key_tokens.to_dict(),
            "layers": list(self.layers),
            "heads": list(self.heads),
            "provenance": self.provenance.to_dict(),
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """One safetensors file with its tokens and provenance inside."""
        with savable(path, self.kind):
            self._check()
        tensors = {"values": self.values, **{f"extra.{name}": t for name, t in self.extra.items()}}
        return save_tensors(path, self.kind, tensors, self._header())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """A saved result; damaged files, other kinds and sizes that do not fit are refused in one sentence."""
        tensors, header = load_tensors(path, cls.kind)
        with understood(path, cls.kind):
            result = cls(**cls._fields(tensors, header))
            if (list(result.layers), list(result.heads)) != (header["layers"], header["heads"]):
                raise ValueError("it does not say which layers and heads it has")
            result._check()
        return result

    @classmethod
    def _fields(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> dict[str, Any]:
        """What the class is made of, from a file's tensors and header; a class with more fields adds its own."""
        keys = header["key_tokens"]
        return {
            "values": tensors["values"],
            "axes": listed(header["axes"]),
            "tokens": Tokens.from_dict(header["tokens"]),
            "provenance": Provenance.from_dict(header["provenance"]),
            "key_tokens": None if keys is None else Tokens.from_dict(keys),
            "layers": listed(header["layers"]),
            "heads": listed(header["heads"]),
            "extra": {name.removeprefix("extra."): t for name, t in tensors.items() if name.startswith("extra.")},
        }

    def _check(self) -> None:
        """A ValueError unless every field is what it is declared to be, and every axis as long as what labels it."""
        check_kinds(self)
        if len(set(self.axes)) != len(self.axes) or min((*self.layers, *self.heads), default=0) < 0:
            raise ValueError(f"axes {self.axes} with layers {self.layers} and heads {self.heads} name nothing")
        if any(getattr(self, f"{name}s") and name not in self.axes for name in ("layer", "head")):
            raise ValueError(f"there are layers {self.layers} and heads {self.heads} for the axes {self.axes}")
        sizes = self._sizes()
        for axis, size in zip(self.axes, self.values.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(f"its values have {size} along {axis}, and there are {sizes[axis]} labels for them")
        values = self.arrays.get("values")
        if values is not None:
            if self.axes not in values.choices:
                raise ValueError(f"its values have the axes {', '.join(self.axes)}, where it has {values.axes}")
            values.check("values", self.values, dict(sizes))
        if self.extra:  # a selection has none
            check_arrays(
                {name: self._beside(a) for name, a in self.arrays.items() if name != "values"}, self.extra, sizes
            )

    def _beside(self, array: Array) -> Array:
        return replace(array, axes=" ".join(self.axes)) if array.axes == "*" else array

    def _sizes(self) -> dict[str, int]:
        """How long each axis is that something labels."""
        rows, columns = len(self.tokens), len(self.key_tokens or self.tokens)
        sizes = {**dict.fromkeys(ROW_AXES, rows), **dict.fromkeys(COLUMN_AXES, columns), "layer": len(self.layers)}
        return sizes | ({"head": len(self.heads)} if self.heads or "head" in self.axes else {})

    def plot(self, *, layer: int | None = None, head: int | None = None, ax: Any = None) -> Any:
        """A figure for a paper (matplotlib); returns the Axes. See `whence.results.plotting.plot_result`."""
        from whence.results.plotting import plot_result

        return plot_result(self, layer=layer, head=head, ax=ax)

    def _repr_html_(self) -> str:
        sizes = " × ".join(f"{n} {axis}" for axis, n in zip(self.axes, self.values.shape, strict=True))
        rows = self.to_frame().head(8).to_html(index=False, float_format=lambda v: f"{v:.4f}", escape=True)
        title = html.escape(f"{type(self).__name__}: {self.provenance.method} of {self.provenance.model}")
        return f"<div><b>{title}</b><br>{html.escape(sizes)}{rows}</div>"


def gather(values: Tensor, dim: int, groups: list[list[int]], *, mean: bool) -> Tensor:
    """Sum (or average) the positions of each group along one dimension."""
    weights = values.new_zeros(len(groups), values.shape[dim])
    for i, group in enumerate(groups):
        weights[i, group] = 1 / len(group) if mean else 1.0
    gathered: Tensor = torch.tensordot(weights, values, dims=([1], [dim])).movedim(0, dim)
    return gathered
