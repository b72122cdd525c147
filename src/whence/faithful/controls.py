"""Jain & Wallace's and Wiegreffe & Pinter's questions: does the prediction care which attention it has?

TVD = ½ Σ |p − p′| between the model's prediction and that with other attention. Permuted: [CLS]'s last row (all heads), then
every row of every layer. Uniform: in the last layer, in all, and in a model that was trained so. The adversary: another row with
exactly the same output (TVD 0 by construction, verified in the model) where K Adam runs are used elsewhere; and one that may
move each coordinate of the head output by a tolerance (methods 1.2), which is what their adversary is allowed. Wiegreffe &
Pinter's *trained* adversary is left out: it is another model, with other weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from whence.attention.doppelganger import doppelganger
from whence.attention.heads import row_of
from whence.core.attention.witness import witness_row
from whence.core.numerics.arrays import AnyArray
from whence.core.numerics.tolerances import JSD_ZERO
from whence.errors import InputError
from whence.faithful.engine import Engine
from whence.faithful.question import TextQuestion, prepared_text, units_of
from whence.mixing.gradients import gradient
from whence.mixing.prediction import prediction_of
from whence.model.load import Model, as_model
from whence.reading.encodings import sequences_given
from whence.reading.rerun.substitution import Replace, substitute
from whence.reading.tokenised import unknown_id
from whence.reading.trace import Layer, Trace
from whence.reading.tracing import trace
from whence.results.short_repr import short_repr

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TextControls:
    """One text: TVD under each control, whether the label stays, and Kendall's τ_b (None: a constant, undefined)."""

    text: str
    permuted_row: float
    """Median TVD over permutations of the read-out row of the last layer, all heads."""
    permuted_all: float
    uniform_last: float
    uniform_all: float
    label_last: bool
    label_all: bool
    """Whether the label survives uniform attention in the last layer, in all."""
    other: float
    """TVD under another attention with the same head outputs (0 up to rounding)."""
    other_jsd: float
    """How far that attention is: Jensen–Shannon divergence of the read-out row, mean over the last layer's heads, nats."""
    near: float
    """TVD when the read-out row of the last layer is another one with nearly the same output, in every head."""
    near_jsd: float
    label_trained: bool | None
    """Whether a model trained with uniform attention gives the same label (None: none was given)."""
    attention_gradient: float | None
    attention_occlusion: float | None
    gradient_occlusion: float | None


