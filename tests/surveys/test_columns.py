"""Every column against a slow, obvious computation from the same trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import whence
from tests.surveys.survey_models import save_tiny, some_texts
from whence.mixing import summaries
from whence.surveys.intervals import mean_over_texts, share_over_texts
from whence.surveys.layer_columns import OFFSETS, distance_name, offset_name
from whence.surveys.result import Survey, certain_share

TOLERANCE = 3e-4  # 13 bits of mantissa, and the batch's own float32


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return some_texts(6)[3:]


@pytest.fixture(scope="module")
def found(tiny: Path, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Survey:
    return whence.survey(tiny, texts, tmp_path_factory.mktemp("out"), rows=0)


@pytest.fixture(scope="module")
def traces(tiny: Path, texts: list[str]) -> list[whence.Trace]:
    model = whence.load(tiny)
    return [whence.trace(model, text) for text in texts]


def grid(found: Survey, text: int, column: str) -> torch.Tensor:
    frame = found.heads[found.heads["text"] == text].sort_values(["layer", "head"])
    return torch.tensor(frame[column].to_numpy(dtype=float)).view(2, 4)


def test_heads(found: Survey, traces: list[whence.Trace]) -> None:
    for text, trace in enumerate(traces):
        attention, values = trace.attention.double(), trace.values.double()
        n = attention.shape[-1]
        raw = attention.mean(2)
        effective = torch.zeros_like(attention)
        for layer in range(2):
            for head in range(4):
                v = values[layer, head].numpy()
                u, s, _ = np.linalg.svd(v, full_matrices=False)
                basis = torch.from_numpy(u[:, s > s[0] * 1e-5])
                effective[layer, head] = attention[layer, head] @ basis @ basis.T
                rank = np.linalg.matrix_rank(np.column_stack([v, np.ones(n)]), tol=1e-4)
                assert grid(found, text, "rank")[layer, head] == basis.shape[1]
                assert grid(found, text, "null_dimension")[layer, head] == n - rank
                a, e = attention[layer, head].flatten().numpy(), effective[layer, head].flatten().numpy()
                assert grid(found, text, "r")[layer, head] == pytest.approx(np.corrcoef(a, e)[0, 1], abs=TOLERANCE)
        share = (attention - effective).abs().sum(-1).mean(-1)
        torch.testing.assert_close(grid(found, text, "null_share"), share, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(grid(found, text, "raw_start"), raw[..., 0], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(grid(found, text, "raw_end"), raw[..., -1], atol=TOLERANCE, rtol=TOLERANCE)
        for kind, at in (("start", [0]), ("end", [n - 1]), ("rest", range(1, n - 1))):
            mass = effective.mean(2)[..., list(at)].sum(-1)
            torch.testing.assert_close(grid(found, text, f"effective_{kind}"), mass, atol=TOLERANCE, rtol=TOLERANCE)
        entropy = -(attention * attention.log()).sum(-1).mean(-1)
        torch.testing.assert_close(grid(found, text, "entropy"), entropy, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(
            grid(found, text, "top"), attention.amax(-1).mean(-1), atol=TOLERANCE, rtol=TOLERANCE
        )


def test_certainty_is_the_verdict(found: Survey, traces: list[whence.Trace]) -> None:
    seen = 0
    for text, trace in enumerate(traces):
        verdict = whence.verdict(trace, rows=0)
        for name in ("unique", "certain", "flat", "open", "sampled", "rows"):
            assert torch.equal(grid(found, text, name).long(), verdict.extra[name]), name
        seen += int(verdict.extra["rows"].sum())
    assert seen > 0  # some rows have alternatives, or nothing was compared
    certain = found.heads[(found.heads["certain"] > 0) & (found.heads["open"] + found.heads["flat"] == 0)]
    assert (certain["width"] <= 0.0501).all()


def test_readings_are_told_apart_by_what_they_are_of(
    found: Survey, texts: list[str], traces: list[whence.Trace], tiny: Path, tmp_path: Path
) -> None:
    """Row by row from the definition: one text alone, every row by its certificate, its heaviest key's type by its place."""
    total = {"certain": 0, "open": 0}
    for text, trace in enumerate(traces):
        n = len(trace.tokens)
        for name in total:
            kinds = {kind: grid(found, text, f"{name}_{kind}") for kind in ("start", "end", "punctuation", "rest")}
            assert torch.equal(sum(kinds.values()), grid(found, text, name))
            total[name] += int(grid(found, text, name).sum())
        for layer in range(2):
            for head in range(4):
                wanted = {"certain": [0, 0, 0], "open": [0, 0, 0]}
                for query in range(n):
                    top = int(trace[layer].attention[head, query].argmax())
                    row = whence.certify(trace, layer=layer, head=head, query=query, top=n)
                    if row.dimension == 0 or float(row.upper.max()) <= 0.05:
                        continue
                    at = row.keys.tolist().index(top)
                    narrow = float(row.upper[at] - row.lower[at]) <= 0.05
                    others = max(float(u) for k, u in zip(row.keys.tolist(), row.upper, strict=True) if k != top)
                    if narrow != (others - float(row.lower[at]) <= 0.05):
                        continue  # whether another key outweighs it is then a question about differences
                    name = "certain" if narrow else "open"
                    wanted[name][0 if top == 0 else 1 if top == n - 1 else 2] += 1
                for name, counts in wanted.items():
                    for kind, count in zip(("start", "end", "rest"), counts, strict=True):
                        assert int(grid(found, text, f"{name}_{kind}")[layer, head]) >= count
    assert min(total.values()) > 0


