"""The residual equation of half a block, in every kind that is known; a further kind is a change of this file.

    state = norm( residual_scale · r + branch_scale · branch_norm(p) + side )

r is the state that the half reads, p what its branch gives (attention's output projection, or the feed-forward layer's
second map), and every part is absent where the model has none:

    post-norm   a norm after the add          pre-norm   no norm in the equation
    sandwich    a norm on the branch alone    parallel   a side part, which the token makes of its own state
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from whence.reading.wiring.norms import Norm

POST, PRE, SANDWICH, PARALLEL = "post-norm", "pre-norm", "sandwich", "parallel"

Factor = Tensor | float | None
"""A number, or a vector (d,), that something is multiplied by; None: 1."""

AXES = {
    **{f"{norm}.{part}": "d" for norm in ("norm", "branch_norm") for part in ("weight", "bias")},
    **dict.fromkeys(("branch_scale", "residual_scale"), "d? | "),
}
"""The arrays of a `Wiring`, those within its norms by their way there, and their axes; a factor may be one number for all."""


def times(x: Tensor, factor: Factor) -> Tensor:
    """x · factor, where there is one."""
    if factor is None:
        return x
    return x * (factor.detach().to(x) if isinstance(factor, Tensor) else factor)


@dataclass(frozen=True)
class SplitState:
    """The state as scale · (heads through weight) + own + bias, the norms' linear parts inside weight, own and bias."""

    weight: Tensor  # (head, d_v, d)
    scale: Tensor | None  # (…, query, 1); None: 1
    own: Tensor  # (…, query, d)
    bias: Tensor  # (…, d)
    state: Tensor  # (…, query, d)


@dataclass(frozen=True, eq=False)
class Wiring:
    """state = norm(residual_scale · r + branch_scale · branch_norm(p) + side), and what follows from it."""

    kind: str  # post-norm | pre-norm | sandwich | parallel
    norm: Norm | None = None  # after the add (post-norm)
    branch_norm: Norm | None = None  # on the branch, before its factor (sandwich)
    branch_scale: Factor = None  # residual multiplier, layer scale
    residual_scale: Factor = None  # DeepNorm and its kin

    @classmethod
    def of_parts(
        cls, norm: Norm | None, branch_norm: Norm | None, branch: Factor, carried: Factor, parallel: bool = False
    ) -> Wiring:
        """The wiring whose residual is multiplied by `carried` and whose branch by `branch`; what is there names its kind."""
        kind = PARALLEL if parallel else POST if norm is not None else PRE if branch_norm is None else SANDWICH
        return cls(kind, norm, branch_norm, branch, carried)

    @property
    def parallel(self) -> bool:
        """Whether there is a side part."""
        return self.kind == PARALLEL

    @property
    def linear(self) -> bool:
        """Whether the state is linear in residual, branch and side part: no norm among them."""
        return self.norm is None and self.branch_norm is None

    @property
    def additive(self) -> bool:
        """Whether the residual passes unchanged, so that states are sums of what the layers added."""
        return self.norm is None and self.residual_scale is None

    # -- forward -----------------------------------------------------------------------------------------------------

    def carried(self, residual: Tensor, side: Tensor | None = None) -> Tensor:
        """What the token itself brings into the sum: the residual and, where there is one, the side part."""
        carried = times(residual, self.residual_scale)
        return carried if side is None else carried + side

    def branch(self, projected: Tensor, normed: Callable[[Norm, Tensor], Tensor] = Norm.__call__) -> Tensor:
        """What is added to the residual. `normed(norm, x)`: how a norm acts, where x is more than a state."""
        return times(projected if self.branch_norm is None else normed(self.branch_norm, projected), self.branch_scale)

    def finish(self, total: Tensor, normed: Callable[[Norm, Tensor], Tensor] = Norm.__call__) -> Tensor:
        """The state, from the sum before the norm."""
        return total if self.norm is None else normed(self.norm, total)

    def rebuild(
        self,
        residual: Tensor,
        projected: Tensor,
        side: Tensor | None = None,
        normed: Callable[[Norm, Tensor], Tensor] = Norm.__call__,
    ) -> Tensor:
        """The state, from its parts."""
        return self.finish(self.carried(residual, side) + self.branch(projected, normed), normed)

    # -- the state as a sum ------------------------------------------------------------------------------------------

    def split(self, own: Tensor, weight: Tensor, projected: Tensor, bias: Tensor) -> SplitState:
        """The state as a sum: own (…, d) carried, weight (head, d_v, d) and bias (d) of the projection.

        projected (…, query, d): all heads through `weight`, without the bias.
        """
        scale: Tensor | None = None
        if self.branch_norm is not None:
            norm = self.branch_norm
            scale = norm.scale(projected + bias).reciprocal()
            weight, projected, bias = norm.linear(weight), norm.linear(projected) * scale, norm.linear(bias) * scale
            bias = norm.shifted(bias)
        weight, projected, bias = (times(t, self.branch_scale) for t in (weight, projected, bias))
        state = (projected + bias).add_(own)
        if self.norm is not None:
            state, factor = self.norm.with_factor(state)
            scale = factor if scale is None else scale * factor
            weight, own, bias = (
                self.norm.linear(weight),
                self.norm.linear(own) * factor,
                self.norm.linear(bias) * factor,
            )
            bias = self.norm.shifted(bias)
        return SplitState(weight, scale, own, bias, state)

    def branch_part(self, x: Tensor, projected: Tensor) -> Tensor:
        """What a part x of `projected` adds to the sum: through the branch's linear maps, by the scale of the whole."""
        if self.branch_norm is not None:
            x = self.branch_norm.linear(x) / self.branch_norm.scale(projected)
        return times(x, self.branch_scale)

    def branch_constant(self, bias: Tensor, projected: Tensor) -> Tensor:
        """What the branch adds whatever it reads: a bias inside `projected`, and the bias of the branch's own norm."""
        part = self.branch_part(bias, projected)
        if self.branch_norm is None or self.branch_norm.bias is None:
            return part
        return part + times(self.branch_norm.bias.to(part), self.branch_scale)

    def toward(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        """Where the wiring is `linear`: state · direction = r · first + p · second + side · direction."""
        return times(direction, self.residual_scale), times(direction, self.branch_scale)

    # -- derivatives -------------------------------------------------------------------------------------------------

    def branch_tangent(self, projected: Tensor, tangent: Tensor) -> Tensor:
        """(n, c, d): the derivative of `branch` at projected (n, d) along tangents."""
        moved = tangent if self.branch_norm is None else self.branch_norm.tangent(projected, tangent)
        return times(moved, self.branch_scale)

    def norm_tangent(self, total: Tensor, tangent: Tensor) -> Tensor:
        """(n, c, d): the derivative of `finish` at total (n, d) along tangents."""
        return tangent if self.norm is None else self.norm.tangent(total, tangent)

    def norm_jacobian_times(self, total: Tensor, right: Tensor) -> Tensor:
        """(n, d, c): the derivative of `finish` at total (n, d), as a matrix for row vectors, times `right`."""
        return right if self.norm is None else self.norm.jacobian_times(total, right)

    def carried_jacobian_times(self, right: Tensor) -> Tensor:
        """(n, d, c): the derivative of `carried`, a diagonal matrix, times `right`."""
        scale = self.residual_scale
        return times(right, scale[:, None] if isinstance(scale, Tensor) and scale.dim() == 1 else scale)
