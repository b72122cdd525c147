"""Could some query have produced it? Alternatives under the key constraint (Bhardwaj et al. 2021, made exact)."""

from __future__ import annotations

import torch
from torch import Tensor

from whence.attention.heads import identifying_values, row_of
from whence.core.attention.reachable_rows import near_tied, reachable_dimension
from whence.core.attention.search_reachable import search_reachable
from whence.errors import WiringError
from whence.reading.trace import Layer


def proved_keys(layer: Layer) -> Tensor:
    """[head, key, d_k], refused where the attention was not shown to be softmax(scale · QKᵀ + mask)."""
    if not layer.keys_proved:
        raise WiringError(
            f"layer {layer.index}: its attention was not shown to be softmax(scale · query · key + mask), so the keys "
            "say nothing of which rows some query could produce (a soft cap, sinks, a bias that depends on the query, or a "
            "model that is not on transformers' attention interface). Use the measures without keys."
        )
    return layer.keys.cpu()  # where ranks are worked out, see `whence.attention.heads`


def key_constraint(layer: Layer) -> dict[str, Tensor]:
    """Per row the local dimension of the reachable alternatives, per head the near-tied bound.

    reachable_dimension [head, query]: −1 where float64 cannot tell; reachable_ratio: the margin of that decision;
    near_tied_bound [head]: total variation of any reachable alternative whose query differs by at most the diameter
    of this head's own queries in this text (conditional on that, and for a row that sees every key); tied [head]:
    keys are a function of the values.
    """
    keys = proved_keys(layer)
    heads = len(layer.heads)
    values = identifying_values(layer)
    values = values.repeat_interleave(heads // values.shape[0], dim=0)
    visible = None if layer.visible is None else layer.visible.cpu()
    search = reachable_dimension(layer.attention.cpu(), keys, values, visible=visible)
    scale = layer.scale if layer.scale is not None else 1.0
    near = near_tied(keys, values, queries=layer.queries.to("cpu", torch.float64) * scale)
    dimension = torch.where(search.determined, search.dimension, -1.0)
    return {
        "reachable_dimension": dimension.nan_to_num(-1.0).to(torch.int64),
        "reachable_ratio": search.ratio,
        "near_tied_bound": near.bound,
        "tied": near.tied,
    }


def key_constrained_witness(
    layer: Layer, index: int, query: int, starts: int, seed: int
) -> tuple[Tensor, float, float, bool, str]:
    """Another row that some query could have produced: it, its distance, its residual, whether found, and in words."""
    keys = proved_keys(layer)[index]
    row, values, visible = row_of(layer, index, query)
    total = row.to(torch.float64).sum()
    search = search_reachable(row.to(torch.float64) / total, keys, values, starts=starts, visible=visible, seed=seed)
    distance = 0.5 * float((search.alternative - search.row).abs().sum())
    return search.alternative * total, distance, search.residual, search.exists, search.verdict
