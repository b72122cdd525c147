"""What a model said, small enough to show: its classes, its next token, or the embedding of the text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whence.model.load import Model

TOP = 6
COMPONENTS = 384


def describe_output(
    logits: Tensor | None, final_states: Tensor | None, model: Model | None, ids: Tensor | None = None
) -> dict[str, Any]:
    """The output of one pass as plain data.

    kind "classes" or "tokens": `items` with label and probability, most probable first; "embedding": `values`, the mean
    of the final states (the first 384 components); "none": the model gave neither.
    """
    if logits is not None and logits.dim() == 1:
        return {"kind": "classes", "what": "class", "items": _top(logits, lambda i: class_name(model, i))}
    if logits is not None and logits.dim() == 2:
        place = read_out_position(ids, model, logits.shape[0])
        masked = place != logits.shape[0] - 1
        what = "token at [MASK]" if masked else "next token"
        return {
            "kind": "tokens",
            "what": what,
            "position": place,
            "items": _top(logits[place], lambda i: token_name(model, i)),
        }
    if final_states is not None:
        pooled = final_states.to(torch.float64).mean(0)
        shown = pooled[:COMPONENTS]
        return {
            "kind": "embedding",
            "what": "embedding",
            "size": len(pooled),
            "values": [round(v, 5) for v in shown.tolist()],
        }
    return {"kind": "none", "what": "output"}


def read_out_position(ids: Tensor | None, model: Model | None, length: int) -> int:
    """Where the prediction is read: the first [MASK], else the last position."""
    mask_id = getattr(getattr(model, "tokenizer", None), "mask_token_id", None)
    if ids is not None and mask_id is not None:
        places = (ids.reshape(-1)[:length] == mask_id).nonzero().reshape(-1)
        if len(places):
            return int(places[0])
    return length - 1


def class_name(model: Model | None, i: int) -> str:
    """What the model calls its class i."""
    names = getattr(getattr(getattr(model, "model", None), "config", None), "id2label", None) or {}
    return str(names.get(i, f"class {i}"))


def token_name(model: Model | None, i: int) -> str:
    """The readable text of token id i."""
    if model is None or model.tokenizer is None:
        return f"token {i}"
    text = str(model.tokenizer.decode([i]))
    return text.strip() or repr(text)[1:-1] or str(model.tokenizer.convert_ids_to_tokens(i))


def _top(logits: Tensor, name: Any) -> list[dict[str, Any]]:
    probabilities = logits.to(torch.float64).softmax(-1)
    best = probabilities.topk(min(TOP, len(probabilities)))
    return [
        {"label": name(int(i)), "index": int(i), "probability": float(p)}
        for p, i in zip(best.values, best.indices, strict=True)
    ]
