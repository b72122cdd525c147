"""How the parts of a layer go into a file and come back: tensors among the tensors, the rest as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from whence.reading.wiring.equation import AXES, PARALLEL, POST, PRE, SANDWICH, Wiring
from whence.reading.wiring.norms import Norm
from whence.reading.wiring.projection import Projection
from whence.results.declared import Array, check_arrays, check_kinds

KINDS = (POST, PRE, SANDWICH, PARALLEL)
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


LAYER = {
    name: Array(axes, "boolean" if name == "visible" else "float", needed=False)
    for name, axes in (
        ("_attention", "head query key"),
        ("_queries", "head query d_k"),
        ("grouped_keys", "key_group key d_k"),
        ("grouped_values", "group key d_v"),
        ("_outputs", "head query d_v"),
        ("visible", "query? key? | head? query? key?"),
        ("bias", "head? query? key? | query? key? | key?"),
        ("sink", "head query"),
        ("_block_input", "query d"),
        ("_after_attention", "query d"),
        ("_block_output", "query d"),
        ("_before_second_norm", "query d"),
        ("_side", "query d"),
        ("_projection.weight", "head d_v d"),
        ("_projection.bias", "d"),
        ("_projection.rows", "query d_v d_v"),
        *((f"wiring.{name}", axes) for name, axes in AXES.items()),
        ("second_norm.weight", "d"),
        ("second_norm.bias", "d"),
    )
}
"""The arrays of a layer, those within its parts by their way there."""

PASS = {
    "logits": Array("token label | label", needed=False),
    "final_states": Array("state d", needed=False),
    "inputs.input_ids": Array("codebook given", "integer", needed=False),
    "inputs.attention_mask": Array("1 given | 1 one? row? given", "any", needed=False),
    "inputs.token_type_ids": Array("1 given", "integer", needed=False),
    "inputs.inputs_embeds": Array("1 given width", needed=False),
    "inputs.decoder_input_ids": Array("codebook answered", "integer", needed=False),
}
"""The arrays of a pass (models of sound have a row of ids a codebook); inputs of other names are the model's own affair."""


def check_pass(trace: Any) -> None:
    """What a pass was given and what it gave fit together; else a ValueError."""
    given = {f"inputs.{name}": tensor for name, tensor in trace.inputs.items()}
    answer = trace.stacks.get("decoder")
    sizes = {"answered": len(answer.tokens)} if answer is not None and answer.tokens else {}
    check_arrays(PASS, {"logits": trace.logits, "final_states": trace.final_states, **given}, sizes)


def check_layer(layer: Any, queries: int, keys: int) -> None:
    """A layer's parts are what they are declared to be, and as long as its heads and its stack's tokens ask for.

    A stack whose layers differ in length has no tokens: then every layer has lengths of its own. Else a ValueError.
    """
    check_kinds(layer)
    heads = len(layer.heads)
    if not heads or len(set(layer.heads)) != heads or min(*layer.heads, layer.index) < 0:
        raise ValueError(f"layer {layer.index} has heads {layer.heads}, which cannot be told apart")
    sizes = {"head": heads} | ({"query": queries, "key": keys} if queries and keys else {})
    try:
        check_arrays(LAYER, {name: _at(layer, name) for name in LAYER}, sizes)
    except ValueError as problem:
        raise ValueError(f"in layer {layer.index}, {problem}") from None
    for name in ("grouped_keys", "grouped_values"):
        grouped = getattr(layer, name)
        if grouped is not None and heads % max(len(grouped), 1):
            raise ValueError(f"in layer {layer.index}, {heads} heads do not share {len(grouped)} {name}")
    if layer.wiring is not None and layer.wiring.kind not in KINDS:
        raise ValueError(f"layer {layer.index} is {layer.wiring.kind!r} wired, which is none of {', '.join(KINDS)}")
    needed = [layer._queries, layer.grouped_keys, layer._outputs, layer.grouped_values]
    if layer.rebuilt and (any(t is None for t in needed) or (layer.scale is None and layer.cap is None)):
        raise ValueError(
            f"layer {layer.index} lacks what its attention is made from: queries, keys, values, outputs, and their scale"
        )


def _at(layer: Any, name: str) -> Tensor | None:
    """The tensor of that name, or None where there is none, or a plain number in its place."""
    part = layer
    for step in name.split("."):
        part = None if part is None else getattr(part, step)
    return part if isinstance(part, Tensor) else None
