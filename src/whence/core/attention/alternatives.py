"""Alternative attention: another attention map for every row of every head at once, with the same head outputs.

What `witness_row` finds for one row, for thousands of them. A first map comes from one batched step per row, from A
along its projected gradient of total variation to the edge of the polytope. Then come rounds, so many as are asked for:
in the first, the programs of all rows of a head go on together from that step (`whence.core.attention.interior_point`); in
the others each row takes sequential linear programs from a new direction, in one simplex model per head whose matrix never
changes: rows differ in the right-hand side only, so every solve starts from the last row's basis. The work is counted in
rounds, and done in one order, so that the result is the same on any machine; a limit in seconds may end it early, and
the result then says so.
"""

from __future__ import annotations

import functools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.effective_attention import effective_attention
from whence.core.attention.interior_point import InteriorPoint
from whence.core.attention.polytope import Polytope
from whence.core.numerics.arrays import Array
from whence.core.numerics.basis import unit_scale
from whence.core.numerics.checks import check_pair, check_stray, shape
from whence.core.numerics.masks import flat_index, full_mask
from whence.core.numerics.threads import one_thread, workers_for
from whence.core.numerics.tolerances import EXACT_OUTPUT, OTHER_OUTPUT, SAME_ROW, SEARCH_GAIN, rank_eps
from whence.errors import InputError
from whence.results.short_repr import short_repr

_STEPS = 6
_CHUNK = 128


@dataclass(frozen=True)
class AlternativeAttention:
    """Another attention map with the same head outputs.

    attention (…, n_query, n_key) float64: rows ≥ 0 with the original's row sums, zero at hidden keys.
    total_variation (…, n_query): ½‖row − original‖₁ / row sum. residual (…, n_query): ‖(A′ − A)V‖ / ‖AV‖
    (absolute where AV = 0). rounds: how many directions every row has tried; fewer than were asked for where the time
    was up (`stopped`). searched (…, n_query): whether the row has tried any; the others have only the first step, and may
    have more to find.
    """

    __repr__ = short_repr

    attention: Tensor
    total_variation: Tensor
    residual: Tensor
    rounds: int
    seconds: float
    searched: Tensor
    stopped: bool


@one_thread()
def alternative_attention(
    attention: Tensor,
    values: Tensor,
    *,
    visible: Tensor | None = None,
    rounds: int = 2,
    budget: float | None = None,
    workers: int | None = None,
    seed: int = 0,
    rows_searched: Tensor | None = None,
) -> AlternativeAttention:
    """An alternative for every row, as different from the original as so many rounds find.

    Args:
        attention: (…, n_query, n_key), rows ≥ 0; rows that see nothing stay as they are.
        values: (…, n_key, d_v), broadcastable against attention.
        visible: boolean, broadcastable to attention.
        rounds: search directions a row.
        budget: seconds after which it stops early; rows then keep the best found so far, each of them valid. None: no
            limit, and the same result on any machine.
        workers: threads; None: two for long rows, one for short ones. The result does not depend on them.
        rows_searched: boolean, broadcastable to (…, n_query): rounds for these rows only; None, for all.

    >>> found = alternative_attention(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[1.0], [0.0], [0.0]]))
    >>> found.attention, found.total_variation
    (tensor([[0.5000, 0.0000, 0.5000]], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
    """
    begin = time.monotonic()
    batch = check_pair(attention, values, visible)
    if (budget is not None and not budget > 0) or rounds < 0 or (workers is not None and workers < 1):
        raise InputError(f"budget={budget!r}, rounds={rounds!r}, workers={workers!r}; all must be positive.")
    limit = math.inf if budget is None else budget
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
    asked = alive if rows_searched is None else alive & rows_searched.expand(alive.shape)
    flat_asked = asked.reshape(size, n_query).numpy()
    heads = values64.reshape(-1, n_key, values64.shape[-1]).numpy()
    head_of = flat_index(tuple(values.shape[:-2]), batch).tolist()
    eps = rank_eps(values.dtype)
    interiors: dict[int, InteriorPoint] = {}
    solvers: dict[int, Polytope] = {}
    searched = ~alive.reshape(size, n_query).numpy()  # a row that sees nothing has nothing to try

    def late() -> bool:
        return time.monotonic() - begin > limit

    @one_thread()
    def work(number: int, first: int, head: int) -> bool:
        """One chunk of rows of one head, in one round; False when the time was up before it was through."""
        if late():
            return False
        if head not in interiors:
            interiors[head] = InteriorPoint(heads[head_of[head]], eps)
        interior = interiors[head]
        rows_here = np.arange(first, min(first + _CHUNK, n_query))
        rows_here = rows_here[flat_asked[head, rows_here]]
        if number == 0:
            roomy = interior.roomy(flat_mask[head, rows_here])
            _onward(interior, flat_rows[head], flat_best[head], flat_mask[head], rows_here[roomy])
            searched[head, rows_here[roomy]] = True
            rows_here = rows_here[~roomy]
        generator = np.random.default_rng((seed, head, number, first))
        for i in rows_here:
            if late():
                return False
            if head not in solvers:
                uniform = np.full(n_key, 1.0 / n_key)
                solvers[head] = Polytope(uniform, interior.values, constraints=interior.constraints)
            _improve(solvers[head], flat_rows[head, i], flat_best[head, i], flat_mask[head, i], number, generator)
            searched[head, i] = True
        return True

    completed, ended = 0, True
    with ThreadPoolExecutor(max_workers=workers or min(2, workers_for(n_key))) as pool:
        for number in range(rounds):
            for first in range(0, n_query, _CHUNK):
                # A chunk of every head, then the next: a head's rows come in one order, whatever the threads do; and
                # when time runs out, every head has had its share.
                chunk = functools.partial(work, number, first)
                ended = all(list(pool.map(chunk, range(size)))) and ended
            if not ended:
                break
            completed += 1
    found = torch.from_numpy(flat_best).reshape(rows.shape)
    residual = _residual(found, rows, values64)
    same = residual <= OTHER_OUTPUT
    found = torch.where(same.unsqueeze(-1), found, rows)
    return AlternativeAttention(
        attention=found * total,
        total_variation=0.5 * (found - rows).abs().sum(-1),
        residual=torch.where(same, residual, 0.0),
        rounds=completed,
        seconds=time.monotonic() - begin,
        searched=torch.from_numpy(searched).reshape(rows.shape[:-1]),
        stopped=not ended,
    )


