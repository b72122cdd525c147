"""How an attention block is wired: its output projection, the residual it is added to, and the norms around it.

Found by following tensors forward from the head outputs on the tape of one short pass (no module or variable name is
trusted), and proved afterwards by reconstructing what the model computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whence.reading.norms import Norm, best_reading, recognise
from whence.reading.tape import ModuleCall, Node, Op, Path, Tape, deviation, flat

POST, PRE, SANDWICH, PARALLEL = "post-norm", "pre-norm", "sandwich", "parallel"

# Operations that leave every number as it is: changes of shape, casts, dropout in eval mode.
_PASSIVE = {
    "view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten", "squeeze", "unsqueeze", "to",
    "type", "type_as", "float", "half", "bfloat16", "double", "clone", "detach", "dropout", "__getitem__", "movedim",
    "swapaxes", "view_as", "reshape_as", "alias",
}  # fmt: skip
_ADD = {"add", "__add__", "__radd__", "add_", "__iadd__"}
_MUL = {"mul", "__mul__", "__rmul__", "mul_", "__imul__"}
_DIV = {"div", "true_divide", "__truediv__", "div_", "__itruediv__"}


class Unread(Exception):
    """A part of the wiring could not be found; the message says what was tried."""


@dataclass(frozen=True)
class Handle:
    """Where a tensor can be picked up in any later pass: the `number`-th call of a module, in its input or output."""

    module: str
    number: int
    side: str  # "in" | "out"
    path: Path
    clone: bool  # the model overwrites it in place later on


@dataclass(frozen=True)
class Projection:
    """The output projection: head h adds z_h · weight[h] to the block's output, and bias is added once."""

    weight: Tensor  # (head, d_v, d)
    bias: Tensor | None  # (d,)

    @cached_property
    def full_rank(self) -> bool:
        """Whether every head's slice has full row rank, so that T = V W has the column space of V. Measured once."""
        if self.weight.shape[-2] > self.weight.shape[-1]:
            return False
        weight = self.weight.detach().to(torch.float64)
        if self.weight.dtype == torch.float64:
            singular = torch.linalg.svdvals(weight).flip(-1)
        else:  # float32 weights are far coarser than the square root of float64's eps, so the Gram matrix tells
            singular = torch.linalg.eigvalsh(weight @ weight.mT).clamp(min=0).sqrt()
        cut = singular[..., -1] * max(self.weight.shape[-2:]) * torch.finfo(self.weight.dtype).eps
        return bool((singular[..., 0] > cut).all())

    def __call__(self, heads: Tensor) -> Tensor:
        """(head, query, d_v) → (query, d)"""
        out = torch.einsum("hqv,hvd->qd", heads, self.weight.to(heads))
        return out if self.bias is None else out + self.bias.to(out)


@dataclass(frozen=True)
class Wiring:
    """state after attention = norm( r + branch(projection) [+ other] ), each part absent where the model has none."""

    kind: str  # post-norm | pre-norm | sandwich | parallel
    residual: Handle | None
    after: Handle | None  # the state after attention (and its norm), where a module shows it
    residual_scale: Tensor | float | None  # a factor on the residual (DeepNorm and its kin)
    branch_scale: Tensor | float | None  # a factor on the attention branch (residual multiplier, layer scale)
    branch_norm: Norm | None  # sandwich: the norm on the attention branch, before its factor
    norm: Norm | None  # post-norm: the norm after the add

    def carried(self, residual: Tensor) -> Tensor:
        """The residual as it enters the sum, from the block's input."""
        return _times(residual, self.residual_scale)

    def branch(self, projected: Tensor) -> Tensor:
        """What the residual is added to, from the projection's output."""
        if self.branch_norm is not None:
            projected = self.branch_norm(projected)
        return _times(projected, self.branch_scale)

    def rebuild(self, residual: Tensor, projected: Tensor, other: Tensor | None = None) -> Tensor:
        """The state after attention, from its parts."""
        state = self.carried(residual) + self.branch(projected)
        if other is not None:
            state = state + other
        return state if self.norm is None else self.norm(state)


def _times(x: Tensor, factor: Tensor | float | None) -> Tensor:
    if factor is None:
        return x
    return x * (factor.to(x) if isinstance(factor, Tensor) else factor)


