"""Effective attention: which part of an attention map does the head's output depend on?

Brunner et al., "On Identifiability in Transformers" (ICLR 2020), section 3.2: split each row of A into the part in
the left null space of the values, which the output never sees, and the rest, A⊥ = A − Proj_LN(V) A = A·P_V.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from whence.core.numerics.basis import centre, column_basis, unit_scale
from whence.core.numerics.causal_blocks import CausalPlan, causal_blocks, causal_plan
from whence.core.numerics.checks import Constraint, check_constraint, check_finite, check_pair, check_stray, shape
from whence.core.numerics.duplicate_keys import duplicate_means
from whence.core.numerics.masks import causal_keys, flat_index, full_mask, grouped, shared_keys
from whence.core.numerics.tolerances import FRESH_LEVERAGE, OUTPUT_SPREAD, measured_in, rank_eps
from whence.errors import InputError

# Numbers of V in a chunk of heads, 128 MB in float64: bounds the temporaries of a large batch.
_CHUNK = 1 << 24


def effective_attention(
    attention: Tensor,
    values: Tensor,
    *,
    constraint: Constraint = "output",
    visible: Tensor | None = None,
    outputs: Tensor | None = None,
) -> Tensor:
    """A⊥ = A·P, with P the projector on the column space of what each row can see.

    constraint "output": P projects on col(V), the paper's definition, the row of least norm with the same output.
    constraint "simplex": P projects on col([V, 1]); rows keep their sum, and an added value bias changes nothing.

    Args:
        attention: (…, n_query, n_key), real floating point. Rows need not be normalised.
        values: (…, n_key, d_v), bias included; leading dimensions broadcast against attention's (grouped-query
            attention: attention.unflatten(-3, (kv_heads, -1)) and values.unsqueeze(-3)).
        visible: boolean, broadcastable to (…, n_query, n_key), True where the row may look. Causal, padded and any
            other masks; each row is projected on the values it sees. A row that sees nothing comes back zero.
        outputs: (…, n_query, d_v), the head output AV if the model has already computed it; saves time only.

    Returns:
        (…, n_query, n_key) in attention's dtype, float32 at the coarsest; entries may be negative; zero at invisible
        keys. Equal to attention where a row's visible values are independent. Factorised in float64; the rank is decided
        per head (see `whence.core.attention.null_space`).

    >>> attention = torch.tensor([[0.5, 0.3, 0.2]])
    >>> values = torch.tensor([[1.0], [1.0], [-1.0]])  # three keys, one value dimension
    >>> effective_attention(attention, values)
    tensor([[ 0.2000,  0.2000, -0.2000]])
    >>> effective_attention(attention, values, constraint="simplex")
    tensor([[0.4000, 0.4000, 0.2000]])
    """
    check_constraint(constraint)
    batch = check_pair(attention, values, visible, finite=False)
    if outputs is not None:
        wanted = (attention.shape[-2], values.shape[-1])
        if outputs.ndim < 2 or tuple(outputs.shape[-2:]) != wanted:
            raise InputError(f"outputs has shape {shape(outputs)}; expected (…, {wanted[0]}, {wanted[1]}) = A @ V.")
        check_finite("outputs", outputs)
        if outputs.dtype not in (torch.float32, torch.float64):
            outputs = None  # rounded to half precision: A and V themselves say more
    attention = attention.detach().to(measured_in(attention.dtype))
    result = attention.new_empty(*batch, *attention.shape[-2:])
    if not result.numel():
        return result
    mask = None if visible is None else full_mask(visible, *attention.shape[-2:])
    keys = None if mask is None else shared_keys(mask)
    causal = causal_keys(mask) if mask is not None and keys is None else None
    if mask is not None and causal is None:
        check_finite("attention", attention)
        check_stray(attention, mask)
        if keys is None:
            _by_group(attention, values, mask, batch, constraint, result.zero_(), None)
            return result
    for a, v, c, out in _head_chunks(attention, values, outputs, result, mask):
        if mask is None or causal is None:
            _shared(a, v, keys, constraint, c, out)
        else:
            _causal(a, v, mask, causal, constraint, c, out)
    if mask is not None and not bool(mask.any(-1).all()):
        result.masked_fill_(~mask.any(-1, keepdim=True), 0.0)
    return result


def _head_chunks(
    attention: Tensor, values: Tensor, outputs: Tensor | None, result: Tensor, mask: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """A bounded number of heads at a time, so that a large batch needs no large float64 copy; else all at once."""
    batch = result.shape[:-2]
    heads = math.prod(batch)
    step = max(1, _CHUNK // (values.shape[-2] * values.shape[-1]))
    plain = attention.shape[:-2] == values.shape[:-2] == batch and (mask is None or mask.ndim == 2)
    if not plain or heads <= step or (outputs is not None and outputs.shape[:-2] != batch):
        yield attention, values, outputs, result
        return
    a, v, out = (t.reshape(heads, *t.shape[-2:]) for t in (attention, values, result))
    c = None if outputs is None else outputs.reshape(heads, *outputs.shape[-2:])
    for first in range(0, heads, step):
        some = slice(first, first + step)
        yield a[some], v[some], None if c is None else c[some], out[some]


def _shared(
    attention: Tensor,
    values: Tensor,
    keys: Tensor | None,
    constraint: Constraint,
    outputs: Tensor | None,
    result: Tensor,
) -> None:
    """Every row of a head sees the same keys: one basis a head, A⊥ = (AQ)Qᵀ, written into result."""
    n, width = values.shape[-2:]
    scaled, scale = unit_scale(values if keys is None else values.masked_fill(~keys.unsqueeze(-1), 0.0))
    valid = None if keys is None else keys.expand(scaled.shape[:-1]).reshape(-1, n)
    own_batch = scaled.shape[:-2]
    work = attention.dtype
    # In float32 products a basis error below eps/8 does not show.
    refine = 0.0 if work == torch.float64 else torch.finfo(work).eps / 8
    flat = scaled.reshape(-1, n, width)
    basis = column_basis(flat, valid, rank_eps(values.dtype), constraint, refine=refine)
    if bool(basis.identified.all()):
        check_finite("attention", attention)
        result.copy_(attention if keys is None else attention.masked_fill(~keys.unsqueeze(-2), 0.0))
        return
    # A row of zeros in V may come out of the factorisation with a rounding error in its place.
    clean = basis.q if valid is None else basis.q.masked_fill(~valid.unsqueeze(-1), 0.0)
    q = clean.to(work).reshape(*own_batch, *basis.q.shape[-2:])
    weights = attention.to(work)
    use_output = outputs is not None and bool((basis.regular & (basis.spread < OUTPUT_SPREAD)).all())
    if use_output and outputs is not None:
        # AQ = A V L⁻ᵀ = C L⁻ᵀ: d_v × d_v work in place of n × d_v.
        inverse = basis.inverse_factor.reshape(*own_batch, width, width)
        c = outputs.detach().to(torch.float64) / scale
        if constraint == "simplex":
            total = weights.sum(-1, keepdim=True, dtype=torch.float64)
            seen = torch.ones(scaled.shape[:-1], dtype=torch.bool) if keys is None else keys.expand(scaled.shape[:-1])
            c = c - total * centre(scaled, seen)[1]
            count = seen.sum(-1, keepdim=True).unsqueeze(-1).to(torch.float64)
            coordinates = torch.cat([c @ inverse.mT, (total / count.sqrt()).expand(*c.shape[:-1], 1)], -1).to(work)
        else:
            coordinates = (c @ inverse.mT).to(work)
    else:
        coordinates = weights @ q
        # NaN in a row of A shows in its d_v coordinates: n / d_v times less to read than A.
        if not bool(torch.isfinite(coordinates.sum())):
            check_finite("attention", attention)
    if result.dtype == work and coordinates.shape[:-2] == q.shape[:-2] == result.shape[:-2]:
        torch.matmul(coordinates, q.mT, out=result)
    else:
        result.copy_(coordinates @ q.mT)
    if bool(basis.identified.any()):
        check_finite("attention", attention)
        kept = attention if keys is None else attention.masked_fill(~keys.unsqueeze(-2), 0.0)
        result.copy_(torch.where(basis.identified.reshape(*own_batch, 1, 1), kept, result))


def _by_group(
    attention: Tensor,
    values: Tensor,
    mask: Tensor,
    batch: tuple[int, ...],
    constraint: Constraint,
    result: Tensor,
    wanted: Tensor | None,
) -> None:
    """Any mask: one basis for each distinct (value head, visible set); writes the wanted rows of result."""
    n_query, n_key = attention.shape[-2:]
    width = values.shape[-1]
    eps = rank_eps(values.dtype)
    scaled = unit_scale(values)[0].reshape(-1, n_key, width)
    rows = attention.reshape(-1, n_query, n_key)
    source = flat_index(tuple(attention.shape[:-2]), batch)
    out = result.view(-1, n_query, n_key)
    for group in grouped(mask, batch, tuple(values.shape[:-2]), wanted, width=width):
        basis = column_basis(scaled[group.value.unsqueeze(-1), group.keys], group.valid, eps, constraint)
        keys = group.keys.unsqueeze(1)
        a = rows[source[group.batch].unsqueeze(-1), group.row.unsqueeze(-1), keys].to(torch.float64)
        a = a * group.valid.unsqueeze(1)
        projected = (a @ basis.q) @ basis.q.mT
        projected = torch.where(basis.identified[:, None, None], a, projected).to(result.dtype)
        # Padded key slots point at invisible keys and hold zero, which is what belongs there.
        out[group.batch.unsqueeze(-1), group.row.unsqueeze(-1), keys] = projected


def _average_duplicates(
    attention: Tensor, mask: Tensor, plan: CausalPlan, head_mask: int, first_equal: Tensor, result: Tensor
) -> None:
    """The independent rows of a head in which keys have equal values, written into result."""
    n_query, n_key = result.shape[-2:]
    batch = tuple(result.shape[:-2])
    rows = plan.independent.reshape(-1, n_query)[head_mask].nonzero().squeeze(-1)
    for head in (flat_index(tuple(plan.independent.shape[:-1]), batch) == head_mask).nonzero().squeeze(-1).tolist():
        a = attention.reshape(-1, n_query, n_key)[flat_index(tuple(attention.shape[:-2]), batch)[head]]
        seen = mask.reshape(-1, n_query, n_key)[flat_index(tuple(mask.shape[:-2]), batch)[head]]
        result.view(-1, n_query, n_key)[head, rows] = duplicate_means(a[rows], first_equal, seen[rows]).to(result.dtype)


def _causal(
    attention: Tensor,
    values: Tensor,
    mask: Tensor,
    keys: Tensor,
    constraint: Constraint,
    outputs: Tensor | None,
    result: Tensor,
) -> None:
    """Row i sees a prefix: A⊥_i = (a_i Z) M_i Zᵀ block by block (`whence.core.numerics.causal_blocks`), written into result."""
    n_query, n_key = attention.shape[-2:]
    batch = tuple(result.shape[:-2])
    seen = mask.any(-1)
    plan = causal_plan(values, keys, n_query, constraint)
    done = plan.independent.clone()
    top = plan.first
    if not bool(plan.real.all()) or not bool(seen.all()):
        check_finite("attention", attention)
        check_stray(attention, mask)
    elif top:
        check_finite("attention", attention[..., :top, :])
        check_stray(attention[..., :top, :], mask[..., :top, :])
    result[..., :top, :] = torch.where(done[..., :top].unsqueeze(-1) & mask[..., :top, :], attention[..., :top, :], 0.0)
    direct = len(batch) > 0 and plan.scaled.shape[:-2] == batch
    for block in causal_blocks(plan):
        rows = slice(block.start, block.stop)
        fits = block.good.unsqueeze(-1) & ~done[..., rows]
        a = attention[..., rows, : block.end]
        # A sum first: the exact test, which also writes the message, runs only where the sum is not 0.
        stray = float(attention[..., rows, block.end :].sum()), float(a[..., block.base :].triu(1).sum())
        if stray != (0.0, 0.0):
            check_finite("attention", attention)
            check_stray(attention, mask)
        if bool(fits.any()):
            # Past keys have ‖z_j‖ ≤ 1, so float32 products are safe unless a fresh key is far outside the prefix.
            work = attention.dtype if block.fresh_leverage < FRESH_LEVERAGE else torch.float64
            z = block.z.to(work)
            total = a.to(work).sum(-1, keepdim=True).to(torch.float64) if block.drift is not None else None
            if outputs is None or not bool((block.spread < OUTPUT_SPREAD).all()):
                white = (a.to(work) @ z).to(torch.float64)
                if not bool(torch.isfinite(white.sum())):
                    check_finite("attention", attention)
            else:
                white = outputs[..., rows, :].detach().to(torch.float64) / plan.scale
                white = (white if total is None else white - total * block.origin) @ block.inverse_factor.mT
            if block.drift is not None and total is not None:
                white = white - total * block.drift
            y = block.apply(white)
            if direct and block.drift is None and work == result.dtype and bool(fits.all()):
                # Straight into place: a temporary of the block's size costs as much as the product.
                place = result.view(-1, n_query, n_key)[:, rows, : block.end]
                torch.bmm(y.to(work).flatten(0, -3), z.flatten(0, -3).mT, out=place)
                place[..., block.base :] *= block.triangle.to(work)
                result[..., rows, block.end :] = 0.0
                done[..., rows] = True
                continue
            found = y.to(work) @ z.mT
            if block.drift is not None and total is not None:
                found += (total * block.ones - (y * block.drift).sum(-1, keepdim=True)).to(work)
                if not bool(plan.real.all()):
                    found *= plan.real[..., None, : block.end]
            found[..., block.base :] *= block.triangle.to(work)
            found = found.to(result.dtype)
        else:
            found = result.new_zeros(())
        if not bool(fits.all()):
            kept = done[..., rows].unsqueeze(-1) & mask[..., rows, : block.end]
            found = torch.where(fits.unsqueeze(-1), found, torch.where(kept, a, 0.0))
        result[..., rows, : block.end] = found
        result[..., rows, block.end :] = 0.0
        done[..., rows] |= fits
    for head_mask, first_equal in plan.duplicate_keys.items():
        _average_duplicates(attention, mask, plan, head_mask, first_equal, result)
    # What is left (rank-deficient prefixes, misaligned padding) goes by distinct visible set.
    left = ~done.expand(*batch, n_query) & seen.expand(*batch, n_query)
    if bool(left.any()):
        _by_group(attention, values, mask, batch, constraint, result, left.reshape(-1, n_query))
