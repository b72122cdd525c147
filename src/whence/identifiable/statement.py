"""The identifiability statement: what is unique about a model's attention, from what, up to which length, and why.

Computed from the weights: ranks are measured (float64 singular values, relative tolerance), not assumed.
"""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from whence.core.numerics.tolerances import TIED_WEIGHTS
from whence.results.short_repr import short_repr

EVERY = "every length"

ROUNDING = 2 * torch.finfo(torch.float32).eps
"""Relative to σ_max: what rounding a matrix of any size to float32 can give a singular value that should be 0.

The rounding errors are independent entries of at most eps/2 of the weights, so their norm stays below eps·σ_max; a
factor of the size, usual for computed matrices, would call real directions of trained weights zero.
"""


@dataclass(frozen=True)
class LayerFacts:
    """What was measured in one layer; ranks and residuals are the worst over its heads."""

    layer: int
    key_size: int
    value_size: int
    value_to_output_rank: int  # rank of L · W_V,h · W_h (d × d), L the norm's linear part: what can pass through head h
    head_output_rank: int  # rank of W_h (d_v × d): full row rank = d_v
    tied_residual: float | None  # ‖K outside span[T, 1]‖ / ‖K‖ as maps of the input; None: keys are free
    output_rank: int  # rank of the whole output projection, (head · d_v × d) or, added heads, (d_v × d)
    output_rows: int
    output_condition: float  # σ_max / σ_min of it: how much noise a recovery of head outputs from the block amplifies


@dataclass(frozen=True)
class Statement:
    """`str()` gives the words, `to_dict()` the numbers.

    from_head: up to which n a row is the only softmax row with its head's output, among all rows of the simplex or,
    with tied keys, among all that some query produces. from_block: the same given only the attention block's output
    (before residual and norm), for the rows of all heads together. None: at no length beyond 1.
    """

    __repr__ = short_repr

    heads: int
    arrangement: str  # concat | add
    keys: str  # free | tied | shared
    attention: str  # softmax | uniform
    positions: str
    norm: str
    max_length: int
    simplex_from_head: int
    from_head: int | str
    from_block: int | str
    local: str  # what holds near the row for free keys
    layers: tuple[LayerFacts, ...]
    condition: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """The statement, a sentence at a time."""
        if self.attention == "uniform":
            return [
                (
                    "Attention is uniform by construction: every visible key gets the weight 1/n, so there is "
                    "nothing to identify. This model is the control."
                )
            ]
        first = self.layers[0]
        worst = min(f.value_to_output_rank for f in self.layers)
        residual = max(f.tied_residual or 0.0 for f in self.layers)
        arranged = "side by side" if self.arrangement == "concat" else "added up"
        keys = {"free": "free keys", "tied": "keys tied to values", "shared": "keys that are the values"}[self.keys]
        simplex = (
            "Given a head's own output, and whatever produced the weights, each row is unique up to "
            f"{self.simplex_from_head} tokens (n ≤ rank + 1, generic inputs) and not beyond."
        )
        out = [
            (
                f"{len(self.layers)} layer{'s' * (len(self.layers) > 1)} of {self.heads} heads {arranged}, {keys}, key size "
                f"{first.key_size}, value size {first.value_size}; measured value-to-output rank per head {worst}."
            )
        ]
        if self.keys == "free":
            out += [simplex, f"Among rows that softmax can produce from its keys: {self.local}"]
        elif self.from_head == EVERY:
            # One claim, and then what it does not cover: two lengths side by side read as a contradiction.
            out += [
                (
                    "Given a head's own output, each row is unique at every length among the rows that softmax can produce "
                    f"from its keys: keys are a linear map of values (K = V{'·M' if self.keys == 'tied' else ''}, measured "
                    f"residual outside span[T, 1] {residual:.0e}), so two rows with the same output have the same logarithm "
                    "up to a constant (Theorem 1)."
                ),
                (
                    "Weights that no query of this head can produce are not covered: in a text of more than "
                    f"{self.simplex_from_head} tokens (rank + 1) some of those share the output."
                ),
            ]
        else:
            out += [
                simplex,
                (
                    "Keys are tied to values, but the output projection of some head loses part of what the keys read, so "
                    f"Theorem 1 does not apply to it: only the {self.from_head} tokens above are claimed."
                ),
            ]
        worst_condition = max(f.output_condition for f in self.layers)
        if self.from_block == EVERY:
            out.append(
                "Given only the attention block's output (before residual and norm) the same holds: the output "
                f"projection has full row rank ({first.output_rank} of {first.output_rows}), so the block output "
                f"determines every head output; its condition number is {worst_condition:.3g}, by which recovery "
                "amplifies noise."
            )
        else:
            out.append(
                "Given only the attention block's output (before residual and norm) the rows of all heads together "
                f"are unique up to {self.from_block} tokens; beyond, other rows give the same block output (condition "
                f"number of the output projection {worst_condition:.3g})."
            )
        if self.norm == "post":
            out.append("After the post-norm one direction per row is lost (the mean and the scale are divided out).")
        if self.positions == "bias":
            out.append(
                "Position biases are added to the scores and do not depend on the query vector, so they change "
                "nothing here."
            )
        out.append(f"The model reads up to {self.max_length} tokens. Condition: {self.condition}")
        return out


def statement(model: Any) -> Statement:
    """The statement of an `IdentifiableModel` or `IdentifiableForSequenceClassification`."""
    config = model.config
    encoder = getattr(model, "model", model)
    facts = tuple(_facts(i, layer.attention, _norm_before(encoder, i)) for i, layer in enumerate(encoder.layers))
    heads = config.num_attention_heads
    return state(
        facts,
        heads=heads,
        arrangement=config.heads,
        keys=config.keys,
        attention=config.attention,
        positions=config.position_embedding_type,
        norm=config.norm,
        max_length=config.max_position_embeddings,
    )


