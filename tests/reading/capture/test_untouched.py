"""After a trace the model is bit for bit what it was: on success, on error, and wherever it is interrupted."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from conformance.zoo import build
from whence.errors import ModelError
from whence.model.load import Model
from whence.model.memory import lock_of
from whence.reading.capture import interface
from whence.reading.capture.recorder import active
from whence.reading.rerun.substitution import ZeroValues, substitute
from whence.reading.streaming import stream
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


PLACES = ("/whence/reading/", "/whence/model/", "contextlib", "torch/overrides")


class Interruption:
    """Raises KeyboardInterrupt at the n-th line that runs in whence's reading code or where `with` blocks are made."""

    def __init__(self, at):
        self.at, self.count = at, 0

    def __call__(self, frame, event, _argument):
        return self.line if any(place in frame.f_code.co_filename for place in PLACES) else None

    def line(self, _frame, event, _argument):
        if event == "line":
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
        return self.line


def interrupted(work, at):
    """Whether the work was interrupted; False once `at` lies past its end. Nothing but the interruption may come out."""
    before = sys.gettrace()
    sys.settrace(Interruption(at))
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def free(model):
    """Whether another thread can have the model's lock."""
    got = []

    def take():
        with lock_of(model):
            got.append(True)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(5)
    return bool(got)


def test_an_interruption_at_any_line_of_the_locks_leaves_none_of_them_locked(monkeypatch):
    model = build("t5").model
    monkeypatch.setattr(sys.modules[__name__], "PLACES", ("whence/model/memory.py",))

    def locked():
        with lock_of(model):
            pass

    at = 1
    while interrupted(locked, at):
        assert free(model), at
        at += 1
    assert at > 20


# One family for each way in; `step` spreads the interruptions over the several thousand lines of a trace.
@pytest.mark.parametrize(("family", "step"), [("bert", 397), ("bloom", 1201), ("t5", 997)])
def test_an_interruption_anywhere_leaves_nothing_behind(family, step):
    specimen = build(family)
    model = Model(specimen.model)
    expected = trace(model, specimen.inputs)
    before = everything(specimen.model)
    at, times = 3, 0
    while interrupted(lambda: trace(model, specimen.inputs), at):
        assert_same(before, everything(specimen.model))
        assert torch.is_grad_enabled()
        assert torch._C._len_torch_function_stack() == 0
        assert not interface._INSIDE.get()
        assert active() is None
        at += step
        times += 1
    assert times > 8
    assert free(specimen.model)
    assert torch.equal(trace(model, specimen.inputs).attention, expected.attention)


