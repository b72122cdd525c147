"""Summaries of shares by origin, as tidy frames: one line per layer (and head) and group.

Rows and columns are the tokens of `result.tokens` and `result.key_tokens`; where the columns hold more tokens than the
rows (an encoder–decoder's source before its target), a row's own column is counted from the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whence.errors import InputError
from whence.results.labels import Tokens
from whence.results.result import Result

if TYPE_CHECKING:
    import pandas as pd

DISTANCES = (("1st", 1, 1), ("2nd", 2, 2), ("3rd", 3, 3), ("4–5th", 4, 5), ("6–10th", 6, 10), ("11th+", 11, None))
"""Groups of neighbours as in Brunner et al. (2020), figure 5."""


def _matrices(result: Result) -> Iterator[tuple[dict[str, int], Tensor]]:
    """Each (hidden, input) matrix in float64, with the layer and head it belongs to."""
    if result.axes[-2:] not in (("hidden", "input"), ("query", "key")):
        raise InputError(
            f"a summary needs rows of hidden tokens and columns of inputs; this result has axes {result.axes}."
        )
    leading = result.axes[:-2]
    values = result.values.detach().to("cpu", torch.float64)
    sizes = values.shape[:-2]
    for at in product(*(range(size) for size in sizes)):
        names = {a: (result.layers if a == "layer" else result.heads)[i] for a, i in zip(leading, at, strict=True)}
        yield names, values[at]


def _columns(result: Result) -> Tokens:
    return result.key_tokens or result.tokens


def _shift(matrix: Tensor) -> int:
    """Where the rows' own tokens begin among the columns."""
    return matrix.shape[1] - matrix.shape[0]


def _own(matrix: Tensor) -> Tensor:
    return torch.diagonal(matrix, offset=_shift(matrix))


def _offsets(matrix: Tensor) -> Tensor:
    """(hidden, input): input position − hidden position."""
    rows, columns = matrix.shape
    return torch.arange(columns)[None] - _shift(matrix) - torch.arange(rows)[:, None]


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows)


def own_share(result: Result) -> pd.DataFrame:
    """How much of itself is left: median, quartiles and mean of the own-token share by layer, and P̃.

    P̃ (`not_largest`, %) is the share of tokens that are not the largest contributor to their own state (Brunner et
    al. 2020, section 5); a tie counts as the token's own.
    """
    return _frame(own_share_rows(result))


def own_share_rows(result: Result) -> list[dict[str, Any]]:
    """`own_share`, line by line: without pandas, whose import takes longer than the rest."""
    rows = []
    for names, matrix in _matrices(result):
        own = _own(matrix)
        q25, median, q75 = torch.quantile(own, torch.tensor([0.25, 0.5, 0.75], dtype=own.dtype)).tolist()
        beaten = (matrix.max(-1).values > own).to(torch.float64).mean()
        rows.append(
            {
                **names,
                "median": median,
                "q25": q25,
                "q75": q75,
                "mean": float(own.mean()),
                "not_largest": 100 * float(beaten),
            }
        )
    return rows


def by_distance(result: Result) -> pd.DataFrame:
    """Share from the 1st, 2nd, 3rd, 4–5th, 6–10th and 11th+ neighbours, both sides together, and from itself.

    `share`: the mean over tokens of the summed share; `per_token`: the mean share of one neighbour.
    """
    rows = []
    for names, matrix in _matrices(result):
        away = _offsets(matrix).abs()
        for group, low, high in (("itself", 0, 0), *DISTANCES):
            inside = (away >= low) & (away <= (away.max() if high is None else high))
            inside[:, : _shift(matrix)] = False  # a source token has no distance from a target token
            mass = float((matrix * inside).sum(-1).mean())
            count = int(inside.sum())
            each = float(matrix[inside].mean()) if count else 0.0
            rows.append({**names, "distance": group, "share": mass, "per_token": each, "pairs": count})
    return _frame(rows)