@dataclass(frozen=True)
class AttentionControls:
    """The controls of every text. Where uniform attention keeps the label, these texts cannot show that attention matters."""

    __repr__ = short_repr

    texts: tuple[TextControls, ...]
    permutations: int
    tolerance: float

    def table(self) -> pd.DataFrame:
        """Mean, median and how many texts count, per control."""
        import pandas as pd

        frame = self.per_text().drop(columns="text").astype(float)
        return pd.DataFrame({"mean": frame.mean(), "median": frame.median(), "texts": frame.count()})

    def per_text(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame([vars(t) for t in self.texts])

    def verdict(self) -> tuple[str, ...]:
        """What the controls allow to be said."""
        n, frame = len(self.texts), self.per_text()
        kept = int(frame["label_last"].sum()), int(frame["label_all"].sum())
        row, every = frame["permuted_row"].median(), frame["permuted_all"].median()
        said = [f"Median TVD: {row:.3f} when the last layer's read-out row is permuted, {every:.3f} when every row is."]
        said.append(f"Uniform attention in the last layer keeps {kept[0]} of {n} labels, in all layers {kept[1]}.")
        far, moved = frame["other_jsd"].mean(), frame["other"].max()
        if far > JSD_ZERO:
            said.append(
                f"Another attention (JSD {far:.2f} nats) with the same outputs: the prediction moves by {moved:.0e}."
            )
        else:
            said.append("No other attention gives the same outputs on these texts: they are too short for one.")
        far, moved = frame["near_jsd"].mean(), frame["near"].median()
        said.append(
            f"Another read-out row (JSD {far:.2f} nats) whose outputs lie within {self.tolerance:.0%} moves the prediction by "
            f"{moved:.3f} (median TVD)."
        )
        trained = frame["label_trained"].dropna()
        if len(trained):
            said.append(
                f"A model trained with uniform attention gives {int(trained.sum())} of {len(trained)} of these labels; where "
                "it gives them all, these texts cannot show that attention matters."
            )
        for name, words in (
            ("attention_gradient", "attention with gradients"),
            ("attention_occlusion", "attention with |leave-one-out|"),
            ("gradient_occlusion", "gradients with |leave-one-out|"),
        ):
            values = frame[name].dropna().astype(float)
            undefined = n - len(values)
            said.append(
                f"Kendall τ of {words}: " + (f"{values.mean():.2f}" if len(values) else "undefined")
                + (f" ({undefined} undefined)." if undefined else ".")
            )  # fmt: skip
        return tuple(said)

    def plot(self, *, ax: Any = None) -> Any:
        """The mean of every control; returns the Axes."""
        from whence.results.plotting import plot_bars

        table = self.table()
        return plot_bars([str(name) for name in table.index], table["mean"].tolist(), "mean over texts", ax)

    def to_dict(self) -> dict[str, Any]:
        return {"texts": [vars(t) for t in self.texts], "verdict": list(self.verdict())}


def attention_controls(
    model: Any,
    texts: Any,
    permutations: int = 100,
    *,
    tolerance: float = 0.01,
    trained_uniform: Any = None,
    budget: float | None = None,
    seed: int = 0,
) -> AttentionControls:
    """Permuted, uniform and other attention against a classifier's prediction, and τ of attention with other explanations.

    tolerance: by how much of its rms each coordinate of a head's output may move for the nearly equal row.
    trained_uniform: a model that `whence train --variant uniform` made of the same data; its labels are compared.
    budget: seconds a text after which the search for other attention with the same outputs stops early; None: no limit.
    """
    chosen = as_model(model)
    if permutations < 1:
        raise InputError(f"permutations={permutations}: give 1 or more.")
    given = sequences_given(chosen, texts)
    if not given:
        raise InputError("no texts were given.")
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance={tolerance}: give a share of the output above 0 and below 1.")
    control = None if trained_uniform is None else as_model(trained_uniform)
    if control is not None and getattr(control.model.config, "attention", None) != "uniform":
        raise InputError(
            f"trained_uniform={control.name!r} was not trained with uniform attention: make one with whence train "
            "--variant uniform on the same data."
        )
    found = tuple(
        _controls(chosen, s[0] if len(s) == 1 else s, permutations, tolerance, control, budget, seed) for s in given
    )
    return AttentionControls(found, permutations, tolerance)


def _controls(
    model: Any,
    text: str | tuple[str, ...],
    permutations: int,
    tolerance: float,
    control: Model | None,
    budget: float | None,
    seed: int,
) -> TextControls:
    prepared = prepared_text(model, text)
    found = trace(model, prepared)
    if not isinstance(found, Trace) or found.logits is None or found.logits.dim() != 1:
        raise InputError(f"{model.name} is no classifier of texts: attention controls compare class probabilities.")
    own = _probabilities(found.logits)
    label = int(own.argmax())
    prediction = prediction_of(model, found, label, None, None)
    reads = int(prediction.rows.argmax())
    units = units_of(prepared, "token", None, unknown_id(model.tokenizer))
    question = TextQuestion(prepared, units, None, label)
    draw = question.generator(seed, "permutations")
    layers = list(found.of())

    def probabilities(changes: list[Replace]) -> AnyArray:
        logits = substitute(found, changes, model=model).logits
        assert logits is not None
        return _probabilities(logits)

    last = layers[-1]
    rows, everything = [], []
    for _ in range(permutations):
        moved = last.attention.detach().clone()
        moved[:, reads] = _shuffled(moved[:, reads], last, reads, draw)
        rows.append(_tvd(own, probabilities([Replace(last.index, moved)])))
    for _ in range(max(1, permutations // 10)):  # all rows of all layers: one shuffle already averages over many
        changes = []
        for layer in layers:
            weights = layer.attention.detach().clone()
            for q in range(weights.shape[1]):
                weights[:, q] = _shuffled(weights[:, q], layer, q, draw)
            changes.append(Replace(layer.index, weights))
        everything.append(_tvd(own, probabilities(changes)))
    uniform = [Replace(layer.index, _uniform(layer)) for layer in layers]
    in_last, in_all = probabilities(uniform[-1:]), probabilities(uniform)
    other = doppelganger(found, rounds=1, budget=budget, sample=1, seed=seed)
    replaced = probabilities([Replace(la, w) for la, w in zip(other.layers, other.values, strict=True)])
    nearly = last.attention.detach().clone()
    nearly[:, reads] = _nearly_equal(last, reads, tolerance, seed)
    attention = last.attention[:, reads].double().mean(0).numpy()
    slopes = gradient(prediction).values.detach().double().numpy()
    engine = Engine(model)
    whole = engine.outputs(question, "drop", [0])[0]
    lost = np.abs(whole - engine.outputs(question, "drop", [1 << u for u in range(len(units))]))
    attended, sloped = units.gather(attention), units.gather(slopes)
    return TextControls(
        text=text if isinstance(text, str) else " / ".join(text),
        permuted_row=float(np.median(rows)),
        permuted_all=float(np.median(everything)),
        uniform_last=_tvd(own, in_last),
        uniform_all=_tvd(own, in_all),
        label_last=int(in_last.argmax()) == label,
        label_all=int(in_all.argmax()) == label,
        other=_tvd(own, replaced),
        other_jsd=_jsd(last.attention[:, reads].double().numpy(), other.values[-1][:, reads].double().numpy()),
        near=_tvd(own, probabilities([Replace(last.index, nearly)])),
        near_jsd=_jsd(last.attention[:, reads].double().numpy(), nearly[:, reads].double().numpy()),
        label_trained=None if control is None else _label(control, text) == label,
        attention_gradient=tau(attended, sloped),
        attention_occlusion=tau(attended, lost),
        gradient_occlusion=tau(sloped, lost),
    )


def _probabilities(logits: Tensor) -> AnyArray:
    return np.asarray(torch.softmax(logits.detach().double(), -1))


def _tvd(p: AnyArray, q: AnyArray) -> float:
    return float(np.abs(p - q).sum() / 2)


def _visible(layer: Layer, query: int) -> AnyArray:
    visible = layer.visible
    n = layer.attention.shape[-1]
    if visible is None:
        return np.arange(n)
    row = visible[query] if visible.dim() == 2 else visible[0, query]
    return np.flatnonzero(row.numpy())


def _shuffled(row: Tensor, layer: Layer, query: int, draw: np.random.Generator) -> Tensor:
    """(head, key): every head's weights in an order of its own, on the keys that the row sees."""
    keys = _visible(layer, query)
    moved = row.clone()
    for h in range(len(row)):
        moved[h, keys] = row[h, draw.permutation(keys)]
    return moved


def _uniform(layer: Layer) -> Tensor:
    weights = torch.zeros_like(layer.attention)
    for q in range(weights.shape[1]):
        keys = _visible(layer, q)
        weights[:, q, keys] = 1 / len(keys)
    return weights


def _nearly_equal(layer: Layer, query: int, tolerance: float, seed: int) -> Tensor:
    """[head, key]: for every head the farthest row found whose output differs by no more than the tolerance."""
    rows = []
    for place in range(len(layer.heads)):
        weights, values, visible = row_of(layer, place, query)  # a sink is the last key, and is not put into the model
        other = witness_row(weights, values, tolerance=tolerance, visible=visible, seed=seed)
        rows.append(other.alternative[: layer.attention.shape[-1]].to(weights))
    return torch.stack(rows)


def _label(model: Model, text: str | tuple[str, ...]) -> int:
    prepared = prepared_text(model, text)
    question = TextQuestion(prepared, units_of(prepared, "token", None), None, 0)
    return int(Engine(model).whole(question).argmax())


def _jsd(p: AnyArray, q: AnyArray) -> float:
    """Jensen–Shannon divergence in nats, mean over heads."""
    m = (p + q) / 2

    def to_middle(x: AnyArray) -> AnyArray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(x > 0, x * np.log(x / m), 0.0).sum(-1)  # type: ignore[no-any-return]

    return float((to_middle(p) + to_middle(q)).mean() / 2)


def tau(x: AnyArray, y: AnyArray) -> float | None:
    """Kendall's τ_b; None where either is constant, for which it is undefined."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    from scipy.stats import kendalltau

    return float(kendalltau(x, y).statistic)
