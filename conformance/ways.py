"""Ways of use: a dozen families, loaded, wrapped and called as people do. `python -m conformance.ways [--write]`.

Every cell is read right, refused with the reason, or not a thing that the family takes. Right means that the trace's
logits are those of a plain pass of the same model on the same inputs, and that attention and measures agree with a
reference (the model before it was wrapped, or merged) where there is one, in half precision with float64 oracles.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conformance import oracle
from conformance.zoo import Specimen, build
from whence.attention.identifiability import identifiability
from whence.errors import WhenceError
from whence.mixing.contributions import contributions
from whence.model.load import Model
from whence.reading.trace import Trace
from whence.reading.tracing import trace

FAMILIES = ("bert", "distilbert", "electra", "modernbert", "mpnet", "gpt2", "opt", "llama", "gpt_neox", "bloom", "mixtral",
            "t5")  # fmt: skip
MEASURES = ("alti", "norms", "rollout", "effective", "globenc", "value-zeroing")
RIGHT, REFUSED, WRONG, NOT_TAKEN = "right", "refused", "WRONG", "not taken"


@dataclass(frozen=True)
class Use:
    """A model as somebody uses it, with inputs; `reference`: a trace that attention and ALTI must agree with."""

    model: nn.Module
    inputs: Mapping[str, Tensor]
    reference: Trace | None = None
    tolerance: float = 1e-4
    plain: nn.Module | None = None  # what makes the plain pass, where it is not the model itself
    shown: oracle.ModelOutputs = field(default_factory=lambda: oracle.ModelOutputs(None))  # what the model hands out
    judge: Callable[[Trace], dict[str, float]] | None = None  # errors of the trace's measures, by name


@dataclass(frozen=True)
class Outcome:
    """What came of one cell."""

    family: str
    way: str
    result: str
    reason: str = ""


# -- the ways ------------------------------------------------------------------------------------------------------


def _reference(specimen: Specimen) -> Trace:
    found: Trace = trace(Model(specimen.model), specimen.inputs)
    return found


def _masked(specimen: Specimen, hide: Sequence[int]) -> Use:
    mask = torch.ones_like(specimen.inputs["input_ids"])
    mask[:, list(hide)] = 0
    return Use(specimen.model, {**specimen.inputs, "attention_mask": mask})


def _four(specimen: Specimen, _: Path) -> Use:
    n = specimen.inputs["input_ids"].shape[1]
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    visible[n // 2 :, 1:3] = False
    mask = torch.zeros(1, 1, n, n).masked_fill(~visible, torch.finfo(torch.float32).min)
    return Use(specimen.model, {**specimen.inputs, "attention_mask": mask})


def _packed(specimen: Specimen, _: Path) -> Use:
    n = specimen.inputs["input_ids"].shape[1]
    positions = torch.cat([torch.arange(n // 2), torch.arange(n - n // 2)])[None]
    return Use(specimen.model, {**specimen.inputs, "position_ids": positions})


def _embedded(specimen: Specimen, _: Path) -> Use:
    inputs = dict(specimen.inputs)
    inputs["inputs_embeds"] = specimen.model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    return Use(specimen.model, inputs, _reference(specimen))


def _in(dtype: torch.dtype) -> Callable[[Specimen, Path], Use]:
    """In half precision: logits and attention against the model's own eager pass, measures against float64 oracles."""

    def way(specimen: Specimen, _: Path) -> Use:
        model = specimen.model.to(dtype)
        own = copy.deepcopy(model)
        for each in (model, own):  # fused kernels round otherwise, and hand out no attention to compare with
            each.set_attn_implementation("eager")
        # Twice as long, so that there are more keys than value dimensions, and a null space.
        inputs = {name: torch.cat([tensor, tensor.flip(1)], 1) for name, tensor in specimen.inputs.items()}
        return Use(model, inputs, plain=own, shown=oracle.model_outputs(own, inputs), judge=oracle_errors)

    return way


def oracle_errors(found: Trace) -> dict[str, float]:
    """How far null share, r, rank, ALTI, norms and rollout of a trace are from float64 on the very tensors it holds."""
    worst: dict[str, float] = {}

    def judge(name: str, ours: Tensor, theirs: Tensor) -> None:
        error = (
            (ours.double() - theirs).abs().nan_to_num(nan=0.0 if bool((ours.isnan() == theirs.isnan()).all()) else 9.0)
        )
        worst[name] = max(worst.get(name, 0.0), float(error.max()))

    for stack in found.stacks.values():
        measured = identifiability(found, attention=stack.name)
        for place, layer in enumerate(stack):
            for name, expected in oracle.identifiability(layer).items():
                judge(name, measured.values[place] if name == "null share" else measured.extra[name][place], expected)
        if stack.name == "cross":
            continue
        split = [oracle.parts(layer) for layer in stack]
        expected_by_method = {
            "alti": [oracle.alti(*both) for both in split],
            "norms": [oracle.norms(terms) for terms, _ in split],
            "rollout": [oracle.half_residual(layer.attention.double()) for layer in stack],
        }
        for method, matrices in expected_by_method.items():
            ours = contributions(found, method, attention=stack.name)
            judge(method, ours.values, torch.stack(matrices))
            judge(f"{method}, rolled out", ours.rollout().values, torch.stack(oracle.rolled_out(matrices)))
    return worst


