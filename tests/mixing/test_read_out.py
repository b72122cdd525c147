"""Which rows a head reads: measured on models that read the first, the last, every row, or only some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    XLNetConfig,
    XLNetForSequenceClassification,
)

import whence
from whence.errors import WiringError
from whence.reading.trace import Trace

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "num_labels": 3}
IDS = torch.tensor([[5, 17, 33, 8, 42, 6]])


def _shaken(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def _modern(pooling: str) -> Any:
    config = ModernBertConfig(
        vocab_size=60, classifier_pooling=pooling, pad_token_id=0, cls_token_id=5, sep_token_id=6, bos_token_id=5,
        eos_token_id=6, **SMALL,
    )  # fmt: skip
    return ModernBertForSequenceClassification(config)


def _xlnet() -> Any:
    return XLNetForSequenceClassification(
        XLNetConfig(vocab_size=60, d_model=16, n_layer=2, n_head=2, d_inner=24, num_labels=3)
    )


MODELS = {
    "bert": (lambda: BertForSequenceClassification(BertConfig(vocab_size=60, **SMALL)), [1, 0, 0, 0, 0, 0]),
    "modernbert, mean": (lambda: _modern("mean"), [1 / 6] * 6),
    "modernbert, cls": (lambda: _modern("cls"), [1, 0, 0, 0, 0, 0]),
    "xlnet": (_xlnet, [0, 0, 0, 0, 0, 1]),
    "llama": (
        lambda: LlamaForSequenceClassification(LlamaConfig(vocab_size=60, pad_token_id=0, **SMALL)),
        [0, 0, 0, 0, 0, 1],
    ),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_rows_of_text_classifiers(name: str) -> None:
    torch.manual_seed(0)
    build, expected = MODELS[name]
    model = _shaken(build())
    trace = whence.trace(model, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})
    trace = trace if isinstance(trace, Trace) else trace[0]
    scores = whence.attribute(model, trace, "rollout")
    rolled = whence.contributions(trace, "rollout").rollout().values[-1]
    weights = torch.tensor(expected, dtype=torch.float32)
    assert torch.allclose(scores.extra["rows"].float(), weights, atol=1e-5)
    assert torch.allclose(scores.values, weights @ rolled, atol=1e-5)


@pytest.mark.parametrize("mean", [True, False])
def test_beit_reads_its_patches_and_never_the_first_row(mean: bool) -> None:
    torch.manual_seed(0)
    config = BeitConfig(image_size=8, patch_size=4, use_mean_pooling=mean, **SMALL)
    model = _shaken(BeitForImageClassification(config))
    trace = whence.trace(model, {"pixel_values": torch.randn(1, 3, 8, 8)})
    trace = trace if isinstance(trace, Trace) else trace[0]
    rows = whence.attribute(model, trace, "rollout").extra["rows"]
    expected = [0, 0.25, 0.25, 0.25, 0.25] if mean else [1.0, 0, 0, 0, 0]
    assert torch.allclose(rows.float(), torch.tensor(expected), atol=1e-5)


def test_rows_by_moving_one_at_a_time() -> None:
    """The slow way: every final state moved alone, the change of the logits compared."""
    torch.manual_seed(0)
    model = _shaken(_modern("mean")).double()
    trace = whence.trace(model, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})
    trace = trace if isinstance(trace, Trace) else trace[0]
    rows = whence.attribute(model, trace, "rollout").extra["rows"]
    step = 1e-6 * torch.eye(16, dtype=torch.float64)
    changes = torch.zeros(6, dtype=torch.float64)
    for i in range(6):
        for direction in step:

            def put(_module: Any, _args: Any, output: Any, i: int = i, by: torch.Tensor = direction) -> Any:
                output = output.clone()
                output[0, i] += by
                return output

            hook = model.model.final_norm.register_forward_hook(put)
            with torch.no_grad():
                moved = model(input_ids=IDS).logits[0]
            hook.remove()
            changes[i] += (moved - trace.logits).square().sum()
    slow = changes.sqrt() / changes.sqrt().sum()
    assert torch.allclose(rows, slow, atol=1e-4)


def test_a_head_that_reads_nothing_is_refused() -> None:
    torch.manual_seed(0)
    model = _shaken(BertForSequenceClassification(BertConfig(vocab_size=60, **SMALL)))
    model.classifier.weight.data.zero_()
    trace = whence.trace(model, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})
    with pytest.raises(WiringError, match="no final state moves its logits"):
        whence.attribute(model, trace if isinstance(trace, Trace) else trace[0], "rollout")
