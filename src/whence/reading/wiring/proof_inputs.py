"""What a proof is made on: inputs long enough to prove anything, and weights that are numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import ModelError
from whence.reading.wiring.stacks import submodule


def kind_of(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a proof depends on besides the model: which inputs there are, and whether the sequence is one token long."""
    ids = inputs.get("input_ids", inputs.get("inputs_embeds"))
    single = isinstance(ids, Tensor) and ids.dim() > 1 and ids.shape[1] == 1
    return (tuple(sorted(inputs)), *((name, t.dim()) for name, t in sorted(inputs.items()) if "mask" in name), single)


def long_enough(model: nn.Module, inputs: Mapping[str, Any], least: int = 12, target: int = 7) -> dict[str, Any]:
    """The inputs with generated tokens at the end of texts that are too short to prove anything on, and no padding.

    A single token attends to itself alone: nothing would tell a decoder from an encoder.
    """
    long = dict(inputs)
    generator = torch.Generator().manual_seed(0)
    embedding = submodule(model, "get_input_embeddings")
    size = getattr(embedding, "num_embeddings", None) or getattr(getattr(model, "config", None), "vocab_size", None)
    special = {v for k, v in vars(getattr(model, "config", None) or object).items() if k.endswith("_token_id")}
    for prefix, wanted in (("", least), ("decoder_", target)):
        ids, mask = inputs.get(f"{prefix}input_ids"), inputs.get(f"{prefix}attention_mask")
        vectors = inputs.get(f"{prefix}inputs_embeds")
        if ids is None and isinstance(vectors, Tensor) and vectors.dim() == 3:
            ids = vectors[..., 0]  # (sequence, token), as ids are
        if ids is None or ids.dim() != 2:
            continue
        n = ids.shape[1]
        seen = torch.ones(n, dtype=torch.bool)
        if mask is not None and mask.dim() == 2 and mask.shape == ids.shape:
            seen = mask[0].bool().cpu()
        elif mask is not None and mask.dim() > 2:  # a mask of the user's own is a fact of the text, not of the model
            del long[f"{prefix}attention_mask"]
        missing = max(0, wanted - int(seen.sum())) if isinstance(size, int) or ids.is_floating_point() else 0
        if bool(seen.all()) and not missing:
            continue
        free = [i for i in range(min(5, (size or 1) - 1), size or 1) if i not in special] or [0]
        new = torch.tensor(free)[torch.randint(len(free), (len(ids), missing), generator=generator)]
        for name, tensor in inputs.items():
            if (
                not isinstance(tensor, Tensor)
                or tensor.shape[1:2] != ids.shape[1:]
                or (len(tensor) != len(ids) and "mask" not in name)  # one mask for several codebooks of one sound
                or name.startswith("decoder_") == (not prefix)
            ):
                continue
            real = tensor[:, seen.to(tensor.device)]
            more = real[:, -1:].expand(-1, missing, *real.shape[2:])
            if name == f"{prefix}input_ids":
                more = new.to(ids)
            elif name == f"{prefix}inputs_embeds":  # vectors of the size of the given ones
                noise = torch.randn(more.shape, generator=generator, dtype=torch.float64).to(more)
                more = noise * real.norm(dim=-1).mean() / real.shape[-1] ** 0.5
            elif "position" in name:
                more = more + torch.arange(1, missing + 1).to(more)
            long[name] = torch.cat([real, more], dim=1)
    return long


def check_weights(model: nn.Module) -> None:
    """Refuse weights that are not numbers, naming the tensor."""
    offloaded = any(getattr(module, "_hf_hook", None) is not None for module in model.modules())
    for name, parameter in model.named_parameters():
        if parameter.is_meta and offloaded:
            continue  # accelerate brings it when it is used; outputs are checked instead
        if parameter.is_meta:
            raise ModelError(
                f"the weight {name!r} has no data (it is on the meta device): load the model's weights first."
            )
        if not parameter.is_floating_point() or parameter.numel() == 0:
            continue
        low, high = torch.aminmax(parameter.detach())  # NaN wins in both: one pass over the weights tells
        if not bool(torch.isfinite(high - low)):
            bad = int((~torch.isfinite(parameter)).sum())
            raise ModelError(
                f"the weight {name!r} holds {bad} value{'s' * (bad != 1)} that {'are' if bad != 1 else 'is'} NaN or "
                f"infinite, out of {parameter.numel()}: nothing computed from it could be trusted. Load an intact copy."
            )
