"""`whence.survey`: the measures over a corpus, every row kept, and a run that survives a kill."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from whence.errors import InputError
from whence.model.identity import model_hashes
from whence.model.load import as_model
from whence.reading.encodings import encoded_texts, is_encoding
from whence.results.progress import Progress, Say, shown
from whence.results.run_folder import run_folder
from whence.results.run_identity import RunIdentity, hash_texts
from whence.surveys.corpus import SurveyCorpus, corpus_of
from whence.surveys.engines import Engine, in_process, worker_processes
from whence.surveys.result import METHOD, Survey, read_survey
from whence.surveys.settings import ROWS, SHARD_SIZE, SurveySettings, chosen_measures
from whence.surveys.shards import TABLES, Sequence, Shard, arrow, file_of, is_done, prepare_folders, shards_of
from whence.surveys.worker import Task, calibrate


def survey(
    model: Any,
    texts: Any,
    out: str | os.PathLike[str],
    *,
    measures: str | Iterable[str] = (),
    without: str | Iterable[str] = (),
    text: str | None = None,
    pair: str | None = None,
    format: str | None = None,  # noqa: A002 (what users call it)
    split: str = "train",
    limit: int | None = None,
    epsilon: float = 0.05,
    rows: int = ROWS,
    probes: int = 16,
    truncate: bool = False,
    attention: str | None = None,
    shard_size: int = SHARD_SIZE,
    workers: int | None = None,
    engine: str | None = None,
    address: str | None = None,
    progress: Progress = False,
    say: Say | None = None,
) -> Survey:
    """Run the measures over a corpus and keep every row in the folder `out`; run again after a kill, it goes on.

    model: a name (then every worker loads it), or what `whence.load` gives. texts: a file (CSV, TSV, JSONL, Parquet, plain
    text), a data set's name, a Dataset, or a list; `text`, `pair`, `format`, `split`, `limit` as in `whence.read_texts`.
    measures: besides the default ones (attention, certainty, alti, tokens) also "hta", "local-global"; `without`: leave
    some out. epsilon, rows, probes, truncate, attention, shard_size: see `whence.surveys.settings.SurveySettings`.

    workers: None or 1, in this process; more, so many processes with one thread each. engine="ray": so many actors (None: one
    a processor) of the Ray cluster at `address` ("auto": the one this machine belongs to). The files' bytes do not depend
    on it.
    progress: see `whence.results.progress`; it counts texts. say: told when the survey there is finished.

    >>> import tempfile, whence
    >>> found = whence.survey("minilm", ["The bank raised its rates.", "It rained."], tempfile.mkdtemp())
    >>> len(found.heads), len(found.layers), len(found.texts)
    (144, 12, 2)
    """
    arrow()
    run_shards = _engine(engine, workers, address)
    settings = SurveySettings(
        chosen_measures(measures, without), epsilon, rows, probes, truncate, attention, shard_size
    )
    if is_encoding(texts):
        texts = encoded_texts(as_model(model), texts)
    corpus = corpus_of(texts, text, pair=pair, format=format, split=split, limit=limit)
    total, digest = _read_once(corpus)
    chosen = as_model(model)
    shape = calibrate(chosen, settings)
    about = {"model": chosen.name, "corpus": corpus.name, "texts": total}
    about |= {name: shape[name] for name in ("layers", "heads", "d_v")}
    hashes = {**model_hashes(chosen), "texts": digest}
    identity = RunIdentity(METHOD, hashes, {**about, **settings.to_dict()})
    folder = run_folder(Path(out), identity, state=("*/*.parquet",))
    if folder.finished:
        if say is not None:
            say(f"The run in {str(out)!r} is finished: nothing was done.")
        return read_survey(folder.path)
    prepare_folders(folder.path)
    by_name = isinstance(model, str | Path) and run_shards is not in_process  # every worker loads it
    task = Task(model if by_name else chosen, chosen.weights_hash, settings)
    done = 0

    def tell(shard: Shard) -> None:
        nonlocal done
        done += len(shard.sequences)
        step("texts", done, total)

    def missing() -> Iterator[Shard]:
        for shard in shards_of(corpus, settings.shard_size, identity.digest):
            if is_done(folder.path, shard):
                tell(shard)
            else:
                yield shard

    with shown(progress) as step:
        for shard in run_shards(missing(), task, folder.path):
            tell(shard)
    if done != total:
        raise InputError(f"the texts changed while they were read: {total} at first, {done} later. Run again.")
    numbers = range(-(-total // settings.shard_size))
    folder.finish([str(file_of(Path(), table, number)) for number in numbers for table in TABLES])
    return read_survey(folder.path)


def _engine(name: str | None, workers: int | None, address: str | None) -> Engine:
    """Who computes the shards."""
    if workers is not None and (not isinstance(workers, int) or workers < 1):  # type: ignore[redundant-expr]
        raise InputError(f"workers={workers!r}: give 1 or more.")
    if name == "ray":
        from whence.surveys.ray_engine import ray_actors

        return ray_actors(address, workers)
    if name is not None:
        raise InputError(
            f"engine={name!r}: there is 'ray'; without an engine the survey runs on this machine (workers)."
        )
    if address is not None:
        raise InputError(f"address={address!r} goes with engine 'ray'.")
    return in_process if workers in (None, 1) else worker_processes(int(workers or 1))


def _read_once(corpus: SurveyCorpus) -> tuple[int, str]:
    """How many texts there are, and their hash; refused where there are none."""
    total = 0

    def counted() -> Iterator[Sequence]:
        nonlocal total
        for sequence in corpus:
            total += 1
            yield sequence

    digest = hash_texts(counted())
    if not total:
        raise InputError(f"{corpus.name!r} holds no texts: there is nothing to survey.")
    return total, digest
