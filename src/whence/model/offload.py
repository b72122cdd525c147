"""Models whose weights accelerate keeps elsewhere (on another device or on disk) until a module runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def device_of(model: nn.Module) -> torch.device:
    """Where the model takes its inputs: where its first weight is, or where accelerate brings offloaded weights."""
    for module in model.modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    weights = (t for t in chain(model.parameters(), model.buffers()) if not t.is_meta)
    return next((t.device for t in weights), torch.device("cpu"))


def parameters_of(module: nn.Module) -> list[Tensor]:
    """A module's weights; those that are offloaded are fetched from where accelerate keeps them."""
    weights = []
    for name, parameter in module.named_parameters():
        owner, _, own_name = name.rpartition(".")
        maps = _weight_maps(module.get_submodule(owner)) if parameter.is_meta else iter(())
        stored = next((m[own_name] for m in maps), parameter)
        weights.append(stored.detach())
    return weights


def _weight_maps(module: nn.Module) -> Iterator[Any]:
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        weights = getattr(one, "weights_map", None)
        if weights is not None:
            yield weights


def stored_elsewhere(module: nn.Module) -> tuple[list[Tensor], list[Hashable]]:
    """The weights that accelerate keeps for this module: tensors in memory, and the state of the files on disk."""
    tensors: list[Tensor] = []
    files: list[Hashable] = []
    for weights in _weight_maps(module):
        prefix = ""
        while hasattr(weights, "dataset"):  # a view of all weights under a prefix
            prefix, weights = weights.prefix + prefix, weights.dataset
        held = weights if isinstance(weights, dict) else getattr(weights, "state_dict", {})
        tensors += [t for name, t in held.items() if name.startswith(prefix) and isinstance(t, Tensor)]
        for name, entry in getattr(weights, "index", {}).items():
            if name.startswith(prefix):
                path = Path(entry.get("safetensors_file") or Path(weights.save_folder) / f"{name}.dat")
                found = path.stat()
                files.append((name, found.st_mtime_ns, found.st_size))
    return tensors, files
