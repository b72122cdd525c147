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
        self.prepare([(question, operator, wanted)])
        return {s: self._values[question.key, operator, s] for s in wanted}

    def prepare(self, asked: Iterable[tuple[TextQuestion, str, Iterable[int]]]) -> None:
        """Find and keep the outputs of several questions, those of short texts in the same batches."""
        rows: dict[bytes, list[tuple[str, str, int]]] = {}
        first: list[Row] = []
        for question, operator, sets in asked:
            unknown = [s for s in dict.fromkeys(sets) if (question.key, operator, s) not in self._values]
            for s, variant in zip(unknown, variants_of(self.model, question, operator, unknown), strict=True):
                # Two sets can leave equal ids ("a a b" without either "a"): those run once, too.
                same = rows.setdefault(_content(question, variant), [])
                if not same:
                    first.append((question, variant))
                same.append((question.key, operator, s))
        for keys, value in zip(rows.values(), self._run(first), strict=True):
            self._values.update(dict.fromkeys(keys, value))

    def outputs(self, question: TextQuestion, operator: str, sets: Sequence[int]) -> np.ndarray[Any, Any]:
        """The outputs alone, in the order of the sets."""
        found = self.values(question, operator, sets)
        return np.array([found[s][0] for s in sets])

    def whole(self, question: TextQuestion) -> Tensor:
        """The logits of the whole text."""
        with lock_of(self.model.model), evaluating(self.model.model):
            return self._logits([(question, v) for v in variants_of(self.model, question, "drop", [0])])[0]

    def forget(self) -> None:
        """Forget the outputs of the texts so far."""
        self._values.clear()

    def _run(self, rows: list[Row]) -> list[Value]:
        if not rows:
            return []
        values: list[Value | None] = [None] * len(rows)
        together: dict[object, list[int]] = {}
        for i, (question, _) in enumerate(
            rows
        ):  # what other inputs a text has must be the same for all rows of a batch
            together.setdefault(None if set(question.prepared.inputs) <= SHARED else question.key, []).append(i)
        with lock_of(self.model.model), evaluating(self.model.model):
            if self._padding is None:
                self._padding = self._batch_kind(rows[0][0])
            for group in together.values():
                lengths = [len(rows[i][1][1]) for i in group]
                for batch in batches(lengths, self._limit(), self._padding, self._call):
                    chosen = [rows[group[i]] for i in batch]
                    for i, value in zip(batch, watch([q for q, _ in chosen], self._logits(chosen)), strict=True):
                        values[group[i]] = value
        self.runs += len(rows)
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
        alone = self._logits([(question, whole)])
        scale = SAME_LOGITS * float(alone.abs().max().clamp(min=1.0))
        for kind, mate in ((2, short), (1, whole)):
            together = self._logits([(question, whole), (question, mate)])[:1]
            if float((together - alone).abs().max()) <= scale:
                return kind
        return 0

    def _logits(self, rows: Sequence[Row]) -> Tensor:
        """(batch, classes or vocabulary), float64, of variants padded on the right."""
        width = max(len(kept) for _, (_, kept) in rows)
        device = self.model.device
        inputs: dict[str, Tensor] = {}
        asks = rows[0][0]
        for name, tensor in asks.prepared.inputs.items():
            along = tensor.dim() == 2 and not name.startswith("decoder_") and tensor.shape[1] == asks.prepared.length
            if name in ("input_ids", "attention_mask"):
                continue
            if along:
                inputs[name] = _padded([q.prepared.inputs[name][0].numpy()[kept] for q, (_, kept) in rows], width, 0)
            else:
                inputs[name] = tensor.expand(len(rows), *tensor.shape[1:])
        inputs["input_ids"] = _padded([ids for _, (ids, _) in rows], width, self.model.pad_id)
        inputs["attention_mask"] = _padded([np.ones(len(kept), dtype=np.int64) for _, (_, kept) in rows], width, 0)
        given = {name: tensor.to(device) for name, tensor in inputs.items()}
        output = self.model.model(**accepted(self.model.model, given))
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise InputError(
                f"{self.model.name} makes no prediction (it has no head), so nothing can be watched while words are "
                "removed: load it with a task, such as 'text-classification' or 'fill-mask'."
            )
        if logits.dim() == 3:
            places = torch.tensor(_read_at(rows, logits.shape[1]), device=logits.device)
            logits = logits[torch.arange(len(rows), device=logits.device), places]
        logits = logits.detach().to("cpu", torch.float64)
        if not bool(logits.isfinite().all()):
            raise ModelError(f"{self.model.name} gave numbers that are not finite for a text with units removed.")
        return logits


Variant = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""The ids that remain, and the positions of the whole text they come from."""

Row = tuple[TextQuestion, Variant]

SHARED = {"input_ids", "attention_mask", "token_type_ids"}
"""Inputs that rows of several texts can have in one batch."""


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


def watch(questions: Sequence[TextQuestion], logits: Tensor) -> list[Value]:
    """p(target), or logit(target) − logit(foil), of every row, and whether the model now prefers something else."""
    rows = torch.arange(len(questions))
    targets = torch.tensor([q.target for q in questions])
    if questions[0].foil is None:
        values, other = torch.softmax(logits, dim=-1)[rows, targets], logits.argmax(-1) != targets
    else:
        values = logits[rows, targets] - logits[rows, torch.tensor([q.foil for q in questions])]
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


def _read_at(rows: Sequence[Row], length: int) -> list[int]:
    """Where each row's prediction stands; at the end of the decoder for an encoder–decoder."""
    return [length - 1 if q.position is None else int(np.searchsorted(kept, q.position)) for q, (_, kept) in rows]


def _content(question: TextQuestion, variant: Variant) -> bytes:
    """What tells two rows apart: ids, segments, where the asking position is, and what is watched; else the question."""
    ids, present = variant
    types = question.prepared.inputs.get("token_type_ids")
    segments = b"" if types is None else types[0].numpy()[present].tobytes()
    asks = -1 if question.position is None else int(np.searchsorted(present, question.position))
    whose = "" if set(question.prepared.inputs) <= SHARED else question.key
    return b"|".join((ids.tobytes(), segments, f"{asks} {question.target} {question.foil} {whose}".encode()))


def _padded(rows: Sequence[np.ndarray[Any, Any]], width: int, fill: int) -> Tensor:
    made = np.full((len(rows), width), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        made[i, : len(row)] = row
    return torch.from_numpy(made)
