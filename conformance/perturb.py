"""Move every parameter off its symmetric starting value, so that a mistake in reading it cannot hide.

At initialisation biases are 0, gains 1, layer scales tiny and attention nearly uniform: a reader that forgot
the bias or the gain would still look right. Here each parameter gets a scale of its own kind.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

BIAS, GAIN, EMBEDDING, SCALAR = 0.1, 0.2, 0.7, 0.5
_EMBEDDING_WORDS = ("embed", "token", "position", "latents", "query_tokens")
_SCALED_IN_FORWARD = {"ctrl", "gemma", "gemma2", "recurrent_gemma", "t5gemma", "vaultgemma"}
_TEMPERATURES = ("temp", "softmax_scaling.scale")  # start at 0 or empty, and multiply the queries or keys
_STATE_SPACE = ("A_log", "dt_bias", "time_decay", "time_first", "time_mix", "lambda", "recurrent_param")


def _fan_in(module: nn.Module, weight: Tensor) -> float:
    """Inputs feeding one output. Stacked experts do not say which axis is which: take the geometric mean."""
    if type(module).__name__ == "Conv1D":  # GPT-2's, stored input first
        return float(weight.shape[0])
    if isinstance(module, nn.Linear | nn.Bilinear) or weight.dim() == 2:
        return float(weight.shape[-1])
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return float(weight[0].numel())
    return math.sqrt(weight.shape[-1] * weight.shape[-2])


def _drawn(name: str, module: nn.Module, start: Tensor, noise: Tensor) -> Tensor:
    """The new value of one parameter, from its name, module, value at initialisation and N(0, 1) noise."""
    leaf = name.rsplit(".", 1)[-1]
    known = bool(torch.isfinite(start).all())
    constant = known and start.numel() > 0 and bool((start == start.flatten()[0]).all())
    if name.endswith(_TEMPERATURES):
        return 1 + GAIN * noise
    if any(word in leaf for word in _STATE_SPACE):
        return start + 0.1 * noise if known else 0.1 * noise
    if isinstance(module, nn.Embedding):
        return EMBEDDING * noise
    if leaf == "bias" or leaf.endswith("_bias"):
        return BIAS * noise
    if "norm" in type(module).__name__.lower() and (constant or start.dim() == 1):
        return GAIN * noise + (float(start.mean().round()) if known else 1.0)
    is_table = any(word in name.lower() for word in _EMBEDDING_WORDS) and not leaf.startswith("weight")
    if start.dim() >= 2 and is_table:
        return EMBEDDING * noise
    if start.dim() >= 2 and (leaf.startswith(("weight", "kernel")) or not constant):
        return noise / math.sqrt(_fan_in(module, start))
    if constant:  # gates and sinks start at 0; layer scales at 1 or 1e-5, where their branch would not show
        return SCALAR * noise if not start.any() else 1 + GAIN * noise
    return start + GAIN * noise if known else GAIN * noise


def _scales_embeddings(model: PreTrainedModel, module: nn.Module) -> bool:
    """Whether the model multiplies this table's rows by √width, which would drown its attention branches."""
    config = model.config
    vocabulary = getattr(config.get_text_config(), "vocab_size", 0)
    words = isinstance(module, nn.Embedding) and module.num_embeddings >= vocabulary > 0
    scales = getattr(config, "scale_embedding", False) or config.model_type in _SCALED_IN_FORWARD
    return words and (scales or getattr(module, "embed_scale", 1.0) != 1.0)


@torch.no_grad()
def perturb(model: PreTrainedModel, seed: int = 0) -> None:
    """Redraw every parameter of `model` in place, the same for the same seed. Tied parameters stay tied.

    Frozen tables (sinusoids) are kept: they are not symmetric, and some models rely on what is in them.
    """
    generator = torch.Generator().manual_seed(seed)
    owners = {
        f"{prefix}.{leaf}" if prefix else leaf: module
        for prefix, module in model.named_modules()
        for leaf in module._parameters
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and parameter.std() > 0:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if _scales_embeddings(model, owners[name]):
            noise /= parameter.shape[-1] ** 0.5
        parameter.copy_(_drawn(name, owners[name], parameter.detach().float(), noise))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(BIAS * torch.randn(buffer.shape, generator=generator))
