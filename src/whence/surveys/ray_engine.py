"""The third engine: actors of a Ray cluster, one processor and one model each, spread over its nodes.

The driver holds the shards that are not done. An actor gets shards only once it has loaded and proved the model, so that a
node without room, or without the model's files, never holds any. An actor that dies (killed, or with its node) gives its
shards back, and another takes its place. Who computes a shard does not change its bytes.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whence.errors import InputError, MissingExtraError, ModelError, UnavailableError, WhenceError
from whence.surveys.engines import DEATHS, IN_HAND, Engine
from whence.surveys.shards import TABLES, Shard, write_shard
from whence.surveys.worker import Task, Worker

START = 300.0  # seconds until at least one actor must have loaded the model
VERSIONED = ("whence", "torch", "transformers", "numpy", "pyarrow")


def ray_actors(address: str | None, number: int | None = None) -> Engine:
    """`number` actors of the Ray cluster at `address` ("auto": the one this machine belongs to); None: one a processor.

    whence never starts a cluster of its own: on one machine `worker_processes` do the same with less.
    """
    try:
        import ray
    except ImportError as problem:
        raise MissingExtraError("engine 'ray' needs Ray: pip install 'whence[scale]'") from problem
    if not address:
        raise InputError(
            "engine 'ray' needs the address of a running cluster: --address auto on one of its machines, or "
            "--address ray://HOST:10001 from elsewhere. On one machine use --workers instead."
        )

    def run(shards: Iterable[Shard], task: Task, folder: Path) -> Iterator[Shard]:
        joined = not ray.is_initialized()
        if joined:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError, TimeoutError) as problem:
                raise UnavailableError(
                    f"no Ray cluster answers at {address!r}: {str(problem).splitlines()[0]} Start one with "
                    "ray start --head, or give the address of one that runs."
                ) from problem
        try:
            yield from _Driver(ray, task, folder, number or _processors(ray)).run(shards)
        finally:
            if joined:
                ray.shutdown()

    return run


def _processors(ray: Any) -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def versions() -> dict[str, str]:
    """What must be the same on every node, so that the bytes are."""
    import platform
    from importlib.metadata import version

    return {"python": platform.python_version(), **{name: version(name) for name in VERSIONED}}


class SurveyActor:
    """On a node: a worker, or the reason why there is none."""

    def __init__(self, task: Task, folder: str, token: str) -> None:
        self.folder = Path(folder)
        self.shares = False
        self.node = os.uname().nodename
        self.problem: str | None = None
        try:
            self.shares = (self.folder / token).is_file()
            self.worker = Worker(task)
        except WhenceError as problem:
            self.problem = str(problem)
        except OSError as problem:
            self.problem = f"{type(problem).__name__}: {problem}"

    def ready(self) -> tuple[str, str | None, dict[str, str]]:
        """The node's name, what is wrong with it (None: nothing), and its versions."""
        return self.node, self.problem, versions()

    def files(self, shard: Shard) -> dict[str, bytes] | None:
        """Write the shard's files where the node sees the survey's folder (None comes back), else send them back."""
        files = self.worker.files(shard)
        if not self.shares:
            return files
        write_shard(self.folder, shard.number, files)
        return None


