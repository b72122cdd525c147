"""The first way into a model: transformers' attention interface.

One attention function is registered under the project's own name, together with a mask function that makes eager
attention's mask (without it a causal model silently sees the future). It hands the work to the model's own eager
function, so that the numbers are the model's, and reports what went in and came out to the active recorder.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whence.core.numerics.tolerances import SAME_STATE
from whence.errors import ModelError
from whence.model.memory import configs_of, lock_of
from whence.reading.capture.function_mode import SOFTMAX
from whence.reading.capture.fused import added, eager_call, mask_parts, sdpa_call
from whence.reading.capture.recorder import AttentionRecorder, Call, active, apply_edits, mix, sink_of

NAME = "whence"

_INSIDE: ContextVar[bool] = ContextVar("whence_inside", default=False)  # this thread is in a `switched` block


@lru_cache(maxsize=1024)
def _eager_function(owner: type[nn.Module]) -> tuple[Callable[..., Any], str]:
    """The eager attention function that `owner` itself would fall back to, and where it was found.

    Found from the names that the class's own forward mentions, so that a file with several eager functions (text
    and vision, say) gives the right one.
    """
    for cls in owner.__mro__:
        forward = vars(cls).get("forward")
        code = getattr(getattr(forward, "__wrapped__", forward), "__code__", None)
        module = sys.modules.get(cls.__module__)
        if code is None or module is None:
            continue
        names = [name for name in code.co_names if "eager" in name and callable(getattr(module, name, None))]
        names += ["eager_attention_forward"]
        for name in names:
            function = getattr(module, name, None)
            if callable(function):
                return function, f"{cls.__module__}.{name}"
    raise ModelError(
        f"{owner.__module__}.{owner.__qualname__} dispatches its attention through transformers' interface, but no "
        "eager attention function was found beside it; whence cannot tell how it computes its weights."
    )


def eager_function(module: nn.Module) -> Callable[..., Any]:
    """The model's own eager attention function; refused where another library has put its own in its place."""
    owner: Any = type(module)
    function, place = _eager_function(owner)
    current = getattr(sys.modules[place.rpartition(".")[0]], place.rpartition(".")[2])
    home, family = str(getattr(current, "__module__", "?")), place.split(".")[0]
    if current is not function or home.split(".")[0] not in (family, "transformers"):
        raise ModelError(
            f"{place} has been replaced by {home}.{getattr(current, '__qualname__', current)}: another library has "
            "patched this model's attention, so whence cannot vouch for what it reads. Undo that patch (or start "
            "a fresh process without it) and trace again."
        )
    eager: Callable[..., Any] = function
    return eager


class SoftmaxWatch(TorchFunctionMode):
    """Keeps what the last softmax and the last log-sum-exp inside its `with` block gave."""

    probabilities: Tensor | None = None
    normaliser: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in SOFTMAX:
            self.probabilities = result
        elif func in (torch.logsumexp, Tensor.logsumexp):
            self.normaliser = result
        return result


