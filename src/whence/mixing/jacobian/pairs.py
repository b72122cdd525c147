"""How scores react where positions enter them through queries and keys (DeBERTa): one pair of tokens at a time.

    δS_jm = δq_j · κ_jm + δk_m · χ_jm

holds for any scores that depend on the two tokens alone. κ and χ are found from the model's own forward mode, which
shows how the weights move: δ log A_jm = δS_jm − c_j with c_j = Σ_m A_jm δS_jm. Two steps:

1. A direction at the tokens of a set P only. In a row j outside P nothing moves but what P's keys bring: S_jm stands
   still for m outside P, which gives c_j, and then δk_m · χ_jm for m in P. Sets are chosen so that for every two tokens one
   set has the second and not the first: a few more than log₂ n of them will do (Sperner). Where all of a row's
   attention is on P nothing stands still: such pairs are tried again, one token at a time.
2. A direction at all tokens. Without what step 1 explains, row j is left with
   δq_j · (κ_jm − κ̄_j) + δk_j · χ_jj ([m = j] − A_jj), which is all that is needed, since a constant added to a row of κ
   changes nothing where rows sum to 1.

d_k directions a set and 2 d_k for the second step, and a few to spare, for all heads and layers at once. Whether the
scores are of that kind is told afterwards: the folding is proved against forward mode through the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, islice

import torch
from torch import Tensor

from whence.mixing.jacobian.scores import Scores
from whence.reading.trace import Layer

Moved = tuple[Tensor, Tensor, Tensor]
"""δq, δk (c, head, n, d_k) and δA (c, head, n, n) of one layer."""

_SPARE = 8


def paired_scores(layers: tuple[Layer, ...], push: Callable[[Tensor], list[Moved]]) -> list[Scores]:
    """κ and χ of every layer. push: directions (c, n, d) at every block's input → what moves in each layer."""
    n, width = layers[0].block_input.shape
    size = max(layer.queries.shape[-1] for layer in layers)
    count = min(width, 2 * size + _SPARE)
    random = torch.randn(width, count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    directions = torch.linalg.qr(random).Q.T.to(layers[0].block_input)
    found = [_Layer(layer) for layer in layers]
    few = directions[: min(count, size + _SPARE)]

    def move(tokens: Tensor) -> None:
        for one, moved in zip(found, push(few[:, None] * tokens[:, None].to(few)), strict=True):
            one.see_keys(moved, tokens)

    for tokens in separating(n).to(directions.device):
        move(tokens)
    for token in torch.stack([one.missing() for one in found]).any(0).nonzero()[:, 0].tolist():
        move(torch.arange(n, device=directions.device) == token)
    for one, moved in zip(found, push(directions[:, None].expand(-1, n, -1)), strict=True):
        one.see_queries(moved)
    dtype = layers[0].block_input.dtype
    return [Scores(1.0, one.layer.attention, one.kappa.to(dtype), one.chi.to(dtype)) for one in found]


def cost(layer: Layer, depth: int) -> tuple[int, int]:
    """What `paired_scores` takes for `depth` layers like this one: directions followed, and bytes held at once."""
    heads, n, _ = layer.shape
    size = layer.queries.shape[-1]
    followed = len(separating(n)) * (size + _SPARE) + 2 * size + _SPARE
    bytes_each = layer.attention.element_size()
    # κ and χ in float64, and what forward mode holds of all directions of the second step.
    moving = (2 * size + _SPARE) * bytes_each * (4 * heads * n * n + 16 * n * layer.block_input.shape[-1])
    return followed, depth * heads * n * n * 2 * 8 * size + moving * (depth // 2 + 2)


def separating(n: int) -> Tensor:
    """(set, token): for any two tokens j ≠ m some set has m and not j. No token's list of sets holds another's.

    >>> separating(6).shape
    torch.Size([4, 6])
    """
    sets = next(t for t in range(1, n + 2) if math.comb(t, t // 2) >= n)
    member = torch.zeros(sets, n, dtype=torch.bool)
    for token, own in enumerate(islice(combinations(range(sets), sets // 2), n)):
        member[list(own), token] = True
    return member


class _Layer:
    """κ and χ of one layer, (head, n, n, d_k) each, as they become known."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.attention = layer.attention.double()
        self.kappa = self.attention.new_zeros(*layer.attention.shape, layer.queries.shape[-1])
        self.chi = torch.zeros_like(self.kappa)
        self._known = torch.zeros_like(self.attention, dtype=torch.bool)  # (head, j, m)
        torch.diagonal(self._known, dim1=1, dim2=2).fill_(True)  # the diagonal comes last
        limits = torch.finfo(layer.attention.dtype)
        self._least = limits.tiny / limits.eps  # of attention, for its changes to have all their digits

    def missing(self) -> Tensor:
        """(n): tokens m with a χ_jm that is not known and matters: with A_jm = 0 or 1, δA is 0 whatever it is."""
        matters = (self.attention > 0) & (self.attention < 1)
        return (matters & ~self._known).any(0).any(0)

    def see_keys(self, moved: Moved, tokens: Tensor) -> None:
        """Step 1, directions at `tokens` (n): χ_jm for j outside them and m among them."""
        still = torch.where(tokens, 0.0, self.attention)  # what c_j is told from
        told = still.sum(-1) > self._least
        new = tokens & ~tokens[:, None] & ~self._known & told[..., None]
        if not bool(new.any()):
            return
        key, change = self._keys(moved[1]), self._change(moved[2])  # (head, n, c, d_k), (head, j, c, m)
        mean = (change * still[:, :, None]).sum(-1, keepdim=True) / _above_zero(still.sum(-1))[..., None, None]
        scores = (change - mean).permute(0, 3, 2, 1)  # (head, m, c, j): δS
        found = (torch.linalg.pinv(key) @ scores).permute(0, 3, 1, 2)  # (head, j, m, d_k)
        self.chi = torch.where(new[..., None], found, self.chi)
        self._known |= new

    def see_queries(self, moved: Moved) -> None:
        """Step 2, directions at all tokens: κ, and the diagonal of χ."""
        query, key, change = moved[0].double().permute(1, 2, 0, 3), self._keys(moved[1]), self._change(moved[2])
        brought = torch.einsum("hmcd,hjmd->hjcm", key, self.chi)  # δk_m · χ_jm; nothing on the diagonal yet
        change = change - brought + (brought * self.attention[:, :, None]).sum(-1, keepdim=True)
        change = torch.where(self.attention[:, :, None] > 0, change, 0.0)
        both = torch.linalg.pinv(torch.cat([query, key], -1)) @ change  # (head, j, 2 d_k, m)
        size = query.shape[-1]
        self.kappa = both[:, :, :size].transpose(2, 3).contiguous()
        own = both[:, :, size:]  # χ_jj ([m = j] − A_jj)
        others = self.attention.clone()
        torch.diagonal(others, dim1=1, dim2=2).zero_()
        rest = others.sum(-1, keepdim=True)
        mean = (own * others[:, :, None]).sum(-1) / _above_zero(rest)
        at = torch.diagonal(own, dim1=1, dim2=3).transpose(1, 2)  # (head, j, d_k)
        torch.diagonal(self.chi, dim1=1, dim2=2).copy_(torch.where(rest > 0, at - mean, 0.0).transpose(1, 2))

    def _keys(self, key: Tensor) -> Tensor:
        """δk by (query) head: (head, n, c, d_k)."""
        key = key.double().permute(1, 2, 0, 3)
        return key.repeat_interleave(len(self.attention) // len(key), dim=0)

    def _change(self, weights: Tensor) -> Tensor:
        """δ log A, (head, j, c, m); 0 where there is no weight."""
        weights = weights.double().permute(1, 2, 0, 3)
        attention = self.attention[:, :, None]
        return torch.where(attention > 0, weights / _above_zero(attention), 0.0)


def _above_zero(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).tiny)
