"""The state of a distillation on disk: written whole, checked before it is believed, and tied to its run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from whence.errors import InputError
from whence.results.files import regular_target
from whence.results.run_identity import RunIdentity
from whence.results.tensor_file import load_tensors, save_tensors, understood

KIND = "distillation checkpoint"


@dataclass
class History:
    """What distillation went through."""

    losses: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """The file of one distillation: the trained weights, the optimiser's state, and the identity of the run."""

    path: Path
    identity: RunIdentity
    model: nn.Module
    optimiser: torch.optim.Optimizer

    def save(self, step: int, history: History) -> None:
        """Replace the file by the state after `step` steps."""
        tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        for number, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{number}.{name}": value for name, value in state.items()}
        header = {
            "identity": self.identity.to_dict(),
            "step": step,
            "losses": history.losses,
            "cpu_seconds": history.cpu_seconds,
        }
        save_tensors(self.path, KIND, tensors, header)

    def resume(self) -> tuple[int, History]:
        """Take up the state in the file, if there is one, and give the step to go on with and what went before."""
        if not regular_target(self.path).exists():
            return 0, History()
        try:
            tensors, header = load_tensors(self.path, KIND)
        except InputError as problem:
            raise InputError(f"{problem} Without {str(self.path)!r} the run begins anew.") from problem
        with understood(self.path, KIND):
            there = RunIdentity.from_dict(header["identity"])
        self.identity.refuse_other(there, self.path)
        with understood(self.path, KIND):
            own = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            with torch.no_grad():
                for name, parameter in own.items():
                    parameter.copy_(tensors[f"model.{name}"])
            state: dict[int, dict[str, torch.Tensor]] = {}
            for name, value in tensors.items():
                if name.startswith("optimiser."):
                    _, number, part = name.split(".")
                    state.setdefault(int(number), {})[part] = value
            groups = self.optimiser.state_dict()["param_groups"]
            self.optimiser.load_state_dict({"state": state, "param_groups": groups})
            return int(header["step"]), History(list(header["losses"]), float(header["cpu_seconds"]))
