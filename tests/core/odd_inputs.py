"""Odd tensors for every function of the core: empty batches, NaN, infinity, denormals, huge numbers, odd dtypes and masks.

One call either raises `InputError` or gives a right result: finite where it must be, and true by a property that is
computed here from the definition. `tests/core/test_odd_inputs.py` makes some calls, `scripts/fuzz_core.py` thousands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.alternatives import alternative_attention
from whence.core.attention.bounds import weight_bounds
from whence.core.attention.certificate import certify_row
from whence.core.attention.effective_attention import effective_attention
from whence.core.attention.head_certificate import certify_head
from whence.core.attention.joint import joint_identifiability
from whence.core.attention.leverage import leverage
from whence.core.attention.null_space import null_space
from whence.core.attention.reachable_rows import near_tied, reachable_dimension
from whence.core.attention.row_intervals import row_intervals
from whence.core.attention.search_reachable import search_reachable
from whence.core.attention.verdict import row_verdicts
from whence.core.attention.witness import random_row_at, witness_row

DTYPES = [torch.float32] * 5 + [torch.float64] * 4 + [torch.float16, torch.bfloat16]
ODD = [torch.int64, torch.complex64, torch.bool, torch.float8_e4m3fn]


class Case:
    """One set of tensors from a seed."""

    def __init__(self, seed: int) -> None:
        self.g = g = np.random.default_rng(seed)
        self.n, self.queries, self.d = int(g.integers(1, 9)), int(g.integers(1, 5)), int(g.integers(1, 5))
        self.batch = [(), (), (1,), (2,), (0,), (2, 0)][g.integers(6)]
        self.dtype = DTYPES[g.integers(len(DTYPES))]
        self.values = self._values((*self.batch, self.n, self.d))
        self.keys = self._values((*self.batch, self.n, self.d))
        self.visible: Tensor | None = None
        if g.random() < 0.5:
            mask = torch.from_numpy(g.random((self.queries, self.n)) < 0.7)
            self.visible = (
                mask if g.random() < 0.7 else torch.ones(self.queries, self.n).tril(self.n - self.queries).bool()
            )
        logits = torch.from_numpy(
            g.normal(size=(*self.batch, self.queries, self.n)) * float(g.choice([0.1, 3.0, 200.0]))
        )
        if self.visible is not None:
            logits = logits.masked_fill(~self.visible, -torch.inf)
        self.attention = torch.softmax(logits, -1).nan_to_num(0.0).to(self.dtype)
        self.spoiled = g.random() < 0.3
        if self.spoiled:
            self._spoil()

    def _values(self, shape: tuple[int, ...]) -> Tensor:
        values = self.g.normal(size=shape) * float(self.g.choice([1.0, 1.0, 1e-3, 1e-40, 1e-310, 1e4, 1e30, 1e300]))
        if self.n > 2 and self.g.random() < 0.4:
            values[..., -1, :] = values[..., 0, :]
        if self.g.random() < 0.15:
            values[..., 0, :] = 0.0
        cast = torch.from_numpy(values).to(self.dtype)
        return cast if bool(torch.isfinite(cast).all()) else torch.zeros_like(cast)

    def _spoil(self) -> None:
        name = ["values", "attention", "keys"][self.g.integers(3)]
        tensor = getattr(self, name).clone()
        kind = int(self.g.integers(5))
        if kind == 0 and tensor.numel():
            tensor.view(-1)[int(self.g.integers(tensor.numel()))] = [torch.nan, torch.inf, -torch.inf][
                self.g.integers(3)
            ]
        elif kind == 1:
            tensor = tensor.to(ODD[self.g.integers(len(ODD))])
        elif kind == 2:
            tensor = tensor[..., :0]
        elif kind == 3:
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
        else:
            self.visible = [torch.ones(self.n), torch.ones(self.queries, self.n + 2).bool(), torch.zeros(0, 3).bool()][
                self.g.integers(3)
            ]  # type: ignore[assignment]
        setattr(self, name, tensor)

    def row(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The first row of the first head."""
        a = self.attention.reshape(-1, *self.attention.shape[-2:])[0, 0] if self.attention.numel() else self.attention
        v = self.values.reshape(-1, *self.values.shape[-2:])[0] if self.values.numel() else self.values
        seen = self.visible[0] if self.visible is not None and self.visible.ndim == 2 and len(self.visible) else None
        return a, v, seen


def finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def _effective(case: Case) -> bool:
    found = effective_attention(case.attention, case.values, visible=case.visible, constraint="simplex")
    mask = torch.ones(()).bool() if case.visible is None else case.visible
    sums = case.attention.double().sum(-1) - found.double().sum(-1)  # the simplex keeps every row's sum
    return finite(found) and bool((sums.abs() < 1e-4).all()) and not bool((found * ~mask).any())


