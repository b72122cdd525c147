"""Everything the page shows of one trace: a manifest of json_value data, and blocks of matrices that it loads when looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from whence.attention.decide import Decisions
from whence.attention.heads import head_of
from whence.attention.overview import Overview
from whence.core.attention.verdict import RowVerdict
from whence.core.numerics.tolerances import SHOWN_MOVE
from whence.errors import InputError
from whence.faithful.result import Faithfulness
from whence.mixing.mixture import Mixture
from whence.reading.trace import Stack, Trace
from whence.reporting.analysis import Analysis
from whence.reporting.answer import answer_data
from whence.reporting.attention import QUANTITIES, counter_examples, json_value, stack_data
from whence.reporting.decisions import decisions_data
from whence.reporting.exact import WEIGHTS, ExactIntervals, HeadIntervals
from whence.reporting.heads import Alternatives, Detail, alternatives_of, detail_of, head_blocks, heaviest_keys
from whence.reporting.mixing import mixtures, naive_identifiability
from whence.reporting.prediction import prediction_data
from whence.reporting.runs import run_data, runs_data
from whence.results.progress import Step, silent
from whence.results.provenance import library_versions
from whence.surveys.result import Survey

FORMAT = 1
DETAILS = ("light", "standard", "full")


@dataclass(frozen=True)
class Document:
    """What a host hands to the page: `manifest` is JSON, `blocks` are compressed (see `quantise`)."""

    manifest: Mapping[str, Any]
    blocks: Mapping[str, bytes] = field(repr=False)


def run_document(run: Faithfulness | Survey) -> Document:
    """A page of its own for a run over many texts."""
    data = run_data(run)
    about = {"format": FORMAT, "model": data["model"], "text": f"{data['title']}: {data['context']}"}
    return Document({**about, "versions": library_versions(), "stacks": [], "runs": [data]}, {})


def default_methods(tokens: int) -> tuple[str, ...]:
    """The mixing methods that a report has unless told: those that cost next to nothing."""
    return ("alti", "norms", "rollout") if tokens <= 256 else ("alti", "rollout")


def build(
    trace: Trace,
    *,
    detail: str = "standard",
    methods: Iterable[str | Mixture] | None = None,
    attributions: Iterable[str] | None = None,
    budget: float | None = None,
    analysis: Analysis | None = None,
    decisions: Iterable[Decisions] = (),
    runs: Iterable[Faithfulness | Survey] = (),
    removal: bool | None = None,
    token_identifiability: Any = None,
    with_heads: bool = True,
    judged_rows: bool = False,
    step: Step = silent,
) -> Document:
    """The document of one trace; `analysis`: what is known of it already; `with_heads`: with head blocks.

    judged_rows: exact intervals only where they decide something: for the listed rows, and in the heads that may be
    read for the rows that the verdict rests on. That a head may not be read is shown by alternatives, and those are there.
    """
    if detail not in DETAILS:
        raise InputError(f"detail={detail!r} is not one of {', '.join(DETAILS)}.")
    chosen = default_methods(len(trace.tokens)) if methods is None else tuple(methods)
    analysis = analysis or Analysis(trace)
    decided = decisions_data(decisions)
    over_texts = runs_data(runs)
    blocks: dict[str, bytes] = {}
    stacks: list[dict[str, Any]] = []
    parts: list[_Part] = []
    exact = ExactIntervals(max(len(stack.key_tokens) for stack in trace.stacks.values()), budget)
    share = 0.5 / len(trace.stacks)
    try:
        for i, (name, stack) in enumerate(trace.stacks.items()):

            def inner(what: str, share_of_it: float, begin: float = i * share) -> None:
                step(what, begin + share * share_of_it)

            inner("Looking for what is certain", 0.0)
            part = _Part(stack, analysis.overview(name), detail)
            data = stack_data(stack, part.overview)
            inner("Other attention with the same output", 0.5)
            part.alternatives = _alternatives(part, judged_rows)
            if with_heads:
                _begin(exact, part, judged_rows)  # in threads of its own, beside all that follows
            inner("Counter-examples, put into the model", 0.6)
            data["witnesses"] = part.witnesses = counter_examples(analysis, part.telling_rows(), name)
            if with_heads:
                inner("Pictures of the heads", 0.8)
                blocks |= _head_blocks(part, listed=False)
            stacks.append(data)
            parts.append(part)
        step("Where each token comes from", 0.52)
        entries, some = mixtures(analysis, chosen)
        step("The prediction", 0.56)
        answer, scores = answer_data(analysis, attributions)
        # After an answer nobody asks for the next token: the answer itself is what is explained.
        prediction = None if trace.prompt_length is not None else prediction_data(analysis, attributions, removal)
        exact.finish(lambda done, of: step(f"Exact intervals, {done} of {of} rows", 0.6 + 0.36 * done / max(of, 1)))
    finally:
        exact.close()
    step("Pictures of the listed heads", 0.97)
    for data, part in zip(stacks, parts, strict=True):
        if with_heads:
            blocks |= _head_blocks(part, listed=True, exact=exact)
        begin = f"head/{part.stack.name}/"
        data["blocks"] = sorted(key.removeprefix(begin) for key in blocks if key.startswith(begin))
        data["exact_heads"] = [
            {"layer": layer, "head": head, "rows": int(found.solved.sum()), "of": len(found.solved)}
            for (name, layer, head), found in exact.heads.items()
            if name == part.stack.name
        ]
    manifest = {
        "format": FORMAT,
        "text": trace.text,
        "text_pair": trace.text_pair,
        "prompt_length": trace.prompt_length,
        "target": trace.target,
        "detail": detail,
        "epsilon": analysis.epsilon,
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
        "prediction": prediction,
        "answer": answer,
        "decisions": decided,
        "runs": over_texts,
    }
    step("Done", 1.0)
    return Document(manifest, blocks | some | scores)


@dataclass
class _Part:
    """One stack on its way into the document."""

    stack: Stack
    overview: Overview
    detail_name: str
    alternatives: dict[int, Alternatives] = field(default_factory=dict)
    witnesses: list[dict[str, Any]] = field(default_factory=list)

    @property
    def detail(self) -> Detail:
        return detail_of(self.detail_name, len(self.stack.tokens))

    @property
    def named(self) -> set[tuple[int, int]]:
        """Layer and head of the listed heads."""
        return {(c.layer, c.head) for c in (*self.overview.worst, *self.overview.best)}

    def telling_rows(self) -> list[tuple[int, int, int]]:
        """Rows to put a counter-example into the model for."""
        rows = [
            *_farthest(self.stack, self.alternatives),
            *((c.layer, c.head, c.query) for c in self.overview.worst if c.dimension > 0),
        ]
        return list(dict.fromkeys(rows))[:3]

    def maps(
        self, layer: int, exact: Mapping[int, HeadIntervals] | None = None
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Other attention of a layer by head, and which rows were searched.

        The quick one, the farthest met while solving, the row put into the model.
        """
        quick = self.alternatives.get(layer)
        maps = {} if quick is None else quick.by_head()
        for head, intervals in (exact or {}).items():
            if intervals.moved:
                before = maps[head][1] if head in maps else torch.zeros_like(intervals.solved)
                maps[head] = (intervals.other, before | intervals.solved)
        for witness in self.witnesses:
            if witness["layer"] == layer and witness["head"] in maps:
                changed, searched = (t.clone() for t in maps[witness["head"]])
                changed[witness["query"]] = torch.tensor(witness["alternative"], dtype=torch.float64)
                searched[witness["query"]] = True
                maps[witness["head"]] = (changed, searched)
        return maps


