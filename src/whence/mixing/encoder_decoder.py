"""ALTI+: an encoder and its decoder together, so that source and target prefix share out every row.

Ferrando et al., "Towards Opening the Black Box of Neural Machine Translation" (EMNLP 2022). In a decoder layer the
cross-attention block's row is shared between the source tokens and its residual, which is the self-attention's output:

    C_l = [ C_cross | diag(c_residual) · C_self ],   rows sum to 1 over source and target prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whence.core.numerics.tolerances import state_agreement
from whence.errors import WiringError
from whence.mixing.contributions import Contributions
from whence.mixing.mixture import check_rows
from whence.reading.trace import Layer, Trace
from whence.reading.wiring.op_graph import deviation
from whence.results.labels import Tokens


def together(
    trace: Trace, name: str, matrices: Mapping[str, Sequence[tuple[Tensor, Tensor]]], settings: Mapping[str, Any]
) -> Contributions:
    """[decoder layer, target token, source tokens then target tokens], with the encoder's layers beside it.

    matrices: by stack and layer, (query, source) and how many of its rows are degenerate.
    """
    decoder, cross = trace.of("decoder"), trace.of("cross")
    if len(decoder) != len(cross):
        raise WiringError(
            f"{len(decoder)} decoder layers and {len(cross)} layers of cross-attention do not go together one by one; "
            "choose attention='encoder' or 'decoder'."
        )
    rows, degenerate = [], []
    pairs = zip(zip(decoder, cross, strict=True), matrices["decoder"], matrices["cross"], strict=True)
    for (own, other), (inside, first), (across, second) in pairs:
        _check_order(own, other)
        rows.append(torch.cat([across[:, :-1], across[:, -1:] * inside], dim=1))
        degenerate.append(first + second)
    extra = {"degenerate": torch.stack(degenerate)}
    if "encoder" in trace.stacks:
        extra["encoder"] = torch.stack([matrix for matrix, _ in matrices["encoder"]])
    else:  # a decoder that was handed its encoder's states
        extra["encoder"] = torch.eye(len(cross.key_tokens)).to(rows[0])[None]
    return Contributions.of_stack(
        decoder,
        check_rows(torch.stack(rows), name),
        trace.provenance.by(name, attention="encoder and decoder", **settings),
        key_tokens=joined(cross.key_tokens, decoder.tokens),
        extra=extra,
    )


def _check_order(own: Layer, other: Layer) -> None:
    """The cross-attention's residual must be what the self-attention gave, or the shares would not be of one state."""
    error = deviation(other.block_input, own.after_attention)
    if error > state_agreement(other.block_input.dtype):
        raise WiringError(
            f"decoder layer {own.index}: its cross-attention does not read what its self-attention gave (they differ by "
            f"{error:.1e}); choose attention='encoder' or 'decoder'."
        )


def joined(source: Tokens, target: Tokens) -> Tokens:
    """Source then target, as one sequence of labels; words of the two stay apart."""
    last = max((w for w in source.words or () if w is not None), default=-1) + 1
    words = None
    if source.words is not None and target.words is not None:
        words = (*source.words, *(None if w is None else w + last for w in target.words))
    ids = None if source.ids is None or target.ids is None else (*source.ids, *target.ids)
    return replace(
        source,
        text=(*source.text, *target.text),
        raw=(*source.raw, *target.raw),
        ids=ids,
        spans=None,
        words=words,
        special=(*source.special, *target.special),
    )