def _residual(other: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """‖(A′ − A)V‖ / ‖AV‖ of every row, or the numerator alone where AV = 0."""
    size = torch.linalg.vector_norm(rows @ values, dim=-1)
    moved = torch.linalg.vector_norm((other - rows) @ values, dim=-1)
    return torch.where(size > 0, moved / size, moved)


def _line_to_edge(rows: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """One batched step: from A away from its heavy keys inside the null space, until a weight reaches 0."""
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    wish = torch.where(rows >= 1.0 / count, -1.0, 1.0).to(torch.float64) * mask
    values64 = values.detach().to(torch.float64)
    direction = wish
    for _ in range(2):  # projected twice: the second pass removes what the first one's rounding left
        direction = direction - effective_attention(direction, values64, constraint="simplex", visible=mask)
    size = direction.abs().amax(-1, keepdim=True)
    # A direction as small as this is rounding error: the row is unique and stays as it is.
    direction = torch.where(size > SAME_ROW, direction / size.clamp(min=SAME_ROW), 0.0)
    reach = torch.where(direction < 0, rows / -direction, torch.inf).amin(-1, keepdim=True)
    step = torch.where(torch.isfinite(reach), reach, 0.0)
    return (rows + step * direction).clamp(min=0.0)


def _onward(
    interior: InteriorPoint,
    rows: Array,
    best: Array,
    visible: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    at: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
) -> None:
    """Rows at (t,), all together: as far as possible along the signs of what the first step moved.

    No vertex is needed, so that the programs may end a few per cent from their optimum; every point on the way is exact.
    """
    if not len(at):
        return
    row, here = rows[at], best[at]
    heavy = np.where(row >= 1.0 / visible[at].sum(1, keepdims=True), 1.0, -1.0)
    distance = np.abs(here - row).sum(1)
    costs = np.where((distance > SAME_ROW)[:, None], -np.sign(here - row), heavy)
    found = interior.minima(costs, row, visible[at], close=0.05)
    points = found.points / found.points.sum(1, keepdims=True)
    exact = np.abs((points - row) @ interior.constraints.q).max(1) <= EXACT_OUTPUT
    better = exact & (np.abs(points - row).sum(1) > distance + SAME_ROW)
    best[at[better]] = points[better]


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
        x = best if np.abs(best - row).sum() > SAME_ROW else None
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
        if gained <= here + SEARCH_GAIN:
            break
        here, reached = gained, x
        cost = -np.sign(x - row)
    if reached is None or here <= distance + SAME_ROW:
        return
    polished = solver.polished(reached)
    # Only a row that is better and exact replaces the old one.
    if np.abs(polished - row).sum() > distance and not polished[~visible].any():
        best[:] = polished