def _begin(exact: ExactIntervals, part: _Part, judged_rows: bool) -> None:
    """Start with the exact intervals of the listed heads: the weights that will be drawn, the listed rows first."""
    found = part.overview.identifiability
    judged = part.overview.verdict.extra["row_verdicts"] >= int(RowVerdict.CERTAIN)
    for layer in part.stack:
        for head in [h for h in layer.heads if (layer.index, h) in part.named]:
            place = layer.heads.index(head)
            weights, _, visible = head_of(layer, place)
            raw = weights.detach().to(torch.float64)
            seen = torch.ones(raw.shape, dtype=torch.bool) if visible is None else visible
            keys = heaviest_keys(raw, seen, WEIGHTS)
            free = found.extra["simplex_null_dimension"][found.layers.index(layer.index), found.heads.index(head)]
            first = [
                c.query for c in (*part.overview.worst, *part.overview.best) if (c.layer, c.head) == (layer.index, head)
            ]
            other, _ = part.maps(layer.index).get(head, (None, None))
            at = found.layers.index(layer.index), found.heads.index(head)
            decided = judged[at] & (part.overview.verdict.of(layer.index, head) != "do not read")
            rows = decided | (not judged_rows)
            exact.add(part.stack.name, layer, head, keys, free, first, rows.nonzero().squeeze(-1).tolist(), other)


