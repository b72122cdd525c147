"""Streams: the layers of a pass one by one, the same as a trace's, in memory of one layer; ended, broken or left early."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import whence
from conformance.zoo import build
from whence.attention import identifiability as identifiability_module
from whence.errors import InputError
from whence.mixing import layerwise
from whence.mixing.contributions import Contributions
from whence.model.load import Model
from whence.model.memory import fingerprint
from whence.reading.streaming import stream
from whence.reading.tracing import trace


def specimen_of(family):
    specimen = build(family)
    if family != "gpt_oss":
        specimen.model.set_attn_implementation("sdpa")
    return Model(specimen.model), specimen.inputs


@pytest.mark.parametrize("family", ["bert", "llama", "t5", "gpt_oss", "bloom", "gpt_neox"])
def test_the_layers_of_a_stream_are_those_of_the_trace(family):
    model, inputs = specimen_of(family)
    whole = trace(model, inputs)
    pieces = list(stream(model, inputs).pieces())
    for name, stack in whole.stacks.items():
        own = [piece.of(name)[layer.index] for layer in stack for piece in pieces if _holds(piece, name, layer.index)]
        assert len(own) == len(stack)
        for ours, theirs in zip(own, stack, strict=True):
            for part in ("attention", "values", "outputs", "block_input", "after_attention", "block_output"):
                torch.testing.assert_close(getattr(ours, part), getattr(theirs, part), atol=1e-6, rtol=1e-5)
    collected = stream(model, inputs).collect()
    assert torch.equal(collected.of().outputs, whole.of().outputs)
    assert (collected.logits is None) == (whole.logits is None)


def _holds(piece, name, index):
    return name in piece.stacks and piece.stacks[name].layers[0].index == index


@pytest.mark.parametrize("family", ["bert", "llama", "gpt_oss"])
def test_measures_of_a_stream_equal_those_of_the_trace_in_blocks_too(family, monkeypatch):
    model, inputs = specimen_of(family)
    whole = trace(model, inputs)
    rows = whence.identifiability(whole)
    mixed = whence.contributions(whole, ["alti", "norms", "rollout", "effective-rollout", "attention"])
    for size in (1 << 23, 100):
        monkeypatch.setattr(layerwise, "WEIGHTS", size)
        monkeypatch.setattr(identifiability_module, "_ROWS", size)
        shares, by_method, rolled, summary = stream(model, inputs).measure(
            whence.identifiability,
            lambda layers: whence.contributions(layers, list(mixed)),
            lambda layers: whence.contributions(layers, "alti", rollout=True, layers=[-1]),
            lambda layers: whence.contributions(layers, "alti", each=Contributions.own_share),
        )
        for name in shares.extra:
            torch.testing.assert_close(shares.extra[name], rows.extra[name], atol=2e-5, rtol=1e-5, equal_nan=True)
        assert "leverage" not in shares.extra
        for name, one in mixed.items():
            torch.testing.assert_close(by_method[name].values, one.values, atol=2e-6, rtol=1e-5)
            assert torch.equal(by_method[name].extra["degenerate"], one.extra["degenerate"])
        torch.testing.assert_close(rolled.values, mixed["alti"].rollout().values[-1:], atol=1e-6, rtol=1e-5)
        assert rolled.layers == mixed["alti"].layers[-1:]
        assert rolled.origin == "embeddings"
        assert (summary["median"] - mixed["alti"].own_share()["median"]).abs().max() < 1e-5


def test_a_layer_is_forgotten_before_the_next_but_one():
    model, inputs = specimen_of("llama")
    seen = []
    for layer in stream(model, inputs):
        gc.collect()
        assert all(ref() is None for ref in seen[:-1])
        seen.append(weakref.ref(layer.outputs))
        del layer
    assert len(seen) == len(trace(model, inputs))


def test_the_pass_ends_with_the_loop_and_leaves_the_model_as_it_was():
    model, inputs = specimen_of("llama")
    trace(model, inputs)
    mark, threads = fingerprint(model.model), threading.active_count()
    for _ in stream(model, inputs):
        break
    assert fingerprint(model.model) == mark
    assert threading.active_count() == threads
    steps = iter(stream(model, inputs))
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt)
    assert fingerprint(model.model) == mark
    assert model.model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.model.modules())


def test_an_error_of_a_measure_ends_the_pass_and_is_raised():
    model, inputs = specimen_of("bert")
    trace(model, inputs)
    mark = fingerprint(model.model)

    def fail(_contributions):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        whence.contributions(stream(model, inputs), "alti", each=fail)
    assert fingerprint(model.model) == mark


def test_running_the_model_while_stepping_through_it_is_refused_and_does_not_hang():
    model, inputs = specimen_of("bert")
    for _ in stream(model, inputs):
        with pytest.raises(InputError, match="in the middle of a stream"):
            trace(model, inputs)
        with torch.no_grad():
            model.model(**inputs)  # a plain pass is nobody's business
    assert len(trace(model, inputs)) == 2


def test_certify_of_a_stream_stops_at_its_layer_and_makes_one_row(monkeypatch):
    from whence.reading import layer as module

    model, inputs = specimen_of("llama")
    theirs = whence.certify(trace(model, inputs), 0, 1, 5)
    rows, make = [], module.attention_rows
    monkeypatch.setattr(module, "attention_rows", lambda q, *a, **k: rows.append(q.shape[1:3]) or make(q, *a, **k))
    found = whence.certify(stream(model, inputs), 0, 1, 5)
    assert rows == [(1, 1)]
    assert found.check()
    torch.testing.assert_close(found.weights, theirs.weights, atol=1e-6, rtol=1e-5)
    with pytest.raises(InputError, match="no layer 7"):
        whence.certify(stream(model, inputs), 7, 0, 5)


def test_what_a_stream_cannot_do_is_refused():
    model, inputs = specimen_of("bert")
    with pytest.raises(InputError, match="takes a trace"):
        whence.contributions(stream(model, inputs), "decompx")
    with pytest.raises(InputError, match="must hand its stream to one measure"):
        stream(model, inputs).measure(lambda _: 3)
    with pytest.raises(InputError, match="no layer 9"):
        whence.contributions(stream(model, inputs), "alti", layers=[9])
    with pytest.raises(InputError, match="not in this model"):
        whence.identifiability(stream(model, inputs), attention="cross")


def test_traces_come_in_order_and_own_their_tensors(minilm):
    texts = ["The bank raised its rates.", "It rained.", "Nobody knew when the roads would open again."] * 4
    read = []
    found = whence.traces(minilm, (read.append(t) or t for t in texts), batch_size=1)
    first = next(found)
    assert len(read) < len(texts)
    held = weakref.ref(first.layers[0].outputs)
    storage = first.layers[0].outputs.untyped_storage().nbytes()
    assert storage == first.layers[0].outputs.nbytes
    del first
    again = [next(found), *found]
    gc.collect()
    assert held() is None
    assert [one.text for one in again] == texts[1:]
    alone = trace(minilm, texts[2])
    assert float((again[1].attention - alone.attention).abs().max()) < 1e-5
    with pytest.raises(InputError, match="several texts"):
        next(whence.traces(minilm, "one"))


def test_stacks_that_a_trace_joins_must_be_named_on_a_stream() -> None:
    specimen = build("t5")
    inputs = {name: t[:1] for name, t in specimen.inputs.items()}
    with pytest.raises(InputError, match="choose attention='encoder' or 'decoder'"):
        whence.contributions(whence.stream(specimen.model, inputs), "alti")
    streamed = whence.contributions(whence.stream(specimen.model, inputs), "alti", attention="decoder")
    collected = whence.contributions(whence.stream(specimen.model, inputs).collect(), "alti", attention="decoder")
    assert torch.allclose(streamed.values, collected.values, atol=1e-6)


def test_a_measure_that_runs_the_model_again_says_to_collect_the_stream() -> None:
    model, inputs = specimen_of("llama")
    with pytest.raises(InputError, match=r"a layer of a stream.*stream\.collect\(\)"):
        whence.contributions(stream(model, inputs), "globenc")
    collected = whence.contributions(stream(model, inputs).collect(), "globenc")
    torch.testing.assert_close(collected.values, whence.contributions(trace(model, inputs), "globenc").values)
