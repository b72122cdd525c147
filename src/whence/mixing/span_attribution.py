"""Scores of the inputs for every token of an answer: one row a token, and what they come to for sentences or documents."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from whence.errors import InputError
from whence.mixing.attribution import Attribution
from whence.mixing.text_units import Groups, unit_groups
from whence.results.declared import Array
from whence.results.labels import Tokens
from whence.results.result import Result

TOP = 5  # inputs that are named for each token of the answer


@dataclass(frozen=True)
class SpanAttribution(Result):
    """`values` [explained, input]: row t scores the inputs for the t-th explained token; what comes after it scores 0.

    `tokens` are the explained tokens, `key_tokens` the inputs. `extra`: "position" [explained], the row of the logits each is
    read from; "logit" and "probability" [explained] of the token explained (not of its difference to a foil).
    """

    kind: ClassVar[str] = "span-attribution"
    arrays: ClassVar[Mapping[str, Array]] = {
        "values": Array("explained input"),
        "position": Array("explained", "integer"),
        **dict.fromkeys(("logit", "probability"), Array("explained")),
    }

    @property
    def signed(self) -> bool:
        return bool(self.provenance.settings.get("signed", False))

    @property
    def inputs(self) -> Tokens:
        """The tokens that are scored: prompt and answer so far, or an encoder–decoder's source."""
        return self.key_tokens or self.tokens

    def of(self, target: int) -> Attribution:
        """The scores for one token of the answer, by its number there."""
        if not -len(self.tokens) <= target < len(self.tokens):
            raise InputError(f"target {target} is out of range: {len(self.tokens)} tokens were explained.")
        return self._one(self.values[target], {"target_token": self.tokens[target]})

    def total(self, how: str = "mean") -> Attribution:
        """One score per input for the whole answer: the mean over its tokens, or the "sum"."""
        return self._one(_together(self.values, how), {"over": how})

    def by(
        self, inputs: str = "sentence", targets: str = "token", *, documents: Sequence[str] | None = None,
        how: str = "mean",
    ) -> SpanAttribution:  # fmt: skip
        """Gathered into units: "token", "word", "sentence" or "document" (paragraphs, or those that `documents` quotes).

        A unit of inputs gets the sum of its tokens' scores; a unit of the answer the mean over its tokens, or the "sum".
        """
        settings = self.provenance.settings
        columns = unit_groups(
            self.inputs, settings.get("text"), inputs, documents=documents, answer=settings.get("prompt_length")
        )
        rows = unit_groups(self.tokens, settings.get("answer"), targets)
        values = torch.stack([_together(self.values[group], how) for _, group in rows])
        values = torch.stack([values[:, group].sum(1) for _, group in columns], dim=1)
        about = {**settings, "inputs": inputs, "targets": targets, "over": how}
        return replace(
            self,
            values=values,
            tokens=_named(rows),
            key_tokens=_named(columns),
            provenance=self.provenance.by(self.provenance.method, **about),
            extra={},
        )

    def ranked(self, target: int) -> list[tuple[str, float]]:
        """Inputs with their scores for one token of the answer, the highest first."""
        return self.of(target).ranked()

    def show(self) -> None:
        """Print the answer, token by token, with the inputs that count most."""
        from rich.console import Console

        Console().print(self.table(), markup=False, highlight=False, soft_wrap=True)

    def table(self, top: int = TOP) -> str:
        """A line per token of the answer: its probability and the inputs with the largest scores, signs kept."""
        width = min(24, max(len(token) for token in self.tokens))
        sign = "+" if self.signed else ""
        lines = []
        for t, token in enumerate(self.tokens):
            order = self.values[t].abs().argsort(descending=True).tolist()[:top]
            named = [f"{self.inputs[i]} {float(self.values[t, i]):{sign}.2g}" for i in order if self.values[t, i] != 0]
            chance = f"{float(self.extra['probability'][t]):5.0%}  " if "probability" in self.extra else ""
            lines.append(f"{token[:width]:<{width}}  {chance}{', '.join(named) or '–'}")
        return "\n".join(lines)

    def _one(self, values: Tensor, more: dict[str, Any]) -> Attribution:
        return Attribution(
            values=values,
            axes=("input",),
            tokens=self.inputs,
            provenance=self.provenance.by(self.provenance.method, **{**self.provenance.settings, **more}),
        )

    def _repr_html_(self) -> str:
        largest = float(self.values.abs().max()) or 1.0
        head = "".join(f"<th>{html.escape(token)}</th>" for token in self.inputs)
        rows = ""
        for t, token in enumerate(self.tokens):
            cells = ""
            for score in self.values[t].tolist():
                colour = "47,125,189" if score >= 0 else "179,88,6"
                cells += f"<td style='background:rgba({colour},{abs(score) / largest:.2f})' title='{score:.4g}'>{score:.2f}</td>"
            rows += f"<tr><th>{html.escape(token)}</th>{cells}</tr>"
        title = html.escape(f"{self.provenance.method} of {self.provenance.model}: inputs across, the answer downwards")
        return f"<div style='overflow:auto'><b>{title}</b><table><tr><th></th>{head}</tr>{rows}</table></div>"


def _together(values: Tensor, how: str) -> Tensor:
    if how not in ("mean", "sum"):
        raise InputError(f"how={how!r} is not 'mean' or 'sum'.")
    return values.mean(0) if how == "mean" else values.sum(0)


def _named(groups: Groups) -> Tokens:
    names = tuple(name for name, _ in groups)
    return Tokens(names, names)