def by_offset(result: Result) -> pd.DataFrame:
    """Mean share from the token at each signed offset (input − hidden)."""
    rows = []
    for names, matrix in _matrices(result):
        shift = _shift(matrix)
        offsets = _offsets(matrix)[:, shift:]
        inner = matrix[:, shift:]
        for offset in range(int(offsets.min()), int(offsets.max()) + 1):
            chosen = inner[offsets == offset]
            rows.append({**names, "offset": offset, "share": float(chosen.mean()), "pairs": len(chosen)})
    return _frame(rows)


def by_kind(result: Result) -> pd.DataFrame:
    """Share that each type of input token (special tokens by name, punctuation, rest) gives to each type of hidden."""
    hidden_kinds, input_kinds = result.tokens.kinds(), _columns(result).kinds()
    rows = []
    for names, matrix in _matrices(result):
        for hidden in dict.fromkeys(hidden_kinds):
            at = [i for i, kind in enumerate(hidden_kinds) if kind == hidden]
            for given in dict.fromkeys(input_kinds):
                of = [j for j, kind in enumerate(input_kinds) if kind == given]
                share = float(matrix[at][:, of].sum(-1).mean())
                rows.append({**names, "hidden_kind": hidden, "input_kind": given, "share": share, "inputs": len(of)})
    return _frame(rows)


def special_mass(result: Result) -> pd.DataFrame:
    """Mean share that comes from special tokens."""
    special = torch.tensor(_columns(result).special, dtype=torch.float64)
    return _frame([{**names, "special": float((matrix @ special).mean())} for names, matrix in _matrices(result)])


def entropy(result: Result) -> pd.DataFrame:
    """Mean entropy of a row in nats, and as a share of the largest that its support allows."""
    rows = []
    for names, matrix in _matrices(result):
        shares = matrix.clamp(min=0)
        shares = shares / shares.sum(-1, keepdim=True).clamp(min=torch.finfo(shares.dtype).tiny)
        nats = -torch.special.xlogy(shares, shares).sum(-1)
        most = (matrix != 0).sum(-1).clamp(min=2).to(torch.float64).log()
        rows.append({**names, "entropy": float(nats.mean()), "relative": float((nats / most).mean())})
    return _frame(rows)


def dominance(result: Result) -> pd.DataFrame:
    """How much one token dominates: mean and quartiles of a row's largest share, and in what % it is above one half."""
    rows = []
    for names, matrix in _matrices(result):
        largest = matrix.max(-1).values
        q25, median, q75 = torch.quantile(largest, torch.tensor([0.25, 0.5, 0.75], dtype=largest.dtype)).tolist()
        above = 100 * float((largest > 0.5).to(torch.float64).mean())
        rows.append(
            {**names, "mean": float(largest.mean()), "q25": q25, "median": median, "q75": q75, "above_half": above}
        )
    return _frame(rows)


def sources(result: Result, layer: int | None = None, top: int = 3) -> pd.DataFrame:
    """For each hidden token of one layer (None: the last), its `top` inputs with their shares."""
    return _frame(source_rows(result, layer, top))


def source_rows(result: Result, layer: int | None = None, top: int = 3) -> list[dict[str, Any]]:
    """`sources`, line by line."""
    chosen = result.select(layer=result.layers[-1] if layer is None else layer)
    tokens, columns = chosen.tokens, _columns(chosen)
    rows = []
    for names, matrix in _matrices(chosen):
        best = matrix.topk(min(top, matrix.shape[1]), dim=-1)
        own = _own(matrix)
        for i, (shares, at) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            for rank, (share, j) in enumerate(zip(shares, at, strict=True), start=1):
                rows.append(
                    {
                        **names,
                        "hidden": i,
                        "hidden_token": tokens[i],
                        "own": float(own[i]),
                        "rank": rank,
                        "input": j,
                        "input_token": columns[j],
                        "share": share,
                    }
                )
    return rows
