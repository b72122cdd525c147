"""A second row that some query reaches, with the same head output, put into the model to see that nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.search_reachable import search_reachable
from whence.core.numerics.tolerances import FAR_ROW, SAME_OUTPUT
from whence.model.load import Model
from whence.reading.capture.recorder import Call, Edit, expand_heads
from whence.reading.rerun.run import Outcome, run
from whence.reading.trace import KEEP
from whence.reading.wiring.proof import Proof
from whence.reading.wiring.sites import AttentionSite
from whence.results.short_repr import short_repr


@dataclass(frozen=True)
class SecondRow:
    """Where it is, how far from the model's own row, and by how much the model's outputs change with it in its place.

    total_variation 0: none was found. control: the same change with the row replaced by the uniform one.
    """

    __repr__ = short_repr

    stack: str
    layer: int
    head: int
    query: int
    total_variation: float
    residual: float
    outputs_change: float | None
    control: float | None
    row: tuple[float, ...]
    alternative: tuple[float, ...]

    def __str__(self) -> str:
        seen = (
            ""
            if self.outputs_change is None
            else f" Put into the model it changes the outputs by {self.outputs_change:.0e} of their size (a uniform row by "
            f"{self.control:.0e})."
        )
        return (
            f"Second row: {self.stack} layer {self.layer}, head {self.head}, query {self.query}: another query gives "
            f"the same head output (to {self.residual:.0e}) from weights at total variation "
            f"{self.total_variation:.3f}.{seen}"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def second_row(
    model: Model, proof: Proof, outcome: Outcome, site: AttentionSite, head: int, query: int, visible: Tensor, scale: float,
    *, starts: int, seed: int,
) -> SecondRow:  # fmt: skip
    """Search one row of one head; a row that is found is put in the model's own row's place and the model run again."""
    call = outcome.calls[site.number]
    assert call.key is not None
    keys, values = (expand_heads(t, site.heads)[0, head][visible].double() for t in (call.key, call.value))
    row = call.weights[0, head, query][visible].double()
    if call.sink is not None:
        keys, values = (torch.cat([t, t.new_zeros(1, t.shape[1])]) for t in (keys, values))
        row = torch.cat([row, call.sink[0, head, query].double()[None]])
    row = row / row.sum()
    other = (
        search_reachable(row, keys * scale, values, starts=starts, seed=seed).alternative
        if call.cap is None
        else _capped(row, call, head, query, keys, values, starts, seed)
    )
    distance = 0.5 * float((other - row).abs().sum())
    n = int(visible.sum())
    change = control = None
    if distance > 0:
        change, control = _verified(model, proof, outcome, site, head, query, visible, other[:n])
    output = row @ values
    return SecondRow(
        site.stack, site.layer, head, query, distance,
        float(torch.linalg.vector_norm((other - row) @ values) / torch.linalg.vector_norm(output).clamp_min(1e-300)),
        change, control, tuple(row.tolist()), tuple(other.tolist()),
    )  # fmt: skip


def _capped(
    row: Tensor, call: Call, head: int, query: int, keys: Tensor, values: Tensor, starts: int, seed: int
) -> Tensor:
    """The same search where scores are bent by a soft cap: least squares on the query itself, from random starts."""
    from scipy.optimize import least_squares

    assert call.cap is not None
    assert call.query is not None
    factor, cap = call.cap
    k, v, a = (t.numpy() for t in (keys, values, row))
    own = call.query[0, head, query].double().numpy() * factor
    fixed = np.log(np.maximum(a, 1e-300)) - cap * np.tanh(k @ own / cap)  # mask and bias, up to a constant

    def softmax_row(q: np.ndarray) -> np.ndarray:
        scores = cap * np.tanh(k @ q / cap) + fixed
        e = np.exp(scores - scores.max())
        return np.asarray(e / e.sum())

    def slope(q: np.ndarray) -> np.ndarray:
        x = softmax_row(q)
        bent = k * (1 - np.tanh(k @ q / cap) ** 2)[:, None]
        return np.asarray(v.T @ (x[:, None] * bent) - np.outer(x @ v, x @ bent))

    function: Callable[[np.ndarray], np.ndarray] = lambda q: (softmax_row(q) - a) @ v  # noqa: E731
    draw = np.random.default_rng(seed)
    best, far = a, 0.0
    for _ in range(min(starts, 8)):
        guess = draw.normal(size=own.shape)
        guess = own + guess / np.abs(k @ guess).max() * draw.uniform(1, 6)
        found = least_squares(function, guess, slope, xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=60)
        x = softmax_row(found.x)
        distance = 0.5 * float(np.abs(x - a).sum())
        if np.linalg.norm(found.fun) < SAME_OUTPUT * np.linalg.norm(v, 2) and distance > max(far, FAR_ROW):
            best, far = x, distance
    return torch.tensor(best)


def _verified(
    model: Model,
    proof: Proof,
    outcome: Outcome,
    site: AttentionSite,
    head: int,
    query: int,
    visible: Tensor,
    row: Tensor,
) -> tuple[float | None, float | None]:
    """How much the model's outputs change with the row, and with a uniform row, in its place; relative."""
    call = outcome.calls[site.number]
    where = torch.zeros_like(call.weights, dtype=torch.bool)
    where[0, head, query] = True
    changes = []
    mass = float(call.weights[0, head, query].double().sum())
    for new in (row, torch.full_like(row, mass / len(row))):
        weights = torch.zeros_like(call.weights)
        weights[0, head, query, visible] = new.to(weights)
        again = run(
            model, proof, outcome.batch, 1, frozenset(KEEP), {site.number: [Edit(weights=weights, where=where)]}
        )
        changes.append(_change(_outputs(again), _outputs(outcome)))
    return changes[0], changes[1]


def _outputs(outcome: Outcome) -> Tensor | None:
    logits = getattr(outcome.output, "logits", None)
    return logits if isinstance(logits, Tensor) else outcome.final_states


def _change(new: Tensor | None, old: Tensor | None) -> float | None:
    if new is None or old is None:
        return None
    return float(torch.linalg.vector_norm(new.double() - old.double()) / torch.linalg.vector_norm(old.double()))
