"""A worker: a model that was proved once, and what it makes of one shard after the other."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from whence.core.numerics.threads import one_thread
from whence.errors import InputError, ModelError, WhenceError
from whence.mixing.contributions import contributions
from whence.model.load import Model, as_model
from whence.reading.inputs import Prepared, prepare
from whence.reading.trace import Trace
from whence.reading.tracing import trace
from whence.surveys.head_columns import head_columns
from whence.surveys.layer_columns import layer_columns
from whence.surveys.settings import SurveySettings
from whence.surveys.shards import Sequence, Shard, as_parquet

CALIBRATION = ("The old doctor told the nurse that she would not leave the ward before noon.", "It was late.")
"""Every worker proves the model on the same sentences, so that nothing depends on the texts it happens to get first."""

BATCH = 32  # texts in one forward pass …
PAIRS = 1 << 17  # … or as many as have so many (query, key) pairs together


@dataclass(frozen=True)
class Task:
    """What a worker needs to begin: the model (or its name), its weights' hash, and the settings."""

    model: Any
    weights: str
    settings: SurveySettings


class Worker:
    """Computes shards with one thread. Made once in each process; refuses a model with other weights than the run's."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(1)
        self.settings = task.settings
        self.model: Model = loaded_here(task)
        self.shape = calibrate(self.model, task.settings)

    def files(self, shard: Shard) -> dict[str, bytes]:
        """The bytes of the shard's three files."""
        with one_thread():
            tables = self._tables(shard)
        return {name: as_parquet(rows, shard.key) for name, rows in tables.items()}

    def _tables(self, shard: Shard) -> dict[str, dict[str, Any]]:
        prepared: dict[int, Prepared] = {}
        cut: set[int] = set()
        reasons: dict[int, str] = {}
        for i, sequence in enumerate(shard.sequences):
            try:
                prepared[i], truncated = _prepared(self.model, sequence, self.settings.truncate)
                cut |= {i} if truncated else set()
            except InputError as problem:
                reasons[i] = str(problem)
        found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        for batch in _batches({i: one.length for i, one in prepared.items()}):
            sequences = [shard.sequences[i] for i in batch]
            for i, result in zip(batch, self._measured(sequences), strict=True):
                if isinstance(result, str):
                    reasons[i] = result
                else:
                    found[i] = result
        return self._joined(shard, prepared, cut, reasons, found)

    def _measured(self, sequences: Many[Sequence]) -> list[tuple[dict[str, Any], dict[str, Any]] | str]:
        """The columns of each text; the reason where they could not be had. One by one where a batch fails."""
        try:
            return list(measure(self.model, sequences, self.settings))
        except Exception as problem:
            if len(sequences) == 1:
                return [" ".join(f"{type(problem).__name__}: {problem}".split())[:500]]
            return [one for sequence in sequences for one in self._measured([sequence])]

    def _joined(
        self,
        shard: Shard,
        prepared: dict[int, Prepared],
        shortened: set[int],
        reasons: dict[int, str],
        by_text: dict[int, tuple[dict[str, Any], dict[str, Any]]],
    ) -> dict[str, dict[str, Any]]:
        """The three tables, texts in their order. A column that a shard has no line for is there all the same."""
        layers, heads = self.shape["layers"], self.shape["heads"]
        n = len(shard.sequences)
        lengths = [prepared[i].length if i in prepared else 0 for i in range(n)]
        order = sorted(by_text)
        tables: dict[str, dict[str, Any]] = {}
        for place, (name, lines) in enumerate((("heads", layers * heads), ("layers", layers))):
            rows: dict[str, Any] = {
                "text": np.repeat(np.array([shard.first + i for i in order], dtype=np.int64), lines),
                "length": np.repeat(np.array([lengths[i] for i in order], dtype=np.int32), lines),
            }
            if name == "heads":
                rows["layer"] = np.tile(np.repeat(np.arange(layers, dtype=np.int16), heads), len(order))
                rows["head"] = np.tile(np.arange(heads, dtype=np.int16), len(order) * layers)
            else:
                rows["layer"] = np.tile(np.arange(layers, dtype=np.int16), len(order))
            for column, dtype in self.shape["columns"][place].items():
                parts = [by_text[i][place][column] for i in order]
                rows[column] = np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
            tables[name] = rows
        tables["texts"] = {
            "text": np.arange(shard.first, shard.first + n, dtype=np.int64),
            "content": [content_of(sequence) for sequence in shard.sequences],
            "length": np.array(lengths, dtype=np.int32),
            "truncated": np.array([i in shortened for i in range(n)]),
            "reason": [reasons.get(i) for i in range(n)],
        }
        return tables


