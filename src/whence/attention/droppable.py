"""Which keys could a head do without? Rows with the same output on at most d_v + 1 keys, put into the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whence.attention.decided_rows import gather_rows
from whence.attention.verified_rows import verify_rows
from whence.attention.witness import Verification
from whence.core.attention.aimed import aimed_row
from whence.core.numerics.tolerances import SAME_OUTPUT, UNIT_SUM
from whence.errors import InputError
from whence.reading.trace import Trace
from whence.results.provenance import Provenance
from whence.results.short_repr import short_repr

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Droppable:
    """Rows that need few keys. rows, sparse: [query, key], float64, shares of the row; same output to 1e-10.

    dropped (query, key): visible keys that the row weighs and that the sparse row does without, all at once.
    `top`: the same number of keys kept by weight and divided by their sum, for comparison; errors of both relative to the
    head output.
    """

    __repr__ = short_repr

    layer: int
    head: int
    queries: tuple[int, ...]
    rows: Tensor = field(repr=False)
    sparse: Tensor = field(repr=False)
    visible: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    provenance: Provenance = field(repr=False)
    verification: Verification | None = None

    @property
    def dropped(self) -> Tensor:
        return self.visible & (self.rows > 0) & (self.sparse == 0)

    @property
    def needed(self) -> Tensor:
        """[query]: how many keys are left."""
        return (self.sparse > 0).sum(-1)

    @property
    def top(self) -> Tensor:
        """[query, key]: as many of the heaviest keys, divided by their sum."""
        result = torch.zeros_like(self.rows)
        for i, k in enumerate(self.needed.tolist()):
            keys = self.rows[i].topk(k).indices
            result[i, keys] = self.rows[i, keys] / self.rows[i, keys].sum()
        return result

    def error(self, other: Tensor) -> Tensor:
        """[query]: how far other rows [query, key] move the head output, relative to it."""
        output = self.rows @ self.values
        size = torch.linalg.vector_norm(output, dim=-1).clamp(min=1e-300)
        moved: Tensor = torch.linalg.vector_norm(other @ self.values - output, dim=-1) / size
        return moved

    def check(self) -> bool:
        """Whether the sparse rows are attention rows on the visible keys with the same output, on at most d_v + 1 keys."""
        fits = bool((self.sparse >= 0).all()) and not bool(self.sparse[~self.visible].any())
        sums = float((self.sparse.sum(-1) - 1).abs().max()) <= UNIT_SUM
        few = bool((self.needed <= self.values.shape[-1] + 1).all())
        return fits and sums and few and bool((self.error(self.sparse) <= SAME_OUTPUT).all())

    def sentences(self) -> list[str]:
        seen, kept = self.visible.sum(-1).double().mean(), self.needed.double().mean()
        by_mass = float(self.error(self.top).median())
        first = (
            f"Layer {self.layer} head {self.head}: of {seen:.0f} keys that a row sees on average it needs {kept:.0f}; the others "
            "can be dropped, all at once, without any change of the head's output. Keeping as many of the heaviest changes it by "
            f"{by_mass:.1%} (median)."
        )
        said = [first]
        if self.verification is not None:
            said.append("Put into the model: " + self.verification.sentence())
        return said

    def plot(self, *, ax: Any = None) -> Any:
        """The keys that each row sees and those that it needs; returns the Axes."""
        from whence.results.plotting import plot_bars

        names = [
            f"{q}: {n} of {seen}"
            for q, n, seen in zip(self.queries, self.needed.tolist(), self.visible.sum(-1).tolist(), strict=True)
        ]
        return plot_bars(names, self.needed.tolist(), "keys that the row needs", ax)

    def to_frame(self) -> pd.DataFrame:
        """One line a query."""
        import pandas as pd

        return pd.DataFrame(
            {
                "query": self.queries,
                "seen": self.visible.sum(-1).numpy(),
                "kept": self.needed.numpy(),
                "error": self.error(self.sparse).numpy(),
                "error_by_mass": self.error(self.top).numpy(),
            }
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "head": self.head,
            "rows": self.to_frame().to_dict("records"),
            "checked": self.check(),
            "verification": None if self.verification is None else self.verification.to_dict(),
            "provenance": self.provenance.to_dict(),
        }


def droppable(
    trace: Trace,
    layer: int,
    head: int,
    queries: Sequence[int | str] | None = None,
    *,
    attention: str | None = None,
    verify: bool = True,
) -> Droppable:
    """For each query, a row with the same output on at most d_v + 1 keys; all of them put into the model at once.

    A key that is dropped here is one that *some* row with the same output does without; it may be needed by another head,
    and at most dim P keys can go at the same time.
    """
    found = gather_rows(trace, [(layer, head)], queries, attention)
    if found.sink:
        raise InputError(f"layer {layer} has attention sinks; droppable keys are found for rows without one.")
    rows, values, visible = found.rows[0], found.values[0], found.visible[0]
    sparse = rows.clone()
    for i in range(len(rows)):
        other = aimed_row(rows[i], values, "sparse", visible=visible[i])
        if other.residual <= SAME_OUTPUT and abs(float(other.alternative.sum()) - 1) <= UNIT_SUM:
            sparse[i] = other.alternative
    verification = None
    moved = [i for i in range(len(rows)) if not torch.equal(rows[i], sparse[i])]
    if verify and trace.model is not None and moved:
        places = [([(layer, head)], found.queries[i], rows[i][None], sparse[i][None]) for i in moved]
        verification = verify_rows(trace, found.stack.name, places)[1]
    origin = trace.provenance.by("droppable", layer=layer, head=head, attention=found.stack.name)
    return Droppable(layer, head, found.queries, rows, sparse, visible, values, origin, verification)