def state(
    facts: tuple[LayerFacts, ...],
    *,
    heads: int,
    arrangement: str,
    keys: str,
    attention: str,
    positions: str,
    norm: str,
    max_length: int,
) -> Statement:
    """The conclusions from the measured facts (METHODS of the theorem: `modeling_identifiable`)."""
    simplex = min(f.value_to_output_rank for f in facts) + 1
    tied = all(f.tied_residual is not None and f.tied_residual <= TIED_WEIGHTS for f in facts)
    full = all(f.output_rank == f.output_rows for f in facts)
    from_head: int | str = EVERY if tied else simplex
    # Rows of all heads together: H(n − 1) unknowns, and the block output shows at most rank(W_O) of them.
    joint = 1 + min(f.output_rank for f in facts) // heads
    from_block: int | str = min(joint, simplex)
    if tied and full and arrangement == "concat":
        from_block = EVERY
    d_k, d_v = facts[0].key_size, facts[0].value_size
    if d_k < d_v:
        local = (
            f"key size {d_k} < value size {d_v}, so a row has no alternatives in its neighbourhood at any length "
            "(generic); far from it none has been found, which is no proof."
        )
    elif d_k == d_v:
        local = (
            f"key size = value size = {d_v}, so a row has no alternatives in its neighbourhood (generic), but beyond "
            f"{simplex} tokens others are found far from it in most rows of such models."
        )
    else:
        local = (
            f"key size {d_k} > value size {d_v}: beyond {simplex} tokens every row has a whole family of alternatives."
        )
    condition = (
        "evaluation mode (no dropout), masked tokens left out."
        if tied
        else "inputs in general position (repeated tokens without positions lower the rank), evaluation mode, masked "
        "tokens left out."
    )
    return Statement(
        heads,
        arrangement,
        keys,
        attention,
        positions,
        norm,
        max_length,
        simplex,
        from_head,
        from_block,
        local,
        facts,
        condition,
    )


def _norm_before(encoder: Any, number: int) -> Any:
    """The LayerNorm whose output layer `number`'s attention reads."""
    if encoder.config.norm == "pre":
        return encoder.layers[number].attention_norm
    return encoder.layers[number - 1].output_norm if number else encoder.embeddings.LayerNorm


def _facts(number: int, attention: Any, norm: Any) -> LayerFacts:
    heads, k, v = attention.sizes
    out = attention.output.weight.detach().double().T  # (h·v, d) or (v, d)
    slices = out.expand(heads, -1, -1) if attention.config.heads == "add" else out.unflatten(0, (heads, v))
    value = attention.value.weight.detach().double().unflatten(0, (heads, v)).mT  # (h, d, v)
    # A LayerNorm's output before gain and bias sums to 0, so inputs fill d − 1 dimensions and not d: with d_v = d the
    # values of n tokens have rank([T, 1]) ≤ d, and a row is unique up to d tokens, one less than d_v + 1.
    value = norm.weight.detach().double()[:, None] * value
    value = value - value.mean(-2, keepdim=True)
    mixing: Tensor | None = None
    if attention.config.attention == "softmax" and attention.config.keys != "free":
        tied = attention.config.keys == "tied"
        mixing = attention.mixing.detach().double() if tied else torch.eye(v, dtype=torch.float64).expand(heads, v, v)
    return facts_of(number, k, value, slices, out, mixing)


def facts_of(
    number: int, key_size: int, value: Tensor, slices: Tensor, output: Tensor, mixing: Tensor | None
) -> LayerFacts:
    """Measure one layer: value (head, d, d_v), slices (head, d_v, d), output (rows, d), mixing M (head, d_v, d_k)."""
    residual = None
    if mixing is not None:
        # K = V M lies in span[T] = V·col(W_h) iff M's columns lie in the column space of W_h.
        outside = mixing - _projector(slices) @ mixing
        through = torch.linalg.matrix_norm(value @ mixing).clamp_min(torch.finfo(torch.float64).tiny)
        residual = float((torch.linalg.matrix_norm(value @ outside) / through).max())
    singular = torch.linalg.svdvals(output)
    rows = output.shape[0]
    condition = (
        float(singular[0] / singular[-1]) if rows <= output.shape[1] and float(singular[-1]) > 0 else float("inf")
    )
    return LayerFacts(
        layer=number,
        key_size=key_size,
        value_size=value.shape[-1],
        value_to_output_rank=int(rank(value @ slices).min()),
        head_output_rank=int(rank(slices).min()),
        tied_residual=residual,
        output_rank=int(rank(output)),
        output_rows=rows,
        output_condition=condition,
    )


def rank(matrix: Tensor) -> Tensor:
    """Numerical rank of float32 weights held in float64: singular values above ROUNDING · σ_max."""
    singular = torch.linalg.svdvals(matrix)
    count: Tensor = (singular > singular[..., :1] * ROUNDING).sum(-1)
    return count


def _projector(slices: Tensor) -> Tensor:
    """The orthogonal projector on the column space of each W_h: (head, d_v, d) → (head, d_v, d_v)."""
    left, singular, _ = torch.linalg.svd(slices, full_matrices=False)
    keep = singular > singular[..., :1] * ROUNDING
    basis: Tensor = left * keep[..., None, :]
    projector: Tensor = basis @ basis.mT
    return projector