@dataclass(frozen=True)
class Found:
    """What the tape shows of one attention call: the wiring and the tensors that prove it."""

    projection: Projection | None
    projected: Node | None
    error_b: float
    wiring: Wiring | None
    error_c: float
    reason_b: str | None
    reason_c: str | None
    residual: Node | None = None
    state: Node | None = None  # the state after attention
    stream: Node | None = None  # the sum before a post-norm


def closure(node: Node) -> list[Node]:
    """`node` and everything that is the same numbers in another shape or dtype, forward in time."""
    found = [node]
    seen = {id(node)}
    for current in found:
        for op in current.consumers:
            if op.name not in _PASSIVE or op.inputs[0] is not current:  # x.type_as(y) passes on x, not y
                continue
            for out in op.outputs:
                if id(out) not in seen and out.value.numel() == node.value.numel():
                    seen.add(id(out))
                    found.append(out)
    return found


def origins(node: Node) -> list[Node]:
    """`node` and what it was reshaped or cast from, backward in time."""
    found = [node]
    while True:
        op = found[-1].producer
        if op is None or op.name not in _PASSIVE or not op.inputs or op.inputs[0].value.numel() != node.value.numel():
            return found
        found.append(op.inputs[0])


def ancestors(nodes: Iterable[Node]) -> set[int]:
    """Ids of every node from which one of `nodes` was computed."""
    todo = list(nodes)
    seen = {id(n) for n in todo}
    while todo:
        op = todo.pop().producer
        for parent in op.inputs if op is not None else ():
            if id(parent) not in seen:
                seen.add(id(parent))
                todo.append(parent)
    return seen


def consumers(nodes: Iterable[Node]) -> list[tuple[Op, Node]]:
    """Operations that do something with one of `nodes`, in the order they ran."""
    pairs = [
        (op, node) for node in nodes for op in node.consumers if op.name not in _PASSIVE or op.inputs[0] is not node
    ]
    return sorted(pairs, key=lambda pair: pair[0].index)


# -- (b): the output projection ------------------------------------------------------------------------------------


def find_projection(start: Node, heads: Tensor, tolerance: float) -> tuple[Projection, Node, float]:
    """From the head outputs (head, query, d_v) to the linear map that mixes them into the model's width."""
    tried: list[str] = []
    for op, node in consumers(closure(start)):
        projection = _as_linear(op, node, heads.shape[0], heads.shape[2])
        out = op.outputs[0] if projection is not None else None
        if projection is None:
            projection, out = _as_added(op, node, heads.shape[0], heads.shape[2])
        if projection is None or out is None:
            tried.append(op.name)
            continue
        expected = projection(heads.to(torch.float64))
        error = deviation(flat(out.value), expected)
        if error <= tolerance:
            return projection, out, error
        tried.append(f"{op.name} (its output differs by {error:.1e} from Σ heads · weight + bias)")
    if not tried:
        raise Unread("nothing was computed from the head outputs")
    gates = sum(name in _MUL or "sigmoid" in name for name in tried)
    hint = (
        "; the head outputs are multiplied by something (a gate or a scale) before they are projected" if gates else ""
    )
    raise Unread(
        f"no linear map of the head outputs alone was found; they go into: {', '.join(dict.fromkeys(tried))}{hint}"
    )


def _as_linear(op: Op, node: Node, heads: int, size: int) -> Projection | None:
    """The operation as a projection of flattened head outputs, if it is one."""
    a, kw = op.args, op.kwargs
    weight: Any = None
    bias: Any = None
    if op.name == "linear" and _is(a, 0, node):
        weight, bias = _arg(a, kw, 1, "weight").T, _arg(a, kw, 2, "bias")
    elif op.name == "addmm" and _is(a, 1, node):
        weight, bias = a[2], a[0]
    elif op.name in ("matmul", "__matmul__", "mm") and _is(a, 0, node) and a[1].dim() == 2:
        weight = a[1]
    elif op.name == "conv1d" and _is(a, 0, node) and _arg(a, kw, 1, "weight").shape[-1] == 1:
        kernel = _arg(a, kw, 1, "weight").squeeze(-1)
        groups = _arg(a, kw, 6, "groups") or 1
        weight = torch.block_diag(*kernel.chunk(groups)).T if groups > 1 else kernel.T
        bias = _arg(a, kw, 2, "bias")
    elif op.name == "einsum":
        weight = _einsum_weight(op, node, heads, size)
    if weight is None or weight.dim() != 2 or weight.shape[0] != heads * size:
        return None
    if bias is not None and bias.numel() != weight.shape[1]:
        return None
    return Projection(weight.detach().unflatten(0, (heads, size)), None if bias is None else bias.detach().reshape(-1))


