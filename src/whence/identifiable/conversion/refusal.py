"""Which models tied keys would not make unique, why, and what would be needed."""

from __future__ import annotations

from typing import Any

from whence.errors import ModelError
from whence.identifiable.conversion.rotary import convertible
from whence.model.load import Model


def refuse_unfit(model: Model, *, experimental: bool = False) -> None:
    """Refuse models for which tied keys would not give uniqueness, with the reason and what would be needed.

    `experimental`: let decoders through; the theorem covers them without rotary positions, and Llamas in another class.
    """
    if hasattr(model.model, "merge_and_unload"):
        raise ModelError(
            f"{model.name} is wrapped by PEFT, whose adapters tie_keys cannot tie: give model.merge_and_unload(), the same "
            "model as plain weights."
        )
    config: Any = getattr(model.model, "config", None)
    if config is None or not hasattr(config, "num_attention_heads"):
        raise ModelError(
            f"{model.name} has no transformers configuration with num_attention_heads: tie_keys cannot convert it."
        )
    kind = str(getattr(config, "position_embedding_type", ""))
    rotary = kind not in ("alibi", "bias", "none") and (
        getattr(config, "rope_parameters", None)
        or getattr(config, "rope_theta", None)
        or kind.startswith(("rope", "rotary"))
        or any("rotary" in type(m).__name__.lower() for m in model.model.modules())
    )
    if rotary and convertible(model.model):
        if experimental:
            return
        raise ModelError(
            f"{model.name} turns its keys by position (RoPE) and not its values: tying its keys would not make its "
            "attention unique, and turning its values too makes it another model. experimental=True (--experimental) "
            "converts it into whence.IdentifiableForCausalLM and distils it; the perplexity that it reaches is "
            "measured, and was more than 1.15 times the original's where this was tried."
        )
    if rotary:
        raise ModelError(
            f"{model.name} turns its keys by position (RoPE) and not its values: K_j = R_j·V_j·M is a different map "
            "at every position, so col(K) leaves span[T, 1] and Theorem 1 does not hold; tying its keys would not "
            "make its attention unique. What would be needed: positions that are added to the embeddings or to the "
            "scores (learned, ALiBi, T5 bias) in place of the rotation, or values that are turned too, and training "
            "anew. Plain Llamas are converted into such a class, experimentally."
        )
    if kind.startswith("relative_key"):
        raise ModelError(
            f"{model.name} adds position terms to its scores that depend on the query ({kind}); Theorem 1 needs a "
            "bias that does not."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{model.name} is an encoder–decoder; tie_keys converts encoders of the BERT family.")
    decoder = getattr(config, "is_decoder", False) or type(model.model).__name__.endswith(
        ("ForCausalLM", "LMHeadModel")
    )
    if decoder and not experimental:
        raise ModelError(
            f"{model.name} is a decoder; tie_keys converts encoders of the BERT family. For a decoder without rotary "
            "positions (ALiBi, none, learned) the theorem holds too: experimental=True (--experimental) converts it, "
            "with the closed form fitted without its causal mask; measure its perplexity before you use it."
        )