def _null_space(case: Case) -> bool:
    found = null_space(case.values, visible=case.visible)
    rank, most = found.simplex_rank, torch.minimum(found.length, torch.tensor(case.values.shape[-1] + 1))
    ordered = (found.rank <= rank) & (rank <= found.rank + 1) & (rank <= most)
    return bool(ordered.all()) and found.condition.shape == rank.shape and len(found.to_frame()) == rank.numel()


def _leverage(case: Case) -> bool:
    found = leverage(case.values, visible=case.visible)
    rank = null_space(case.values, visible=case.visible).simplex_rank
    return finite(found) and bool(((found.sum(-1) - rank).abs() < 1e-5).all())


def _bounds(case: Case) -> bool:
    found = weight_bounds(case.attention, case.values, visible=case.visible)
    a = case.attention.double()
    a = a / a.sum(-1, keepdim=True).clamp(min=1e-300)
    return finite(found.lower, found.upper) and bool(((found.lower <= a + 1e-9) & (a <= found.upper + 1e-9)).all())


def _certificate(case: Case) -> bool:
    row, values, seen = case.row()
    tolerance = float(case.g.choice([0.0, 0.0, 0.01]))
    return certify_row(row, values, top=2, visible=seen, tolerance=tolerance).check()


def _witness(case: Case) -> bool:
    row, values, seen = case.row()
    found = witness_row(row, values, visible=seen, starts=1, top=1)
    x = found.alternative
    return finite(x) and bool((x >= 0).all()) and abs(float(x.sum()) - 1) < 1e-9 and found.residual < 1e-6


def _head(case: Case) -> bool:
    return certify_head(case.attention, case.values, rows=2, visible=case.visible).check()


def _intervals(case: Case) -> bool:
    odd = not case.attention.numel() or case.attention.dtype not in DTYPES
    top = torch.zeros(1, 1).long() if odd else case.attention.float().argmax(-1, keepdim=True)
    for found in row_intervals(case.attention, case.values, top, visible=case.visible):
        row = case.attention[found.query].double()
        weight = float(row[top[found.query]] / row.sum())
        if not float(found.lower) - 1e-6 <= weight <= float(found.upper) + 1e-6:
            return False
    return True


def _verdicts(case: Case) -> bool:
    found = row_verdicts(case.attention, case.values, visible=case.visible)
    return tuple(found.shape) == tuple(case.attention.shape[:1]) and bool(((found >= -1) & (found <= 3)).all())


def _alternatives(case: Case) -> bool:
    found = alternative_attention(case.attention, case.values, visible=case.visible, rounds=1, workers=1)
    return finite(found.attention) and bool((found.attention >= 0).all()) and bool((found.residual < 1e-5).all())


def _joint(case: Case) -> bool:
    found = joint_identifiability(case.keys, None)
    return 0 <= found.rank <= min(case.keys.shape[0] * case.keys.shape[1], case.keys.shape[2])


def _reachable(case: Case) -> bool:
    found = reachable_dimension(case.attention, case.keys, case.values, visible=case.visible)
    known = found.dimension[found.determined]
    return bool((known >= 0).all()) and bool((known <= case.d).all())


def _tied(case: Case) -> bool:
    found = near_tied(case.keys, case.values, query_diameter=1.0)
    return finite(found.share, found.bound) and bool(((found.bound >= 0) & (found.bound <= 1)).all())


def _search(case: Case) -> bool:
    row, values, seen = case.row()
    keys = case.keys.reshape(-1, *case.keys.shape[-2:])[0] if case.keys.numel() else case.keys
    found = search_reachable(row, keys, values, visible=seen, starts=2, iterations=4)
    return finite(found.alternative) and abs(float(found.alternative.sum()) - 1) < 1e-6


def _random_row(case: Case) -> bool:
    row, _, seen = case.row()
    found = random_row_at(row, 0.0, visible=seen)
    return finite(found) and abs(float(found.sum()) - 1) < 1e-9


FUNCTIONS: dict[str, Callable[[Case], bool]] = {
    name.removeprefix("_"): value
    for name, value in list(globals().items())
    if name.startswith("_") and not name.startswith("__") and callable(value)
}


def one_call(name: str, seed: int) -> str:
    """ "right" or "refused"; anything else is an error of the core, with what was given."""
    from whence.errors import InputError

    case: Any = Case(seed)
    try:
        right = FUNCTIONS[name](case)
    except InputError:
        return "refused"
    if not right:
        raise AssertionError(f"{name} is wrong on the case of seed {seed}")

    return "right"