def _as_added(op: Op, node: Node, heads: int, size: int) -> tuple[Projection | None, Node | None]:
    """Heads added first and then projected, (Σ_h z_h) W: every head is given the same W. With the projected tensor.

    That the sum runs over the heads, and over nothing else, is left to the caller's check by value.
    """
    if op.name != "sum" or not op.outputs or op.outputs[0].value.numel() * heads != node.value.numel():
        return None, None
    for after, summed in consumers(closure(op.outputs[0])):
        one = _as_linear(after, summed, 1, size)
        if one is not None:
            return Projection(one.weight.expand(heads, -1, -1), one.bias), after.outputs[0]
    return None, None


def _einsum_weight(op: Op, node: Node, heads: int, size: int) -> Tensor | None:
    """The matrix of an einsum of head outputs (…, head, d_v) with one weight, read by its subscripts."""
    if not isinstance(op.args[0], str):
        return None
    operands = op.args[1] if isinstance(op.args[1], (list, tuple)) else op.args[1:]
    if len(operands) != 2 or operands[0] is not node.tensor or "." in op.args[0]:
        return None
    left, rest = op.args[0].replace(" ", "").split(",")
    right, out = rest.split("->")
    summed = [c for c in left if c in right and c not in out]
    free = [c for c in right if c not in left]
    weight: Tensor = operands[1]
    if len(free) != 1 or set(summed) | set(free) != set(right):
        return None
    weight = weight.permute(*(right.index(c) for c in (*summed, *free)))
    return weight.reshape(-1, weight.shape[-1]) if weight[..., 0].numel() == heads * size else None


def _is(args: tuple[object, ...], i: int, node: Node) -> bool:
    return len(args) > i and args[i] is node.tensor


def _arg(args: tuple[Any, ...], kwargs: dict[str, Any], i: int, name: str) -> Any:
    return args[i] if len(args) > i else kwargs.get(name)


# -- (c): residual and norm ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sum:
    residual: Node
    total: Node
    add: Op
    scale: Tensor | float | None
    norm: Norm | None
    others: tuple[Node, ...]
    residual_scale: Tensor | float | None


def find_wiring(tape: Tape, projected: Node, upstream: set[int], tolerance: float) -> tuple[Wiring, Found]:
    """From the projection's output to the state after attention. `upstream`: ids of what the queries came from."""
    found = _find_sum(projected, upstream, tolerance)
    total, kind, others = found.total, PRE, list(found.others)
    norm: Norm | None = None
    state = total
    uses = consumers(closure(total))
    side = _lone_side_addend(total, uses)
    while side is not None:
        add, other = side
        others.append(other)
        total = state = add.outputs[0]
        uses = consumers(closure(total))
        side = _lone_side_addend(total, uses)
    if others:
        kind = PARALLEL
    else:
        kind = PRE if found.norm is None else SANDWICH
        after = _sole_norm(total, uses, tolerance)
        if after is not None and _carried_on(after[1]):
            norm, state = after
            kind = POST
        elif after is None and not _carried_on(total):
            names = ", ".join(dict.fromkeys(op.name for op, _ in uses)) or "nothing"
            raise Unread(
                f"residual + attention goes into {names}, and on to no later residual: no wiring that is known"
            )
    wiring = Wiring(
        kind=kind,
        residual=find_handle(tape, found.residual),
        after=find_handle(tape, state),
        residual_scale=found.residual_scale,
        branch_scale=found.scale,
        branch_norm=found.norm,
        norm=norm,
    )
    if flat(found.residual.value).shape != flat(projected.value).shape:
        raise Unread(
            f"the residual has shape {tuple(found.residual.value.shape)}, the projection {tuple(projected.value.shape)}"
        )
    aside = sum((flat(n.value) for n in others[1:]), flat(others[0].value)) if others else None
    rebuilt = wiring.rebuild(flat(found.residual.value), flat(projected.value), aside)
    error = deviation(flat(state.value), rebuilt)
    reason = None
    if error > tolerance:
        reason = f"rebuilding the state after attention as {kind} misses it by {error:.1e} (tolerance {tolerance:.0e})"
    elif wiring.residual is None:
        reason = "the residual input is not shown by any module, so it cannot be picked up in later passes"
    return wiring, Found(None, projected, 0.0, wiring, error, None, reason, found.residual, state, total)


