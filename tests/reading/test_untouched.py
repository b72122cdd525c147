"""After a trace the model is bit for bit what it was: on success, on error, and wherever it is interrupted."""

from __future__ import annotations

import sys

import pytest
import torch

from conformance.zoo import build
from whence.model.load import Model
from whence.model.memory import lock_of
from whence.reading.tracing import trace


def everything(model):
    """Names and identities of all that a pass could change."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    modules = {
        name: (
            id(module),
            module.training,
            sorted(map(id, module._forward_hooks.values())),
            sorted(map(id, module._forward_pre_hooks.values())),
            {k: v for k, v in vars(module).items() if isinstance(v, (str, int, float, type(None)))},
            len(module._forward_hooks_with_kwargs),
            len(module._forward_pre_hooks_with_kwargs),
        )
        for name, module in model.named_modules()
    }
    tensors = {n: (t.data_ptr(), t._version, t.clone()) for n, t in model.state_dict(keep_vars=True).items()}
    registered = (
        {k: v for k, v in ALL_ATTENTION_FUNCTIONS.items() if k != "whence"},
        {k: v for k, v in ALL_MASK_ATTENTION_FUNCTIONS.items() if k != "whence"},
    )
    return modules, tensors, model.config.to_dict(), model.config._attn_implementation, registered


def assert_same(before, after):
    for one, other in zip(before[:1] + before[2:], after[:1] + after[2:], strict=True):
        assert one == other
    assert before[1].keys() == after[1].keys()
    for name, (place, version, value) in before[1].items():
        assert (place, version) == after[1][name][:2], name
        assert torch.equal(value, after[1][name][2]), name


@pytest.mark.parametrize("family", ["bert", "llama", "big_bird", "t5", "mixtral", "bloom"])
def test_a_trace_leaves_nothing_behind(family):
    specimen = build(family)
    specimen.model.train()
    before = everything(specimen.model)
    trace(Model(specimen.model), specimen.inputs)
    assert_same(before, everything(specimen.model))
    assert torch.is_grad_enabled()


def test_big_bird_keeps_its_sparse_attention():
    specimen = build("big_bird")
    body = specimen.model.base_model
    body.set_attention_type("block_sparse")
    parts = [layer.attention.self for layer in body.encoder.layer]
    trace(Model(specimen.model), specimen.inputs)
    assert body.attention_type == "block_sparse"
    assert [layer.attention.self for layer in body.encoder.layer] == parts


class Interruption:
    """Raises KeyboardInterrupt at the n-th line that whence's reading code runs."""

    def __init__(self, at):
        self.at, self.count = at, 0

    def __call__(self, frame, event, _argument):
        if "/whence/reading/" not in frame.f_code.co_filename and "contextlib" not in frame.f_code.co_filename:
            return None
        return self.line

    def line(self, _frame, event, _argument):
        if event == "line":
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
        return self.line


def interrupted(work, at):
    """Whether the work was interrupted; False once `at` lies past its end."""
    before = sys.gettrace()
    sys.settrace(Interruption(at))
    try:
        work()
    except (KeyboardInterrupt, RuntimeError):  # torch's own mode stack complains when it is interrupted
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize(("family", "step"), [("bert", 211), ("bloom", 197)])
def test_an_interruption_anywhere_leaves_nothing_behind(family, step):
    specimen = build(family)
    specimen.model.train()
    model = Model(specimen.model)
    trace(model, specimen.inputs)
    before = everything(specimen.model)
    at, times = 3, 0
    while interrupted(lambda: trace(model, specimen.inputs), at):
        assert_same(before, everything(specimen.model))
        at += step
        times += 1
        assert torch.is_grad_enabled()
    assert times > 8
    assert_same(before, everything(specimen.model))
    with lock_of(specimen.model):
        pass
