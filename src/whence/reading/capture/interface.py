"""The first way into a model: transformers' attention interface.

One attention function is registered under the project's own name, together with the mask function that eager
attention uses (without it a causal model silently sees the future). It hands the work to the model's own eager
function, so that the numbers are the model's, and reports what went in and came out to the active recorder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whence.errors import ModelError
from whence.reading.capture.function_mode import SOFTMAX
from whence.reading.capture.recorder import MASKED, Call, active, apply_edits, sink_of

NAME = "whence"


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
    found: Callable[..., Any] = function
    return found


class SoftmaxWatch(TorchFunctionMode):
    """Keeps what the last softmax inside its `with` block gave."""

    probabilities: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in SOFTMAX:
            self.probabilities = result
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
    _sinks[module] = sink is not None
    return output, weights, sink


def visibility(mask: Tensor | None, n_key: int) -> Tensor | None:
    """Which keys a mask leaves visible: boolean masks as they are, additive ones where they are not a closed door."""
    if mask is None:
        return None
    mask = mask[..., :n_key]
    return mask if mask.dtype == torch.bool else mask > MASKED


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function whence registers: the model's own eager one, overheard."""
    eager = eager_function(module)
    recorder = active()
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
    bias = kwargs.get("position_bias")
    factor, cap = query.shape[-1] ** -0.5 if scale is None else scale, kwargs.get("softcap")
    call = Call(
        query=query,
        key=key,
        value=value,
        weights=weights,
        output=output.transpose(1, 2) if output.dim() == 4 else output,
        visible=visibility(attention_mask if isinstance(attention_mask, Tensor) else None, weights.shape[-1]),
        # A soft cap bends the scores, so that they are no longer scale · query · key: no factor is claimed.
        scale=None if cap is not None else factor,
        bias=bias if isinstance(bias, Tensor) else None,
        node=output,
        cap=None if cap is None else (float(factor), float(cap)),
        sink=sink,
    )
    if edits:
        call = apply_edits(call, edits)
        output, weights = call.output.transpose(1, 2).contiguous().view_as(output), call.weights
    recorder.see(number, call)
    return output, weights


def register() -> None:
    """Make the function known to transformers, once; refuse if the name has been taken by somebody else."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    present = ALL_ATTENTION_FUNCTIONS.get(NAME)
    if present is not None and present is not attention:
        raise ModelError(
            f"transformers' attention interface holds {present!r} under the name {NAME!r}, which is not whence's own: "
            "another library has replaced it. Register that function under another name and trace again."
        )
    if present is None:
        AttentionInterface.register(NAME, attention)
    if ALL_MASK_ATTENTION_FUNCTIONS.get(NAME) is not eager_mask:
        AttentionMaskInterface.register(NAME, eager_mask)


_known: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


def _configs(model: nn.Module) -> list[Any]:
    """Every distinct configuration that decides which attention some part of the model uses; looked up once."""
    if model not in _known or not any(c is getattr(model, "config", None) for c in _known[model]):
        _known[model] = _find_configs(model)
    return _known[model]


def _find_configs(model: nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    todo = [getattr(module, "config", None) for module in model.modules()]
    while todo:
        config = todo.pop()
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        found[id(config)] = config
        todo += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return list(found.values())


@contextmanager
def switched(model: nn.Module, name: str) -> Iterator[None]:
    """Run the model with attention implementation `name` wherever it can be switched; always switched back.

    transformers' own `set_attn_implementation` guesses from source text whether a class can be switched and checks
    kernels; here the configurations are set and restored one by one, and the calls are counted afterwards instead.
    """
    register()
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


@contextmanager
def plain_experts(model: nn.Module) -> Iterator[None]:
    """Run mixtures of experts one expert after the other, as their papers have it; always switched back.

    The grouped kernels that transformers prefers have no forward mode.
    """
    field = "_experts_implementation_internal"
    before = [(config, getattr(config, field)) for config in _configs(model) if getattr(config, field, None)]
    try:
        for config, _ in before:
            setattr(config, field, "eager")
        yield
    finally:
        for config, implementation in before:
            setattr(config, field, implementation)