# Whether a module's softmax has a column for a sink. Watching costs time, so that it is found out on the first call.
_sinks: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _overheard(
    eager: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> tuple[Any, Any, Tensor | None]:
    """The eager function's output and weights, and the weight of the sink where the model has one."""
    if not _sinks.get(module, True):
        output, weights = eager(module, *args, **kwargs)
        return output, weights, None
    with SoftmaxWatch() as watch:
        output, weights = eager(module, *args, **kwargs)
    if weights is None or watch.probabilities is None:
        return output, weights, None
    sink = sink_of(watch.probabilities, weights)
    if sink is None and watch.normaliser is not None and isinstance(kwargs.get("s_aux"), Tensor):
        weights, sink = _with_sink(weights, watch.normaliser, kwargs["s_aux"], args[2], output)
    _sinks[module] = sink is not None
    return output, weights, sink


def _with_sink(
    weights: Tensor, normaliser: Tensor, score: Tensor, value: Tensor, output: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Weights and sink where a model leaves the sink out of its softmax and scales the head outputs instead (Granite).

    With scores s and a sink of score t, softmax over both gives exp(s) / (Σ exp(s) + exp(t)): the softmax without the
    sink, times sigmoid(log Σ exp(s) − t). Taken only where it gives the model's own head outputs.
    """
    if normaliser.shape != weights.shape[:-1] or score.numel() != weights.shape[1]:
        return weights, None
    share = torch.sigmoid(normaliser.float() - score.float().view(1, -1, 1))
    scaled = weights.float() * share[..., None]
    found = output.transpose(1, 2).float()
    apart = (mix(scaled, value.float()) - found).abs().amax()
    if not apart <= 4 * max(torch.finfo(output.dtype).eps, SAME_STATE) * found.abs().amax():
        return weights, None
    return scaled.to(weights.dtype), (1 - share).to(weights.dtype)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function whence registers: the model's own eager one, overheard.

    A thread that runs the model while another one traces it gets what the model would have used.
    """
    if not _INSIDE.get():
        own = _own_implementation(getattr(module, "config", None))
        if own != "eager":
            function = _registered(own)
            outcome: tuple[Tensor, Tensor | None] = function(module, query, key, value, attention_mask, *args, **kwargs)
            return outcome
    recorder = active()
    if recorder is not None and recorder.count in recorder.fused and not args and recorder.count not in recorder.edits:
        output = _without_weights(recorder, module, query, key, value, attention_mask, kwargs)
        if output is not None:
            return output, None
    if (
        attention_mask is not None
        and attention_mask.dtype == torch.bool
        and _own_implementation(getattr(module, "config", None)) != "eager"
    ):
        # A ready boolean mask (True: visible) is what sdpa takes; eager attention would add it to the scores.
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
    eager = eager_function(module)
    if recorder is None:
        result: tuple[Tensor, Tensor | None] = eager(module, query, key, value, attention_mask, *args, **kwargs)
        return result
    recorder.busy = True
    try:
        output, weights, sink = _overheard(eager, module, query, key, value, attention_mask, *args, **kwargs)
    finally:
        recorder.busy = False
    if weights is None:
        return output, weights
    number, edits = recorder.begin()
    scale = kwargs.get("scaling")
    position = kwargs.get("position_bias")
    visible, bias = mask_parts(recorder, attention_mask, weights.shape[-1])
    bias = added(position if isinstance(position, Tensor) else None, bias)
    factor, cap = query.shape[-1] ** -0.5 if scale is None else scale, kwargs.get("softcap")
    call = Call(
        query=query,
        key=key,
        value=value,
        weights=weights,
        output=output.transpose(1, 2) if output.dim() == 4 else output,
        visible=visible,
        # A soft cap bends the scores, so that they are no longer scale · query · key: no factor is claimed.
        scale=None if cap is not None else factor,
        bias=bias,
        node=output,
        cap=None if cap is None else (float(factor), float(cap)),
        sink=sink,
    )
    if edits:
        call = apply_edits(call, edits)
        output, weights = call.output.transpose(1, 2).contiguous().view_as(output), call.weights
    recorder.see(number, call)
    return output, weights


def _without_weights(
    recorder: AttentionRecorder,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """The call as the model itself would make it, its weights never whole; None where it must be made with them."""
    own = _own_implementation(getattr(module, "config", None))
    found: tuple[Tensor, Call] | None = None
    if own == "sdpa" and kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        found = sdpa_call(recorder, _registered(own), module, query, key, value, mask, kwargs)
    elif own == "eager":
        eager = eager_function(module)
        found = eager_call(partial(_overheard, eager), recorder, module, query, key, value, mask, kwargs)
    if found is None:
        return None
    number, _ = recorder.begin()
    recorder.see(number, found[1])
    return found[0]


def _registered(name: str) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
    return function


def mask(*args: Any, **kwargs: Any) -> Any:
    """The mask function whence registers: eager attention's in a trace, the model's own one in any other thread.

    The two must fit: sdpa's mask of a causal model is None, with which eager attention would see the future.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    own = _own_implementation(kwargs.get("config"))
    recorder = active()
    fused = own == "sdpa" and recorder is not None and recorder.all_fused
    own = "eager" if _INSIDE.get() and not fused else own
    return ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **kwargs)


def register() -> None:
    """Make the function known to transformers, once; refuse if the name has been taken by somebody else."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    present = ALL_ATTENTION_FUNCTIONS.get(NAME)
    if present is not None and present is not attention:
        raise ModelError(
            f"transformers' attention interface holds {present!r} under the name {NAME!r}, which is not whence's own: "
            "another library has replaced it. Register that function under another name and trace again."
        )
    if present is None:
        AttentionInterface.register(NAME, attention)
    if ALL_MASK_ATTENTION_FUNCTIONS.get(NAME) is not mask:
        AttentionMaskInterface.register(NAME, mask)


# The implementation each configuration had before it was switched, for passes of other threads. An entry outlives its
# switch: such a pass may have looked the function up just before the switch ended.
_own: dict[int, str] = {}


def _own_implementation(config: Any) -> str:
    """What the model uses when nobody traces it."""
    current = getattr(config, "_attn_implementation_internal", None)
    own = _own.get(id(config)) if current == NAME else current
    return "eager" if own is None else own


@contextmanager
def switched(model: nn.Module) -> Iterator[None]:
    """Run the model with whence's attention function, which is its own eager one, overheard; always switched back.

    transformers' own `set_attn_implementation` guesses from source text whether a class can be switched and checks
    kernels; here the configurations are set and restored one by one, and the calls are counted afterwards instead.
    Passes of other threads go on as if nothing had happened: see `attention` and `mask`.
    """
    register()
    with lock_of(model):
        before = [(config, config._attn_implementation_internal) for config in configs_of(model)]
        token = _INSIDE.set(True)
        try:
            try:
                for config, implementation in before:
                    if implementation != NAME:
                        if id(config) not in _own:
                            weakref.finalize(config, _own.pop, id(config), None)
                        _own[id(config)] = implementation
                        config._attn_implementation_internal = NAME
                yield
            finally:
                _switch_back(before)
        finally:
            _switch_back(before)  # an interruption may have met the first one
            _INSIDE.reset(token)


def _switch_back(before: list[tuple[Any, Any]]) -> None:
    for config, implementation in before:
        config._attn_implementation_internal = implementation


def in_plain_sight(model: nn.Module) -> bool:
    """Whether the model's own implementation can be overheard as it is: plain code and torch's own fused function."""
    return all(_own_implementation(config) in ("eager", "sdpa") for config in configs_of(model))


@contextmanager
def plain_experts(model: nn.Module) -> Iterator[None]:
    """Run mixtures of experts one expert after the other, as their papers have it; always switched back.

    The grouped kernels that transformers prefers have no forward mode.
    """
    field = "_experts_implementation_internal"
    before = [(config, getattr(config, field)) for config in configs_of(model) if getattr(config, field, None)]
    try:
        for config, _ in before:
            setattr(config, field, "eager")
        yield
    finally:
        for config, implementation in before:
            setattr(config, field, implementation)
