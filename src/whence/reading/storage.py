"""How the parts of a layer go into a file and come back: tensors among the tensors, the rest as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from whence.reading.wiring.equation import Wiring
from whence.reading.wiring.norms import Norm
from whence.reading.wiring.projection import Projection

STORED = {kind.__name__: kind for kind in (Norm, Projection, Wiring)}
"""What a layer holds besides tensors and plain values: dataclasses, written field by field under their names."""


def pack(key: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON for a value; its tensors go into `tensors`, under names that begin with `key`."""
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"tensor": key}
    if type(value).__name__ in STORED:
        parts = {f.name: pack(f"{key}.{f.name}", getattr(value, f.name), tensors) for f in fields(value)}
        return {"stored": type(value).__name__, **parts}
    return list(value) if isinstance(value, tuple) else value


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` stored."""
    if isinstance(value, dict) and "tensor" in value:
        return tensors[value["tensor"]]
    if isinstance(value, dict):
        parts = {name: unpack(part, tensors) for name, part in value.items() if name != "stored"}
        return STORED[value["stored"]](**parts)
    return tuple(value) if isinstance(value, list) else value


def understand_earlier(layer: dict[str, Any], stack: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A layer's JSON as `pack` writes it now, from files in which it held the parts of its wiring one by one."""
    if isinstance(layer["wiring"], dict) or "norm" not in layer:
        return layer

    def now(part: str, value: Any) -> Any:
        if not isinstance(value, dict) or "tensor" in value:
            return value
        names = ("weight", "bias", "rows") if "projection" in value else ("weight", "bias")
        keys = {name: f"{stack}.{layer['index']}.{part}.{name}" for name in names}
        held = {name: {"tensor": key} if key in tensors else None for name, key in keys.items()}
        rest = {name: value[name] for name in ("eps", "centred", "offset") if name in value}
        return {"stored": "Projection" if "projection" in value else "Norm", **held, **rest}

    parts = {part: now(part, value) for part, value in layer.items()}
    own = {name: parts.pop(name) for name in (f.name for f in fields(Wiring)) if name != "kind"}
    kind = parts["wiring"]
    return {**parts, "wiring": None if kind is None else {"stored": "Wiring", "kind": kind, **own}}


def check_sizes(layer: Any, queries: int, keys: int) -> None:
    """A loaded layer's tensors have the sizes that its heads and its stack's tokens ask for; else a ValueError."""
    heads = len(layer.heads)
    expected: dict[str, tuple[int | None, ...]] = {
        "_attention": (heads, queries, keys),
        "_queries": (heads, queries, None),
        "grouped_keys": (None, keys, None),
        "grouped_values": (None, keys, None),
        "_outputs": (heads, queries, None),
        "_block_input": (queries, None),
        "_after_attention": (queries, None),
        "_block_output": (queries, None),
    }
    for part, sizes in expected.items():
        tensor = getattr(layer, part)
        if tensor is None:
            continue
        fits = tensor.dim() == len(sizes)
        if not fits or any(want not in (None, have) for want, have in zip(sizes, tensor.shape, strict=True)):
            wanted = " × ".join("any" if size is None else str(size) for size in sizes)
            raise ValueError(
                f"{part.lstrip('_')} of layer {layer.index} is {tuple(tensor.shape)}, where its tokens and heads ask "
                f"for {wanted}"
            )
    if layer.rebuilt:
        needed = [layer._queries, layer.grouped_keys, layer._outputs, layer.grouped_values]
        if any(t is None for t in needed) or any(needed[i].shape[-1] != needed[i + 1].shape[-1] for i in (0, 2)):
            raise ValueError(
                f"layer {layer.index} lacks what its attention is made from: queries, keys, values and outputs"
            )
