"""The state of a long measurement on disk: what was fitted of each layer, target and part, one file for each.

A run that was stopped runs the model again, which takes little of its time, and goes on with the first file missing. Files are
written whole and checked before they are believed; the folder belongs to one run (`whence.results.run_folder`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from whence.errors import InputError
from whence.results.run_folder import RunFolder
from whence.results.tensor_file import load_tensors, save_tensors, understood
from whence.tokens.maps import Affine, Map, Perceptron
from whence.tokens.result import TokenIdentifiability

KIND = "fitted maps"
RESULT = "result.safetensors"
FITTED = "fitted-*.safetensors"
FILES = (FITTED, RESULT)


@dataclass(frozen=True)
class FittedCell:
    """What one layer, target and part gave: `arrays` (hits, epochs, control), the maps, and plain facts about them."""

    arrays: dict[str, Tensor]
    maps: dict[tuple[str, str], Map]  # (map, distance)
    facts: dict[str, Any]


@dataclass(frozen=True)
class FittedMaps:
    """The folder of one measurement."""

    folder: RunFolder

    def load(self, layer: int, target: int, part: str) -> FittedCell | None:
        """What was fitted for this layer, target and part before; None if nothing was."""
        path = self._path(layer, target, part)
        if not path.exists():
            return None
        try:
            tensors, header = load_tensors(path, KIND)
        except InputError as problem:
            raise InputError(f"{problem} Without {str(path)!r} it is fitted anew.") from problem
        with understood(path, KIND):
            names: dict[tuple[str, str], dict[str, Tensor]] = {}
            arrays = {}
            for name, tensor in tensors.items():
                kind, _, rest = name.partition("/")
                if kind == "map":
                    key, distance, entry = rest.split("/")
                    names.setdefault((key, distance), {})[entry] = tensor
                else:
                    arrays[name] = tensor
            return FittedCell(arrays, {key: _map(parts) for key, parts in names.items()}, header["facts"])

    def save(self, layer: int, target: int, part: str, fitted: FittedCell) -> None:
        """Keep what was fitted."""
        tensors = dict(fitted.arrays)
        for (name, distance), g in fitted.maps.items():
            tensors |= {f"map/{name}/{distance}/{entry}": tensor for entry, tensor in _tensors(g).items()}
        save_tensors(self._path(layer, target, part), KIND, tensors, {"facts": fitted.facts})

    def result(self) -> TokenIdentifiability:
        """What the finished run measured."""
        return TokenIdentifiability.load(self.folder.path / RESULT)

    def finish(self, result: TokenIdentifiability) -> None:
        """Keep the result, and remove what is no longer needed for it."""
        result.save(self.folder.path / RESULT)
        self.folder.finish([RESULT])
        self.tidy()

    def tidy(self) -> None:
        """Remove the maps of a finished run: a kill may have come between its end and this."""
        for path in self.folder.path.glob(FITTED):
            path.unlink(missing_ok=True)

    def _path(self, layer: int, target: int, part: str) -> Path:
        return self.folder.path / f"fitted-{layer}-{target:+d}-{part}.safetensors"


def _tensors(g: Map) -> dict[str, Tensor]:
    linear = g.linear if isinstance(g, Perceptron) else g
    assert isinstance(linear, Affine)  # the identity is fitted to nothing
    hidden = {"into": g.into, "into_bias": g.into_bias, "out": g.out} if isinstance(g, Perceptron) else {}
    return {"mean": linear.mean, "spread": linear.spread, "weight": linear.weight, "bias": linear.bias, **hidden}


def _map(parts: dict[str, Tensor]) -> Map:
    linear = Affine(parts["mean"], parts["spread"], parts["weight"], parts["bias"])
    return Perceptron(linear, parts["into"], parts["into_bias"], parts["out"]) if "into" in parts else linear