def _offloaded(kind: str) -> Callable[[Specimen, Path], Use]:
    def way(specimen: Specimen, folder: Path) -> Use:
        import accelerate

        reference = _reference(specimen)
        if kind == "cpu":
            accelerate.cpu_offload(specimen.model, execution_device=torch.device("cpu"))
        else:
            accelerate.disk_offload(specimen.model, str(folder), execution_device=torch.device("cpu"))
        return Use(specimen.model, specimen.inputs, reference)

    return way


def _compiled(specimen: Specimen, _: Path) -> Use:
    reference = _reference(specimen)
    model: Any = torch.compile(specimen.model, backend="eager")
    return Use(model, specimen.inputs, reference, plain=specimen.model)


def _checkpointed(specimen: Specimen, _: Path) -> Use:
    reference = _reference(specimen)
    specimen.model.gradient_checkpointing_enable()
    return Use(specimen.model, specimen.inputs, reference)


def _hooked(specimen: Specimen, _: Path) -> Use:
    layer = next(m for m in specimen.model.modules() if isinstance(m, nn.LayerNorm) or "Norm" in type(m).__name__)
    layer.register_forward_hook(lambda _module, _inputs, output: output * 1.5)
    return Use(specimen.model, specimen.inputs)


def _adapted(specimen: Specimen, _: Path) -> Use:
    """LoRA on every linear map of the attention, against the same weights merged."""
    import peft

    words = ("attn", "attention", "SelfAttention")
    kinds = (nn.Linear, *(t for m in specimen.model.modules() if (t := type(m)).__name__ == "Conv1D"))
    targets = [
        n
        for n, m in specimen.model.named_modules()
        if isinstance(m, kinds) and any(w.lower() in n.lower() for w in words)
    ]
    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        specimen.model, peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False)
    ).eval()
    merged = copy.deepcopy(adapted).merge_and_unload().eval()
    return Use(adapted, specimen.inputs, trace(Model(merged), specimen.inputs))


def _beside(specimen: Specimen, _: Path) -> Use:
    """Plain passes in another thread while the model is traced, bit for bit as always; an error there is WRONG."""
    expected = specimen.run()
    passes: list[bool] = []

    def plain() -> None:
        passes.extend(torch.equal(specimen.run(), expected) for _ in range(10))

    reference = _reference(specimen)
    thread = threading.Thread(target=plain)
    thread.start()
    while thread.is_alive():
        trace(Model(specimen.model), specimen.inputs)
    thread.join()
    if len(passes) != 10 or not all(passes):
        raise AssertionError("plain passes beside a trace gave other numbers")
    return Use(specimen.model, specimen.inputs, reference)


WAYS: dict[str, Callable[[Specimen, Path], Use]] = {
    "bf16": _in(torch.bfloat16),
    "fp16": _in(torch.float16),
    "4-D mask": _four,
    "holes": lambda s, _: _masked(s, [3, 5]),
    "left-padded": lambda s, _: _masked(s, [0, 1, 2]),
    "packed": _packed,
    "inputs_embeds": _embedded,
    "cpu_offload": _offloaded("cpu"),
    "disk_offload": _offloaded("disk"),
    "torch.compile": _compiled,
    "checkpointing": _checkpointed,
    "foreign hook": _hooked,
    "LoRA": _adapted,
    "two threads": _beside,
}


# -- judging -------------------------------------------------------------------------------------------------------


def judge(family: str, way: str) -> Outcome:
    """One cell."""
    specimen = build(family)
    if getattr(specimen.model, "_supports_sdpa", False):
        specimen.model.set_attn_implementation("sdpa")
    with tempfile.TemporaryDirectory() as folder:
        try:
            use = WAYS[way](specimen, Path(folder))
            with torch.no_grad():
                expected = (use.plain or use.model)(**use.inputs).logits
        except WhenceError as refusal:
            return Outcome(family, way, REFUSED, f"(the reference) {refusal}")
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as problem:
            return Outcome(family, way, NOT_TAKEN, f"{type(problem).__name__}: {problem}".splitlines()[0])
        except AssertionError as problem:
            return Outcome(family, way, WRONG, str(problem))
        try:
            found = trace(use.model, use.inputs)
        except WhenceError as refusal:
            return Outcome(family, way, REFUSED, str(refusal))
        return Outcome(family, way, *compare(found, use, expected))