def measure(
    model: Model, sequences: Many[Sequence], settings: SurveySettings
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(head columns, layer columns) of each text, traced in one batch."""
    pairs = [s[1] for s in sequences] if len(sequences[0]) > 1 else None
    traces: list[Trace] = trace(
        model, [s[0] for s in sequences], pairs, truncate=settings.truncate, batch_size=len(sequences)
    )
    if "alti" in settings.measures:
        mixed: list[Any] = list(contributions(traces, "alti", **_stack_of(traces[0], settings)))
    else:
        mixed = [None] * len(traces)
    results = []
    for sequence, one, alti in zip(sequences, traces, mixed, strict=True):
        seed = int(content_of(sequence), 16) & 0x7FFFFFFF
        results.append((head_columns(one, settings, seed), layer_columns(one, alti, settings, seed)))
    return results


def _stack_of(one: Trace, settings: SurveySettings) -> dict[str, str]:
    """An encoder–decoder's contributions are asked of one stack, as everything else is."""
    if settings.attention is None and len(one.stacks) == 1:
        return {}
    return {"attention": one.of(settings.attention).name}


def content_of(sequence: Sequence) -> str:
    """16 hexadecimal digits of a text's SHA-256: the same text has the same, and the same samples."""
    return hashlib.sha256("\0".join(sequence).encode()).hexdigest()[:16]


def _prepared(model: Model, sequence: Sequence, truncate: bool) -> tuple[Prepared, bool]:
    """The text as the model takes it, and whether it was cut."""
    pair = sequence[1] if len(sequence) > 1 else None
    try:
        return prepare(model, sequence[0], pair)[0][0], False
    except InputError:
        if not truncate:
            raise
    return prepare(model, sequence[0], pair, truncate=True)[0][0], True


def _batches(lengths: dict[int, int]) -> list[list[int]]:
    """Which texts go through the model together: of about one length, fixed by the shard."""
    batches: list[list[int]] = []
    for i in sorted(lengths, key=lambda i: (lengths[i], i)):
        n = lengths[i]
        if batches and len(batches[-1]) < BATCH and (len(batches[-1]) + 1) * n * n <= PAIRS:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def loaded_here(task: Task) -> Model:
    """The run's model on this machine; an error that names the machine where it is not there, or is another one."""
    try:
        model = as_model(task.model)
    except WhenceError as problem:
        raise ModelError(
            f"the model {task.model!r} is not there on the machine {os.uname().nodename!r}: {problem}"
        ) from problem
    if model.weights_hash != task.weights:
        raise ModelError(
            f"the model on the machine {os.uname().nodename!r} has other weights (SHA-256 {model.weights_hash[:12]}) than the "
            f"run's ({task.weights[:12]}): give every worker the same files."
        )
    return model


def calibrate(model: Model, settings: SurveySettings) -> dict[str, Any]:
    """Prove the model on fixed sentences and see what its columns are: layers, heads, d_v, columns and their types."""
    with one_thread():
        sequences = [(text,) for text in CALIBRATION]  # cut for a model that has fewer positions
        stack = trace(model, CALIBRATION[0], keep=("values",), truncate=True).of(settings.attention)
        first = measure(model, sequences, replace(settings, truncate=True))[0]
    widths = {len(layer.heads) for layer in stack}
    if len(widths) > 1:
        raise ModelError(
            f"the layers of {model.name} have {sorted(widths)} heads: a survey needs the same number in all."
        )
    columns = tuple({name: values.dtype for name, values in part.items()} for part in first)
    return {
        "layers": len(stack),
        "heads": widths.pop(),
        "d_v": int(stack.layers[0].values.shape[-1]),
        "columns": columns,
    }
