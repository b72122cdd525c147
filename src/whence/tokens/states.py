"""Every hidden state of a corpus from one pass of the model, in memory or, beyond a budget, on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from whence.errors import InputError, UnavailableError
from whence.model.load import Model
from whence.reading.capture.attach import accepted
from whence.reading.inputs import Prepared
from whence.reading.rerun.run import on_device, prove_model
from whence.reading.rerun.word_embeddings import word_embedding, word_start
from whence.reading.trace import Stack, Trace
from whence.reading.tracing import trace
from whence.results.labels import Tokens
from whence.results.progress import Step, silent
from whence.tokens.corpus import Corpus

BUDGET = 1 << 30  # bytes of states held in memory


class Store:
    """Rows [N, d] for each layer, appended sequence by sequence. Past `budget` bytes they go to files, one a layer.

    >>> with Store(budget=0) as store:
    ...     store.add(torch.ones(2, 3, 4))
    ...     store.add(torch.zeros(2, 1, 4))
    ...     store.finish()
    ...     store[1].shape, store.on_disk
    (torch.Size([4, 4]), True)
    """

    def __init__(self, budget: int = BUDGET, folder: str | Path | None = None) -> None:
        self.budget = budget
        self._parent = folder
        self._files: list[IO[bytes]] = []  # without names: whatever ends the process, nothing of them is left
        self._waiting: list[list[Tensor]] = []
        self._bytes = 0
        self._rows = 0
        self._ready: list[Tensor] = []

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ready.clear()
        self._waiting.clear()
        for file in self._files:
            file.close()

    @property
    def on_disk(self) -> bool:
        return bool(self._files)

    @property
    def bytes(self) -> int:
        """How much the states take, wherever they are."""
        return sum(t.numel() * t.element_size() for t in self._ready)

    def add(self, states: Tensor) -> None:
        """The states of one sequence, [layer, n, d]."""
        if not self._waiting:
            self._waiting = [[] for _ in states]
        for rows, layer in zip(self._waiting, states, strict=True):
            rows.append(layer.detach().to("cpu", torch.float32, copy=True))  # a copy: not a view of a padded batch
        self._width = states.shape[-1]
        self._rows += states.shape[1]
        self._bytes += states.numel() * 4
        if self._bytes > self.budget:
            self._spill()

    def _open(self) -> None:
        try:
            for _ in self._waiting:
                self._files.append(tempfile.TemporaryFile(dir=self._parent))  # noqa: SIM115 (closed in __exit__)
        except OSError as problem:
            raise InputError(f"folder={str(self._parent)!r} cannot hold the states: {problem.strerror}.") from problem

    def _spill(self) -> None:
        if not self._files:
            self._open()
        try:
            for file, rows in zip(self._files, self._waiting, strict=True):
                for part in rows:
                    file.write(part.numpy().tobytes())
                file.flush()
                rows.clear()
        except OSError as problem:
            raise UnavailableError(
                f"the hidden states could not be written to disk ({problem.strerror}) after {self._rows:,} tokens. "
                "Give a folder= with more room, a larger memory=, fewer layers= or fewer texts."
            ) from problem
        self._bytes = 0

    def finish(self) -> None:
        """No more sequences; the layers can be read now."""
        if self.on_disk:
            self._spill()
            shape = (self._rows, self._width)
            self._ready = [torch.from_numpy(np.memmap(file, np.float32, "r+", shape=shape)) for file in self._files]
            return
        for rows in self._waiting:  # a layer at a time, so that no two copies of everything exist
            self._ready.append(torch.cat(rows))
            rows.clear()

    def __getitem__(self, layer: int) -> Tensor:
        """[N, d]"""
        return self._ready[layer]

    def __len__(self) -> int:
        return len(self._ready)


def body_of(model: Model) -> Model:
    """The model without its head: hidden states do not need logits over the vocabulary."""
    body = getattr(model.model, "base_model", model.model)
    return Model(body, model.tokenizer, model.processor, model.name)


def collect(
    model: Model,
    texts: Corpus,
    store: Store,
    layers: Sequence[int] | None,
    *,
    attention: str | None = None,
    batch_size: int = 16,
    truncate: bool = False,
    step: Step = silent,
) -> tuple[list[Tokens], tuple[int, ...], bool]:
    """Run the model over the corpus once; states 0 and `layers` go into `store`, 0 first.

    Returns the tokens of each sequence, the numbers of the layers (None: all of them), and whether attention is causal.
    """
    body = body_of(model)
    double = bool(getattr(getattr(body.model, "config", None), "is_encoder_decoder", False))
    tokens: list[Tokens] = []
    chosen: tuple[int, ...] = ()
    causal = words_first = False
    sequences = texts.sequences
    for start in range(0, len(sequences), batch_size):
        group = sequences[start : start + batch_size]
        firsts, seconds = [s[0] for s in group], [s[1] if len(s) > 1 else None for s in group]
        # An encoder–decoder's decoder reads the text itself: without this the model would first write one of its own.
        target: Any = firsts if double else None
        traces = trace(body, firsts, seconds, target, keep=("states",), truncate=truncate, batch_size=batch_size)
        for one in traces:
            stack = one.of(attention)
            if stack.name == "cross":
                raise InputError("attention='cross' has no hidden states of its own: choose 'encoder' or 'decoder'.")
            states = stack.states
            if not tokens:
                words_first = one.mixes is not None and _mixes_first(body, one, stack)
                chosen = _layers(layers, len(states) - 1, model.name)
                causal = any(layer.causal for layer in stack)
            if words_first:  # what the first block with attention reads is no embedding of one token
                inputs = accepted(body.model, on_device(body, one.inputs))
                states = torch.cat([word_embedding(body.model, inputs)[1].to(states), states[1:]])
            store.add(states[[0, *chosen]])
            tokens.append(stack.tokens)
        step("Running the model", len(tokens), len(sequences))
    store.finish()
    return tokens, chosen, causal


def _mixes_first(model: Model, text: Trace, stack: Stack) -> bool:
    proof = prove_model(model, Prepared(dict(text.inputs), text.tokens))
    return word_start(text, model, proof, stack) is not None


def _layers(wanted: Sequence[int] | None, last: int, name: str) -> tuple[int, ...]:
    """Numbers of hidden states, checked: 0 is the embeddings, l what layer l (counted from 1) gives."""
    if wanted is None:
        return tuple(range(last + 1))
    wrong = [layer for layer in wanted if not 0 <= layer <= last]
    if wrong or not wanted:
        raise InputError(
            f"layers={list(wanted)}: {name} has hidden states 0 … {last} (0: the embeddings). Choose among them."
        )
    return tuple(dict.fromkeys(wanted))