def test_a_model_with_few_positions_is_surveyed(tmp_path: Path) -> None:
    """The sentences that workers prove the model on are cut to fit."""
    import json

    folder = save_tiny(tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    from transformers import BertConfig, BertModel

    BertModel(BertConfig(**{**config, "max_position_embeddings": 14})).save_pretrained(folder)
    survey = whence.survey(folder, [some_texts(1)[0], some_texts(15)[14]], tmp_path / "out")
    assert survey.texts["reason"].isna().tolist() == [True, False]  # a text that does not fit is not cut


def test_width_is_that_of_a_certificate(found: Survey, traces: list[whence.Trace]) -> None:
    lines = found.heads[(found.heads["open"] == found.heads["rows"]) & (found.heads["rows"] > 0)]
    assert len(lines)  # heads all of whose rows went to the solver
    line = lines.iloc[0]
    trace = traces[int(line["text"])]
    widths = []
    for query in range(int(line["length"])):
        row = whence.certify(trace, layer=int(line["layer"]), head=int(line["head"]), query=query, top=1)
        widths.append(float(row.upper[0] - row.lower[0]))
    assert line["width"] == pytest.approx(np.mean(widths), abs=1e-3)


def test_layers_are_the_summaries(found: Survey, traces: list[whence.Trace]) -> None:
    for text, trace in enumerate(traces):
        lines = found.layers[found.layers["text"] == text].set_index("layer")
        mixed = whence.contributions(trace, "alti").rollout()
        own = summaries.own_share(mixed).set_index("layer")
        special = summaries.special_mass(mixed).set_index("layer")
        distance = summaries.by_distance(mixed).set_index(["layer", "distance"])["share"]
        offset = summaries.by_offset(mixed).set_index(["layer", "offset"])["share"]
        n = len(trace.tokens)
        for layer in range(2):
            line = lines.loc[layer]
            assert line["alti_own"] == pytest.approx(own.loc[layer, "mean"], abs=TOLERANCE)
            assert line["alti_own_median"] == pytest.approx(own.loc[layer, "median"], abs=TOLERANCE)
            assert 100 * line["alti_beaten"] / n == pytest.approx(own.loc[layer, "not_largest"])
            assert line["alti_special"] == pytest.approx(special.loc[layer, "special"], abs=TOLERANCE)
            for index, (name, _, _) in enumerate(summaries.DISTANCES):
                value = line[f"alti_{distance_name(index)}"]
                assert value == pytest.approx(distance.loc[layer, name], abs=TOLERANCE)
            for k in OFFSETS:
                value = line[f"alti_{offset_name(k)}"]
                assert np.isnan(value) if abs(k) >= n else value == pytest.approx(offset.loc[layer, k], abs=TOLERANCE)
            states = trace.of().states.double()
            hits = {"cosine": 0, "l2": 0}
            for i in range(n):
                x = states[0]
                cosine = torch.nn.functional.cosine_similarity(states[layer + 1, i][None], x)
                hits["cosine"] += int(cosine.argmax()) == i
                hits["l2"] += int((x - states[layer + 1, i]).norm(dim=-1).argmin()) == i
            assert {m: line[f"tokens_{m}"] for m in hits} == hits


def test_intervals_over_texts() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"text": np.repeat(np.arange(50), 3), "x": rng.normal(size=150)})
    each = frame["x"].to_numpy().reshape(50, 3).mean(1)
    from scipy.stats import ttest_1samp

    interval = ttest_1samp(each, 0).confidence_interval(0.95)
    found = mean_over_texts(frame, "x")
    assert (found["low"], found["high"]) == pytest.approx((interval.low, interval.high))
    total = rng.integers(1, 9, size=400)
    covered = 0
    for _ in range(300):
        hits = rng.binomial(total, rng.beta(3, 7, size=400))  # rows of a text are alike
        share = share_over_texts(range(400), hits, total)
        covered += share["low"] <= 0.3 <= share["high"]
    assert 0.92 <= covered / 300 <= 0.98


def test_sampled_rows_stand_for_all_rows_of_their_text() -> None:
    lines = pd.DataFrame(
        {"text": [0, 1, 2], "unique": [5, 0, 3], "certain": [0, 1, 0], "open": [0, 1, 0], "flat": 0}
        | {"sampled": [0, 2, 0], "rows": [0, 10, 8]}
    )
    assert certain_share(lines)["share"] == 0.5  # the only text with a sample
    assert certain_share(lines, unique=True)["share"] == pytest.approx((5 + 5) / (5 + 10))  # the third says nothing
