"""The soak, short: failures in many threads leave the models as they were, and the check itself can fail."""

from __future__ import annotations

import torch

from torture.models import families
from torture.soak import appearance, soak


def test_a_short_soak():
    outcome = soak(traces=60, threads=8, fail=0.3, seed=1)
    assert outcome.problems == ()
    assert 5 <= outcome.failed <= 30


def test_what_is_left_behind_is_seen():
    model = families()["bert"].model
    before = appearance(model)
    assert appearance(model) == before
    handle = model.encoder.layer[0].register_forward_hook(lambda *_: None)
    assert appearance(model) != before
    handle.remove()
    model.encoder.layer[1].training = True
    assert appearance(model) != before
    model.encoder.layer[1].training = False
    assert appearance(model) == before
    with torch.no_grad():
        model.encoder.layer[1].output.dense.bias[0] += 1e-6
    assert appearance(model) != before
