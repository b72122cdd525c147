"""Value Zeroing: does a token's new state change direction when another token's value is taken away?

Mohebbi et al., "Quantifying Context Mixing in Transformers" (EACL 2023): 1 − cos(e_i, e_i without v_j) in each layer,
rows divided by their sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whence.core.numerics.tolerances import state_agreement
from whence.errors import WiringError
from whence.mixing.budget import as_bytes
from whence.mixing.contributions import LAYER, Contributions
from whence.mixing.layerwise import single
from whence.mixing.mixture import check_rows, normalise_rows
from whence.mixing.raised import in_float32
from whence.mixing.zeroed_blocks import written_down, zeroed_outputs
from whence.reading.capture.recorder import Edit
from whence.reading.inputs import Prepared
from whence.reading.rerun.replay import block_handles, repeated, replay
from whence.reading.rerun.run import prove_model
from whence.reading.trace import Layer, Stack, Trace
from whence.reading.wiring.block_tail import read_blocks
from whence.reading.wiring.sites import AttentionSite
from whence.results.progress import Progress, counted


def value_zeroing(
    trace: Trace,
    *,
    attention: str | None = None,
    model: Any = None,
    memory: str | float = "2GB",
    progress: Progress = False,
) -> Contributions:
    """[layer, hidden, input of that layer]: 1 − cos of the block's output with and without each key's value.

    Where the block's parts are proved, its output is made from them (`zeroed_outputs`), and what the most important token
    changes is asked of the model itself; where they are not, or the model answers otherwise, every block runs on a batch
    of n copies of its own traced input, copy j without the value of token j. The provenance says which ("blocks").
    `memory` limits how much is worked on at once.
    """
    single(trace, attention, "value-zeroing")
    trace, chosen, settings = in_float32(trace, trace.with_model(model))
    stack = single(trace, attention, "value-zeroing")
    proof = prove_model(chosen, Prepared(dict(trace.inputs), trace.tokens))
    proof.refuse_chosen_heads(stack, "value-zeroing")
    wanted = {layer.index for layer in stack}
    sites = [site for site in proof.of(stack.name) if site.layer in wanted]
    n = len(stack.tokens)
    budget = as_bytes(memory)

    def asked(first: int, size: int) -> Tensor:
        return _without(trace, stack, chosen, proof, sites, first, size)

    scores = _written(trace, stack, chosen, proof, sites, budget, progress)
    settings |= {"blocks": "written down" if scores is not None and _confirmed(scores, asked) else "the model's own"}
    if scores is None or settings["blocks"] != "written down":
        scores = torch.zeros(len(sites), n, n, dtype=torch.float64)
        with counted("value zeroing", n, progress) as step:
            for first, size in _pieces(n, chosen.model, trace, budget):
                scores[:, :, first : first + size] = asked(first, size)
                for _ in range(size):
                    step()
    scores = scores.to(torch.float64 if stack.layers[0].dtype == torch.float64 else torch.float32)
    rows, degenerate = zip(*(normalise_rows(layer.clamp(min=0)) for layer in scores), strict=True)
    settings |= {} if trace.mixes is None else {"mixes": trace.mixes}
    return Contributions.of_stack(
        stack,
        check_rows(torch.stack(rows), "value-zeroing"),
        trace.provenance.by("value-zeroing", attention=stack.name, origin=LAYER, **settings),
        layers=tuple(site.layer for site in sites),
        extra={"degenerate": torch.stack(degenerate).sum(-1), "change": scores},
    )


def _written(
    trace: Trace, stack: Stack, model: Any, proof: Any, sites: list[AttentionSite], memory: int, progress: Progress
) -> Tensor | None:
    """(layer, hidden, input): every change, from the blocks' proved parts; None where a part is not proved."""
    readings = read_blocks(model, proof, trace.inputs)
    parts = [(stack[site.layer], readings[site.number].feedforward) for site in sites]
    if not all(written_down(layer, rest) for layer, rest in parts):
        return None
    n = len(stack.tokens)
    scores = torch.zeros(len(sites), n, n, dtype=torch.float64)
    with counted("value zeroing", n * len(sites), progress) as step:
        for at, (layer, rest) in enumerate(parts):
            assert rest is not None
            for first, last, row, changed in zeroed_outputs(layer, rest, memory):
                scores[at, row:, first:last] = _change(layer, changed, first, row)
                for _ in range(first, last):
                    step()
    return scores


