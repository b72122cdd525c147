"""The last layer's attention at the rows that the head reads: what people look at when they look at attention.

Raw (the mean over heads of A), or effective (Brunner et al. 2020): the same for every attention with the same outputs.
"""

from __future__ import annotations

from torch import Tensor

from whence.mixing.effective import Effective
from whence.mixing.layerwise import LayerMethod, LayerView
from whence.mixing.prediction import Prediction
from whence.mixing.raw_attention import RawAttention
from whence.mixing.token_scores import TokenScores


def last_attention(prediction: Prediction) -> TokenScores:
    """Σ_i w_i mean_h A_ij of the last layer, w the head's own weights of the rows."""
    return _read(prediction, RawAttention())


def last_effective(prediction: Prediction, *, constraint: str = "simplex") -> TokenScores:
    """The same of effective attention. Entries may be negative."""
    return _read(prediction, Effective(constraint))


def _read(prediction: Prediction, method: LayerMethod) -> TokenScores:
    stack = prediction.stack
    matrix = method.matrix(LayerView(stack.layers[-1], prediction.trace, stack.name))
    assert isinstance(matrix, Tensor)
    return TokenScores(prediction.rows.to(matrix) @ matrix, stack.tokens)
