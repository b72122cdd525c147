"""Of one text: a line for each layer. How much of its tokens is left, where the rest comes from, can they be told?"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.mixing.contributions import Contributions
from whence.mixing.hidden_token_attribution import hidden_token_attribution
from whence.mixing.summaries import DISTANCES
from whence.reading.trace import Stack, Trace
from whence.surveys.head_columns import Columns
from whence.surveys.settings import SurveySettings
from whence.tokens.nearest import DISTANCES as METRICS
from whence.tokens.nearest import equal_in_sequence, scores

OFFSETS = tuple(sign * k for k in (1, 2, 3, 4, 5, 10, 20) for sign in (-1, 1))
"""Signed offsets (input − hidden) that are kept."""


def distance_name(index: int) -> str:
    """The column of a group of neighbours: distance_1, distance_4_5, distance_11."""
    _, low, high = DISTANCES[index]
    return f"distance_{low}" if high in (low, None) else f"distance_{low}_{high}"


def offset_name(offset: int) -> str:
    """The column of a signed offset: before_1, after_20."""
    return f"{'before' if offset < 0 else 'after'}_{abs(offset)}"


def layer_columns(trace: Trace, alti: Contributions | None, settings: SurveySettings, seed: int) -> Columns:
    """Columns of length layers. `alti`: the contributions by layer, where they were asked for."""
    stack = trace.of(settings.attention)
    special = torch.tensor(stack.tokens.special, dtype=torch.float64)
    columns: Columns = {}
    if alti is not None:
        columns |= share_columns("alti", alti.rollout().values.to(torch.float64), special)
        columns["alti_degenerate"] = alti.extra["degenerate"].to(torch.int32).numpy()
    if "tokens" in settings.measures:
        columns |= token_columns(stack)
    if "hta" in settings.measures:
        found = hidden_token_attribution(
            trace, mode="probes", probes=settings.probes, attention=settings.attention, seed=seed
        )
        columns |= share_columns("hta", found.values.to(torch.float64), special)
        if found.error is not None:
            own = torch.diagonal(found.error.to(torch.float64), dim1=-2, dim2=-1)
            columns["hta_own_error"] = own.mean(-1).numpy()
    return columns


def share_columns(prefix: str, shares: Tensor, special: Tensor) -> Columns:
    """Of shares [layer, hidden, input]: the own share, who is not its own largest part, and where the rest comes from.

    own: the mean of c_jj; own_median; beaten: how many tokens are not the largest contributor to themselves (P̃ is this
    over the length); special: the mean share from special tokens; distance_…: the mean summed share of each group of
    neighbours; before_k, after_k: the mean share of the token k before or after (NaN where no token has one).
    """
    n = shares.shape[-1]
    own = torch.diagonal(shares, dim1=-2, dim2=-1)
    columns: dict[str, Tensor] = {
        "own": own.mean(-1),
        "own_median": torch.quantile(own, 0.5, dim=-1),
        "beaten": (shares.amax(-1) > own).sum(-1).to(torch.int32),
        "special": (shares @ special).mean(-1),
    }
    away = (torch.arange(n)[None] - torch.arange(n)[:, None]).abs()
    for index, (_, low, high) in enumerate(DISTANCES):
        inside = (away >= low) & (away <= (n if high is None else high))
        columns[distance_name(index)] = (shares * inside).sum(-1).mean(-1)
    for offset in OFFSETS:
        line = torch.diagonal(shares, offset=offset, dim1=-2, dim2=-1) if abs(offset) < n else shares[..., :0, 0]
        columns[offset_name(offset)] = line.mean(-1)
    return {f"{prefix}_{name}": values.numpy() for name, values in columns.items()}


def token_columns(stack: Stack) -> Columns:
    """How many tokens each layer's states still identify: nearest of the text's own embeddings, ties counted as hits."""
    states = stack.states.detach().to(torch.float64)
    embeddings, hidden = states[0], states[1:]
    first = equal_in_sequence(embeddings, [len(embeddings)])
    columns: Columns = {}
    for metric in METRICS:
        nearest = scores(hidden, embeddings, metric).argmax(-1)
        columns[f"tokens_{metric}"] = (first[nearest] == first).sum(-1).to(torch.int32).numpy()
    return columns
