"""Methods that read one layer at a time: several of them, on several traces, in one go.

Layer by layer, so that what the methods share (the decomposition, the attention laid out by key) is made once and
dropped before the next layer; and traces of about one length together (`whence.mixing.batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from whence.errors import InputError, WiringError
from whence.mixing.batch import groups, stacked, unpadded
from whence.mixing.contributions import LAYER, Contributions
from whence.mixing.decomposition import Decomposition, apart, decompose, working
from whence.mixing.encoder_decoder import together
from whence.mixing.mixture import check_rows
from whence.reading.inputs import Prepared
from whence.reading.rerun.run import prove_model
from whence.reading.trace import Layer, Stack, Trace
from whence.reading.wiring.block_tail import feedforward_of
from whence.reading.wiring.equation import POST, Wiring

Matrix = Tensor | tuple[Tensor, Tensor]
"""(query, source); or with it which rows are degenerate, (query). Several sequences: both with the sequence first."""


class LayerMethod(Protocol):
    """What an entry that gives a "matrix" makes of its options.

    It may have three attributes, False unless it says otherwise. by_rows: it can read a block of a layer's rows
    (`Layer.block`), so that a long text never has its attention whole. joint: it can read an encoder and its decoder together
    (ALTI+), with a column for the residual where the layer is crossed. batched: it can read a layer of several
    sequences, whose tensors have the sequence as their first axis.
    """

    def matrix(self, layer: LayerView) -> Matrix:
        """(query, source) of one layer."""


@dataclass(frozen=True)
class FunctionMethod:
    """A plain function of a layer as a method."""

    function: Callable[..., Matrix]
    options: Mapping[str, Any]

    def matrix(self, layer: LayerView) -> Matrix:
        """(query, key)"""
        return self.function(layer, **self.options)


def layer_method(given: Callable[..., Any], options: Mapping[str, Any]) -> LayerMethod:
    """The method that a table entry names: its class with the options, or its function."""
    return given(**options) if isinstance(given, type) else FunctionMethod(given, options)


class LayerView:
    """One layer, or the same layer of several sequences, as the methods of a run see it: what they share is made once.

    crossed: its keys are other tokens than its queries; the residual is then a source of its own, after the keys.
    """

    def __init__(self, layer: Layer, trace: Trace, stack: str) -> None:
        self.layer, self.trace, self.stack = layer, trace, stack
        self.crossed = stack == "cross"
        self.first_row = layer.first_row or 0  # of a block of rows: which key is the first query's own token

    @cached_property
    def attention(self) -> Tensor:
        """(…, head, query, key), in float32 or float64."""
        attention = self.layer.attention.detach()
        return attention.to(working(attention))

    @cached_property
    def decomposition(self) -> Decomposition:
        """The state after attention as a sum of one vector per source."""
        return decompose(self.layer, crossed=self.crossed)

    def after_second_norm(self, model: Any = None) -> Decomposition:
        """The parts as the block's second norm passes them on: by the sum that the trace kept, else by the model."""
        layer, decomposition = self.layer, self.decomposition
        norm, before = layer.second_norm, layer._before_second_norm
        if norm is not None and before is not None:
            onward = decomposition.through(Wiring(POST, norm), before.detach().to(decomposition.state))
            _check_output(layer, onward.state)
            return onward
        chosen = self.trace.with_model(model)
        proof = prove_model(chosen, Prepared(dict(self.trace.inputs), self.trace.tokens))
        rest = feedforward_of(chosen, proof, self.trace.inputs, self.stack, layer.index)
        return decomposition.through(rest.wiring, rest.before_norm(decomposition.state))


def by_layer(
    traces: Sequence[Trace], named: Sequence[tuple[str, LayerMethod]], attention: str | None = None
) -> list[list[Contributions]]:
    """[method][trace]: what each named method makes of each trace.

    attention: the stack that is read; None: an encoder and its decoder together, where the method can.
    """
    results: list[list[Any]] = [[None] * len(traces) for _ in named]
    batched = all(getattr(method, "batched", False) for _, method in named)
    for batch in groups(traces) if batched else [[i] for i in range(len(traces))]:
        together_ = [traces[i] for i in batch]
        read = [_stacks(together_[0], method, name, attention) for name, method in named]
        matrices = _matrices(together_, [method for _, method in named], read)
        for number, (name, method) in enumerate(named):
            for place, i in enumerate(batch):
                found = {stack: rows[place] for stack, rows in matrices[number].items()}
                results[number][i] = _result(traces[i], name, method, found, read[number])
    return results


Rows = list[tuple[Tensor, Tensor]]
"""By layer: its matrix, and how many of its rows are degenerate."""


def _matrices(
    traces: Sequence[Trace], methods: Sequence[LayerMethod], read: Sequence[list[str]]
) -> list[dict[str, list[Rows]]]:
    """[method][stack][trace][layer], one layer of all traces at a time."""
    matrices: list[dict[str, list[Rows]]] = [{name: [[] for _ in traces] for name in stacks} for stacks in read]
    for name in traces[0].stacks:
        wanted = [i for i, stacks in enumerate(read) if name in stacks]
        for layers in zip(*(trace.stacks[name] for trace in traces), strict=True) if wanted else ():
            view = LayerView(stacked(layers), traces[0], name)
            for i, (matrix, empty) in zip(wanted, _of_view(view, [methods[i] for i in wanted]), strict=True):
                for place, own in enumerate(layers):
                    rows = matrix if len(layers) == 1 else unpadded(matrix, place, own, view.crossed)
                    lost = empty if empty is None or len(layers) == 1 else empty[place]
                    count = torch.tensor(0) if lost is None else lost[: rows.shape[0]].sum()
                    _check_shape(rows, own, view.crossed, methods[i])
                    matrices[i][name][place].append((rows, count))
    return matrices


