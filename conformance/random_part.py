"""Families with random configurations, from a fresh seed each run, against the slow oracle of `conformance.oracle`.

    python -m conformance.random_part [--seed 7] [--count 25]

Attention is compared with the model's own eager attention; "alti", "norms" and rollout with plain loops in float64.
The seed is printed, so that a failure can be run again.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import whence
from conformance import oracle
from conformance.__main__ import quiet
from conformance.shrink import small_fields
from conformance.zoo import CannotBuild, Family, build, families
from whence.errors import WhenceError
from whence.model.load import Model

TOLERANCE = 1e-4
COUNT = 25
WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim")
ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")


@dataclass(frozen=True)
class Comparison:
    """One random model: its configuration, and how far each measure is from the oracle, or why it was not compared."""

    family: str
    configuration: dict[str, Any]
    errors: dict[str, float] = field(default_factory=dict)
    refused: str = ""

    @property
    def wrong(self) -> list[str]:
        return [name for name, error in self.errors.items() if not error <= TOLERANCE]


def configuration(family: Family, draw: random.Random) -> dict[str, Any]:
    """Random sizes and activations, for those fields that the family's configuration has."""
    small = small_fields(family.config_class()())
    chosen: dict[str, Any] = {name: draw.choice((40, 72, 128)) for name in WIDTHS if isinstance(small.get(name), int)}
    default = family.config_class()()
    chosen |= {
        n: draw.choice(("gelu", "relu", "silu")) for n in ACTIVATIONS if isinstance(getattr(default, n, None), str)
    }
    if not any(isinstance(value, list) for value in small.values()):
        depth = draw.randint(1, 3)
        chosen |= {n: depth for n in ("num_hidden_layers", "n_layer", "n_layers") if isinstance(small.get(n), int)}
    if "head_dim" not in small and "num_key_value_heads" not in small:
        heads = draw.choice((2, 4, 8))
        chosen |= {n: heads for n in ("num_attention_heads", "n_head", "n_heads") if isinstance(small.get(n), int)}
    elif small.get("num_key_value_heads") == 2:
        chosen["num_key_value_heads"] = draw.choice((1, 2, 4))
    return chosen


def compare(family: Family, chosen: dict[str, Any], seed: int) -> Comparison:
    """Build, trace, and hold every measure against the oracle; `CannotBuild` passes through."""
    specimen = build(family, seed, chosen)
    try:
        trace = whence.trace(Model(specimen.model, name=family.name), specimen.inputs)
        stack = trace.of("encoder" if "encoder" in trace.stacks else next(iter(trace.stacks)))
        ours = {m: whence.contributions(trace, m, attention=stack.name) for m in ("alti", "norms", "rollout")}
        split = [oracle.parts(layer) for layer in stack]
        rolled = {m: ours[m].rollout().values for m in ("alti", "rollout")}
    except WhenceError as problem:
        return Comparison(family.name, chosen, refused=str(problem))
    errors = {"state": _worst([layer.after_attention for layer in stack], [states for _, states in split])}
    theirs = oracle.model_attention(specimen.model, specimen.inputs)
    if theirs is not None and len(theirs) == len(stack) and len(trace.stacks) == 1:
        errors["attention"] = _worst([layer.attention for layer in stack], theirs)
    expected = {
        "alti": [oracle.alti(*both) for both in split],
        "norms": [oracle.norms(terms) for terms, _ in split],
        "rollout": [oracle.half_residual(layer.attention.double()) for layer in stack],
    }
    errors |= {name: _worst(ours[name].values, expected[name]) for name in expected}
    errors |= {f"{m} rolled out": _worst(rolled[m], oracle.rolled_out(expected[m])) for m in rolled}
    return Comparison(family.name, chosen, errors)


def _worst(ours: Any, theirs: list[Tensor]) -> float:
    """The largest difference, relative to the largest number of each layer."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


def main(argv: list[str] | None = None) -> int:
    """Compare until enough families gave numbers; 1 if any is wrong, or too few could be compared."""
    parser = argparse.ArgumentParser(prog="python -m conformance.random_part", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run; default: a fresh one")
    parser.add_argument("--count", type=int, default=COUNT)
    arguments = parser.parse_args(argv)
    quiet()
    seed = secrets.randbelow(1 << 31) if arguments.seed is None else arguments.seed
    print(f"seed {seed} (run again with --seed {seed})", flush=True)
    draw = random.Random(seed)
    order = [family for family in families() if family.skip is None and family.kind == "text"]
    draw.shuffle(order)
    compared: list[Comparison] = []
    for family in order:
        if len(compared) == arguments.count:
            break
        chosen = configuration(family, draw)
        try:
            outcome = compare(family, chosen, draw.randrange(1 << 31))
        except CannotBuild as problem:
            print(f"{family.name:28} not built with {chosen}: {str(problem)[:100]}", flush=True)
            continue
        if outcome.refused:
            print(f"{family.name:28} refused with {chosen}: {outcome.refused[:100]}", flush=True)
            continue
        compared.append(outcome)
        errors = "  ".join(f"{name} {error:.0e}" for name, error in outcome.errors.items())
        print(f"{family.name:28} {'WRONG' if outcome.wrong else 'right'}  {errors}  {chosen}", flush=True)
    wrong = [outcome.family for outcome in compared if outcome.wrong]
    print(f"{len(compared)} random families compared, wrong: {wrong or 'none'} (seed {seed})")
    return int(bool(wrong) or len(compared) < arguments.count)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
