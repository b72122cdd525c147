"""The configuration of the identifiable transformer."""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from whence.errors import InputError

HEADS = ("concat", "add")
KEYS = ("free", "tied", "shared")
ATTENTION = ("softmax", "uniform")
POSITIONS = ("learned", "none", "bias")
NORMS = ("post", "pre")
POOLING = ("cls", "mean")
_ROTARY = ("rope", "rotary", "rotary_embedding", "rotary_embeddings")


@strict
class IdentifiableConfig(PreTrainedConfig):  # type: ignore[misc, unused-ignore]
    """An encoder whose key and value sizes are free of each other, and whose keys may be tied to its values.

    `key_size` d_k and `value_size` d_v are per head; None: hidden_size / num_attention_heads, but for `heads="add"`
    d_v = hidden_size, and for `keys="shared"` d_k = d_v.
    `heads`: "concat" puts the head outputs side by side before the output projection, "add" sums them first.
    `keys`: "free" has a key projection of its own, "tied" K = V·M with M learned per head, "shared" K = V.
    `attention`: "softmax", or "uniform", the control: every visible key gets the same weight.
    `position_embedding_type`: "learned" (added to the words), "none", or "bias" (a learned number per head and
    distance, added to the scores). Rotary positions are refused: they turn keys and not values, so K = V·M would
    no longer hold at any two positions and the uniqueness of tied keys would be lost.
    `norm`: "post" or "pre". `classifier_pooling`: "cls", the first token, or "mean".

    >>> IdentifiableConfig(keys="tied").value_size
    32
    """

    model_type = "identifiable"

    vocab_size: int = 8000
    hidden_size: int = 128
    num_hidden_layers: int = 1
    num_attention_heads: int = 4
    intermediate_size: int = 256
    key_size: int | None = None
    value_size: int | None = None
    heads: str = "concat"
    keys: str = "free"
    attention: str = "softmax"
    position_embedding_type: str = "learned"
    max_position_embeddings: int = 512
    relative_distance: int = 32
    norm: str = "post"
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    classifier_dropout: float | int | None = None
    classifier_pooling: str = "cls"
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        for name, allowed in (
            ("heads", HEADS),
            ("keys", KEYS),
            ("attention", ATTENTION),
            ("norm", NORMS),
            ("classifier_pooling", POOLING),
        ):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name}={getattr(self, name)!r} is not known; choose one of {', '.join(allowed)}.")
        self._check_positions()
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                     "max_position_embeddings", "relative_distance", "key_size", "value_size"):  # fmt: skip
            given = getattr(self, name)
            if given is not None and given < 1:
                raise InputError(f"{name}={given} must be at least 1.")
        shared = self.hidden_size // self.num_attention_heads
        if self.hidden_size % self.num_attention_heads and (self.value_size is None and self.heads == "concat"):
            raise InputError(
                f"hidden_size={self.hidden_size} does not divide into {self.num_attention_heads} heads: choose sizes "
                "that do, or give key_size and value_size."
            )
        if self.value_size is None:
            self.value_size = self.hidden_size if self.heads == "add" else shared
        if self.key_size is None:
            self.key_size = self.value_size if self.keys == "shared" else max(1, shared)
        if self.keys == "shared" and self.key_size != self.value_size:
            raise InputError(
                f"keys='shared' means K = V, so key_size={self.key_size} must be value_size={self.value_size}; with "
                "keys='tied' they may differ."
            )

    def _check_positions(self) -> None:
        given = self.position_embedding_type
        if given in _ROTARY:
            why = (
                f"keys={self.keys!r} needs every key to be the same linear map of its value, and a rotation by "
                "position makes that map differ from position to position: attention would no longer be unique. "
                if self.keys != "free"
                else "this model has no rotary positions. "
            )
            raise InputError(f"position_embedding_type={given!r}: {why}Choose one of {', '.join(POSITIONS)}.")
        if given == "absolute":  # what BERT calls it
            self.position_embedding_type = "learned"
        elif given not in POSITIONS:
            raise InputError(f"position_embedding_type={given!r} is not known; choose one of {', '.join(POSITIONS)}.")
