"""Token identifiability (Brunner et al., ICLR 2020, section 4): is this hidden state still its input token?

    e_i^l is identified by g  ⇔  argmin_j δ(g(e_i^l), x_j) = i

x_j the input embeddings (token + position + segment, after the embedding norm) of the same sequence, or with
pool="vocabulary" the embedding table; g the identity or a map fitted on other sentences. A hit is any j with x_j = x_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from whence.errors import InputError
from whence.model.identity import model_hashes
from whence.model.load import as_model
from whence.results.progress import Progress, Say, shown
from whence.results.provenance import Provenance
from whence.results.run_folder import run_folder
from whence.results.run_identity import RunIdentity, hash_texts
from whence.tokens.candidates import Data, Vocabulary
from whence.tokens.checkpoint import FILES, FittedMaps
from whence.tokens.corpus import corpus
from whence.tokens.intervals import bootstrap as interval
from whence.tokens.maps import MAPS, PARTS
from whence.tokens.measurement import Clock, Measurement
from whence.tokens.nearest import DISTANCES
from whence.tokens.result import HIT, NOT_COUNTED, TokenIdentifiability
from whence.tokens.split import SHARES, split
from whence.tokens.states import BUDGET, Store, collect
from whence.tokens.training import Training

POOLS = ("sentence", "vocabulary")


def token_identifiability(
    model: Any,
    texts: Any,
    *,
    layers: Sequence[int] | int | None = None,
    maps: Sequence[str] = ("naive", "linear", "mlp"),
    distances: Sequence[str] = DISTANCES,
    pool: str = "sentence",
    targets: Sequence[int] | None = None,
    parts: Sequence[str] = PARTS,
    transfer: bool | None = None,
    shares: Sequence[float] = SHARES,
    seed: int = 0,
    training: Training | None = None,
    bootstrap: int = 1000,
    shuffle_labels: bool = False,
    attention: str | None = None,
    truncate: bool = False,
    batch_size: int = 16,
    memory: int = BUDGET,
    folder: str | Path | None = None,
    checkpoint: str | Path | None = None,
    progress: Progress = False,
    say: Say | None = None,
) -> TokenIdentifiability:
    """At layer l, can one still tell which input token a hidden state was? The share of test tokens for which one can.

    `texts`: texts or pairs of texts (or what `whence.read_texts` gives); split by sentence 70/15/15 (`shares`, `seed`),
    duplicates removed, pairs that share a sentence kept on one side. `layers`: hidden states, 0 (embeddings) to L;
    None: all. `maps`: "naive" (identity), "linear" and "mlp" (trained with the distance as loss, early stopping),
    "ridge" and "procrustes" (closed form). `distances`: "cosine", "l2", for the training and the nearest neighbour.
    `pool`: the candidates, the input embeddings of the same "sentence" or those of the "vocabulary" (the embedding
    table, which is then also what the maps are trained to give). `targets`: 0 the token itself, 1 the next one; None:
    (0,), for causal models (0, 1). `parts`: also recover from the "direction" e/‖e‖ or the "norm" ‖e‖ alone (target 0).
    `transfer`: the map of each layer tested on every other; None: for pool="sentence". `shuffle_labels`: permute which
    embedding belongs to which token within each sequence; every rate must then fall to chance. `attention`: "encoder"
    or "decoder" of a model that has both (its decoder reads the same text). `memory`: bytes of states kept in memory,
    beyond which they go to temporary files in `folder`. `checkpoint`: a folder from which a run that was stopped goes
    on, with the result in it at the end; another run's is refused. `say`: told when the run there is finished.
    `progress`: see `whence.results.progress`.

    The model runs once. Returns rates [target, part, map, distance, layer] with bootstrap intervals over sentences,
    chance, ties, breakdowns by token, and what was left out or diverged.

    >>> import whence
    >>> texts = [f"The {a} {b} near the {c}." for a in ("old", "red", "tall") for b in ("house stood", "ship lay")
    ...          for c in ("sea", "hill", "road", "wood")]
    >>> found = whence.token_identifiability(whence.load(), texts, layers=[0, 6], maps=("naive", "ridge"))
    >>> found.rate("naive", "cosine")[0].item()          # at the embeddings every token is itself
    1.0
    """
    chosen = as_model(model)
    settings = training or Training()
    _check("maps", maps, MAPS)
    _check("distances", distances, DISTANCES)
    _check("pool", [pool], POOLS)
    _check("parts", parts, PARTS)
    if bootstrap < 1 or batch_size < 1:
        raise InputError(f"bootstrap={bootstrap} and batch_size={batch_size} must be at least 1.")
    wanted = [layers] if isinstance(layers, int) else None if layers is None else list(layers)
    read = corpus(chosen, texts, truncate=truncate)
    sides = split(read.sequences, seed=seed, shares=shares)
    described = {
        "pool": pool, "seed": seed, "shares": list(shares), "bootstrap": bootstrap,
        "shuffle_labels": shuffle_labels, "attention": attention, "truncate": truncate,
        "training": {**asdict(settings), "penalties": list(settings.penalties)},
    }  # fmt: skip
    state = None
    if checkpoint is not None:
        asked = {
            "layers": wanted, "maps": list(maps), "distances": list(distances), "parts": list(parts),
            "targets": None if targets is None else list(targets), "transfer": transfer, "batch_size": batch_size,
        }  # fmt: skip
        hashes = {**model_hashes(chosen), "texts": hash_texts(read.sequences)}
        identity = RunIdentity("token identifiability", hashes, {"model": chosen.name, **described, **asked})
        state = FittedMaps(run_folder(checkpoint, identity, state=FILES))
        if state.folder.finished:
            if say is not None:
                say(f"The run in {str(checkpoint)!r} is finished: nothing was done.")
            state.tidy()
            return state.result()
    with shown(progress) as step, Store(memory, folder) as store:
        clock = Clock(step)
        with clock("forward"):
            tokens, numbers, causal = collect(
                chosen, read, store, wanted, attention=attention, batch_size=batch_size, truncate=truncate,
                step=step,
            )  # fmt: skip
        data = Data(
            store,
            tokens,
            sides,
            Vocabulary.of(chosen) if pool == "vocabulary" else None,
            seed,
            shuffle_labels,
        )
        if data.vocabulary is not None:
            _check_widths(data, maps)
        chosen_targets = tuple(targets) if targets is not None else (0, 1) if causal else (0,)
        if not chosen_targets or not all(isinstance(target, int) for target in chosen_targets):
            raise InputError(f"targets={targets!r} must be whole numbers: 0 for the token itself, 1 for the next one.")
        measurement = Measurement(
            data, numbers, chosen_targets, tuple(dict.fromkeys(parts)), tuple(dict.fromkeys(maps)),
            tuple(dict.fromkeys(distances)), settings, seed, clock, state,
        )  # fmt: skip
        measurement.run()
        with_transfer = transfer if transfer is not None else pool == "sentence"
        if with_transfer and 0 in chosen_targets and "whole" in parts and set(maps) - {"naive"}:
            measurement.transfer()
        with clock("bootstrap"):
            low, high = interval(
                measurement.hits == HIT, measurement.hits != NOT_COUNTED, data.sentence, draws=bootstrap, seed=seed
            )
    provenance = Provenance(
        chosen.name,
        "token identifiability",
        described,
        source=chosen,
    )
    result = measurement.result(provenance, low, high, pool, read.left_out)
    if state is not None:
        state.finish(result)
    return result


def _check(name: str, given: Any, known: Sequence[str]) -> None:
    if isinstance(given, str) or not given:
        raise InputError(f"{name}={given!r}: give a list, with one or more of {', '.join(known)}.")
    wrong = [one for one in given if one not in known]
    if wrong:
        raise InputError(f"{name}: {wrong[0]!r} is not known; choose among {', '.join(known)}.")


def _check_widths(data: Data, maps: Sequence[str]) -> None:
    assert data.vocabulary is not None
    width, table = data.store[0].shape[1], data.vocabulary.table.shape[1]
    square = [name for name in maps if name in ("naive", "procrustes")]
    if width != table and square:
        raise InputError(
            f"the embedding table has width {table} and the states {width}: {' and '.join(square)} cannot bring one "
            "to the other. Choose maps among linear, mlp, ridge."
        )
