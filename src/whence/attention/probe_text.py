"""Inputs on which a model is asked about its scores: a long text, and the same positions with other tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whence.model.load import Model
from whence.reading.inputs import Prepared, prepare

TEXT = (
    "When on board the ship, as naturalist, I was much struck with certain facts in the distribution of the inhabitants "
    "of South America, and in the geological relations of the present to the past inhabitants of that continent. These "
    "facts seemed to me to throw some light on the origin of species, that mystery of mysteries, as it has been called "
    "by one of our greatest philosophers. On my return home, it occurred to me that something might perhaps be made out "
    "on this question by patiently accumulating and reflecting on all sorts of facts which could possibly have any "
    "bearing on it. After five years of work I allowed myself to speculate on the subject, and drew up some short notes; "
    "these I enlarged into a sketch of the conclusions, which then seemed to me probable: from that period to the present "
    "day I have steadily pursued the same object. I hope that I may be excused for entering on these personal details, as "
    "I give them to show that I have not been hasty in coming to a decision. My work is now nearly finished; but as it "
    "will take me two or three more years to complete it, and as my health is far from strong, I have been urged to "
    "publish this abstract. I have more especially been induced to do this, as a colleague who is now studying the "
    "natural history of the Malay islands has arrived at almost exactly the same general conclusions that I have on the "
    "origin of species."
)


def long_text(model: Model, text: Any) -> Prepared:
    """A text longer than keys and values together are wide, or as long as the model reads."""
    if text is not None:
        return prepare(model, text)[0][0]
    config: Any = getattr(model.model, "config", None)
    config = getattr(config, "text_config", config)
    width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or 0
    heads = getattr(config, "num_attention_heads", None) or 1
    width = max(width, (getattr(config, "hidden_size", None) or 64) // heads, getattr(config, "v_head_dim", 0) or 0)
    limit = getattr(config, "max_position_embeddings", None) or 10**6
    n = min(2 * width + 40, limit, 700)
    if model.tokenizer is not None:
        ids = model.tokenizer(TEXT, verbose=False)["input_ids"]
        ids = torch.tensor((ids * (n // len(ids) + 1))[:n])
    else:
        embedding = model.model.get_input_embeddings()
        size = int(embedding.weight.shape[0])
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(min(5, size - 1), size, (n,), generator=generator)
    given: dict[str, Tensor] = {"input_ids": ids[None]}
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids[None].clone()
    return prepare(model, given)[0][0]


def shuffled(prepared: Prepared) -> Prepared | None:
    """The same places with other tokens: the order turned round, first and last kept. None where there are no ids."""
    changed = dict(prepared.inputs)
    done = False
    for name in ("input_ids", "decoder_input_ids"):
        ids = changed.get(name)
        if ids is not None and ids.shape[-1] > 3:
            changed[name] = torch.cat([ids[:, :1], ids[:, 1:-1].flip(-1), ids[:, -1:]], dim=-1)
            done = True
    return Prepared(changed, None) if done else None
