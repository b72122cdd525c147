"""Everything the page shows of one trace: a manifest of plain data, and blocks of matrices that it loads when looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from whence.attention.overview import Overview, overview
from whence.errors import InputError
from whence.mixing.mixture import Mixture
from whence.provenance import library_versions
from whence.reading.trace import Stack, Trace
from whence.reporting.attention import QUANTITIES, counter_examples, exact_rows, plain, stack_data
from whence.reporting.heads import Alternatives, Detail, alternatives_of, detail_of, head_blocks
from whence.reporting.mixing import mixtures, naive_identifiability
from whence.reporting.prediction import prediction_data

FORMAT = 1
DETAILS = ("light", "standard", "full")

Step = Callable[[str, float], None]
"""Told what is being done and how much of the whole is done, in [0, 1]. It may raise, to stop the work."""


def _silent(_what: str, _share: float) -> None:
    return None


@dataclass(frozen=True)
class Document:
    """What a host hands to the page: `manifest` is JSON, `blocks` are compressed (see `quantise`)."""

    manifest: Mapping[str, Any]
    blocks: Mapping[str, bytes] = field(repr=False)


def default_methods(tokens: int) -> tuple[str, ...]:
    """The mixing methods that a report has unless told: those that cost next to nothing."""
    return ("alti", "norms", "rollout") if tokens <= 256 else ("alti", "rollout")


def build(
    trace: Trace,
    *,
    detail: str = "standard",
    methods: Iterable[str | Mixture] | None = None,
    attributions: Iterable[str] | None = None,
    budget: float = 5.0,
    seen: Mapping[str, Overview] | None = None,
    token_identifiability: Any = None,
    with_heads: bool = True,
    step: Step = _silent,
) -> Document:
    """The document of one trace; `seen`: overviews that are there already, by stack; `with_heads`: with head blocks."""
    if detail not in DETAILS:
        raise InputError(f"detail={detail!r} is not one of {', '.join(DETAILS)}.")
    chosen = default_methods(len(trace.tokens)) if methods is None else tuple(methods)
    blocks: dict[str, bytes] = {}
    stacks = []
    share = 0.9 / len(trace.stacks)
    for i, (name, stack) in enumerate(trace.stacks.items()):

        def inner(what: str, part: float, begin: float = i * share) -> None:
            step(what, begin + share * part)

        inner("Looking for what is certain", 0.0)
        look = (seen or {}).get(name) or overview(trace, attention=name)
        inner("Exact intervals", 0.4)
        data = stack_data(stack, look)
        data["exact"] = exact_rows(trace, look, budget=budget / len(trace.stacks), attention=name)
        inner("Other attention with the same output", 0.55)
        level = detail_of(detail, len(stack.tokens))
        others = _alternatives(stack, level, look, budget)
        inner("Counter-examples, put into the model", 0.65)
        rows = list(
            dict.fromkeys(
                [*_farthest(stack, others), *((c.layer, c.head, c.query) for c in look.worst if c.dimension > 0)]
            )
        )
        data["witnesses"] = counter_examples(trace, rows[:3], name)
        for found in data["witnesses"]:
            maps = others.get(found["layer"])
            if maps is not None and found["head"] in maps.maps:  # the farthest row known, in place of a quick one
                maps.maps[found["head"]][found["query"]] = torch.tensor(found["alternative"], dtype=torch.float64)
        inner("Pictures of the heads", 0.8)
        if with_heads:
            blocks |= _head_blocks(stack, level, look, others)
        data["blocks"] = sorted(key.removeprefix(f"head/{name}/") for key in blocks if key.startswith(f"head/{name}/"))
        stacks.append(data)
    step("Where each token comes from", 0.92)
    entries, some = mixtures(trace, chosen)
    blocks |= some
    step("The prediction", 0.96)
    manifest = {
        "format": FORMAT,
        "text": trace.text,
        "text_pair": trace.text_pair,
        "target": trace.target,
        "detail": detail,
        "model": trace.provenance.model,
        "provenance": trace.provenance.to_dict(),
        "versions": dict(library_versions()),
        "quantities": QUANTITIES,
        "stacks": stacks,
        "mixtures": entries,
        "identity": {
            "naive": naive_identifiability(trace) if len(trace.stacks) == 1 else None,
            "trained": trained_data(token_identifiability),
        },
        "prediction": prediction_data(trace, attributions),
    }
    step("Done", 1.0)
    return Document(manifest, blocks)


def _named(look: Overview) -> set[tuple[int, int]]:
    return {(c.layer, c.head) for c in (*look.worst, *look.best)}


def _alternatives(stack: Stack, detail: Detail, look: Overview, budget: float) -> dict[int, Alternatives]:
    """Other attention by layer: of every head of a short text, of the listed heads of a long one."""
    everywhere = len(stack.tokens) <= detail.alternatives and detail.heads == "all"
    found: dict[int, Alternatives] = {}
    for i, layer in enumerate(stack):
        wanted = [h for h in layer.heads if everywhere or (layer.index, h) in _named(look)]
        if wanted and int(look.free[i].max()) > 0:
            some = layer if len(wanted) == len(layer.heads) else layer.select(wanted)
            found[layer.index] = alternatives_of(some, budget=max(0.001, 0.05 * min(budget, 5.0)))
    return found


def _farthest(stack: Stack, others: Mapping[int, Alternatives]) -> list[tuple[int, int, int]]:
    """The row of an ordinary token that moved farthest, where any did."""
    plain_tokens = torch.tensor([not special for special in stack.tokens.special], dtype=torch.float64)
    best, place = 1e-3, None
    for layer, found in others.items():
        for head, moved in found.moved.items():
            row = int((moved * plain_tokens).argmax())
            if float(moved[row] * plain_tokens[row]) > best:
                best, place = float(moved[row]), (layer, head, row)
    return [] if place is None else [place]


def _head_blocks(stack: Stack, detail: Detail, look: Overview, others: Mapping[int, Alternatives]) -> dict[str, bytes]:
    """The blocks of the heads that this level of detail has, by `head/STACK/LAYER/HEAD`."""
    named = _named(look)
    found: dict[str, bytes] = {}
    for layer in stack:
        mine = [h for h in layer.heads if detail.heads == "all" or (layer.index, h) in named]
        if not mine:
            continue
        part = layer if len(mine) == len(layer.heads) else layer.select(mine)
        maps = others[layer.index].maps if layer.index in others else {}
        for head, block in head_blocks(part, detail, maps).items():
            found[f"head/{stack.name}/{layer.index}/{head}"] = block
    return found


def trained_data(found: Any) -> dict[str, Any] | None:
    """The curves of a token-identifiability result: a line per map and distance, whole states, the token itself."""
    if found is None:
        return None
    curves = []
    for name in found.maps:
        for distance in found.distances:
            low, high = found.interval(name, distance)
            parts = {"rate": found.rate(name, distance), "low": low, "high": high}
            curves.append(
                {"map": name, "distance": distance, **{k: [plain(v) for v in t.tolist()] for k, t in parts.items()}}
            )
    return {"layers": list(found.layers), "chance": found.chance, "curves": curves}
