"""How the parts of a layer go into a file and come back: tensors among the tensors, the rest as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from whence.reading.wiring.norms import Norm
from whence.reading.wiring.projection import Projection


def pack(key: str, value: Any, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    """Tensors into the file's tensors, the rest into its JSON."""
    part = key.rpartition(".")[2]
    if isinstance(value, Tensor):
        tensors[key] = value
        plain[part] = {"tensor": key}
    elif isinstance(value, Projection):
        tensors[f"{key}.weight"] = value.weight
        for name, tensor in (("bias", value.bias), ("rows", value.rows)):
            if tensor is not None:
                tensors[f"{key}.{name}"] = tensor
        plain[part] = {"projection": key}
    elif isinstance(value, Norm):
        for name, tensor in (("weight", value.weight), ("bias", value.bias)):
            if tensor is not None:
                tensors[f"{key}.{name}"] = tensor
        plain[part] = {"norm": key, "eps": value.eps, "centred": value.centred, "offset": value.offset}
    else:
        plain[part] = list(value) if isinstance(value, tuple) else value


def parts(stack: str, plain: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Every part of a layer with the key its tensors are stored under."""
    return {part: (f"{stack}.{plain['index']}.{part}", value) for part, value in plain.items()}


def unpack(key: str, value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` stored."""
    if isinstance(value, dict) and "tensor" in value:
        return tensors[value["tensor"]]
    if isinstance(value, dict) and "projection" in value:
        return Projection(tensors[f"{key}.weight"], tensors.get(f"{key}.bias"), tensors.get(f"{key}.rows"))
    if isinstance(value, dict) and "norm" in value:
        return Norm(
            tensors.get(f"{key}.weight"), tensors.get(f"{key}.bias"), value["eps"], value["centred"], value["offset"]
        )
    return tuple(value) if isinstance(value, list) else value


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
