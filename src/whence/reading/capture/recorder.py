"""What one forward pass shows of its attention, and what may be put in its place.

An `AttentionRecorder` is handed to both ways into a model (`interface.py`, `function_mode.py`). Each of them calls
`AttentionRecorder.see` once per attention call, in the order of the calls; nothing else is shared between them.
The recorder of the running forward pass lives in a `ContextVar`, so that two threads never see each other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whence.reading.capture.lineage import Lineage, Role

MASKED = -1e4  # an additive mask or a score gap below this is a closed door: softmax gives exactly 0 there


@dataclass(frozen=True)
class Call:
    """One attention call of one forward pass, batch first; key and value heads before the GQA repeat."""

    query: Tensor | None  # (batch, head, query, d_k)
    key: Tensor | None  # (batch, kv head, key, d_k)
    value: Tensor  # (batch, kv head, key, d_v)
    weights: Tensor  # (batch, head, query, key); empty where the pass was fused, and rows are made on demand
    output: Tensor  # (batch, head, query, d_v), as the model computed it
    visible: Tensor | None  # boolean, broadcastable to weights; None: every key is visible
    scale: float | None  # the factor on query·key, where it is known
    bias: Tensor | None = None  # what was added to the scaled scores besides the mask, where it is known
    node: Tensor | None = None  # the very tensor the model goes on with (its dataflow is followed from here)
    cap: tuple[float, float] | None = None  # a soft cap on the scores: (factor on query·key, cap)
    sink: Tensor | None = None  # (batch, head, query): the weight of a learned sink, which has no value of its own
    fused: bool = False  # made without weights: rows of them follow from query, key and the rest


@dataclass(frozen=True)
class Edit:
    """A change to one attention call: rows of attention replaced, or values set to zero.

    `weights` is broadcast to (batch, head, query, key); only entries where `where` (same broadcasting) is True are
    replaced. `zero` (broadcast to (batch, head, key)) marks values that are set to zero for those heads. `output` is
    applied to the head outputs (batch, head, query, d_v) last of all.
    """

    weights: Tensor | None = None
    where: Tensor | None = None
    zero: Tensor | None = None
    output: Callable[[Tensor], Tensor] | None = None


@dataclass
class AttentionRecorder:
    """Collects the calls of one forward pass and applies the edits asked for, by call number."""

    edits: Mapping[int, Sequence[Edit]] = field(default_factory=dict)
    keep: Callable[[int], frozenset[str]] | None = None  # what to hold of call number i; None: everything
    calls: list[Call] = field(default_factory=list)
    count: int = 0
    busy: bool = False  # inside an attention call that will be reported
    follow: bool = False  # hold the very tensors that the model goes on with, too
    fused: frozenset[int] = frozenset()  # calls that the model may make with its own fused attention, without weights
    block: int | None = None  # weights that an eager attention in blocks makes at a time; None: as many as are quick
    all_fused: bool = False  # whether that is every call, so that the model's own masks will do
    listener: Callable[[int], None] | None = None  # told of every call as soon as it is recorded
    lineage: Lineage | None = None  # where queries and keys come from is followed in this pass
    roles: list[Role] = field(default_factory=list)  # of every call, where it is
    _masks: dict[Any, Any] = field(default_factory=dict)  # what layers share is made once

    def shared(self, key: Any, holder: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for this pass. `holder` stays alive, so that its id stays its own."""
        if key not in self._masks:
            self._masks[key] = (holder, make())
        return self._masks[key][1]

    def begin(self) -> tuple[int, Sequence[Edit]]:
        number = self.count
        self.count += 1
        return number, self.edits.get(number, ())

    def see(self, number: int, call: Call) -> None:
        if self.lineage is not None:
            self.roles.append(self.lineage.role(call))
        if self.keep is not None:
            wanted = self.keep(number)
            empty = call.weights.new_empty(0)
            call = Call(
                query=call.query if "queries" in wanted else None,
                key=call.key if "keys" in wanted else None,
                value=call.value if "values" in wanted else empty,
                weights=call.weights if "attention" in wanted else empty,
                output=call.output if "outputs" in wanted else empty,
                visible=call.visible,
                scale=call.scale,
                bias=call.bias if "keys" in wanted else None,
                cap=call.cap,
                sink=call.sink,
                node=call.node if self.follow else None,
                fused=call.fused,
            )
        self.calls.append(call)
        if self.listener is not None:
            self.listener(number)


