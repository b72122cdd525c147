"""Shrink a config class's defaults to a few thousand parameters, keeping one of each kind of layer.

The rule: start from the class's own defaults, so that every switch the family is known for stays on, and
replace sizes by name. Lists with one entry per layer are cut to the same few layers together, chosen so that
every distinct combination of layer kinds is still there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from conformance.sizes import (
    HEAD_DIM,
    HIDDEN,
    LAST_FREE_ID,
    POSITIONS,
    SCALARS,
    SIZES,
    TOKEN_IDS,
    VOCAB,
    WIDE_HEAD_DIM,
)

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def layer_count(config: PretrainedConfig) -> int | None:
    """How many layers the config says it has, under whichever of the usual names."""
    for name in _LAYER_COUNTS:
        count: object = getattr(config, name, None)
        if isinstance(count, int):
            return count
    return None


def kept_layers(per_layer: Mapping[str, list[Any]], count: int, least: int = 2) -> list[int]:
    """Layers that show every distinct combination of the per-layer lists once, and at least `least`."""
    seen: dict[str, int] = {}
    for index in range(count):
        seen.setdefault(repr([values[index] for values in per_layer.values()]), index)
    kept = sorted(seen.values())
    spare = (index for index in range(count) if index not in kept)
    while len(kept) < min(least, count):
        kept.append(next(spare))
    return sorted(kept)


def _per_layer_lists(fields: Mapping[str, Any], count: int | None) -> dict[str, list[Any]]:
    """Lists as long as the model is deep, except lists of layer numbers."""
    if count is None or count < 3:
        return {}
    return {
        name: list(value)
        for name, value in fields.items()
        if isinstance(value, (list, tuple)) and len(value) == count and list(value) != list(range(count))
    }


def _token_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Every special-token id inside the small vocabulary and outside the range the inputs are drawn from."""
    ids: dict[str, Any] = {}
    spare = LAST_FREE_ID + 1
    for name, value in fields.items():
        if not name.endswith(("_token_id", "_token_index")) or value is None:
            continue
        if name in TOKEN_IDS:
            ids[name] = TOKEN_IDS[name]
        else:
            ids[name] = min(spare, VOCAB - 1)
            spare += 1
    return ids


def _head_dim(fields: Mapping[str, Any]) -> int | None:
    """A head size that keeps the family's habit: heads x size = width, or heads wider than the stream."""
    if fields.get("qk_rope_head_dim") is not None:
        return min(int(fields["qk_rope_head_dim"]), SIZES["qk_rope_head_dim"])
    size, width, heads = (fields.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if size is None:
        return None
    if isinstance(width, int) and isinstance(heads, int) and size * heads != width:
        return WIDE_HEAD_DIM
    return HEAD_DIM


def _rope(value: Any, head_dim: int) -> Any:
    """RoPE parameters whose lengths (mrope sections, longrope factors) follow the small head."""
    if not isinstance(value, dict):
        return value
    small = {name: _rope(inner, head_dim) for name, inner in value.items()}
    rotary = int(head_dim * small.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if small.get(name):
            small[name] = [1.0 + 0.1 * i for i in range(rotary)]
    if small.get("original_max_position_embeddings"):
        small["original_max_position_embeddings"] = POSITIONS // 2
    if small.get("mrope_section"):
        parts = len(small["mrope_section"])
        small["mrope_section"] = [rotary - (parts - 1) * (rotary // parts), *[rotary // parts] * (parts - 1)]
    return small


def small_fields(default: PretrainedConfig) -> dict[str, Any]:
    """The keyword arguments that turn a config class's defaults into a small config of the same kind."""
    fields = {
        name: value
        for name, value in vars(default).items()
        if not name.startswith("_") and not isinstance(value, PretrainedConfig)
    }
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name in SIZES and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            small[name] = min(value, SIZES[name])
        elif name in SCALARS and isinstance(value, (int, float)):
            small[name] = SCALARS[name]
    small |= _token_ids(fields)
    heads, kv_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if kv_heads is not None and kv_heads == 1 != heads:
        small["num_key_value_heads"] = 1  # multi-query stays multi-query
    if kv_heads is not None and "kv_lora_rank" in fields:
        small["num_key_value_heads"] = small["num_attention_heads"]  # latent attention has a key per head
    if fields.get("embedding_size", fields.get("hidden_size")) != fields.get("hidden_size"):
        small["embedding_size"] = HIDDEN // 2  # a factorised embedding stays factorised
    head_dim = _head_dim(fields)
    if head_dim is not None:
        small["head_dim"] = head_dim
    for name in ("rope_parameters", "rope_scaling"):
        if fields.get(name):
            small[name] = _rope(fields[name], head_dim or HEAD_DIM)
    count = layer_count(default)
    lists = _per_layer_lists(fields, count)
    if lists and count is not None:
        kept = kept_layers(lists, count)
        small |= {name: [values[index] for index in kept] for name, values in lists.items()}
        small |= {name: len(kept) for name in _LAYER_COUNTS if name in small}
    if "use_cache" in fields:
        small["use_cache"] = False
    return small


def shrink(cls: type[PretrainedConfig], overrides: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """A small config of class `cls`; `overrides` win, and those of a sub-config's name are merged into it."""
    overrides = dict(overrides or {})
    default = cls()
    fields = small_fields(default)
    for name, sub in vars(default).items():
        if isinstance(sub, PretrainedConfig):
            fields[name] = shrink(type(sub), overrides.pop(name, {}))
    return cls(**(fields | overrides))
