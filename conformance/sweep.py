"""Prove the reader on one family: the six checks, and a trace of another input rebuilt from its own tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.zoo import CannotBuild, Family, Specimen, build
from whence.errors import WhenceError
from whence.model.load import Model
from whence.reading.trace import Trace
from whence.reading.tracing import trace
from whence.reading.wiring.op_graph import deviation
from whence.reading.wiring.proof import Proof, prove


@dataclass(frozen=True)
class Verdict:
    """What came of one family."""

    family: Family
    proof: Proof | None = None
    rebuilt: float | None = None  # the largest error of the states after attention, rebuilt from a trace
    reason: str = ""
    built: bool = True

    @property
    def holds(self) -> dict[str, bool]:
        """The six checks; all False where nothing could be read."""
        return dict.fromkeys("abcdef", False) if self.proof is None else self.proof.holds

    @property
    def kinds(self) -> str:
        """The wirings found, as "pre-norm" or "encoder post-norm, cross pre-norm"."""
        if self.proof is None:
            return ""
        found = dict.fromkeys((s.stack, s.wiring.kind) for s in self.proof.sites if s.wiring and s.reason_c is None)
        if len({kind for _, kind in found}) == 1:
            return next(iter(found))[1]
        return ", ".join(f"{stack} {kind}" for stack, kind in found)


def judge(family: Family) -> Verdict:
    """Build, prove, trace; whatever is refused becomes the reason."""
    try:
        specimen = build(family)
    except CannotBuild as problem:
        return Verdict(family, reason=str(problem), built=False)
    prefer_fused(specimen)
    try:
        proof = prove(specimen.model, specimen.inputs)
    except WhenceError as problem:
        note = f" ({specimen.note})" if specimen.note else ""
        return Verdict(family, reason=f"{problem}{note}")
    reasons = dict.fromkeys(r for s in proof.sites if (r := s.reason_b or s.reason_c or s.reason_e))
    if proof.mixes is not None:
        reasons[f"(f) {proof.mixes}"] = None
    try:
        rebuilt = rebuild(trace(Model(specimen.model, name=family.name), other_inputs(specimen)))
    except WhenceError as problem:
        return Verdict(family, None, reason=f"proved, but tracing another input failed: {problem}")
    return Verdict(family, proof, rebuilt, "; ".join(reasons))


def prefer_fused(specimen: Specimen) -> None:
    """Give the model the implementation people run (sdpa) where it has one, so that (d) compares two ways to compute."""
    if getattr(specimen.model, "_supports_sdpa", False):
        try:
            specimen.model.set_attn_implementation("sdpa")
        except (ValueError, KeyError):
            return
        if not all(torch.isfinite(t).all() for t in [specimen.run()]):
            specimen.model.set_attn_implementation("eager")


def other_inputs(specimen: Specimen) -> dict[str, Tensor]:
    """Inputs that the proof has not seen: the same ids in another order and one fewer, other pixels."""
    generator = torch.Generator().manual_seed(7)
    changed = {}
    for name, tensor in specimen.inputs.items():
        if name.endswith("input_ids"):
            order = torch.randperm(tensor.shape[1], generator=generator)
            changed[name] = tensor[:, order]
        elif tensor.is_floating_point() and tensor.dim() > 2:
            changed[name] = tensor.flip(-1)
        else:
            changed[name] = tensor
    return changed


def rebuild(found: Trace) -> float | None:
    """The largest relative error of attention · values and of norm(r + projection) against what the trace holds."""
    worst: float | None = None
    for stack in found.stacks.values():
        for layer in stack:
            errors = [deviation(layer.outputs, layer.attention.double() @ layer.values.double())]
            if layer.wiring is not None and layer._block_input is not None:
                errors.append(deviation(layer.after_attention, layer.wiring.finish(layer.before_norm)))
            worst = max([*errors, worst or 0.0])
    return worst