def expand_heads(grouped: Tensor, heads: int) -> Tensor:
    """(batch, kv head, …) → (batch, head, …), repeating each key-value head for its group of query heads.

    A view where nothing needs repeating.
    """
    groups = heads // grouped.shape[1]
    if groups == 1:
        return grouped
    return grouped.repeat_interleave(groups, dim=1)


def mix(weights: Tensor, value: Tensor) -> Tensor:
    """attention · values with grouped heads broadcast, never copied: (B,H,q,k), (B,G,k,d) → (B,H,q,d)."""
    batch, heads, n_query, n_key = weights.shape
    groups = value.shape[1]
    if heads == groups:
        return weights @ value
    # The heads of a group as more rows of one product: a broadcast product would copy the values for each of them.
    split = weights.reshape(batch, groups, heads // groups * n_query, n_key)
    return (split @ value).view(batch, heads, n_query, value.shape[-1])


def apply_edits(call: Call, edits: Sequence[Edit]) -> Call:
    """The call as it would have been with the edits: new weights, zeroed values, and the output they give."""
    weights, value = call.weights, call.value
    for edit in edits:
        if edit.weights is not None:
            new = edit.weights.to(weights)
            where = torch.ones((), dtype=torch.bool) if edit.where is None else edit.where
            weights = torch.where(where.to(weights.device), new, weights)
        if edit.zero is not None:
            # Zeroing is asked for per query head, so grouped values must be told apart first.
            value = expand_heads(value, weights.shape[1])
            value = value.masked_fill(edit.zero.to(value.device)[..., None], 0.0)
    same = all(edit.weights is None and edit.zero is None for edit in edits)
    output = call.output if same else mix(weights.to(value.dtype), value)
    for edit in edits:
        output = output if edit.output is None else edit.output(output)
    return Call(
        query=call.query,
        key=call.key,
        value=value,
        weights=weights,
        output=output,
        visible=call.visible,
        scale=call.scale,
        bias=call.bias,
        cap=call.cap,
        # Other weights leave another rest to the sink, which is not mixed in: its value is zero.
        sink=call.sink if call.sink is None or same else 1 - weights.sum(-1),
    )


def sink_of(probabilities: Tensor, weights: Tensor) -> Tensor | None:
    """The column of a softmax that the attention weights leave out, (…, query); None where they leave out none.

    A learned sink is one more score beside those of the keys: softmax over n + 1 columns, of which n are used.

    >>> import torch
    >>> probabilities = torch.tensor([[0.5, 0.3, 0.2]])
    >>> sink_of(probabilities, probabilities[..., :-1])
    tensor([0.2000])
    """
    if probabilities.dim() != weights.dim() or probabilities.shape[-1] != weights.shape[-1] + 1:
        return None
    for keys, sink in (
        (probabilities[..., :-1], probabilities[..., -1]),
        (probabilities[..., 1:], probabilities[..., 0]),
    ):
        if keys.shape == weights.shape and torch.equal(keys.to(weights.dtype), weights):
            return sink
    return None


_ACTIVE: ContextVar[AttentionRecorder | None] = ContextVar("whence_recorder", default=None)


def active() -> AttentionRecorder | None:
    """The recorder of the forward pass that is running in this thread, if any."""
    return _ACTIVE.get()


@contextmanager
def listening(recorder: AttentionRecorder) -> Iterator[AttentionRecorder]:
    """Make `recorder` the one that attention calls in this context report to."""
    token = _ACTIVE.set(recorder)
    try:
        yield recorder
    finally:
        _ACTIVE.reset(token)
