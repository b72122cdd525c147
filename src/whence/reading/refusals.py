"""Sentences that several refusals share."""

from __future__ import annotations

from whence.errors import WiringError


def refuse_following(what: str, mixes: str | None) -> None:
    """The refusal of measures that follow tokens through the layers by way of attention; `mixes`: why, if so."""
    if mixes is not None:
        raise WiringError(
            f"{what} follows tokens through the layers by way of attention, but {mixes}. Attention, identifiability, "
            "certificates and each layer's own contributions of its attention block are right; from input to output use "
            "hidden-token-attribution, gradients or occlusion."
        )


def ranges(numbers: tuple[int, ...]) -> str:
    """ "0 … 5" for people, where the numbers follow each other."""
    if numbers and numbers == tuple(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2:
        return f"{numbers[0]} … {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