def _find_sum(projected: Node, upstream: set[int], tolerance: float) -> _Sum:
    """Walk from the projection's output to the add that joins the residual, noting scales and norms on the way."""
    node, scale, norm = projected, None, None
    others: list[Node] = []
    tried: list[str] = []
    for _ in range(12):
        step: Node | None = None
        uses = consumers(closure(node))
        for op, used in uses:
            if op.name not in _ADD or not op.outputs:
                continue
            other = _other_operand(op, used)
            if other is None or other.value.numel() != node.value.numel() or op.kwargs.get("alpha", 1) != 1:
                continue
            residual, residual_scale = _unscaled(other, upstream)
            if residual is not None:
                return _Sum(residual, op.outputs[0], op, scale, norm, tuple(others), residual_scale)
            others.append(other)
            step = op.outputs[0]
            break
        if step is None:
            for op, used in uses:
                if op.name in _MUL | _DIV and op.outputs[0].value.numel() == node.value.numel():
                    factor = _factor(op, used)
                    if factor is not None and not others:
                        scale = factor if scale is None else scale * factor
                        step = op.outputs[0]
                        break
        if step is None and scale is None and norm is None and not others:
            read = _norm_of(node, uses, tolerance)
            if read is not None:
                norm, step = read
        if step is None:
            tried += [op.name for op, _ in uses]
            break
        node = step
    raise Unread(
        "the projection's output is never added to a residual that the queries came from; it goes into: "
        + (", ".join(dict.fromkeys(tried)) or "nothing")
    )


def _other_operand(op: Op, used: Node) -> Node | None:
    """The tensor that `used` is added to."""
    rest = [n for n in op.inputs if n is not used]
    return rest[0] if len(rest) == 1 else None


def _unscaled(other: Node, upstream: set[int]) -> tuple[Node | None, Tensor | float | None]:
    """The residual behind an addend, and its factor: something that the queries came from, possibly times a constant."""
    if any(id(o) in upstream for o in origins(other)):
        return other, None
    op = other.producer
    if op is not None and op.name in _MUL | _DIV:
        for node in op.inputs:
            factor = _factor(op, node)
            if factor is not None and any(id(o) in upstream for o in origins(node)):
                return node, factor
    return None, None


def _factor(op: Op, used: Node) -> Tensor | float | None:
    """A number, or a vector of the model's width, that the branch is multiplied by."""
    for i, arg in enumerate(op.args[:2]):
        inverse = op.name in _DIV
        if inverse and i == 0:
            continue
        if isinstance(arg, (int, float)):
            return 1.0 / arg if inverse else float(arg)
        if isinstance(arg, Tensor) and arg is not used.tensor and (arg.numel() == 1 or arg.dim() == 1):
            return arg.detach().reciprocal() if inverse else arg.detach()
    return None


def _lone_side_addend(total: Node, uses: list[tuple[Op, Node]]) -> tuple[Op, Node] | None:
    """(r + attention) + f, where f does not come from the sum: the parallel wiring's other branch."""
    ops = {op.index: (op, used) for op, used in uses}
    if len(ops) != 1:
        return None
    op, used = next(iter(ops.values()))
    other = _other_operand(op, used) if op.name in _ADD else None
    if other is None or other.value.shape != used.value.shape or id(total) in ancestors([other]):
        return None
    return op, other


def _norm_calls(names: set[int], op: Op, since: int) -> Iterator[ModuleCall]:
    """Module calls around `op` that began after `since` and were given one of the nodes in `names`."""
    for call in op.region:
        if call.begin > since and any(id(node) in names for _, node in call.inputs):
            yield call