def _confirmed(scores: Tensor, asked: Callable[[int, int], Tensor]) -> bool:
    """Whether the model, run without the value of the token that changes most, says the same in every layer.

    Angles are compared: 1 − cos is the square of one, and rounding of the states moves the angle.
    """
    key = int(scores.sum((0, 1)).argmax())
    angles = [(2 * change.clamp(min=0)).sqrt() for change in (scores[:, :, key], asked(key, 1)[..., 0])]
    return bool((angles[0] - angles[1]).abs().max() <= state_agreement(torch.float32))


def _change(layer: Layer, changed: Tensor, first: int, row: int = 0) -> Tensor:
    """(row, key): 1 − cos of changed (key, row, d) with the block's own output, exactly 0 where no head sees the key."""
    changed, plain = (t.to("cpu", torch.float64) for t in (changed, layer.block_output[row:]))
    change = 1 - torch.nn.functional.cosine_similarity(changed, plain[None], dim=-1).T
    seen = layer.visible_mask
    seen = seen.any(0) if seen.dim() == 3 else seen
    return change * seen[row:, first : first + len(changed)].to(change)


def _pieces(n: int, model: torch.nn.Module, trace: Trace, memory: int) -> list[tuple[int, int]]:
    """(first, size) of each batch, so that a batch's widest tensors stay within the budget."""
    config = getattr(model, "config", None)
    width = max(getattr(config, "intermediate_size", 0) or 0, 4 * trace.of().layers[0].block_input.shape[-1])
    heads = max(len(layer.heads) for stack in trace.stacks.values() for layer in stack)
    each = 4 * n * (6 * width + 4 * heads * n)
    size = max(1, min(n, memory // max(1, each)))
    return [(first, min(size, n - first)) for first in range(0, n, size)]


def _without(
    trace: Trace, stack: Stack, model: Any, proof: Any, sites: list[AttentionSite], first: int, size: int
) -> Tensor:
    """(layer, hidden, size): the change in every block when the values of tokens first … first + size − 1 are zeroed."""
    n = len(stack.tokens)
    zero = torch.zeros(size, 1, n, dtype=torch.bool)
    zero[torch.arange(size), 0, torch.arange(first, first + size)] = True
    layers = {site.layer: stack[site.layer] for site in sites}
    outputs: dict[int, Tensor] = {}
    changes: dict[Any, Any] = {}

    def chain(handle: Any, function: Any) -> None:
        before = changes.get(handle)
        changes[handle] = function if before is None else lambda t: function(before(t))

    for site in sites:
        end = block_handles(site)[1]
        chain(end, lambda t, at=site.layer: outputs.setdefault(at, t))
    for site in sites:
        start = block_handles(site)[0]
        chain(start, lambda t, at=site.layer: layers[at].block_input.to(t).expand_as(t))
    edits = {site.number: [Edit(zero=zero)] for site in sites}
    replay(model, proof, repeated(trace.inputs, size), size, changes, edits=edits)
    out = []
    for site in sites:
        changed, plain = outputs[site.layer], layers[site.layer].block_output
        if changed.shape != (size, *plain.shape):
            raise WiringError(
                f"layer {site.layer}: {size} copies gave states of shape {tuple(changed.shape)}, not {(size, *plain.shape)}."
            )
        out.append(_change(layers[site.layer], changed, first))
    return torch.stack(out)
