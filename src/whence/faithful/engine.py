"""The model's output with any set of units removed: every set runs once, in batches sorted by length.

A set of units is a Python integer, bit u for unit u. `drop` deletes the ids of its units (the text is never tokenised
again), `mask` puts the mask token in their place. Special tokens and the asking position always stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.core.numerics.tolerances import SAME_LOGITS
from whence.errors import InputError, ModelError
from whence.faithful.question import TextQuestion
from whence.model.load import Model
from whence.reading.capture.attach import accepted, evaluating, lock_of
from whence.reading.tokenised import input_embedding

OPERATORS = ("drop", "mask")
TOKENS_A_BATCH = 8192
LOGITS_A_BATCH = 1 << 26  # numbers; a language model's output has a vocabulary for every token
PADDING = 0.1  # the largest share of padding in a batch, unless another call would cost more than the padding
CALL = 5e7  # what a call costs besides its tokens, in multiplications: some milliseconds of Python and kernel launches

Value = tuple[float, bool]
"""The watched output, and whether the model's own choice is another than the target."""


def full(n: int) -> int:
    """The set of all n units."""
    return (1 << n) - 1


@dataclass
class Engine:
    """Runs a model on texts with units removed and remembers every output of the text at hand."""

    model: Model
    asked: int = 0
    """How many sets were asked for."""
    runs: int = 0
    """How many inputs the model was run on."""
    _values: dict[tuple[str, str, int], Value] = field(default_factory=dict, repr=False)
    _padding: int | None = field(default=None, repr=False)

    def values(self, question: TextQuestion, operator: str, sets: Iterable[int]) -> dict[int, Value]:
        """The output for each set of removed units."""
        wanted = list(sets)
        self.asked += len(wanted)
        unknown = [s for s in dict.fromkeys(wanted) if (question.key, operator, s) not in self._values]
        if unknown:
            # Two sets can leave equal ids ("a a b" without either "a"): those run once, too.
            rows: dict[bytes, list[int]] = {}
            variants = dict(zip(unknown, variants_of(self.model, question, operator, unknown), strict=True))
            for s, (ids, kept) in variants.items():
                rows.setdefault(ids.tobytes() + b"|" + _kept_types(question, kept), []).append(s)
            found = self._run(question, [variants[same[0]] for same in rows.values()])
            for same, value in zip(rows.values(), found, strict=True):
                self._values.update({(question.key, operator, s): value for s in same})
        return {s: self._values[question.key, operator, s] for s in wanted}

    def outputs(self, question: TextQuestion, operator: str, sets: Sequence[int]) -> np.ndarray[Any, Any]:
        """The outputs alone, in the order of the sets."""
        found = self.values(question, operator, sets)
        return np.array([found[s][0] for s in sets])

    def whole(self, question: TextQuestion) -> Tensor:
        """The logits of the whole text."""
        with lock_of(self.model.model), evaluating(self.model.model):
            return self._logits(question, variants_of(self.model, question, "drop", [0]))[0]

    def forget(self) -> None:
        """Forget the outputs of the texts so far."""
        self._values.clear()

    def _run(self, question: TextQuestion, variants: list[Variant]) -> list[Value]:
        values: list[Value | None] = [None] * len(variants)
        lengths = [len(kept) for _, kept in variants]
        with lock_of(self.model.model), evaluating(self.model.model):
            if self._padding is None:
                self._padding = self._batch_kind(question)
            for batch in batches(lengths, self._limit(), self._padding, self._call):
                logits = self._logits(question, [variants[i] for i in batch])
                for i, value in zip(batch, watch(question, logits), strict=True):
                    values[i] = value
        self.runs += len(variants)
        return [v for v in values if v is not None]

    @cached_property
    def _call(self) -> float:
        """How many tokens cost as much as one call: many for a tiny model, few for a large one."""
        table = input_embedding(self.model.model)
        tables = 0 if table is None else table.weight.numel()
        weights = sum(p.numel() for p in self.model.model.parameters())
        return CALL / float(max(1, weights - tables))

    def _limit(self) -> int:
        vocabulary = getattr(getattr(self.model.model, "config", None), "vocab_size", None) or 1
        return min(TOKENS_A_BATCH, max(1, LOGITS_A_BATCH // int(vocabulary)))

    def _batch_kind(self, question: TextQuestion) -> int:
        """2: batches may be padded, 1: only equal lengths run together, 0: one by one. Tried on this very text."""
        whole, short = variants_of(self.model, question, "drop", [0, full(len(question.units)) >> 1])
        alone = self._logits(question, [whole])
        scale = SAME_LOGITS * float(alone.abs().max().clamp(min=1.0))
        for kind, mate in ((2, short), (1, whole)):
            together = self._logits(question, [whole, mate])[:1]
            if float((together - alone).abs().max()) <= scale:
                return kind
        return 0

    def _logits(self, question: TextQuestion, variants: Sequence[Variant]) -> Tensor:
        """(batch, classes or vocabulary), float64, of variants padded on the right."""
        width = max(len(kept) for _, kept in variants)
        device = self.model.device
        inputs: dict[str, Tensor] = {}
        for name, tensor in question.prepared.inputs.items():
            along = (
                tensor.dim() == 2 and not name.startswith("decoder_") and tensor.shape[1] == question.prepared.length
            )
            if name in ("input_ids", "attention_mask"):
                continue
            if along:
                row = tensor[0].numpy()
                inputs[name] = _padded([row[kept] for _, kept in variants], width, 0)
            else:
                inputs[name] = tensor.expand(len(variants), *tensor.shape[1:])
        inputs["input_ids"] = _padded([ids for ids, _ in variants], width, self.model.pad_id)
        inputs["attention_mask"] = _padded([np.ones(len(kept), dtype=np.int64) for _, kept in variants], width, 0)
        given = {name: tensor.to(device) for name, tensor in inputs.items()}
        output = self.model.model(**accepted(self.model.model, given))
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise InputError(
                f"{self.model.name} makes no prediction (it has no head), so nothing can be watched while words are "
                "removed: load it with a task, such as 'text-classification' or 'fill-mask'."
            )
        if logits.dim() == 3:
            rows = torch.arange(len(variants), device=logits.device)
            logits = logits[rows, torch.tensor(_read_at(question, variants, logits.shape[1]), device=logits.device)]
        logits = logits.detach().to("cpu", torch.float64)
        if not bool(logits.isfinite().all()):
            raise ModelError(f"{self.model.name} gave numbers that are not finite for a text with units removed.")
        return logits


Variant = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""The ids that remain, and the positions of the whole text they come from."""


def variants_of(model: Model, question: TextQuestion, operator: str, sets: Sequence[int]) -> list[Variant]:
    """The ids of the text without the units of each set."""
    if operator not in OPERATORS:
        raise InputError(f"operator {operator!r} is not one of {', '.join(OPERATORS)}.")
    ids = question.prepared.inputs["input_ids"][0].numpy()
    units = question.units.positions
    member = np.zeros((len(units), len(ids)), dtype=bool)
    for u, tokens in enumerate(units):
        member[u, list(tokens)] = True
    size = max(1, (len(units) + 7) // 8)
    packed = np.frombuffer(b"".join(s.to_bytes(size, "little") for s in sets), dtype=np.uint8).reshape(len(sets), size)
    bits = np.unpackbits(packed, axis=1, count=len(units), bitorder="little")
    gone = (bits @ member.astype(np.uint8)).astype(bool)
    places = np.arange(len(ids))
    if operator == "drop":
        return [(ids[kept], places[kept]) for kept in ~gone]
    masked = np.where(gone, mask_id(model), ids)
    return [(row, places) for row in masked]


def mask_id(model: Model) -> int:
    """What stands for a removed token under `mask`: the mask token, else the padding token, else the unknown one."""
    for name in ("mask_token_id", "pad_token_id", "unk_token_id", "eos_token_id"):
        mask = getattr(model.tokenizer, name, None)
        if isinstance(mask, int):
            return mask
    raise InputError(f"{model.name} has no mask, padding or unknown token: use operators=('drop',) (--operators drop).")


def watch(question: TextQuestion, logits: Tensor) -> list[Value]:
    """p(target), or logit(target) − logit(foil), of every row, and whether the model now prefers something else."""
    target, foil = question.target, question.foil
    if foil is None:
        values, other = torch.softmax(logits, dim=-1)[:, target], logits.argmax(-1) != target
    else:
        values = logits[:, target] - logits[:, foil]
        other = values < 0
    return list(zip(values.tolist(), other.tolist(), strict=True))


def batches(lengths: Sequence[int], limit: int, kind: int, call: float = 0.0) -> Iterator[list[int]]:
    """Indices in batches of similar length, the longest first; `call` is what another batch costs, in tokens."""
    batch: list[int] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch:
            width, size = lengths[batch[0]], lengths[batch[0]] * (len(batch) + 1)
            padding = size - tokens - lengths[i]
            fits = size <= limit and (padding <= PADDING * size or padding <= call)
            if kind == 0 or not fits or (kind == 1 and lengths[i] != width):
                yield batch
                batch, tokens = [], 0
        batch.append(i)
        tokens += lengths[i]
    if batch:
        yield batch


def _read_at(question: TextQuestion, variants: Sequence[Variant], length: int) -> list[int]:
    if question.position is None:  # an encoder–decoder: where its decoder stands
        return [length - 1] * len(variants)
    return [int(np.searchsorted(kept, question.position)) for _, kept in variants]


def _kept_types(question: TextQuestion, present: np.ndarray[Any, Any]) -> bytes:
    """What else besides the ids tells two inputs apart: their segments, and where the asking position is."""
    types = question.prepared.inputs.get("token_type_ids")
    segments = b"" if types is None else types[0].numpy()[present].tobytes()
    return segments + b"|%d" % (-1 if question.position is None else int(np.searchsorted(present, question.position)))


def _padded(rows: Sequence[np.ndarray[Any, Any]], width: int, fill: int) -> Tensor:
    made = np.full((len(rows), width), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        made[i, : len(row)] = row
    return torch.from_numpy(made)
