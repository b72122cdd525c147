"""The tied key: a key projection that reads the values, K = V·M, and its folding into an ordinary matrix."""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from whence.core.numerics.tolerances import TIED_KEYS
from whence.errors import ModelError

NAMES = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q_proj", "k_proj", "v_proj"), ("q", "k", "v"))
"""What the BERT family calls the three projections of an attention module."""


class TiedKey(nn.Module):
    """Takes the place of a key projection: K = V·M, head by head, with V = x·W_V + b_V of the module beside it.

    The product is folded into one weight on the way, so that a pass costs what the original costs.

    Shapes: `mixing` M (head, d_v, d_k); forward (…, d) → (…, head · d_k).
    """

    def __init__(self, value: nn.Linear, mixing: Tensor) -> None:
        super().__init__()
        self.mixing = nn.Parameter(mixing)
        # In a list, so that torch does not count the value projection's weights a second time as ours.
        self._value = [value]

    def folded(self) -> tuple[Tensor, Tensor | None]:
        """W_K = W_V·M and b_K = b_V·M, laid out as `nn.Linear` keeps them: (head · d_k, d) and (head · d_k,)."""
        value = self._value[0]
        bias: Tensor | None = value.bias
        heads, size, _ = self.mixing.shape
        weight = torch.einsum("hvk,hvd->hkd", self.mixing, value.weight.unflatten(0, (heads, size))).flatten(0, 1)
        if bias is None:
            return weight, None
        return weight, torch.einsum("hvk,hv->hk", self.mixing, bias.unflatten(0, (heads, size))).flatten()

    def forward(self, states: Tensor) -> Tensor:
        weight, bias = self.folded()
        return functional.linear(states, weight, bias)


@dataclass(frozen=True)
class Projections:
    """The three projections of one attention module, and what their attributes are called."""

    module: nn.Module
    path: str
    names: tuple[str, str, str]
    heads: int

    def part(self, i: int) -> nn.Linear:
        linear = getattr(self.module, self.names[i])
        assert isinstance(linear, nn.Linear)
        return linear

    @property
    def query(self) -> nn.Linear:
        return self.part(0)

    @property
    def value(self) -> nn.Linear:
        return self.part(2)

    @property
    def key(self) -> nn.Module:
        module = getattr(self.module, self.names[1])
        assert isinstance(module, nn.Module)
        return module

    def put(self, key: nn.Module) -> None:
        """Set the key projection."""
        setattr(self.module, self.names[1], key)


def projections(model: nn.Module, heads: int) -> list[Projections]:
    """Every attention module of `model` with separate query, key and value projections, in the order of modules.

    Raises `ModelError` where there is none (fused projections, no attention) or where keys and values differ in
    number, as in grouped attention.
    """
    projections = list(_projections(model, heads))
    if not projections:
        raise ModelError(
            f"{type(model).__name__} has no attention module with separate query, key and value projections under any "
            f"of the names {', '.join('/'.join(n) for n in NAMES)}; tie_keys converts encoders of the BERT family."
        )
    return projections


def _projections(model: nn.Module, heads: int) -> Iterator[Projections]:
    for path, module in model.named_modules():
        for names in NAMES:
            parts = [getattr(module, name, None) for name in names]
            if not all(isinstance(part, (nn.Linear, TiedKey)) for part in parts):
                continue
            query, _, value = parts
            assert isinstance(query, nn.Linear)
            assert isinstance(value, nn.Linear)
            if query.out_features != value.out_features or value.out_features % heads:
                raise ModelError(
                    f"in {path!r} queries have {query.out_features} features and values {value.out_features} for "
                    f"{heads} heads: tie_keys needs one value head for every query head."
                )
            yield Projections(module, path, names, heads)


def tie(places: list[Projections], mixing: list[Tensor]) -> list[TiedKey]:
    """Replace every key projection by its values times M."""
    tied = []
    for place, matrix in zip(places, mixing, strict=True):
        key = TiedKey(place.value, matrix.to(place.value.weight))
        place.put(key)
        tied.append(key)
    return tied


@torch.no_grad()
def fold(places: list[Projections]) -> list[Tensor]:
    """Put an ordinary linear layer with W_K = W_V·M in the place of every tied key; gives back the matrices M.

    The product is taken in float64, so that what is stored is the tied key rounded once.
    """
    matrices = []
    for place in places:
        key = place.key
        assert isinstance(key, TiedKey)
        value = place.value
        heads, size, width = key.mixing.shape
        mixing = key.mixing.double()
        plain = nn.Linear(value.in_features, heads * width, bias=value.bias is not None).to(value.weight)
        by_head = value.weight.double().unflatten(0, (heads, size))
        plain.weight.copy_(torch.einsum("hvk,hvd->hkd", mixing, by_head).flatten(0, 1))
        if value.bias is not None:
            plain.bias.copy_(
                torch.einsum("hvk,hv->hk", mixing, value.bias.double().unflatten(0, (heads, size))).flatten()
            )
        plain.requires_grad_(value.weight.requires_grad)
        place.put(plain)
        matrices.append(key.mixing.detach().clone())
    return matrices


@torch.no_grad()
def unfold(places: list[Projections]) -> list[Tensor]:
    """M of every key projection that is already a linear map of its values: the least squares W_V·M ≈ W_K, by head.

    Raises `ModelError` where more than rounding is left over.
    """
    matrices = []
    for place in places:
        key = place.key
        assert isinstance(key, nn.Linear)
        value = place.value.weight.double().unflatten(0, (place.heads, -1)).mT  # (head, d, d_v)
        wanted = key.weight.double().unflatten(0, (place.heads, -1)).mT  # (head, d, d_k)
        mixing = torch.linalg.lstsq(value, wanted, driver="gelsd").solution
        left = torch.linalg.matrix_norm(wanted - value @ mixing) / torch.linalg.matrix_norm(wanted)
        if float(left.max()) > TIED_KEYS:
            raise ModelError(
                f"the keys of {place.path!r} are no function of its values ({float(left.max()):.1e} is left over): "
                "start from a model that tie_keys has made."
            )
        matrices.append(mixing)
    return matrices
