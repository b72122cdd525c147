"""The ways through a model: folded, forward mode, and what is left; a way that is wrong is not taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import whence
from tests.mixing.mixing_oracle import backward
from whence.errors import ModelError
from whence.mixing.hidden_token_attribution import HiddenTokenAttribution
from whence.mixing.jacobian import sweep as sweeping
from whence.reading.trace import Trace

Zoo = Callable[..., Trace]


def test_mixtures_of_experts(zoo: Zoo) -> None:
    """Their grouped kernels have no forward mode (and no float64): experts are run one by one for it."""
    trace = zoo("mixtral")
    mixed = whence.hidden_token_attribution(trace, "exact")
    assert "folded" in mixed.provenance.settings["way"]
    slow = backward(trace, [0, 5, 11])
    assert torch.allclose(
        mixed.extra["squared"].sqrt()[:, [0, 5, 11]].float(), slow, atol=1e-4 * float(slow.max()), rtol=0
    )
    assert trace.model is not None
    assert trace.model.model.config._experts_implementation != "eager"  # switched back


class _Own(torch.autograd.Function):
    """tanh with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        ctx.note = ctx.needs_input_grad[0]
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return grad * (1 - y.square())


class _StraightThrough(_Own):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class _Lost(_Own):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * torch.nan


class _NewKind(torch.autograd.Function):
    """With `setup_context`, and still without a forward mode."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return grad * (1 - y.square())


class _Activation(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def _attributed(function: Callable[[torch.Tensor], torch.Tensor], of: str = "states") -> HiddenTokenAttribution:
    """A small BERT whose activation is `function`."""
    from conformance.zoo import build

    specimen = build("bert")
    model = specimen.model.double()
    for name, part in model.named_modules():
        if name.endswith("intermediate"):
            part.intermediate_act_fn = _Activation(function)
    trace = whence.trace(whence.Model(model), dict(specimen.inputs))
    return whence.hidden_token_attribution(trace if isinstance(trace, Trace) else trace[0], "exact", of=of)


@pytest.mark.parametrize("operation", [_Own, _NewKind])
@pytest.mark.parametrize("of", ["states", "heads"])
def test_operations_with_a_backward_of_their_own(operation: Any, of: str) -> None:
    """They have no forward mode: backward passes give the same."""
    mixed = _attributed(operation.apply, of)
    assert mixed.provenance.settings["way"].startswith("backward passes")
    assert torch.allclose(mixed.values, _attributed(torch.tanh, of).values, atol=1e-9, rtol=0)


@pytest.mark.parametrize("operation", [_Lost, _StraightThrough])
def test_a_backward_that_is_no_derivative_is_refused(operation: Any) -> None:
    with pytest.raises(ModelError, match="not the derivative"):
        _attributed(operation.apply)


def test_nothing_of_torch_is_patched() -> None:
    before = dict(torch.autograd.Function.__dict__)
    _attributed(_Own.apply)
    assert dict(torch.autograd.Function.__dict__) == before


def test_two_models_in_two_threads(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has one count of forward mode's levels for all threads."""
    monkeypatch.setattr(sweeping, "_folds", lambda *_: iter([([], "switched off")]))
    traces = [zoo("bert", torch.float64), zoo("gpt2", torch.float64)]
    alone = [whence.hidden_token_attribution(t, "probes", 4).values for t in traces]
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def work(i: int) -> None:
        found[i] += [whence.hidden_token_attribution(traces[i], "probes", 4).values for _ in range(6)]

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in (0, 1):
        assert len(found[i]) == 6
        assert all(torch.allclose(values, alone[i], atol=1e-12) for values in found[i])


@pytest.mark.parametrize("family", ["bert", "llama", "gpt_neox"])
def test_heads_and_states_by_both_ways(zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = zoo(family, torch.float64)
    folded = [whence.hidden_token_attribution(trace, "exact", of=of) for of in ("states", "heads")]
    assert folded[1].axes == ("layer", "head", "hidden", "input")
    monkeypatch.setattr(sweeping, "_folds", lambda *_: iter([([], "switched off")]))
    plain = [whence.hidden_token_attribution(trace, "exact", of=of) for of in ("states", "heads")]
    assert "switched off" in plain[0].provenance.settings["way"]
    for ours, theirs in zip(folded, plain, strict=True):
        assert torch.allclose(ours.values, theirs.values, atol=1e-6)
        assert torch.allclose(ours.values.sum(-1), torch.ones(ours.shape[:-1], dtype=torch.float64))


def test_a_wrong_folding_is_not_used(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    trace, honest = zoo("bert", torch.float64), sweeping.fold_read
    right = whence.hidden_token_attribution(trace, "exact").values

    def wrong(layer: object, reading: object, scores: object) -> object:
        fold = honest(layer, reading, scores)  # type: ignore[arg-type]
        return replace(fold, d_residual=fold.d_residual * 1.01)

    def wrong_at_one_token(layer: Any, reading: object, scores: object) -> object:
        fold = honest(layer, reading, scores)  # type: ignore[arg-type]
        d_residual = fold.d_residual.clone()
        d_residual[5] *= 1.01 if layer.index == 0 else 1.0
        return replace(fold, d_residual=d_residual)

    monkeypatch.setattr(sweeping, "fold_read", wrong_at_one_token)
    mixed = whence.hidden_token_attribution(trace, "exact")
    assert "miss the model" in mixed.provenance.settings["way"]
    monkeypatch.setattr(sweeping, "fold_read", wrong)
    mixed = whence.hidden_token_attribution(trace, "exact")
    assert "miss the model" in mixed.provenance.settings["way"]
    assert torch.allclose(mixed.values, right, atol=1e-10)


def test_too_little_memory_falls_back_and_says_so(zoo: Zoo) -> None:
    mixed = whence.hidden_token_attribution(zoo("bert"), "probes", 4, memory="1MB")
    assert "allowed" in mixed.provenance.settings["way"]
    assert torch.allclose(mixed.values, whence.hidden_token_attribution(zoo("bert"), "probes", 4).values, atol=1e-4)