def _alternatives(part: _Part, judged_rows: bool) -> dict[int, Alternatives]:
    """Other attention by layer: of every head of a short text, of the listed heads of a long one.

    judged_rows: of the heads that are not listed, only the rows that the verdict looked at are searched.
    """
    everywhere = len(part.stack.tokens) <= part.detail.alternatives and part.detail.heads == "all"
    alternatives: dict[int, Alternatives] = {}
    for i, layer in enumerate(part.stack):
        wanted = [h for h in layer.heads if everywhere or (layer.index, h) in part.named]
        if wanted and int(part.overview.free[i].max()) > 0:
            some = layer if len(wanted) == len(layer.heads) else layer.select(wanted)
            rows = None
            if judged_rows:
                places = [part.overview.identifiability.heads.index(h) for h in wanted]
                rows = part.overview.verdict.extra["row_verdicts"][i, places] >= int(RowVerdict.CERTAIN)
                rows |= torch.tensor([(layer.index, h) in part.named for h in wanted])[:, None]
            alternatives[layer.index] = alternatives_of(some, rows)
    return alternatives


def _farthest(stack: Stack, others: Mapping[int, Alternatives]) -> list[tuple[int, int, int]]:
    """The row of an ordinary token that moved farthest, where any did."""
    plain_tokens = torch.tensor([not special for special in stack.tokens.special], dtype=torch.float64)
    best, place = SHOWN_MOVE, None
    for layer, found in others.items():
        for head, moved in found.moved.items():
            row = int((moved * plain_tokens).argmax())
            if float(moved[row] * plain_tokens[row]) > best:
                best, place = float(moved[row]), (layer, head, row)
    return [] if place is None else [place]


def _head_blocks(part: _Part, *, listed: bool, exact: ExactIntervals | None = None) -> dict[str, bytes]:
    """The blocks of the listed heads, or of the others that this level of detail has, by `head/STACK/LAYER/HEAD`."""
    name, named = part.stack.name, part.named
    blocks: dict[str, bytes] = {}
    for layer in part.stack:
        mine = [
            h for h in layer.heads if ((layer.index, h) in named) == listed and (listed or part.detail.heads == "all")
        ]
        if not mine:
            continue
        some = layer if len(mine) == len(layer.heads) else layer.select(mine)
        intervals = {h: exact.heads[name, layer.index, h] for h in mine} if exact is not None else {}
        for head, block in head_blocks(some, part.detail, part.maps(layer.index, intervals), intervals).items():
            blocks[f"head/{name}/{layer.index}/{head}"] = block
    return blocks


def trained_data(trained: Any) -> dict[str, Any] | None:
    """The curves of a token-identifiability result: a line per map and distance, whole states, the token itself."""
    if trained is None:
        return None
    curves = []
    for name in trained.maps:
        for distance in trained.distances:
            low, high = trained.interval(name, distance)
            parts = {"rate": trained.rate(name, distance), "low": low, "high": high}
            curves.append(
                {
                    "map": name,
                    "distance": distance,
                    **{k: [json_value(v) for v in t.tolist()] for k, t in parts.items()},
                }
            )
    return {"layers": list(trained.layers), "chance": trained.chance, "curves": curves}
