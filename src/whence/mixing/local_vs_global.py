"""Local against global attention: does a head look at the tokens that its output depends on?

Pascual, Brunner & Wattenhofer, "Telling BERT's Full Story" (EACL 2021): local is the attention row itself, global the
attribution of that head's output to the input embeddings. They agree in the first layer and part ways further up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from whence.mixing.hidden_token_attribution import HiddenTokenAttribution, hidden_token_attribution
from whence.reading.trace import Trace
from whence.results.declared import Array
from whence.results.result import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LocalGlobal(Result):
    """`values` [layer, head, query]: Pearson's r of each attention row with its attribution row.

    `extra`: "spearman" and "jsd" (nats, at most ln 2), the same shape. Rows that see fewer than three tokens, or are
    constant, have no correlation: NaN.
    """

    kind: ClassVar[str] = "local-vs-global"
    arrays: ClassVar[Mapping[str, Array]] = {
        "values": Array("layer head query"),
        **dict.fromkeys(("spearman", "jsd"), Array("*")),
    }

    def to_frame(self) -> pd.DataFrame:
        """One line per row of attention: layer, head, query, token, pearson, spearman, jsd."""
        frame = super().to_frame().rename(columns={"value": "pearson"})
        for name in ("spearman", "jsd"):
            frame[name] = self.extra[name].reshape(-1).cpu().numpy()
        return frame

    def by_head(self) -> pd.DataFrame:
        """The mean over rows, by layer and head."""
        return self._mean(["layer", "head"])

    def by_layer(self) -> pd.DataFrame:
        """The mean over rows and heads, by layer."""
        return self._mean(["layer"])

    def _mean(self, by: list[str]) -> pd.DataFrame:
        return self.to_frame().groupby(by, as_index=False)[["pearson", "spearman", "jsd"]].mean()


def local_vs_global(
    trace: Trace, *, attribution: HiddenTokenAttribution | None = None, attention: str | None = None, **options: Any
) -> LocalGlobal:
    """Attention rows against the attribution of the head outputs, by layer and head.

    `attribution`: what `hidden_token_attribution(trace, of="heads")` gave, if it is at hand; else it is computed with
    `options` (mode, probes, seed, memory, …).

    >>> import whence
    >>> trace = whence.trace(whence.load(), "The bank raised its rates.")
    >>> whence.local_vs_global(trace, mode="probes", probes=4).by_layer().shape
    (6, 4)
    """
    if attribution is None:
        attribution = hidden_token_attribution(trace, of="heads", attention=attention, **options)
    stack = trace.of(attention)
    local = stack.attention.detach().to(torch.float64).cpu()
    whole = attribution.values.to(torch.float64).cpu()
    visible = torch.stack([layer.visible_mask.expand(local.shape[1:]) for layer in stack]).cpu()
    extra = {
        "spearman": correlation(ranks(local, visible), ranks(whole, visible), visible),
        "jsd": divergence(local, whole),
    }
    settings = {**attribution.provenance.settings, "attention": stack.name}
    origin = trace.provenance.by("local-vs-global", **settings)
    return LocalGlobal.of_stack(
        stack, correlation(local, whole, visible), origin, axes=("layer", "head", "query"), extra=extra
    )


def correlation(a: Tensor, b: Tensor, visible: Tensor) -> Tensor:
    """Pearson's r along the last axis over visible entries; NaN with fewer than three, or where a side is constant."""
    count = visible.sum(-1, keepdim=True)
    centred = []
    for x in (a, b):
        x = torch.where(visible, x, 0.0)
        centred.append(torch.where(visible, x - x.sum(-1, keepdim=True) / count.clamp(min=1), 0.0))
    left, right = centred
    spread = left.norm(dim=-1) * right.norm(dim=-1)
    r = (left * right).sum(-1) / spread
    floor = torch.finfo(a.dtype).eps * a.shape[-1]
    flat = (left.norm(dim=-1) <= floor * a.norm(dim=-1)) | (right.norm(dim=-1) <= floor * b.norm(dim=-1))
    return torch.where((count[..., 0] < 3) | flat, torch.nan, r)


def ranks(x: Tensor, visible: Tensor) -> Tensor:
    """Ranks along the last axis among visible entries, ties sharing their mean rank."""
    hidden = torch.where(visible, x, torch.inf)
    below = (hidden[..., None, :] < hidden[..., :, None]).sum(-1)
    equal = (hidden[..., None, :] == hidden[..., :, None]).sum(-1)
    return below + (equal - 1) / 2.0


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen–Shannon divergence along the last axis, in nats; rows are first divided by their sums."""
    p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))
    m = (p + q) / 2
    halves = [(torch.special.xlogy(x, x) - torch.special.xlogy(x, m)).sum(-1) for x in (p, q)]
    return torch.stack(halves).mean(0).clamp(min=0)