def test_an_interruption_keeps_the_modes_of_the_caller():
    from torch.overrides import TorchFunctionMode

    class Users(TorchFunctionMode):
        def __torch_function__(self, func, _types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    specimen = build("bloom")
    model = Model(specimen.model)
    trace(model, specimen.inputs)
    with Users() as mode:
        for at in range(50, 4000, 397):
            assert interrupted(lambda: trace(model, specimen.inputs), at)
            assert torch.overrides._get_current_function_mode_stack() == [mode]


# -- models that write into themselves -----------------------------------------------------------------------------


def test_a_buffer_that_every_pass_writes_into_is_put_back():
    """A counter that the output depends on: a trace is of the pass that the user would make now, and counts as none."""
    specimen = build("bert")
    first = specimen.model.bert.encoder.layer[0]
    first.register_buffer("count", torch.zeros(1))
    plain = type(first).forward

    def forward(self, states, *args, **kwargs):
        self.count += 1
        return plain(self, states * (1 + 0.1 * self.count), *args, **kwargs)

    first.forward = forward.__get__(first)
    before = everything(specimen.model)
    found = trace(Model(specimen.model), specimen.inputs)
    assert torch.equal(first.count, torch.zeros(1))
    for name, (place, _, value) in before[1].items():
        after = everything(specimen.model)[1][name]
        assert after[0] == place
        assert torch.equal(after[2], value)
    substitute(found, ZeroValues(0, [1]))
    assert torch.equal(first.count, torch.zeros(1))
    torch.testing.assert_close(found.logits, specimen.run()[0], atol=1e-5, rtol=1e-4)
    assert torch.equal(first.count, torch.ones(1))


def _add(bias):
    bias.add_(1e-3)


def _through_data(bias):
    bias.data.mul_(1.5)


def _by_index(bias):
    bias.data[3:5] = 7.0


def _another_storage(bias):
    bias.data = bias.data + 1


@pytest.mark.parametrize("write", [_add, _through_data, _by_index, _another_storage])
def test_a_model_that_writes_into_its_weights_is_refused_and_put_back(write):
    specimen = build("bert")
    bias = specimen.model.bert.encoder.layer[0].output.dense.bias
    before, place = bias.detach().clone(), bias.data_ptr()
    hook = specimen.model.bert.encoder.layer[0].register_forward_hook(lambda *_: write(bias))
    with pytest.raises(
        ModelError, match=r"writes into its own weights as it runs \(bert.encoder.layer.0.output.dense.bias\)"
    ):
        trace(Model(specimen.model), specimen.inputs)
    hook.remove()
    assert torch.equal(bias, before)
    assert bias.data_ptr() == place


def test_a_write_that_changes_nothing_is_none():
    specimen = build("switch_transformers")  # its routers call .to(dtype) on themselves
    before = {name: value.clone() for name, value in specimen.model.state_dict().items()}
    assert set(trace(Model(specimen.model), specimen.inputs).stacks) == {"encoder", "decoder", "cross"}
    assert all(torch.equal(before[name], value) for name, value in specimen.model.state_dict().items())


@pytest.mark.parametrize(
    "last", [1, 2, 5, 9, 41]
)  # passes of the proof: watched, plain, recorded, copies; of a later text
def test_a_weight_that_is_written_to_only_later_is_put_back(last):
    """Whichever pass it is that the model begins to learn in: it is refused, and nothing is learned."""
    specimen = build("bert")
    model = Model(specimen.model)
    passes = 0

    def learn(module, _arguments, _output):
        nonlocal passes
        passes += 1
        if passes >= last:
            module.output.dense.bias.add_(1e-3)

    before = {name: value.clone() for name, value in specimen.model.state_dict().items()}
    hook = specimen.model.bert.encoder.layer[0].register_forward_hook(learn)
    with pytest.raises(
        ModelError, match=r"writes into its own weights as it runs \(bert.encoder.layer.0.output.dense.bias\)"
    ):
        [trace(model, specimen.inputs) for _ in range(last)]
    hook.remove()
    assert passes >= last
    assert all(torch.equal(before[name], value) for name, value in specimen.model.state_dict().items())


# -- training mode -------------------------------------------------------------------------------------------------


def test_training_mode_with_dropout_is_refused_and_left_alone():
    specimen = build("bert")
    model = specimen.model
    quiet = trace(Model(model), specimen.inputs)
    model.train()
    model.bert.encoder.layer[0].eval()
    before = everything(model)
    with pytest.raises(ModelError, match=r"training mode with .*drop.* Call model\.eval\(\) first"):
        trace(Model(model), specimen.inputs)
    assert_same(before, everything(model))
    model.eval()
    assert torch.equal(trace(Model(model), specimen.inputs).attention, quiet.attention)


@pytest.mark.parametrize("what", ["dropout module", "batch norm", "setting"])
def test_whatever_is_random_in_training_mode_is_found(what):
    specimen = build("llama")
    model = specimen.model.train()
    trace(Model(model), specimen.inputs)
    if what == "dropout module":
        model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.2), model.lm_head)
    elif what == "batch norm":
        model.model.extra = torch.nn.BatchNorm1d(4)
    else:
        model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ModelError, match="training mode with"):
        trace(Model(model), specimen.inputs)


def test_training_mode_without_dropout_is_read_as_it_is_and_seen_by_everyone():
    """Another thread never finds the model in eval mode, nor does a hook within the trace."""
    specimen = build("llama")
    quiet = trace(Model(specimen.model), specimen.inputs)
    model = specimen.model.train()
    seen = []
    model.model.layers[1].register_forward_hook(lambda m, _a, _o: seen.append(m.training and model.training))
    done = threading.Event()

    def watch():
        while not done.is_set():
            seen.append(all(m.training for m in model.modules()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        found = trace(Model(model), specimen.inputs)
    finally:
        done.set()
        watcher.join()
    assert len(seen) > 10
    assert all(seen)
    assert torch.equal(found.attention, quiet.attention)


def test_an_interruption_anywhere_in_a_loop_over_a_stream_ends_it():
    specimen = build("gpt2")
    model = Model(specimen.model)
    layers = list(stream(model, specimen.inputs))
    before, ended = everything(specimen.model), []

    def attempts():
        at, step = 1, 0
        while interrupted(lambda: [layer.index for layer in stream(model, specimen.inputs)], at):
            assert_same(before, everything(specimen.model))
            at, step = at + 37, step + 1
        ended.append(step)

    thread = threading.Thread(target=attempts, daemon=True)  # a pass that waits for ever must not hold up the others
    thread.start()
    thread.join(120)
    assert ended
    assert ended[0] > 10
    assert free(specimen.model)
    assert len(list(stream(model, specimen.inputs))) == len(layers)
