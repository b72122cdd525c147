"""Attaching changes nothing that outlives the pass: not on success, not on error, not for other threads."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from conformance.zoo import build
from whence.errors import ModelError
from whence.model.load import Model
from whence.reading.capture import interface
from whence.reading.capture.attach import FUNCTION_MODE, INTERFACE, attached
from whence.reading.capture.recorder import AttentionRecorder
from whence.reading.tracing import trace


def state(model):
    """Everything that attaching touches."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return model.config._attn_implementation, hooks, [m.training for m in model.modules()]


@pytest.mark.parametrize("capture", [INTERFACE, FUNCTION_MODE])
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_model_is_restored(capture, error):
    specimen = build("bert")
    specimen.model.set_attn_implementation("sdpa")
    before = state(specimen.model)
    try:
        with attached(specimen.model, capture, AttentionRecorder(), 1):
            assert (specimen.model.config._attn_implementation == "sdpa") == (capture == FUNCTION_MODE)
            if error:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        pass
    assert state(specimen.model) == before
    assert torch.is_grad_enabled()


def test_a_failing_forward_pass_leaves_no_hook_behind():
    specimen = build("bert")
    trace(Model(specimen.model), specimen.inputs)
    before = state(specimen.model)

    def stop(*_):
        raise KeyboardInterrupt

    handle = specimen.model.bert.encoder.layer[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        trace(Model(specimen.model), specimen.inputs)
    handle.remove()
    assert state(specimen.model) == before


def test_two_models_in_two_threads_do_not_see_each_other():
    specimens = [build("bert", seed=1), build("gpt2", seed=2)]
    alone = [trace(Model(s.model), s.inputs) for s in specimens]
    failures = []
    barrier = threading.Barrier(2)

    def work(i):
        barrier.wait()
        for _ in range(8):
            found = trace(Model(specimens[i].model), specimens[i].inputs)
            if found.attention.shape != alone[i].attention.shape or not torch.equal(
                found.attention, alone[i].attention
            ):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


def test_another_thread_that_runs_the_traced_model_is_not_recorded():
    """The same model, run plainly by a thread that knows nothing of the trace, while it is attached."""
    specimen = build("bert")
    recorder = AttentionRecorder()
    with attached(specimen.model, INTERFACE, recorder, 1):
        runner = threading.Thread(target=lambda: specimen.model(**specimen.inputs))
        runner.start()
        runner.join()
    assert recorder.calls == []


def test_a_registered_name_taken_by_someone_else_is_refused(monkeypatch):
    from transformers.modeling_utils import AttentionInterface

    monkeypatch.setitem(AttentionInterface._global_mapping, interface.NAME, lambda *a, **k: None)
    specimen = build("bert")
    with pytest.raises(ModelError, match="another library has replaced it"):
        trace(Model(specimen.model), specimen.inputs)


def test_an_eager_function_replaced_by_another_library_is_refused(monkeypatch):
    specimen = build("bert")
    module = sys.modules[type(specimen.model).__module__]

    original = module.eager_attention_forward

    def faster(*args, **kwargs):
        return original(*args, **kwargs)

    interface._eager_function.cache_clear()
    monkeypatch.setattr(module, "eager_attention_forward", faster)
    with pytest.raises(ModelError, match=r"eager_attention_forward has been replaced by .*faster"):
        trace(Model(specimen.model), specimen.inputs)
    interface._eager_function.cache_clear()


def test_weights_that_change_are_proved_anew():
    specimen = build("bert")
    model = Model(specimen.model)
    trace(model, specimen.inputs)
    with torch.no_grad():
        specimen.model.bert.encoder.layer[0].attention.self.value.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"value\.weight"):
        trace(model, specimen.inputs)
