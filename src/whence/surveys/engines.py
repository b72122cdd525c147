"""Who computes the shards: this process, or worker processes of this machine.

An engine takes shards as they come, keeps only a few in hand, and tells of each when its files are written. It never
decides what is in them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from whence.errors import UnavailableError, WhenceError
from whence.surveys.shards import Shard, write_shard
from whence.surveys.worker import Task, Worker

IN_HAND = 2  # shards given to each worker: one under way, one waiting
DEATHS = 3  # how often workers may die before the run stops

Engine = Callable[[Iterable[Shard], Task, Path], Iterator[Shard]]


def in_process(shards: Iterable[Shard], task: Task, folder: Path) -> Iterator[Shard]:
    """One after the other, here."""
    worker: Worker | None = None
    for shard in shards:
        worker = worker or Worker(task)
        write_shard(folder, shard.number, worker.files(shard))
        yield shard


def worker_processes(number: int) -> Engine:
    """`number` processes of this machine, each with a model and one thread of its own.

    A worker that dies (killed, out of memory) is replaced, and its shards are done again. On Ctrl-C the shards under way
    are finished; when this process is killed the workers end by themselves.
    """

    def run(shards: Iterable[Shard], task: Task, folder: Path) -> Iterator[Shard]:
        waiting, deaths = iter(shards), 0
        again: list[Shard] = []
        while True:
            pool = ProcessPoolExecutor(
                number, multiprocessing.get_context("spawn"), initializer=_start, initargs=(task, str(folder))
            )
            under_way: dict[Future[None], Shard] = {}
            try:
                while True:
                    while len(under_way) < IN_HAND * number:
                        shard = again.pop() if again else next(waiting, None)
                        if shard is None:
                            break
                        under_way[pool.submit(_write, shard)] = shard
                    if not under_way:
                        return
                    for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                        done.result()
                        yield under_way.pop(done)
            except BrokenProcessPool as problem:
                again += under_way.values()
                deaths += 1
                if deaths > DEATHS:
                    raise UnavailableError(
                        f"worker processes died {deaths} times (killed, or out of memory?). What is done is kept: run "
                        "again with fewer workers to go on."
                    ) from problem
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    return run


_worker: Worker | WhenceError
_folder: Path


def _start(task: Task, folder: str) -> None:
    """In a worker process: make the worker. Ctrl-C is the parent's business, and the parent's end is ours."""
    global _worker, _folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _folder = Path(folder)
    try:
        _worker = Worker(task)
    except WhenceError as problem:  # raised here it would only break the pool: the first shard tells of it
        _worker = problem


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write(shard: Shard) -> None:
    if isinstance(_worker, WhenceError):
        raise _worker
    write_shard(_folder, shard.number, _worker.files(shard))
