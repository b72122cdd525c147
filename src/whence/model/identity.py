"""Which model is this? Hashes of all that decides what it computes: weights, configuration, tokenizer.

The same weights with another number of heads, another activation or another tokenizer are another model.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn

from whence.model.load import Model

# Where a model lies, what wrote it and what it hands out besides: none of it changes a number.
INDIFFERENT = {
    "architectures", "dtype", "output_attentions", "output_hidden_states", "return_dict", "torch_dtype",
    "transformers_version",
}  # fmt: skip


def model_hashes(model: Model) -> dict[str, str]:
    """SHA-256 of a model's weights, configuration and tokenizer, by name; what it does not have is left out."""
    hashes = {"weights": model.weights_hash}
    if (configuration := hash_configuration(model.model)) is not None:
        hashes["configuration"] = configuration
    if model.tokenizer is not None:
        hashes["tokenizer"] = hash_tokenizer(model.tokenizer)
    return hashes


def hash_configuration(model: nn.Module) -> str | None:
    """SHA-256 of a transformers configuration, without what changes no number; None where there is none."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    return hashlib.sha256(json.dumps(_effective(config.to_dict()), sort_keys=True, default=str).encode()).hexdigest()


def _effective(value: Any) -> Any:
    if isinstance(value, dict):
        entries = ((str(name), one) for name, one in value.items())
        return {name: _effective(one) for name, one in entries if name not in INDIFFERENT and not name.startswith("_")}
    return [_effective(one) for one in value] if isinstance(value, list | tuple) else value


def hash_tokenizer(tokenizer: Any) -> str:
    """SHA-256 of all that a tokenizer does: its vocabulary, rules and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        for name in ("padding", "truncation"):  # left there by the last call
            content.pop(name, None)
    else:
        content = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else type(tokenizer).__qualname__
    special = getattr(tokenizer, "special_tokens_map", None)
    return hashlib.sha256(json.dumps([content, special], sort_keys=True, default=str).encode()).hexdigest()
