"""A half-precision trace measured in float32: measures that run the model again do so on a copy of it.

The model's dtype decides what its weights are, never how they are measured. In float16 squares of small derivatives are
exact zeros; in bfloat16 the cosine of two nearly equal states has two digits. The copy has the same weights, held in
float32; it is made for one measure and dropped.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from whence.errors import ModelError
from whence.model.load import Model
from whence.reading.trace import Trace
from whence.reading.tracing import trace as trace_of


def in_float32(trace: Trace, model: Model) -> tuple[Trace, Model, dict[str, str]]:
    """The trace and model to measure on, and what to say of it: themselves, unless they are in half precision."""
    if trace.of().layers[0].outputs.dtype in (torch.float32, torch.float64):
        return trace, model, {}
    try:
        fine = replace(model, model=copy.deepcopy(model.model).float(), _hash={})
        inputs = {k: t.float() if t.is_floating_point() else t for k, t in trace.inputs.items()}
        again = trace_of(fine, inputs)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as problem:
        raise ModelError(
            f"{model.name} is in half precision and cannot be raised to float32 for this measure "
            f"({' '.join(str(problem).split())[:120]}): load it with dtype=torch.float32."
        ) from problem
    again = again if isinstance(again, Trace) else again[0]
    stacks = {}
    for name, stack in trace.stacks.items():
        layers = tuple(again.stacks[name][layer.index] for layer in stack)
        stacks[name] = replace(stack, layers=layers)
    return replace(again, stacks=stacks, provenance=trace.provenance), fine, {"arithmetic": "float32"}
