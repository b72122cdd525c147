"""Families with random configurations, from a fresh seed each run, against the slow oracle of `conformance.oracle`.

    python -m conformance.random_part [--seed 7] [--count 25]

Sizes, depth, heads, activations and a quarter of the configuration's switches are drawn, the text is 2 to 12 tokens long,
and the model runs eager or fused. Attention and the blocks' inputs are compared with what the model's own eager pass hands
out; "alti", "norms" and rollout with plain loops in float64. The seed is printed, so that a failure can be run again.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import whence
from conformance import oracle
from conformance.__main__ import quiet
from conformance.shrink import small_fields
from conformance.sweep import prefer_fused
from conformance.zoo import CannotBuild, Family, build, families
from whence.errors import WhenceError
from whence.model.load import Model

TOLERANCE = 1e-4
COUNT = 25
WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim")
FLIPPED = 0.25  # of the switches
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
    """Random sizes, activations and switches, for those fields that the family's configuration has."""
    default = family.config_class()()
    small = small_fields(default)
    chosen: dict[str, Any] = {name: draw.choice((40, 72, 128)) for name in WIDTHS if isinstance(small.get(name), int)}
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
    switches = [n for n, v in vars(default).items() if isinstance(v, bool) and not _is_of_the_call(n)]
    return chosen | {n: not getattr(default, n) for n in switches if draw.random() < FLIPPED}


def _is_of_the_call(name: str) -> bool:
    """Whether a switch says what a call returns or which kind of model this is, not how its layers are made."""
    return name.startswith(("_", "output_", "return_", "is_")) or name in (
        "use_cache",
        "torchscript",
        "add_cross_attention",
    )


def compare(family: Family, chosen: dict[str, Any], seed: int) -> Comparison:
    """Build, trace, and hold every measure against the oracle; `CannotBuild` passes through."""
    specimen = build(family, seed, chosen)
    draw = random.Random(seed)
    inputs = shortened(specimen.inputs, draw.randint(2, 12))
    if draw.random() < 0.5:
        prefer_fused(specimen)
    try:
        with torch.no_grad():
            specimen.model(**inputs)
    except (RuntimeError, ValueError, IndexError) as problem:
        raise CannotBuild(f"it does not take {inputs['input_ids'].shape[1]} tokens: {problem}") from problem
    try:
        trace = whence.trace(Model(specimen.model, name=family.name), inputs)
        stacks = [stack for name, stack in trace.stacks.items() if name != "cross"]
        results = {
            stack.name: {m: whence.contributions(trace, m, attention=stack.name) for m in ("alti", "norms", "rollout")}
            for stack in stacks
        }
        rolled = {name: {m: ours[m].rollout().values for m in ("alti", "rollout")} for name, ours in results.items()}
        split = {stack.name: [oracle.parts(layer) for layer in stack] for stack in stacks}
    except WhenceError as problem:
        return Comparison(family.name, chosen, refused=str(problem))
    worst: dict[str, list[float]] = {}

    def judge(name: str, ours: Any, theirs: Sequence[Tensor]) -> None:
        worst.setdefault(name, []).append(_worst(ours, theirs))

    shown = oracle.model_outputs(specimen.model, inputs)
    for name, stack in trace.stacks.items():
        theirs = shown.attention(name, len(trace.stacks))
        if theirs is not None and len(theirs) == len(stack):
            judge("attention", [oracle.as_shown(*pair) for pair in zip(stack, theirs, strict=True)], theirs)
    for stack in stacks:
        states = shown.states(stack.name, len(trace.stacks))
        if states is not None and len(states) == len(stack) + 1:
            judge("block inputs", [layer.block_input[-len(states[0]) :] for layer in stack], states[:-1])
        ours, terms = results[stack.name], split[stack.name]
        expected = {
            "alti": [oracle.alti(*both) for both in terms],
            "norms": [oracle.norms(parts) for parts, _ in terms],
            "rollout": [oracle.half_residual(layer.attention.double()) for layer in stack],
        }
        judge("state", [layer.after_attention for layer in stack], [after for _, after in terms])
        for method, matrices in expected.items():
            judge(method, ours[method].values, matrices)
        for method, values in rolled[stack.name].items():
            judge(f"{method} rolled out", values, oracle.rolled_out(expected[method]))
    return Comparison(family.name, chosen, {name: max(errors) for name, errors in worst.items()})


def shortened(inputs: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """The first tokens of the text (and of the target), at most `length`."""
    ids = inputs["input_ids"].shape[1]
    return {
        name: tensor[:, :length] if tensor.dim() >= 2 and (tensor.shape[1] == ids or "decoder" in name) else tensor
        for name, tensor in inputs.items()
    }


def _worst(ours: Any, theirs: Sequence[Tensor]) -> float:
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
        except Exception as problem:  # no refusal: a fault like a wrong number, and the run goes on to the next
            outcome = Comparison(family.name, chosen, {f"{type(problem).__name__}: {problem}": float("inf")})
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