@dataclass
class _Driver:
    """The shards of one run, the actors that are ready, and those that are not yet."""

    ray: Any
    task: Task
    folder: Path
    number: int
    starting: dict[Any, Any] = field(default_factory=dict)  # reference of `ready` → actor
    under_way: dict[Any, tuple[Any, Shard]] = field(default_factory=dict)  # reference of `files` → actor, shard
    idle: deque[Any] = field(default_factory=deque)  # a place for one more shard, per actor and shard in hand
    deaths: int = 0

    def run(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        waiting, again = iter(shards), list[Shard]()
        first = next(waiting, None)
        if first is None:
            return
        again.append(first)
        # A node that sees this file sees the folder. What a kill leaves of it goes with the next run (`prepare_folders`).
        token = f"{TABLES[-1]}/.whence-{secrets.token_hex(8)}.part"
        mark = self.folder / token
        mark.touch()
        try:
            shared_task = self.ray.put(self.task)
            for _ in range(self.number):
                self._start(shared_task, token)
            while True:
                while self.idle:
                    shard = again.pop() if again else next(waiting, None)
                    if shard is None:
                        break
                    actor = self.idle.popleft()
                    self.under_way[actor.files.remote(shard)] = (actor, shard)
                if not self.under_way and not again and self.idle:
                    return
                for done in self._wait():
                    if done in self.starting:
                        again += self._started(done, shared_task, token)
                    else:
                        actor, shard = self.under_way.pop(done)
                        written = self._finished(done, shard)
                        if written:
                            self.idle.append(actor)
                            yield shard
                        else:
                            again += [shard, *self._lost(actor, shared_task, token)]
        finally:
            mark.unlink(missing_ok=True)
            for actor in {id(a): a for a in (*self.starting.values(), *self.idle)}.values():
                self.ray.kill(actor)
            for actor, _ in self.under_way.values():
                self.ray.kill(actor)

    def _start(self, task: Any, token: str) -> None:
        remote = self.ray.remote(num_cpus=1, scheduling_strategy="SPREAD", max_restarts=0)(SurveyActor)
        actor = remote.remote(task, str(self.folder.resolve()), token)
        self.starting[actor.ready.remote()] = actor

    def _wait(self) -> list[Any]:
        references = [*self.starting, *self.under_way]
        alone = not self.under_way and not self.idle
        done, _ = self.ray.wait(references, num_returns=1, timeout=START if alone else None)
        if not done:
            raise UnavailableError(
                f"no actor of the cluster was ready within {START:.0f} s: it has "
                f"{self.ray.available_resources().get('CPU', 0):.0f} of {_processors(self.ray)} processors free. What is done is "
                "kept: run again when there is room."
            )
        return list(done)

    def _started(self, reference: Any, task: Any, token: str) -> list[Shard]:
        """An actor that is ready takes shards; one that died while it loaded the model is replaced."""
        actor = self.starting.pop(reference)
        try:
            node, problem, theirs = self.ray.get(reference)
        except self.ray.exceptions.RayActorError:
            return self._lost(actor, task, token)
        if problem is not None:
            raise ModelError(f"on the node {node!r}: {problem}")
        ours = versions()
        if theirs != ours:
            other = next(name for name in ours if theirs[name] != ours[name])
            raise ModelError(
                f"the node {node!r} has {other} {theirs[other]} and this machine {ours[other]}, so that its bytes could differ: "
                "install the same versions on every node."
            )
        self.idle.extend([actor] * IN_HAND)
        return []

    def _finished(self, reference: Any, shard: Shard) -> bool:
        """Whether the shard's files are there; False where the actor died under it."""
        try:
            files = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as problem:
            cause = getattr(problem, "cause", None)
            raise cause if isinstance(cause, WhenceError) else problem from problem
        except self.ray.exceptions.RayError:
            return False
        if files is not None:
            write_shard(self.folder, shard.number, files)
        return True

    def _lost(self, actor: Any, task: Any, token: str) -> list[Shard]:
        """The other shards of an actor that died; another actor is started in its place."""
        back = [shard for owner, shard in self.under_way.values() if owner is actor]
        self.under_way = {ref: pair for ref, pair in self.under_way.items() if pair[0] is not actor}
        self.idle = deque(other for other in self.idle if other is not actor)
        self.deaths += 1
        if self.deaths > DEATHS + self.number:
            raise UnavailableError(
                f"actors died {self.deaths} times (killed, out of memory, or nodes that went away). What is done is kept: "
                "run again to go on."
            )
        self._start(task, token)
        return back
