"""A document without a model: the right shape, random numbers."""

from __future__ import annotations

from typing import Any

import torch

from whence.reporting.attention import QUANTITIES
from whence.reporting.document import Document
from whence.reporting.heads import detail_of
from whence.reporting.quantise import pack, quantise, whole_numbers


def made_up(*, tokens: int, layers: int, heads: int) -> Document:
    """A document of the right shape with random numbers, made without a model."""
    torch.manual_seed(0)
    detail = detail_of("standard", tokens)
    raw = torch.softmax(2 * torch.randn(tokens, tokens), -1)
    signed = raw - raw.mean(-1, keepdim=True)
    count = min(detail.rows or tokens, tokens)
    keys = raw.topk(count, -1).indices
    weight = raw.gather(-1, keys)
    picture: dict[str, Any] = {"bits": 8, "levels": detail.levels, "root": True}
    block = pack(
        {
            "raw": quantise(raw, **picture), "effective": quantise(signed, **picture),
            "alternative": quantise(raw.flip(0), **picture),
            "keys": whole_numbers(keys), "weight": quantise(weight, scale=1.0), "effective_weight": quantise(weight),
            "alternative_weight": quantise(weight), "lower": quantise(weight * 0, scale=1.0),
            "upper": quantise(weight * 2, scale=1.0),
        }
    )  # fmt: skip
    words = [f"word{i}" for i in range(tokens)]
    about = {
        "text": words, "raw": words, "special": [False] * tokens, "kind": ["rest"] * tokens, "glued": [False] * tokens,
        "word": [None] * tokens,
    }  # fmt: skip
    row = {
        "layer": 0, "head": 0, "query": 1, "dimension": 3, "keys": [0, 1, 2], "weights": [0.5, 0.2, 0.1],
        "lower": [0.1, 0.1, 0.0],        "upper": [0.9, 0.3, 0.2], "outside": 0.4, "certain": [],
        "sentence": "s", "sentences": ["s"] * 3, "checked": True,
    }  # fmt: skip
    grid = {name: torch.rand(layers, heads).tolist() for name in QUANTITIES}
    stack = {
        "name": "encoder", "tokens": about, "key_tokens": None, "layers": list(range(layers)), "heads": list(range(heads)),
        "head_size": 32, "causal": False, "grid": grid, "rank": [], "free_rows": 1.0, "findings": ["a", "b"], "worst": [row],
        "best": [row],
        "verdict": {
            "epsilon": 0.05, "names": [["read"] * heads] * layers, "sentences": [["read"] * heads] * layers, "readable": 1,
        }, "witnesses": [], "blocks": [],
    }  # fmt: skip
    own = torch.rand(layers, tokens)
    mixture = {
        "name": "alti", "title": "ALTI", "paper": "", "origin": "layer", "layers": list(range(layers)), "tokens": about,
        "input_tokens": None, "settings": {}, "own_by_token": own.tolist(),
        "own": {name: own.mean(-1).tolist() for name in ("median", "q25", "q75", "mean", "not_largest")},
    }  # fmt: skip
    mix = pack({"values": quantise(raw)})
    manifest = {
        "format": 1, "text": " ".join(words), "text_pair": None, "target": None, "detail": "standard",
        "epsilon": 0.05, "model": "made up",
        "provenance": {}, "versions": {"whence": "0", "torch": "0", "transformers": "0"}, "quantities": QUANTITIES,
        "stacks": [stack], "mixtures": [mixture], "identity": {"naive": None, "trained": None}, "prediction": None,
    }  # fmt: skip
    blocks = {f"head/encoder/{layer}/{head}": block for layer in range(layers) for head in range(heads)}
    return Document(manifest, {**blocks, **{f"mix/alti/{layer}": mix for layer in range(layers)}})
