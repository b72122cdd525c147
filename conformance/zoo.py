"""The zoo: every text family of transformers, tiny and random, to prove the reader on.

>>> from conformance.zoo import build
>>> build("bert").run().shape
torch.Size([1, 12, 120])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from conformance.families import Family, families, variants
from conformance.inputs import make_inputs
from conformance.overrides import NOTES, OVERRIDES
from conformance.perturb import perturb
from conformance.shrink import shrink

__all__ = ["CannotBuild", "Family", "Specimen", "UnknownFamily", "build", "families", "find", "variants"]


class UnknownFamily(KeyError):
    """No family of this transformers has the name; an older one lacks some."""


class CannotBuild(RuntimeError):
    """A family that is not built or does not run; the message is the reason, true and complete."""


@dataclass(frozen=True)
class Specimen:
    """One small model with inputs: evaluated, float32, every parameter off its starting value."""

    family: str
    model: PreTrainedModel
    inputs: dict[str, Tensor]
    note: str = ""

    @torch.no_grad()
    def run(self) -> Tensor:
        """The output on the specimen's inputs: logits where it has a head, else final states."""
        return first_tensor(self.model(**self.inputs))


def first_tensor(output: ModelOutput | tuple[object, ...]) -> Tensor:
    """Logits if the output has them, else its last hidden state, else its first tensor of floats."""
    for name in ("logits", "last_hidden_state"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    values = output.to_tuple() if isinstance(output, ModelOutput) else output
    return next(v for v in values if isinstance(v, Tensor) and v.is_floating_point())


def find(name: str) -> Family:
    """The family (or variant, as `bert:causal`) of that name."""
    for family in [*families(), *variants()]:
        if family.name == name:
            return family
    raise UnknownFamily(f"no family is called {name!r}; `python -m conformance --list` prints the names")


def small_config(family: Family, chosen: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """The family's small config, overrides and what is `chosen` applied, caches off."""
    overrides = {**OVERRIDES.get(family.model_type, {}), **(chosen or {})}
    if family.name.endswith(":causal"):
        overrides |= {"is_decoder": True, "is_encoder_decoder": False}
    return shrink(family.config_class(), overrides)


def _instantiate(family: Family, config: PretrainedConfig) -> tuple[PreTrainedModel, str]:
    """The model, on eager attention where the family allows it, and a note where it does not."""
    make: Any = family.model_class()._from_config
    try:
        return make(config, attn_implementation="eager", dtype=torch.float32), ""
    except (ValueError, TypeError, ImportError) as error:
        if "attn" not in str(error) and "attention" not in str(error):
            raise
        return make(config, dtype=torch.float32), f"eager refused: {error}"


def build(family: Family | str, seed: int = 0, chosen: Mapping[str, Any] | None = None) -> Specimen:
    """Build one family small, perturb it, run it twice; handed over only if finite and repeating itself.

    Raises CannotBuild with the true reason otherwise. The global random state is left as it was.
    """
    family = find(family) if isinstance(family, str) else family
    if family.skip is not None:
        raise CannotBuild(family.skip)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model, note = _instantiate(family, small_config(family, chosen))
            model.eval()  # type: ignore[no-untyped-call]
            perturb(model, seed)
            note = note or NOTES.get(family.model_type, "")
            specimen = Specimen(family.name, model, make_inputs(family, model, seed), note)
            first, second = specimen.run(), specimen.run()
        except Exception as error:
            raise CannotBuild(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    if not torch.isfinite(first).all():
        raise CannotBuild("the plain forward is not finite")
    if not torch.equal(first, second):
        worst = float((first - second).abs().max())
        raise CannotBuild(f"the plain forward does not repeat itself (largest difference {worst:.1e})")
    return specimen
