"""Effective attention: which part of an attention map does the head's output depend on?

Brunner et al., "On Identifiability in Transformers" (ICLR 2020), section 3.2: split each row of A into the part in
the left null space of the values, which the output never sees, and the rest, A⊥ = A − Proj_LN(V) A = A·P_V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.core._basis import centre, column_basis, rank_eps, unit_scale
from whence.core._causal import causal_blocks, causal_plan
from whence.core._checks import Constraint, check_constraint, check_finite, check_pair, check_stray, shape
from whence.core._units import causal_keys, flat_index, full_mask, grouped, shared_keys
from whence.errors import InputError

# A finished output C = AV carries rounding eps·κ through V⁺; beyond this κ_F the whitened (AQ)Qᵀ, free of κ, is used.
_OUTPUT_SPREAD = 256.0
# ‖L⁻¹v‖² of a fresh row up to which float32 products inside a causal block lose at most this factor.
_FRESH_LEVERAGE = 16.0


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
        (…, n_query, n_key) in attention's dtype; entries may be negative; zero at invisible keys. Equal to attention
        where a row's visible values are independent. Factorised in float64; the rank is decided per head
        (see `whence.core.null_space`).

    >>> attention = torch.tensor([[0.5, 0.3, 0.2]])
    >>> values = torch.tensor([[1.0], [1.0], [-1.0]])  # three keys, one value dimension
    >>> effective_attention(attention, values)
    tensor([[ 0.2000,  0.2000, -0.2000]])
    >>> effective_attention(attention, values, constraint="simplex")
    tensor([[0.4000, 0.4000, 0.2000]])
    """
    check_constraint(constraint)
    batch = check_pair(attention, values, visible, finite=visible is not None)
    if outputs is not None:
        wanted = (attention.shape[-2], values.shape[-1])
        if outputs.ndim < 2 or tuple(outputs.shape[-2:]) != wanted:
            raise InputError(f"outputs has shape {shape(outputs)}; expected (…, {wanted[0]}, {wanted[1]}) = A @ V.")
        check_finite("outputs", outputs)
    attention = attention.detach()
    if visible is None:
        return _shared(attention, values, None, batch, constraint, outputs)
    check_stray(attention, visible)
    mask = full_mask(visible, *attention.shape[-2:])
    keys = shared_keys(mask)
    if keys is not None:
        result = _shared(attention, values, keys, batch, constraint, outputs)
        seen = mask.any(-1, keepdim=True)
        return result if bool(seen.all()) else result.masked_fill_(~seen, 0.0)
    keys = causal_keys(mask)
    if keys is not None:
        return _causal(attention, values, mask, keys, batch, constraint, outputs)
    result = attention.new_zeros(*batch, *attention.shape[-2:])
    _by_group(attention, values, mask, batch, constraint, result, None)
    return result


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 stays float32 in the two large products; everything else is done in float64."""
    return torch.float32 if dtype == torch.float32 else torch.float64


def _shared(
    attention: Tensor,
    values: Tensor,
    keys: Tensor | None,
    batch: tuple[int, ...],
    constraint: Constraint,
    outputs: Tensor | None,
) -> Tensor:
    """Every row of a head sees the same keys: one basis a head, A⊥ = (AQ)Qᵀ."""
    n, width = values.shape[-2:]
    scaled, scale = unit_scale(values if keys is None else values.masked_fill(~keys.unsqueeze(-1), 0.0))
    valid = None if keys is None else keys.expand(scaled.shape[:-1]).reshape(-1, n)
    unit_batch = scaled.shape[:-2]
    work = _work_dtype(attention.dtype)
    # In float32 products a basis error below eps/8 does not show.
    refine = 0.0 if work == torch.float64 else torch.finfo(work).eps / 8
    flat = scaled.reshape(-1, n, width)
    basis = column_basis(flat, valid, rank_eps(values.dtype), constraint, refine=refine)
    result_shape = (*batch, *attention.shape[-2:])
    if bool(basis.identified.all()):
        check_finite("attention", attention)
        result = attention.expand(result_shape).clone()
        return result if keys is None else result.masked_fill_(~keys.unsqueeze(-2), 0.0)
    q = basis.q.to(work).reshape(*unit_batch, *basis.q.shape[-2:])
    wide = attention.to(work)
    use_output = outputs is not None and bool((basis.regular & (basis.spread < _OUTPUT_SPREAD)).all())
    if use_output and outputs is not None:
        # AQ = A V L⁻ᵀ = C L⁻ᵀ: d_v × d_v work in place of n × d_v.
        inverse = basis.inverse_factor.reshape(*unit_batch, width, width)
        c = outputs.detach().to(torch.float64) / scale
        if constraint == "simplex":
            total = wide.sum(-1, keepdim=True, dtype=torch.float64)
            seen = torch.ones(scaled.shape[:-1], dtype=torch.bool) if keys is None else keys.expand(scaled.shape[:-1])
            c = c - total * centre(scaled, seen)[1]
            count = seen.sum(-1, keepdim=True).unsqueeze(-1).to(torch.float64)
            coordinates = torch.cat([c @ inverse.mT, (total / count.sqrt()).expand(*c.shape[:-1], 1)], -1).to(work)
        else:
            coordinates = (c @ inverse.mT).to(work)
    else:
        coordinates = wide @ q
        # NaN in a row of A shows in its d_v coordinates: n / d_v times less to read than A.
        if not bool(torch.isfinite(coordinates.sum())):
            check_finite("attention", attention)
    result = (coordinates @ q.mT).expand(result_shape)
    if result.dtype != attention.dtype:
        result = result.to(attention.dtype)
    if bool(basis.identified.any()):
        same = basis.identified.reshape(*unit_batch, 1, 1)
        check_finite("attention", attention)
        kept = attention if keys is None else attention.masked_fill(~keys.unsqueeze(-2), 0.0)
        result = torch.where(same, kept, result)
    return result.contiguous()


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


def _causal(
    attention: Tensor,
    values: Tensor,
    mask: Tensor,
    keys: Tensor,
    batch: tuple[int, ...],
    constraint: Constraint,
    outputs: Tensor | None,
) -> Tensor:
    """Row i sees a prefix: A⊥_i = (a_i Z) M_i Zᵀ block by block, see `whence.core._causal`."""
    n_query, n_key = attention.shape[-2:]
    result = attention.new_empty(*batch, n_query, n_key)
    seen = mask.any(-1)
    plan = causal_plan(values, keys, n_query, constraint)
    done = plan.identified.clone()
    top = plan.first
    result[..., :top, :] = torch.where(done[..., :top].unsqueeze(-1) & mask[..., :top, :], attention[..., :top, :], 0.0)
    for block in causal_blocks(plan):
        rows = slice(block.start, block.stop)
        fits = block.good.unsqueeze(-1) & ~done[..., rows]
        a = attention[..., rows, : block.end]
        if bool(fits.any()):
            # Past keys have ‖z_j‖ ≤ 1, so float32 products are safe unless a fresh key is far outside the prefix.
            work = _work_dtype(attention.dtype) if block.fresh_leverage < _FRESH_LEVERAGE else torch.float64
            z = block.z.to(work)
            total = a.sum(-1, keepdim=True, dtype=torch.float64)
            if outputs is None or not bool((block.spread < _OUTPUT_SPREAD).all()):
                white = (a.to(work) @ z).to(torch.float64)
            else:
                white = (outputs[..., rows, :].detach().to(torch.float64) / plan.scale - total * block.origin) @ (
                    block.inverse_factor.mT
                )
            if block.drift is not None:
                white = white - total * block.drift
            y = block.apply(white)
            found = y.to(work) @ z.mT
            if block.drift is not None:
                found += (total * block.ones - (y * block.drift).sum(-1, keepdim=True)).to(work)
                if not bool(plan.real.all()):
                    found *= plan.real[..., None, : block.end]
            found[..., block.base :].tril_()
            found = found.to(result.dtype)
        else:
            found = result.new_zeros(())
        if not bool(fits.all()):
            kept = done[..., rows].unsqueeze(-1) & mask[..., rows, : block.end]
            found = torch.where(fits.unsqueeze(-1), found, torch.where(kept, a, 0.0))
        result[..., rows, : block.end] = found
        result[..., rows, block.end :] = 0.0
        done[..., rows] |= fits
    # What is left (rank-deficient prefixes, misaligned padding) goes by distinct visible set.
    left = ~done.expand(*batch, n_query) & seen.expand(*batch, n_query)
    if bool(left.any()):
        _by_group(attention, values, mask, batch, constraint, result, left.reshape(-1, n_query))
    return result if bool(seen.all()) else result.masked_fill_(~seen.unsqueeze(-1), 0.0)
