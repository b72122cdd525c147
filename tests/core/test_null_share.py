"""Null share and Pearson r."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.core import make
from whence.core.attention.effective_attention import effective_attention
from whence.core.attention.null_share import null_share, pearson
from whence.errors import InputError


def test_null_share_is_zero_where_identified_and_matches_numpy() -> None:
    attention = make.attention(2, 30, 30)
    assert not null_share(attention, effective_attention(attention, make.values(2, 30, 40))).any()
    effective = effective_attention(attention, make.values(2, 30, 8))
    a, e = attention.double().numpy(), effective.double().numpy()
    assert np.allclose(null_share(attention, effective).numpy(), np.abs(a - e).sum(-1) / a.sum(-1))


def test_pearson_matches_numpy_and_counts_visible_entries_only() -> None:
    visible = make.causal(30)
    attention = make.attention(2, 30, 30, visible=visible)
    effective = effective_attention(attention, make.values(2, 30, 4), visible=visible)
    for b in range(2):
        plain = np.corrcoef(attention[b].double().ravel(), effective[b].double().ravel())[0, 1]
        seen = np.corrcoef(attention[b][visible].double(), effective[b][visible].double())[0, 1]
        assert float(pearson(attention, effective)[b]) == pytest.approx(plain, abs=1e-10)
        assert float(pearson(attention, effective, visible=visible)[b]) == pytest.approx(seen, abs=1e-10)
    assert bool(torch.isnan(pearson(torch.ones(3, 3), torch.ones(3, 3))))


def test_errors_say_what_to_do() -> None:
    with pytest.raises(InputError, match="one shape"):
        null_share(torch.ones(3, 3), torch.ones(3, 4))
    with pytest.raises(InputError, match="NaN"):
        pearson(torch.ones(3, 3), torch.full((3, 3), torch.nan))