def _norm_of(node: Node, uses: list[tuple[Op, Node]], tolerance: float) -> tuple[Norm, Node] | None:
    """The norm that reads `node`, with its output, if one of its uses is a norm."""
    names = {id(n) for n in closure(node)}
    since = node.producer.index if node.producer is not None else -1
    for op, used in uses:
        if op.name in ("layer_norm", "rms_norm"):
            weight = _arg(op.args, op.kwargs, 2, "weight")
            bias = _arg(op.args, op.kwargs, 3, "bias") if op.name == "layer_norm" else None
            eps = _arg(op.args, op.kwargs, 4 if op.name == "layer_norm" else 3, "eps")
            eps_values = [eps] if isinstance(eps, float) else [1e-5, torch.finfo(used.value.dtype).eps]
            detached = [None if not isinstance(t, Tensor) else t.detach() for t in (weight, bias)]
            reading = [(detached[0], detached[1], 0.0)]
            norm = best_reading(reading, eps_values, used.value, op.outputs[0].value, tolerance)
            if norm is not None:
                return norm, op.outputs[0]
        for call in _norm_calls(names, op, since):
            if len(call.outputs) != 1:
                continue
            given = next(n for _, n in call.inputs if id(n) in names)
            norm = recognise(call.module, given.value, call.outputs[0][1].value, tolerance)
            if norm is not None:
                return norm, call.outputs[0][1]
    return None


def _sole_norm(total: Node, uses: list[tuple[Op, Node]], tolerance: float) -> tuple[Norm, Node] | None:
    """The post-norm: a norm that is the only thing the sum goes into."""
    read = _norm_of(total, uses, tolerance)
    if read is None:
        return None
    _, out = read
    inside = _producing_region(out, total)
    if all(op.index in inside for op, _ in uses):
        return read
    return None


def _carried_on(node: Node) -> bool:
    """Whether a state goes on as a residual: into an add, plainly or times a constant.

    A norm whose output does not is a final norm after a last block without feed-forward, not a post-norm.
    """
    for op, used in consumers(closure(node)):
        if op.name in _ADD:
            return True
        if op.name in _MUL | _DIV and _factor(op, used) is not None:
            return True
    return False


def _producing_region(out: Node, source: Node) -> set[int]:
    """Indices of the operations that compute `out` from `source`."""
    todo, seen, ops = [out], {id(out)}, set()
    while todo:
        node = todo.pop()
        op = node.producer
        if op is None or node is source:
            continue
        ops.add(op.index)
        for parent in op.inputs:
            if id(parent) not in seen:
                seen.add(id(parent))
                todo.append(parent)
    since = source.producer.index if source.producer is not None else -1
    return {i for i in ops if i > since}


# -- where a tensor can be picked up -------------------------------------------------------------------------------


def find_handle(tape: Tape, node: Node) -> Handle | None:
    """A module's input or output that is this very tensor (or the same numbers in the same layout)."""
    same = {id(n) for n in (*origins(node), *closure(node))}
    for call in tape.calls:
        for side, entries in (("in", call.inputs), ("out", call.outputs)):
            for path, entry in entries:
                if id(entry) in same and entry.value.dim() >= 2 and entry.value.shape[-1] == node.value.shape[-1]:
                    return Handle(call.name, call.number, side, path, entry.frozen is not None)
    return None


def block_output(site: Op, found: Found) -> Node | None:
    """The state after the whole block: what the innermost enclosing module that was given the residual gives back."""
    if found.residual is None or found.state is None or found.stream is None or found.stream.producer is None:
        return None
    joined = found.stream.producer.index  # the block must hold the residual add, not the attention alone
    given = {id(n) for n in (*origins(found.residual), *closure(found.residual))}
    own = {id(n) for n in (*origins(found.state), *closure(found.state))}
    width = found.state.value.shape[-1]
    fallback: Node | None = None
    for call in reversed(site.region):
        if not call.begin <= joined < call.end or not any(id(node) in given for _, node in call.inputs):
            continue
        for _, out in call.outputs:
            if out.value.dim() < 2 or out.value.shape[-1] != width or out.value.numel() != found.state.value.numel():
                continue
            if id(out) not in own:
                return out
            fallback = out
            break
    return fallback


def with_projection(found: Found, projection: Projection, projected: Node, error: float) -> Found:
    """The same findings with the projection that led to them."""
    return replace(found, projection=projection, projected=projected, error_b=error)
