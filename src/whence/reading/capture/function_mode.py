"""The second way into a model, for those that are not on transformers' attention interface.

A `TorchFunctionMode` watches for the two shapes attention takes in plain code: softmax → … → matmul with the values,
and `scaled_dot_product_attention`. The scores are followed back to the product of queries and keys where there
is one. Nothing is patched; the mode is local to the thread and ends with its `with` block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from whence.reading.capture.fused import mask_parts, prefixes
from whence.reading.capture.multi_head import multi_head_attention
from whence.reading.capture.recorder import MASKED, AttentionRecorder, Call, apply_edits, expand_heads, sink_of

SOFTMAX = {torch.softmax, torch.nn.functional.softmax, Tensor.softmax, torch.special.softmax}
_MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_BADDBMM = {torch.baddbmm, Tensor.baddbmm}
_SDPA = torch.nn.functional.scaled_dot_product_attention

# Operations through which weights stay the same weights: casts, dropout in eval mode, changes of shape.
_PASSIVE = {
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "dropout", "contiguous", "clone", "detach",
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "__get__", "transpose", "permute", "nan_to_num",
}  # fmt: skip
# Operations that turn a product of queries and keys into the argument of the softmax.
_SCORE = _PASSIVE | {
    "mul", "div", "true_divide", "add", "sub", "__mul__", "__truediv__", "__add__", "__sub__", "__radd__", "__rmul__",
    "mul_", "div_", "add_", "__iadd__", "__imul__", "__itruediv__", "masked_fill", "masked_fill_", "where", "maximum",
    "max", "clamp", "tanh", "__rsub__", "__neg__", "einsum",
}  # fmt: skip


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))


class AttentionMode(TorchFunctionMode):
    """Reports every softmax-and-matmul attention and every fused one to the recorder."""

    def __init__(self, recorder: AttentionRecorder, batch: int, outside: AttentionRecorder | None = None) -> None:
        super().__init__()
        self.outside = outside  # attention that this other recorder is just being told of is not reported again
        self.recorder = recorder
        self.batch = batch
        # id → (a tensor that is weights, the softmax's input, the softmax's output)
        self._weights: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._scores: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # id → (scores, left factor, right factor)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.outside is not None and self.outside.busy:
            return func(*args, **kwargs)
        if func is _SDPA:
            return self._fused(*args, **kwargs)
        if func is torch.nn.functional.multi_head_attention_forward:
            # Inside torch's own function nothing can be watched, so that it is written out in operations that can.
            with self:
                written_out = multi_head_attention(*args, **kwargs)
            if written_out is not None:
                return written_out
        if func in _MATMUL and len(args) == 2 and id(args[0]) in self._weights:
            return self._mixed(func, args[0], args[1])
        if _name(func) == "einsum" and len(args) >= 1 and isinstance(args[0], str):
            operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
            if len(operands) == 2 and id(operands[0]) in self._weights:
                mixed = self._mixed_einsum(args[0], operands[0], operands[1])
                if mixed is not None:
                    return mixed
            if len(operands) == 2 and all(isinstance(t, Tensor) and t.dim() >= 3 for t in operands):
                result = func(*args, **kwargs)
                self._note_einsum(args[0], operands[0], operands[1], result)
                return result
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        if func in SOFTMAX:
            self._note_softmax(
                args[0] if args else kwargs["input"], result, kwargs.get("dim", args[1] if len(args) > 1 else -1)
            )
        elif func in _MATMUL and len(args) == 2 and args[0].dim() >= 3 and args[1].dim() >= 3:
            self._keep_score(result, args[0], args[1])
        elif func in _BADDBMM:
            left, right = (args[i] if len(args) > i else kwargs.get(f"batch{i}") for i in (1, 2))
            if isinstance(left, Tensor) and isinstance(right, Tensor):
                self._keep_score(result, left, right)
        else:
            self._pass_on(_name(func), args, result)
        return result

    # -- what is remembered ------------------------------------------------------------------------------------

    def _keep_score(self, result: Tensor, left: Tensor, right: Tensor) -> None:
        self._scores[id(result)] = (result, left, right)

    def _note_einsum(self, equation: str, left: Tensor, right: Tensor, result: Tensor) -> None:
        """A contraction of two activations may be the scores; kept as (queries, keys transposed) by batch-head."""
        operands = _bring_forward(equation, left, right)
        if operands is not None:
            self._keep_score(result, *operands)

    def _note_softmax(self, scores: Tensor, weights: Tensor, dim: int | None) -> None:
        last = dim in (None, -1, weights.dim() - 1)
        if not last and weights.dim() < 3:
            return
        self._weights[id(weights)] = (weights, scores, weights)
        while len(self._weights) > 16:  # old candidates are let go, or every layer's scores would stay in memory
            del self._weights[next(iter(self._weights))]

    def _pass_on(self, name: str, args: tuple[Any, ...], result: Tensor) -> None:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if name in ("__mul__", "mul", "__rmul__", "__getitem__", "where", "masked_fill") or name in _PASSIVE:
            for tensor in tensors:
                if id(tensor) in self._weights:
                    self._weights[id(result)] = (result, *self._weights[id(tensor)][1:])
        if name in _SCORE:
            for tensor in tensors:
                if id(tensor) in self._scores and result.numel() >= tensor.numel():
                    self._scores[id(result)] = (result, *self._scores[id(tensor)][1:])
                    break

    # -- attention, seen ---------------------------------------------------------------------------------------

    def _heads_first(self, tensor: Tensor) -> Tensor:
        """(batch·head, a, b) → (batch, head, a, b); four-dimensional tensors as they are."""
        if tensor.dim() == 3:
            tensor = tensor.unflatten(0, (self.batch, -1))
        return tensor

    def _mixed(self, func: Callable[..., Any], weights: Tensor, value: Tensor) -> Any:
        result = func(weights, value)
        _, scores, probabilities = self._weights[id(weights)]
        shapes_fit = (
            weights.dim() in (3, 4)
            and value.dim() == weights.dim()
            and value.shape[-2] == weights.shape[-1]
            and weights.shape[0] % self.batch == 0
        )
        if not shapes_fit or (weights.dim() == 4 and weights.shape[0] != self.batch):
            return result
        number, edits = self.recorder.begin()
        call = self._call(
            self._heads_first(weights),
            self._heads_first(value),
            self._heads_first(result),
            scores,
            result,
            probabilities,
        )
        if edits:
            call = apply_edits(call, edits)
            result = call.output.reshape(result.shape)
        self.recorder.see(number, call)
        return result

    def _mixed_einsum(self, equation: str, weights: Tensor, value: Tensor) -> Any | None:
        """weights · values written as an einsum, in any order of the axes (XLNet: "bnij,jbnd->ibnd")."""
        left, rest = equation.replace(" ", "").split(",")
        right, out = rest.split("->")
        summed = [c for c in left if c in right and c not in out]
        shared = [c for c in left if c in right and c in out]
        free_left = [c for c in left if c not in right]
        free_right = [c for c in right if c not in left]
        if len(summed) != 1 or len(free_left) != 1 or len(free_right) != 1 or len(shared) != 2 or len(out) != 4:
            return None
        # Which shared axis is the batch: the one whose size is the batch's; ties go to the first in the weights.
        sizes = dict(zip(left, weights.shape, strict=True))
        b = next((c for c in shared if sizes[c] == self.batch), None)
        if b is None:
            return None
        h = next(c for c in shared if c != b)
        w = weights.permute(*(left.index(c) for c in (b, h, free_left[0], summed[0])))
        v = value.permute(*(right.index(c) for c in (b, h, summed[0], free_right[0])))
        result = torch.einsum(equation, weights, value)
        z = result.permute(*(out.index(c) for c in (b, h, free_left[0], free_right[0])))
        _, scores, probabilities = self._weights[id(weights)]
        number, edits = self.recorder.begin()
        call = self._call(w, v, z, scores, result, probabilities)
        if edits:
            call = apply_edits(call, edits)
            order = (b, h, free_left[0], free_right[0])
            result = call.output.permute(*(order.index(c) for c in out))
        self.recorder.see(number, call)
        return result

    def _call(
        self, weights: Tensor, value: Tensor, output: Tensor, scores: Tensor, node: Tensor, probabilities: Tensor
    ) -> Call:
        sink = sink_of(self._heads_first(probabilities), weights) if probabilities.dim() >= 3 else None
        factors = self._scores.get(id(scores))
        query = key = None
        if factors is not None:
            left, right = self._heads_first(factors[1]), self._heads_first(factors[2])
            fits = (
                left.dim() == 4
                and right.dim() == 4
                and left.shape[-2] == weights.shape[-2]
                and right.shape[-1] == weights.shape[-1]
                and left.shape[-1] == right.shape[-2]
            )
            if fits:
                query, key = left, right.transpose(-1, -2)
        self._scores.clear()
        visible = None
        if scores.shape[-1] == weights.shape[-1]:
            gap = scores - scores.amax(dim=-1, keepdim=True)
            open_door = self._heads_first(gap > MASKED)
            if open_door.shape == weights.shape and not bool(open_door.all()):
                visible = open_door
        return Call(query, key, value, weights, output, visible, None, None, node, sink=sink)

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`scaled_dot_product_attention`, computed openly so that its weights can be seen."""
        if query.dim() != 4 or query.shape[0] != self.batch:
            return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        heads = query.shape[1]
        number, edits = self.recorder.begin()
        if number in self.recorder.fused and not edits and not dropout_p:
            output = _SDPA(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
            seen, bias = mask_parts(self.recorder, attn_mask, key.shape[2])
            if is_causal:
                seen = prefixes(self.recorder, query.shape[2], key.shape[2], query.device)
            call = Call(query, key, value, query.new_empty(0), output, seen, factor, bias, output, fused=True)
            self.recorder.see(number, call)
            return output
        scores = query @ expand_heads(key, heads).transpose(-1, -2) * factor
        bias = visible = None
        if is_causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                visible = attn_mask if visible is None else visible & attn_mask
            else:
                opened = attn_mask > MASKED
                visible = opened if visible is None else visible & opened
                bias = attn_mask
                scores = scores + attn_mask
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        weights = torch.softmax(scores, dim=-1)
        call = Call(
            query, key, value, weights, expand_heads(weights, heads) @ expand_heads(value, heads), visible, factor, bias
        )
        if edits:
            call = apply_edits(call, edits)
        # The tensor handed on is the one recorded, so that its dataflow can be followed.
        call = Call(call.query, call.key, call.value, call.weights, call.output, visible, factor, bias, call.output)
        self.recorder.see(number, call)
        return call.output


def _bring_forward(equation: str, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor] | None:
    """An einsum of queries and keys as (…, query, d) and (…, d, key), in the axis order of its result."""
    try:
        a, rest = equation.replace(" ", "").split(",")
        b, out = rest.split("->")
    except ValueError:
        return None
    summed = [c for c in a if c in b and c not in out]
    if len(summed) != 1 or len(out) != 4 or "." in equation:
        return None
    q, k = out[-2], out[-1]
    if q not in a or k not in b or any(c not in a or c not in b for c in out[:2]):
        return None
    return (
        left.permute(*(a.index(c) for c in (*out[:2], q, summed[0]))),
        right.permute(*(b.index(c) for c in (*out[:2], summed[0], k))),
    )
