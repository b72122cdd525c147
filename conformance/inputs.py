"""Ready tensors for one specimen: what its forward asks for, batch 1, and nothing it does not need."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from conformance.families import BASE, SEQ2SEQ, Family
from conformance.sizes import FIRST_FREE_ID, LAST_FREE_ID

TEXT_LENGTH, SOURCE_LENGTH, TARGET_LENGTH = 12, 11, 7


def _ids(length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(FIRST_FREE_ID, LAST_FREE_ID + 1, (1, length), generator=generator)


def _boxes(length: int, generator: torch.Generator) -> Tensor:
    """Boxes (left, top, right, bottom) in 0..63 with right >= left and bottom >= top."""
    corner = torch.randint(0, 30, (1, length, 2), generator=generator)
    return torch.cat([corner, corner + torch.randint(1, 30, (1, length, 2), generator=generator)], dim=-1)


def _pixels(config: PretrainedConfig, generator: torch.Generator) -> Tensor:
    size: Any = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(1, getattr(config, "num_channels", 3), height, width, generator=generator)


def make_inputs(family: Family, model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Inputs for `model`: 12 tokens; or 11 in and 7 out; or pixels; or speech features and 7 out."""
    generator = torch.Generator().manual_seed(seed + 1)
    config, takes = model.config, inspect.signature(model.forward).parameters
    if family.kind == "vision":
        return {"pixel_values": _pixels(config, generator)}
    if family.kind == "speech" and family.head == SEQ2SEQ:
        frames = 2 * config.max_source_positions
        features = torch.randn(1, config.num_mel_bins, frames, generator=generator)
        return {"input_features": features, "decoder_input_ids": _ids(TARGET_LENGTH, generator)}
    two_sided = "decoder_input_ids" in takes and (family.head in (SEQ2SEQ, BASE) or config.is_encoder_decoder)
    length = SOURCE_LENGTH if two_sided else TEXT_LENGTH
    made = {"input_ids": _ids(length, generator)}
    if "attention_mask" in takes:
        made["attention_mask"] = torch.ones(1, length, dtype=torch.long)
    if "bbox" in takes:
        boxes = _boxes(length, generator)
        made["bbox"] = boxes / 64 if family.model_type == "udop" else boxes
    if family.model_type in ("musicgen", "musicgen_melody"):  # one row of tokens per codebook
        made["input_ids"] = _ids(length * config.num_codebooks, generator).view(config.num_codebooks, length)
    if family.model_type == "voxtral_realtime_text":  # an embedding of the delay, which modulates every layer
        made["t_cond"] = torch.randn(1, 1, config.hidden_size, generator=generator)
    if family.model_type in ("trocr", "musicgen"):  # decoders made to look at an encoder
        states = torch.randn(1, SOURCE_LENGTH, config.hidden_size, generator=generator)
        made["encoder_hidden_states"] = states
    if family.model_type == "mllama":  # image states, so that the cross-attention layer is not passed over
        made["cross_attention_states"] = torch.randn(1, 5, config.hidden_size, generator=generator)
    if two_sided:
        made["decoder_input_ids"] = _ids(TARGET_LENGTH, generator)
    return made