def _of_view(view: LayerView, methods: Sequence[LayerMethod]) -> list[tuple[Tensor, Tensor | None]]:
    """Each method's matrix of a layer and its degenerate rows. Long layers go in blocks of rows, where the methods can."""
    layer = view.layer
    if not view.crossed and layer.outputs.dim() == 3 and all(getattr(m, "by_rows", False) for m in methods):
        heads, queries, keys = layer.shape
        if heads * queries * keys > WEIGHTS:
            return _by_rows(view, methods)
    return [_pair(method.matrix(view)) for method in methods]


def _by_rows(view: LayerView, methods: Sequence[LayerMethod]) -> list[tuple[Tensor, Tensor | None]]:
    _, queries, keys = view.layer.shape
    whole: list[tuple[Tensor, Tensor | None]] = []
    first = 0
    for block in view.layer.blocks(WEIGHTS):
        part = LayerView(block, view.trace, view.stack)
        for number, method in enumerate(methods):
            rows, empty = _pair(method.matrix(part))
            if len(whole) <= number:
                matrix = rows.new_zeros(queries, keys)
                whole.append((matrix, None if empty is None else empty.new_zeros(queries)))
            matrix, lost = whole[number]
            matrix[first : first + len(rows), : rows.shape[1]] = rows
            if lost is not None and empty is not None:
                lost[first : first + len(rows)] = empty
        first += block.shape[1]
    return whole


WEIGHTS = 1 << 23
"""Weights of a block of rows: 32 MB in float32. A layer of fewer is worked on at once."""


def _pair(matrix: Matrix) -> tuple[Tensor, Tensor | None]:
    return matrix if isinstance(matrix, tuple) else (matrix, None)


def _result(
    trace: Trace, name: str, method: LayerMethod, by_stack: dict[str, list[Rows]] | dict[str, Rows], read: list[str]
) -> Contributions:
    settings = {"origin": LAYER, **settings_of(method)}
    if trace.mixes is not None:  # these are shares of the attention block, and must not be multiplied
        settings["mixes"] = trace.mixes
    if len(read) > 1:
        return together(trace, name, by_stack, settings)  # type: ignore[arg-type]
    stack = trace.of(read[0])
    matrices, counts = zip(*by_stack[stack.name], strict=True)
    sizes = sorted({tuple(matrix.shape) for matrix in matrices}, reverse=True)
    if len(sizes) > 1:
        raise InputError(
            f"{name}: the {stack.name}'s layers have different numbers of tokens ({', '.join(map(str, sizes))}), because the "
            "model pools them on its way: choose layers of one size with trace.select(layers=[…])."
        )
    return Contributions.of_stack(
        stack,
        check_rows(torch.stack(matrices), name),
        trace.provenance.by(name, attention=stack.name, **settings),
        extra={"degenerate": torch.stack(counts)},
    )


def settings_of(method: Any) -> dict[str, Any]:
    """A method's options as they were, for the provenance: all but the model."""
    if isinstance(method, FunctionMethod):
        return dict(method.options)
    if not is_dataclass(method):
        return {}
    return {f.name: getattr(method, f.name) for f in fields(method) if f.name != "model"}


def _stacks(trace: Trace, method: LayerMethod, name: str, attention: str | None) -> list[str]:
    """Every stack of an encoder–decoder where the method can read both, else the one that was asked for."""
    if attention is None and len(trace.stacks) > 1 and getattr(method, "joint", False):
        return list(trace.stacks)
    return [single(trace, attention, name).name]


def single(trace: Trace, attention: str | None, name: str) -> Stack:
    """The one stack that a method of a single stack reads."""
    if attention is None and len(trace.stacks) > 1:
        raise InputError(
            f"{name} reads one stack, and this trace has {', '.join(trace.stacks)}: choose attention='encoder' or 'decoder'."
        )
    stack = trace.of(attention)
    if stack.name == "cross":
        raise InputError(
            "cross-attention is read together with its decoder: leave attention= out (alti, norms, rollout)."
        )
    return stack


def _check_shape(rows: Tensor, layer: Layer, crossed: bool, method: LayerMethod) -> None:
    _, queries, keys = layer.shape
    if tuple(rows.shape) != (queries, keys + int(crossed)):
        raise InputError(
            f"{type(method).__name__}.matrix gave {tuple(rows.shape)} for layer {layer.index}: {queries} queries and "
            f"{keys} keys{' and the residual' if crossed else ''} are {(queries, keys + int(crossed))}."
        )


def _check_output(layer: Layer, state: Tensor) -> None:
    """The second norm of what was kept must be the block's output, on this very text."""
    if layer._block_output is None:
        return
    error, tolerance = apart(state, layer._block_output)
    if not error <= tolerance:
        raise WiringError(
            f"layer {layer.index}: its second norm misses the block's output by {error:.1e} (tolerance {tolerance:.0e})."
        )
