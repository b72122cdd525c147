"""The configuration of the identifiable decoder, and which of its combinations a theorem covers."""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from whence.errors import InputError
from whence.identifiable.configuration_identifiable import ATTENTION, KEYS

POSITIONS = ("rope", "alibi", "bias", "none")
SINKS = ("none", "fixed")
FEED_FORWARD = ("plain", "gated")


@strict
class IdentifiableDecoderConfig(PreTrainedConfig):  # type: ignore[misc, unused-ignore]
    """A causal language model whose key can be its value, so that every attention row is the only one with its output.

    `keys`: "free" has a key projection of its own; "shared" K = u, the value itself (its leading `key_size` numbers
    where keys are smaller); "tied" K = u·M with M learned per head, a complex number on every rotated pair and any
    matrix on the rest.
    `position_embedding_type`: "rope", "alibi", "bias" (a learned number per head and distance) or "none".
    `rotate_values`: RoPE turns the value as it turns the key, and the output back (None: exactly where keys are not
    free). `rotary_fraction`: the share of every head that is turned.
    `shared_norm`: one RMSNorm on the tensor that is key and value; `query_norm`; `key_norm`, on free keys only.
    `sink`: "fixed" gives every head one learned logit that competes with the keys and has the value 0.
    `softcap`: s·tanh(score/s), with free keys only.
    `feed_forward`: "plain" W_2 σ(W_1 x), or "gated" W_2 (σ(W_g x) ⊙ W_1 x), as Llama has it; `feed_forward_bias`.
    `key_size`, `value_size`: per head; None: hidden_size / num_attention_heads, and key_size = value_size.

    >>> IdentifiableDecoderConfig(keys="shared").rotate_values
    True
    """

    model_type = "identifiable_decoder"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (transformers declares it so)

    vocab_size: int = 4000
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    intermediate_size: int = 512
    key_size: int | None = None
    value_size: int | None = None
    keys: str = "shared"
    attention: str = "softmax"
    position_embedding_type: str = "rope"
    rotate_values: bool | None = None
    rotary_fraction: float | int = 1.0
    rope_theta: float | int = 10000.0
    relative_distance: int = 128
    query_norm: bool = False
    key_norm: bool = False
    shared_norm: bool = False
    sink: str = "none"
    softcap: float | None = None
    attention_bias: bool = False
    hidden_act: str = "gelu"
    feed_forward: str = "plain"
    feed_forward_bias: bool = True
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self._check_names()
        self._check_sizes()
        if self.rotate_values is None:
            self.rotate_values = self.position_embedding_type == "rope" and self.keys != "free"
        if self.rotate_values and self.position_embedding_type != "rope":
            raise InputError(
                f"rotate_values=True needs position_embedding_type='rope'; {self.position_embedding_type!r} turns "
                "nothing."
            )
        problem = uncovered(self)
        if self.keys != "free" and problem:
            raise InputError(
                f"keys={self.keys!r} promises that attention is unique, and here it would not be: {problem}"
            )

    def _check_names(self) -> None:
        for name, allowed in (
            ("keys", KEYS),
            ("attention", ATTENTION),
            ("position_embedding_type", POSITIONS),
            ("sink", SINKS),
            ("feed_forward", FEED_FORWARD),
        ):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name}={getattr(self, name)!r} is not known; choose one of {', '.join(allowed)}.")

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                     "max_position_embeddings", "relative_distance", "key_size", "value_size",
                     "num_key_value_heads"):  # fmt: skip
            given = getattr(self, name)
            if given is not None and given < 1:
                raise InputError(f"{name}={given} must be at least 1.")
        heads = self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = heads
        if heads % self.num_key_value_heads:
            raise InputError(
                f"num_attention_heads={heads} is no multiple of num_key_value_heads={self.num_key_value_heads}."
            )
        if self.value_size is None:
            if self.hidden_size % heads:
                raise InputError(
                    f"hidden_size={self.hidden_size} does not divide into {heads} heads: choose sizes that do, or "
                    "give key_size and value_size."
                )
            self.value_size = self.hidden_size // heads
        if self.key_size is None:
            self.key_size = self.value_size
        if not 0 < self.rotary_fraction <= 1:
            raise InputError(f"rotary_fraction={self.rotary_fraction} is the share of a head that is turned: 0 … 1.")
        if self.softcap is not None and self.softcap <= 0:
            raise InputError(f"softcap={self.softcap} must be more than 0.")
        if self.position_embedding_type == "rope" and self.rotary_size(self.value_size) < 2:
            raise InputError(
                f"rotary_fraction={self.rotary_fraction} of value_size={self.value_size} leaves no pair to turn."
            )

    def rotary_size(self, size: int) -> int:
        """How many of a head's numbers are turned: whole pairs, 0 without RoPE."""
        return 2 * round(self.rotary_fraction * size / 2) if self.position_embedding_type == "rope" else 0


def uncovered(config: IdentifiableDecoderConfig) -> str | None:
    """The condition of Theorem A that a configuration breaks; None where it holds.

    The key of every row must be an affine map of what the row adds up, Φ = T·N + 1cᵀ, while the query varies
    (`whence.identifiable.modeling_identifiable_decoder`).
    """
    key, value = config.key_size or 0, config.value_size or 0
    rope = config.position_embedding_type == "rope"
    if config.keys == "free":
        return "keys='free' have a projection of their own, so that Φ = T·N + 1cᵀ has no reason to hold."
    if rope and not config.rotate_values:
        return (
            "RoPE turns the key of position j by R_j and, with rotate_values=False, not its value: no one matrix takes "
            "all values to their keys. Set rotate_values=True, or choose 'alibi', 'bias' or 'none'."
        )
    if config.key_norm:
        return (
            "key_norm divides each key by a length of its own and leaves the value: Φ = T·N would need another N for "
            "every key. Use shared_norm, or query_norm."
        )
    if config.softcap is not None:
        return f"softcap={config.softcap} bends the scores, so that they are no longer q·φ_j + b_j. Leave it out."
    if config.keys == "shared" and key > value:
        return f"key_size={key} is more than value_size={value}, so the key cannot be a part of the value."
    if rope and (key > value or key % 2):
        return (
            f"key_size={key} must be a number of whole pairs, at most value_size={value}: a matrix that commutes with "
            "the rotations takes each pair to itself."
        )
    return None