def compare(found: Trace, use: Use, expected: Tensor) -> tuple[str, str]:
    """Whether the trace is of what the model computes, and agrees with the reference."""
    rows, ours = expected[0], found.logits
    mask = use.inputs.get("attention_mask")
    if mask is not None and mask.dim() == 2 and len(found.stacks) == 1:
        rows = rows[mask[0].bool()]
    if ours is None or ours.shape != rows.shape or not _close(ours, rows, use.tolerance):
        return WRONG, "logits differ from those of a plain pass"
    for name, stack in found.stacks.items():
        others = None if use.shown is None else use.shown.attention(name, len(found.stacks))
        if others is None and use.reference is not None:
            others = list(use.reference.stacks[name].attention)
        if others is not None and not _close(stack.attention, torch.stack(others), use.tolerance):
            return WRONG, f"the {name}'s attention differs from the reference"
    if use.judge is not None:
        try:
            errors = use.judge(found)
        except WhenceError as refusal:
            return REFUSED, f"attention is read; {refusal}"
        wrong = {name: error for name, error in errors.items() if not error <= use.tolerance}
        if wrong:
            return WRONG, "; ".join(f"{name} is {error:.1e} from float64" for name, error in wrong.items())
    if use.reference is not None:
        for name, error in differences(found, use.reference).items():
            if isinstance(error, str):
                return REFUSED, f"attention is read; {name}: {error}"
            if not error <= use.tolerance:
                return WRONG, f"{name} differs from the reference by {error:.1e}"
    return RIGHT, ""


def differences(found: Trace, reference: Trace) -> dict[str, float | str]:
    """How far every measure by layer of one trace is from another's, or why it is refused."""
    result: dict[str, float | str] = {}
    for stack in [name for name in found.stacks if name != "cross"]:
        options = {"attention": stack}
        for method in MEASURES:
            try:
                theirs = contributions(reference, method, **options).values
            except WhenceError:
                continue  # not for this family, however it is used
            try:
                ours = contributions(found, method, **options).values
            except WhenceError as refusal:
                result[f"{method} ({stack})"] = str(refusal)
                continue
            result[f"{method} ({stack})"] = float((ours.double() - theirs.double()).abs().max())
        ours, theirs = (identifiability(t, attention=stack).values for t in (found, reference))
        result[f"null share ({stack})"] = float((ours - theirs).abs().max())
    return result


def _close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return bool((ours - theirs).abs().amax() <= tolerance * theirs.abs().amax())


# -- the page ------------------------------------------------------------------------------------------------------

TITLE = "## Ways of use"
HEAD = f"""{TITLE}

Models as people load, wrap and call them, small and random, each against a plain pass of the same model on the same
inputs and, where there is one, against a reference (before wrapping, merged, in float32): ✓ right, R refused with the
reason below, – not something that this family takes. Right means to 1e-4: logits and attention; with a reference also
{", ".join(MEASURES)} and null shares. In bf16 and fp16 logits and attention are held against the
model's own eager pass in that precision, and null share, r, ALTI, norms and rollout against slow float64 oracles on the
very tensors that the trace holds; ranks must be equal.

"""


def section(outcomes: Sequence[Outcome]) -> str:
    """The table and the reasons."""
    marks = {RIGHT: "✓", REFUSED: "R", NOT_TAKEN: "–", WRONG: "WRONG"}
    cells = {(o.family, o.way): marks[o.result] for o in outcomes}
    ways, names = (list(dict.fromkeys(getattr(o, part) for o in outcomes)) for part in ("way", "family"))
    lines = ["| family | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cells.get((name, way), "") for way in ways) + " |" for name in names]
    reasons: dict[tuple[str, str], list[str]] = {}
    for o in outcomes:
        if o.result in (REFUSED, WRONG):
            reasons.setdefault((o.way, re.sub(r"\s+", " ", o.reason)), []).append(o.family)
    text = HEAD + "\n".join(lines) + "\n\n"
    return text + "".join(f"- {way}, {', '.join(who)}: {why}\n" for (way, why), who in reasons.items())


def put(page: Path, outcomes: Sequence[Outcome]) -> None:
    """Put the section into the page: in place of the one that is there, else at the end."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    before, found, rest = text.partition(TITLE)
    after = rest.partition("\n## ")[2] if found else ""
    page.write_text(
        before.rstrip("\n") + "\n\n" + section(outcomes) + (f"\n## {after}" if after else ""), encoding="utf-8"
    )


def judge_all(families: Sequence[str] = FAMILIES, ways: Sequence[str] = tuple(WAYS)) -> list[Outcome]:
    """Every cell, printed as it comes."""
    outcomes = []
    for family in families:
        for way in ways:
            outcomes.append(judge(family, way))
            print(f"{family:12} {way:14} {outcomes[-1].result:10} {outcomes[-1].reason[:120]}", flush=True)
    return outcomes


def main(argv: list[str] | None = None) -> int:
    """Judge, print, and with --write put the section into docs/SUPPORT.md; exit 1 if anything is wrong."""
    from conformance.__main__ import SUPPORT, quiet

    parser = argparse.ArgumentParser(prog="python -m conformance.ways", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", default=FAMILIES)
    parser.add_argument("--ways", nargs="+", metavar="WAY", default=tuple(WAYS))
    parser.add_argument("--write", action="store_true", help="put the section into docs/SUPPORT.md")
    arguments = parser.parse_args(argv)
    quiet()
    outcomes = judge_all(arguments.only, arguments.ways)
    if arguments.write:
        put(SUPPORT, outcomes)
    return int(any(o.result == WRONG for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
