"""Matrices small enough to send: integers with a scale, packed and compressed into self-describing blocks.

A block is zlib-compressed: a 4-byte little-endian length, a JSON header that names the arrays, then their bytes. An
array of 16 bits is stored as its low bytes followed by its high bytes, which compresses better. To read one back:

    value = scale · sign(q) · (|q| / levels)^power
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from whence.errors import InputError

Toward = Literal["nearest", "down", "up"]


@dataclass(frozen=True)
class Quantised:
    """Integers of 8 or 16 bits and what they mean."""

    integers: np.ndarray[Any, np.dtype[Any]]
    scale: float
    levels: int
    power: int

    @property
    def values(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """What a reader gets back."""
        q = self.integers.astype(np.float64)
        return np.asarray(np.sign(q) * self.scale * (np.abs(q) / self.levels) ** self.power, dtype=np.float64)

    def header(self) -> dict[str, Any]:
        kind = {"u": "uint", "i": "int"}[self.integers.dtype.kind] + str(8 * self.integers.dtype.itemsize)
        return {
            "type": kind, "shape": list(self.integers.shape),
            "scale": self.scale, "levels": self.levels, "power": self.power,
        }  # fmt: skip

    def tobytes(self) -> bytes:
        plain = np.ascontiguousarray(self.integers)
        if plain.dtype.itemsize == 1:
            return plain.tobytes()
        pairs = plain.astype(plain.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, 2)
        return pairs[:, 0].tobytes() + pairs[:, 1].tobytes()


def quantise(
    values: Tensor,
    *,
    bits: int = 16,
    levels: int | None = None,
    root: bool = False,
    scale: float | None = None,
    toward: Toward = "nearest",
) -> Quantised:
    """Real numbers as integers of `bits` bits; signed where some are negative.

    root: steps even in the square root, so that small weights keep their shade. levels: fewer steps than the bits
    allow. toward: "down" or "up" rounds to a bound that is still valid. scale: the largest magnitude, when known.

    >>> quantise(torch.tensor([0.0, 0.5, 1.0]), bits=8).integers.tolist()
    [0, 128, 255]
    """
    if bits not in (8, 16):
        raise InputError(f"bits={bits} is not 8 or 16.")
    plain = values.detach().to("cpu", torch.float64).numpy()
    if not np.isfinite(plain).all():
        plain = np.nan_to_num(plain, nan=0.0, posinf=0.0, neginf=0.0)
    signed = bool((plain < 0).any())
    most = 2 ** (bits - signed) - 1
    steps = most if levels is None else min(levels, most)
    if scale is None:
        scale = float(np.abs(plain).max(initial=0.0)) or 1.0
    share = np.clip(plain / scale, -1.0, 1.0)
    power = 2 if root else 1
    if root:
        share = np.sign(share) * np.sqrt(np.abs(share))
    rounded = {"nearest": np.rint, "down": np.floor, "up": np.ceil}[toward](share * steps)
    return Quantised(rounded.astype(np.dtype(f"{'i' if signed else 'u'}{bits // 8}")), scale, steps, power)


def whole_numbers(values: Tensor) -> Quantised:
    """Positions and counts below 65,536, as they are."""
    return Quantised(values.cpu().numpy().astype(np.uint16), 65535.0, 65535, 1)


def pack(arrays: Mapping[str, Quantised], about: Mapping[str, Any] | None = None, *, effort: int = 6) -> bytes:
    """One compressed block of named arrays; `about`: further plain data for its header."""
    header = json.dumps({"arrays": {name: a.header() for name, a in arrays.items()}, **(about or {})}).encode()
    body = b"".join(a.tobytes() for a in arrays.values())
    return zlib.compress(struct.pack("<I", len(header)) + header + body, effort)


def unpack(block: bytes) -> tuple[dict[str, np.ndarray[Any, np.dtype[np.float64]]], dict[str, Any]]:
    """The arrays of a block, as a reader gets them back, and its header."""
    plain = zlib.decompress(block)
    (length,) = struct.unpack_from("<I", plain)
    header = json.loads(plain[4 : 4 + length])
    place, found = 4 + length, {}
    for name, about in header["arrays"].items():
        dtype = np.dtype(about["type"])
        count = int(np.prod(about["shape"]))
        data = np.frombuffer(plain, np.uint8, count * dtype.itemsize, place)
        if dtype.itemsize == 2:
            data = np.ascontiguousarray(data.reshape(2, count).T).reshape(-1)
        place += count * dtype.itemsize
        integers = data.view(dtype.newbyteorder("<")).reshape(about["shape"])
        found[name] = Quantised(integers, about["scale"], about["levels"], about["power"]).values
    return found, header
