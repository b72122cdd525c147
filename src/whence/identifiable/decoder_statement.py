"""What is unique about a decoder's attention: the theorem, its conditions, and the numbers, from the weights.

Ranks and condition numbers are measured (float64 singular values), not assumed.
"""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from whence.core.numerics.tolerances import TIED_WEIGHTS
from whence.identifiable.configuration_identifiable_decoder import uncovered
from whence.identifiable.statement import EVERY, rank
from whence.results.short_repr import short_repr

THEOREM_A = "Theorem A"
THEOREM_B = "Theorem B"


@dataclass(frozen=True)
class DecoderLayerFacts:
    """What was measured in one layer; ranks, residuals and conditions are the worst over its heads."""

    layer: int
    head_output_rank: int  # rank of W_h (d_v × d); full row rank = d_v
    head_output_condition: float  # σ_max/σ_min of the worst W_h
    tied_residual: float | None  # share of the key lost where W_h is not of full row rank; None: keys are free
    output_rank: int  # rank of W_O (head · d_v × d)
    output_rows: int
    output_condition: float  # cond(W_O): what a recovery of head outputs from the block's output multiplies noise by


@dataclass(frozen=True)
class DecoderStatement:
    """`str()` gives the words, `to_dict()` the numbers.

    theorem: "Theorem A", "Theorem B" (generic) or None. failing: the condition of Theorem A that does not hold.
    from_head: up to how many visible tokens a row is the only one that some query produces with its head's output.
    from_block: the same, given only the attention block's output. simplex_from_head: among all rows of the simplex.
    """

    __repr__ = short_repr

    heads: int
    key_value_heads: int
    key_size: int
    value_size: int
    keys: str
    attention: str
    positions: str
    rotated_values: bool
    sink: str
    theorem: str | None
    failing: str | None
    simplex_from_head: int
    from_head: int | str
    from_block: int | str
    cache_numbers: int  # kept for every token, all layers
    layers: tuple[DecoderLayerFacts, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """The statement, a sentence at a time."""
        if self.attention == "uniform":
            return ["Attention is uniform by construction, so there is nothing to identify. This model is the control."]
        worst = max(f.output_condition for f in self.layers)
        slices = max(f.head_output_condition for f in self.layers)
        out = [
            (
                f"{len(self.layers)} layer{'s' * (len(self.layers) > 1)} of {self.heads} heads, {self.key_value_heads} of "
                f"keys and values, key size {self.key_size}, value size {self.value_size}, positions: {self.positions}."
            ),
            (
                "Among all rows of the simplex, given a head's own output, a row is unique while it sees up to "
                f"{self.simplex_from_head} tokens (generic inputs) and not beyond."
            ),
        ]
        if self.theorem == THEOREM_A:
            tie = "K = V" if self.keys == "shared" else "K = V·M"
            how = ", values turned as keys and the output turned back" if self.rotated_values else ""
            out.append(
                f"Among rows that some query reaches, every row is unique at every length (Theorem A): {tie}{how}, so "
                "two rows with the same output have the same logarithm up to a constant. Conditions, checked: no norm, "
                "bias or soft cap on keys alone; position biases do not depend on the query; every head's part of the "
                f"output matrix has full row rank (condition at most {slices:.3g}; part of a key that it loses "
                f"{max(f.tied_residual or 0.0 for f in self.layers):.0e})."
            )
        elif self.theorem == THEOREM_B:
            out.append(
                f"Among rows that some query reaches, a row is unique for almost every value matrix (Theorem B: key "
                f"size {self.key_size} < value size {self.value_size}). Generic only: no bound says how far a row with "
                f"almost the same output can lie. Theorem A does not apply: {self.failing}"
            )
        else:
            out.append(
                f"Among rows that some query reaches nothing is proved beyond {self.simplex_from_head} tokens, and "
                f"second rows are found in most such models: {self.failing}"
            )
        if self.from_block == EVERY:
            out.append(
                "Given only the attention block's output the same holds, since the output matrix has full row rank; "
                f"its condition number is {worst:.3g}, by which recovery multiplies noise: exact, but "
                f"{'fragile' if worst > 1e3 else 'usable'}."
            )
        else:
            out.append(
                f"Given only the attention block's output, rows are claimed unique up to {self.from_block} tokens "
                f"(condition number of the output matrix {worst:.3g})."
            )
        out.append(
            f"The cache keeps {self.cache_numbers:,} numbers for every token"
            + (": one tensor a head, key and value at once." if self.keys != "free" else ", keys and values.")
        )
        return out


def decoder_statement(model: Any) -> DecoderStatement:
    """The statement of an `IdentifiableForCausalLM` or `IdentifiableDecoderModel`."""
    config = model.config
    layers = getattr(model, "model", model).layers
    facts = tuple(_facts(i, layer.attention) for i, layer in enumerate(layers))
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    key, value = config.key_size, config.value_size
    failing = uncovered(config)
    lost = max((f.tied_residual or 0.0) for f in facts)
    if failing is None and lost > TIED_WEIGHTS:
        failing = f"the output matrix of some head loses {lost:.0e} of what its keys read."
    theorem = THEOREM_A if failing is None else None
    if theorem is None and config.softcap is None and key < min(f.head_output_rank for f in facts):
        theorem = THEOREM_B
    simplex = min(f.head_output_rank for f in facts) + (config.sink == "none")  # a sink's value, 0, takes one away
    full = all(f.output_rank == f.output_rows for f in facts)
    joint = 1 + min(f.output_rank for f in facts) // heads
    unique = config.attention == "softmax" and theorem == THEOREM_A
    stored = groups * (value + (key if config.keys == "free" and config.attention == "softmax" else 0))
    return DecoderStatement(
        heads=heads,
        key_value_heads=groups,
        key_size=key,
        value_size=value,
        keys=config.keys,
        attention=config.attention,
        positions=config.position_embedding_type,
        rotated_values=bool(config.rotate_values),
        sink=config.sink,
        theorem=theorem if config.attention == "softmax" else None,
        failing=failing,
        simplex_from_head=simplex,
        from_head=EVERY if unique else simplex,
        from_block=EVERY if unique and full else min(joint, simplex),
        cache_numbers=stored * len(facts),
        layers=facts,
    )


def _facts(number: int, attention: Any) -> DecoderLayerFacts:
    heads, groups, k, v = attention.sizes
    out = attention.output.weight.detach().double().T  # (head · v, d)
    slices = out.unflatten(0, (heads, v))
    singular, single = torch.linalg.svdvals(out), torch.linalg.svdvals(slices)
    residual: float | None = None
    if attention.config.keys != "free" and attention.config.attention == "softmax":
        residual = _lost(slices, _mixing(attention, groups, v, k).repeat_interleave(heads // groups, dim=0))
    fits = v <= out.shape[1]
    return DecoderLayerFacts(
        layer=number,
        head_output_rank=int(rank(slices).min()),
        head_output_condition=_ratio(single[..., 0], single[..., -1]) if fits else float("inf"),
        tied_residual=residual,
        output_rank=int(rank(out)),
        output_rows=out.shape[0],
        output_condition=_ratio(singular[0], singular[-1]) if out.shape[0] <= out.shape[1] else float("inf"),
    )


def _ratio(largest: Tensor, smallest: Tensor) -> float:
    return float((largest / smallest).max()) if bool((smallest > 0).all()) else float("inf")


def _mixing(attention: Any, groups: int, v: int, k: int) -> Tensor:
    """M (group, v, k), written out: what the model itself makes of the rows of the identity."""
    identity = torch.eye(v, dtype=attention.value.weight.dtype).expand(1, groups, v, v)
    with torch.no_grad():
        made: Tensor = attention.tie(identity.to(attention.value.weight.device))[0]
    return made.cpu().double().reshape(groups, v, k)


def _lost(slices: Tensor, mixing: Tensor) -> float:
    """The share of M outside the column space of W_h: what T = V·W_h no longer shows of K = V·M."""
    left, singular, _ = torch.linalg.svd(slices.cpu(), full_matrices=False)
    basis = left * (singular > singular[..., :1] * 2 * torch.finfo(torch.float32).eps)[..., None, :]
    outside = mixing - basis @ (basis.mT @ mixing)
    share = torch.linalg.matrix_norm(outside) / torch.linalg.matrix_norm(mixing).clamp_min(1e-300)
    return float(share.max())
