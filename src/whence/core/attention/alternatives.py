"""Alternative attention: another attention map for every row of every head at once, with the same head outputs.

What `witness_row` finds for one row, for thousands under a time budget. A first map comes from one batched step per
row, from A along its projected gradient of total variation to the edge of the polytope. Then each head gets one linear
program whose matrix never changes: rows differ in the right-hand side only, so every solve starts from the last row's
basis (about a millisecond at n = 128, d_v = 32). Round by round, each row takes sequential linear programs from a new
direction and keeps the farthest vertex, until the budget is spent.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.effective_attention import effective_attention
from whence.core.attention.polytope import Polytope
from whence.core.numerics.arrays import Array
from whence.core.numerics.basis import unit_scale
from whence.core.numerics.checks import check_pair, check_stray, shape
from whence.core.numerics.masks import flat_index, full_mask
from whence.core.numerics.tolerances import rank_eps
from whence.errors import InputError
from whence.results.short_repr import short_repr

_STEPS = 6
_CHUNK = 16


@dataclass(frozen=True)
class AlternativeAttention:
    """Another attention map with the same head outputs.

    attention (…, n_query, n_key) float64: rows ≥ 0 with the original's row sums, zero at hidden keys.
    total_variation (…, n_query): ½‖row − original‖₁ / row sum. residual (…, n_query): ‖(A′ − A)V‖ / ‖AV‖
    (absolute where AV = 0). rounds: how many directions every row has tried; 0: the budget ended within the first.
    searched (…, n_query): whether the row has tried any; the others have only the first step, and may have more to find.
    """

    __repr__ = short_repr

    attention: Tensor
    total_variation: Tensor
    residual: Tensor
    rounds: int
    seconds: float
    searched: Tensor


def alternative_attention(
    attention: Tensor,
    values: Tensor,
    *,
    visible: Tensor | None = None,
    budget: float = 60.0,
    rounds: int = 4,
    workers: int = 2,
    seed: int = 0,
) -> AlternativeAttention:
    """An alternative for every row, as different from the original as the budget allows.

    Args:
        attention: (…, n_query, n_key), rows ≥ 0; rows that see nothing stay as they are.
        values: (…, n_key, d_v), broadcastable against attention.
        visible: boolean, broadcastable to attention.
        budget: seconds. Where it runs out, rows keep the best found so far; each is valid at any time.
        rounds: at most this many search directions a row.
        workers: threads; HiGHS works outside Python's lock.

    >>> found = alternative_attention(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[1.0], [0.0], [0.0]]))
    >>> found.attention, found.total_variation
    (tensor([[0.5000, 0.0000, 0.5000]], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
    """
    begin = time.monotonic()
    batch = check_pair(attention, values, visible)
    if budget <= 0 or rounds < 0 or workers < 1:
        raise InputError(f"budget={budget!r}, rounds={rounds!r}, workers={workers!r}; all must be positive.")
    n_query, n_key = attention.shape[-2:]
    mask = torch.ones(n_query, n_key, dtype=torch.bool)
    if visible is not None:
        check_stray(attention, visible)
        mask = full_mask(visible, n_query, n_key)
    whole = mask.expand(*batch, n_query, n_key)
    rows = attention.detach().to(torch.float64).expand(*batch, n_query, n_key).masked_fill(~whole, 0.0)
    if bool((rows < 0).any()):
        raise InputError(f"attention {shape(attention)} has negative entries; give raw attention rows.")
    total = rows.sum(-1, keepdim=True)
    alive = (total > 0).squeeze(-1)
    rows = torch.where(total > 0, rows / total, 0.0)
    values64 = unit_scale(values)[0]
    best = _line_to_edge(rows, values, whole)

    size = math.prod(batch)
    flat_rows = rows.reshape(size, n_query, n_key).numpy()
    flat_best = best.reshape(size, n_query, n_key).numpy()
    flat_mask = whole.reshape(size, n_query, n_key).numpy()
    flat_alive = alive.reshape(size, n_query).numpy()
    heads = values64.reshape(-1, n_key, values64.shape[-1]).numpy()
    head_of = flat_index(tuple(values.shape[:-2]), batch).tolist()
    eps = rank_eps(values.dtype)
    solvers: dict[int, Polytope] = {}
    locks = [Lock() for _ in range(size)]
    searched = ~flat_alive  # a row that sees nothing has nothing to try

    def work(task: tuple[int, int, int]) -> bool:
        """One chunk of rows of one head, in one round; False when the budget ended before it was through."""
        number, first, head = task
        if time.monotonic() - begin > budget:
            return False
        generator = np.random.default_rng((seed, head, number, first))
        with locks[head]:
            if head not in solvers:
                solvers[head] = Polytope(np.full(n_key, 1.0 / n_key), heads[head_of[head]], eps=eps)
            for i in range(first, min(first + _CHUNK, n_query)):
                if time.monotonic() - begin > budget:
                    return False
                if flat_alive[head, i]:
                    seen = flat_mask[head, i]
                    _improve(solvers[head], flat_rows[head, i], flat_best[head, i], seen, number, generator)
                    searched[head, i] = True
        return True

    completed = 0
    starts = range(0, n_query, _CHUNK)
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for number in range(rounds):
            # Chunk by chunk over all heads: when time runs out, every head has had its share.
            tasks = [(number, first, head) for first in starts for head in range(size)]
            if not all(list(pool.map(work, tasks))):
                break
            completed += 1
    found = torch.from_numpy(flat_best).reshape(rows.shape)
    distance = 0.5 * (found - rows).abs().sum(-1)
    output = rows @ values64
    size_of = torch.linalg.vector_norm(output, dim=-1)
    moved = torch.linalg.vector_norm((found - rows) @ values64, dim=-1)
    return AlternativeAttention(
        attention=found * total,
        total_variation=distance,
        residual=torch.where(size_of > 0, moved / size_of, moved),
        rounds=completed,
        seconds=time.monotonic() - begin,
        searched=torch.from_numpy(searched).reshape(rows.shape[:-1]),
    )


def _line_to_edge(rows: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """One batched step: from A away from its heavy keys inside the null space, until a weight reaches 0."""
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    wish = torch.where(rows >= 1.0 / count, -1.0, 1.0).to(torch.float64) * mask
    values64 = values.detach().to(torch.float64)
    direction = wish
    for _ in range(2):  # projected twice: the second pass removes what the first one's rounding left
        direction = direction - effective_attention(direction, values64, constraint="simplex", visible=mask)
    size = direction.abs().amax(-1, keepdim=True)
    # What is only rounding is no direction: such rows are unique.
    direction = torch.where(size > 1e-9, direction / size.clamp(min=1e-9), 0.0)
    reach = torch.where(direction < 0, rows / -direction, torch.inf).amin(-1, keepdim=True)
    step = torch.where(torch.isfinite(reach), reach, 0.0)
    return (rows + step * direction).clamp(min=0.0)


def _improve(
    solver: Polytope,
    row: Array,
    best: Array,
    visible: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    number: int,
    generator: np.random.Generator,
) -> None:
    """Sequential linear programs from one direction; writes a farther alternative into `best`."""
    solver.move_to(row, visible)
    if number == 0:
        x = best if np.abs(best - row).sum() > 1e-9 else None
        cost = -np.sign(x - row) if x is not None else np.where(row >= 1.0 / visible.sum(), 1.0, -1.0)
    elif number == 1:
        cost = np.where(row >= 1.0 / visible.sum(), 1.0, -1.0)
    else:
        cost = generator.choice([-1.0, 1.0], size=len(row))
    reached, distance = None, np.abs(best - row).sum()
    here = 0.0
    for _ in range(_STEPS):
        x = solver.vertex(cost)
        gained = np.abs(x - row).sum()
        if gained <= here + 1e-6:
            break
        here, reached = gained, x
        cost = -np.sign(x - row)
    if reached is None or here <= distance + 1e-9:
        return
    polished = solver.polished(reached)
    # Only a row that is better and exact replaces the old one.
    if np.abs(polished - row).sum() > distance and not polished[~visible].any():
        best[:] = polished
