"""Passes in other threads compute what they always compute, and models that share a configuration are safe."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from conformance.zoo import build
from whence.mixing.attribute import attribute
from whence.mixing.contributions import contributions
from whence.mixing.hidden_token_attribution import hidden_token_attribution
from whence.model.load import Model
from whence.reading.capture.attach import picking_up
from whence.reading.capture.own_hooks import on_enter, on_leave
from whence.reading.rerun.substitution import ZeroValues, substitute
from whence.reading.tracing import trace
from whence.reading.wiring.handles import Handle


def together(*jobs: Callable[[], None]) -> None:
    """Run every job in a thread of its own, all at once; an error in one of them is raised here."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(jobs))

    def guarded(job: Callable[[], None]) -> None:
        barrier.wait()
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def logits(specimen, ids):
    with torch.no_grad():
        return specimen.model(**{**specimen.inputs, "input_ids": ids}).logits


@pytest.mark.parametrize("family", ["llama", "bert", "bloom", "gpt2", "t5"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_plain_passes_beside_a_trace_are_the_same_bit_for_bit(family, implementation):
    specimen = build(family)
    if implementation == "sdpa" and not specimen.model._supports_sdpa:
        pytest.skip("has no sdpa")
    specimen.model.set_attn_implementation(implementation)
    ids = specimen.inputs["input_ids"].flip(-1)
    expected = logits(specimen, ids)
    found = trace(Model(specimen.model), specimen.inputs)
    passes = []
    done = threading.Event()

    def tracing():
        try:
            for _ in range(12):
                again = trace(Model(specimen.model), specimen.inputs)
                assert torch.equal(again.logits, found.logits)
                substitute(found, ZeroValues(0, [1]))
        finally:
            done.set()

    def plain():
        while not done.is_set() or len(passes) < 20:
            passes.append(logits(specimen, ids))

    together(tracing, plain, plain)
    assert len(passes) >= 40
    assert all(torch.equal(p, expected) for p in passes)
    assert specimen.model.config._attn_implementation == implementation


MEASURES = {
    "integrated gradients": lambda one: (
        attribute(one.model, dict(one.inputs), method="integrated-gradients", target=3).values
    ),
    "input x gradient": lambda one: attribute(one.model, dict(one.inputs), method="input-x-gradient", target=3).values,
    "ALTI-Logit": lambda one: attribute(one.model, dict(one.inputs), method="alti-logit", target=3).values,
    "value zeroing": lambda one: contributions(one, "value-zeroing").values,
    "attribution": lambda one: hidden_token_attribution(one, mode="probes", probes=2).values,
}


@pytest.mark.parametrize("measure", MEASURES)
def test_plain_passes_beside_a_measure_are_the_same_and_so_is_the_measure(measure):
    """What a measure puts into the model, or overhears, is of its own thread alone."""
    specimen = build("llama")
    specimen.model.set_attn_implementation("sdpa")
    ids = specimen.inputs["input_ids"].flip(-1)
    found = trace(Model(specimen.model), specimen.inputs)
    expected, alone = logits(specimen, ids), MEASURES[measure](found)
    passes, done = [], threading.Event()

    def measuring():
        try:
            for _ in range(6):
                torch.testing.assert_close(MEASURES[measure](found), alone, atol=1e-6, rtol=1e-5)
        finally:
            done.set()

    def plain():
        while not done.is_set() or len(passes) < 20:
            passes.append(logits(specimen, ids))

    together(measuring, plain, plain)
    assert all(torch.equal(p, expected) for p in passes)


def test_measures_of_one_model_in_two_threads_are_what_they_are_alone():
    """What one puts into the model is still there when the other tidies up after its own pass."""
    specimen = build("llama")
    found = trace(Model(specimen.model), specimen.inputs)
    alone = {name: MEASURES[name](found) for name in ("integrated gradients", "value zeroing", "attribution")}

    def again(name):
        for _ in range(4):
            torch.testing.assert_close(MEASURES[name](found), alone[name], atol=1e-6, rtol=1e-5)

    together(*(lambda name=name: again(name) for name in alone))


@pytest.mark.parametrize("set_hook", [on_enter, on_leave])
def test_a_hook_that_is_half_there_does_not_disturb_another_thread(set_hook):
    """torch puts a hook in its place, and then notes that it takes keyword arguments: a pass may come in between."""
    layer, heard = torch.nn.Linear(2, 2), []
    handle = set_hook(layer, lambda *given: heard.append(len(given)))
    for flags in (layer._forward_pre_hooks_with_kwargs, layer._forward_hooks_with_kwargs):
        flags.clear()
    together(lambda: layer(torch.zeros(1, 2)))
    assert heard == []
    handle.remove()
    with set_hook(layer, lambda *given: heard.append(len(given))):
        layer(torch.zeros(1, 2))
        together(lambda: layer(torch.zeros(1, 2)))
    assert heard == [3 if set_hook is on_enter else 4]


def test_a_mask_made_before_the_switch_and_attention_after_it_fit():
    """The worst moment: the pass of another thread has its mask (None under sdpa) and then the trace begins."""
    specimen = build("llama")
    specimen.model.set_attn_implementation("sdpa")
    ids = specimen.inputs["input_ids"]
    expected = logits(specimen, ids)
    begun, attached_now, outcome = threading.Event(), threading.Event(), []
    first = specimen.model.model.layers[0]

    def wait(*_):
        if threading.current_thread().name == "plain":
            begun.set()
            attached_now.wait(10)

    def attach_late(*_):
        if threading.current_thread().name != "plain":
            attached_now.set()
            runner.join()

    first.register_forward_pre_hook(wait)
    specimen.model.model.layers[1].register_forward_pre_hook(attach_late)
    runner = threading.Thread(target=lambda: outcome.append(logits(specimen, ids)), name="plain")
    runner.start()
    begun.wait(10)
    trace(Model(specimen.model), specimen.inputs)
    runner.join()
    assert torch.equal(outcome[0], expected)


def test_two_models_of_one_configuration_are_traced_at_once():
    one = build("llama", seed=1)
    other = type(one.model)(one.model.config).eval()
    one.model.set_attn_implementation("sdpa")
    assert other.config is one.model.config
    models = [Model(one.model), Model(other)]
    alone = [trace(m, one.inputs) for m in models]

    def job(i):
        def work():
            for _ in range(10):
                assert torch.equal(trace(models[i], one.inputs).logits, alone[i].logits)

        return work

    together(job(0), job(1), job(0))
    assert one.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("side", ["in", "out"])
def test_a_plain_pass_outlives_the_hooks_that_were_there_when_it_began(side):
    """A pass in another thread is in the midst of a module's hooks when ours are taken away."""
    specimen = build("llama")
    ids = specimen.inputs["input_ids"].flip(-1)
    expected, passes = logits(specimen, ids), []
    there, begun, gone = threading.Event(), threading.Event(), threading.Event()

    def wait(*_):
        begun.set()
        assert gone.wait(30)

    layer = specimen.model.get_submodule("model.layers.0")
    own = layer.register_forward_pre_hook(wait) if side == "in" else layer.register_forward_hook(wait)

    def watching():
        with picking_up(specimen.model, [Handle("model.layers.0", 0, side, (0,), clone=False)]):
            there.set()
            assert begun.wait(30)
        gone.set()

    def plain():
        assert there.wait(30)
        passes.append(logits(specimen, ids))

    together(watching, plain)
    own.remove()
    assert torch.equal(passes[0], expected)
