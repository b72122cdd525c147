"""Many traces of five families in many threads, some of which fail on purpose: nothing changes, nothing grows.

    python -m torture.soak [--traces 1000] [--threads 8] [--fail 0.2] [--seed 0]

A failure is an exception raised inside a random module of the model in the middle of a trace. Afterwards every model is
as it was before, bit for bit (weights, hooks, flags, attributes), and every trace that came through has the numbers of
one made alone.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import whence
from torture.models import WORDS, families
from whence.model.load import hash_weights

GROWTH = 64 << 20  # bytes of memory that a process may gain while it runs: the allocator's own pools


class Struck(Exception):
    """A failure on purpose."""


@dataclass(frozen=True)
class Soak:
    """What became of the traces; `problems` are sentences, none where all is well."""

    traces: int
    failed: int
    seconds: float
    growth: int
    problems: tuple[str, ...]


class Striker:
    """A hook on every module of a model that raises in the thread that asked for it, at the module it asked for."""

    def __init__(self, model: nn.Module) -> None:
        self._asked = threading.local()
        self.modules = [module for module in model.modules() if not isinstance(module, nn.ModuleList)]
        for module in self.modules:
            module.register_forward_pre_hook(self._hook)

    def aim(self, module: nn.Module | None) -> None:
        """From now on, in this thread, fail when `module` is called."""
        self._asked.module = module

    def _hook(self, module: nn.Module, _: Any) -> None:
        if getattr(self._asked, "module", None) is module:
            raise Struck


def appearance(model: nn.Module) -> list[Any]:
    """All that a trace could leave behind: weights, hooks, flags, attributes, the configuration."""
    seen: list[Any] = [hash_weights(model), str(getattr(model, "config", None))]
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("hooks")}
        flags = [(n, p.requires_grad, p.grad is None) for n, p in module.named_parameters(recurse=False)]
        seen.append((name, type(module), module.training, sorted(vars(module)), hooks, flags))
    return seen


def soak(traces: int, threads: int, fail: float, seed: int) -> Soak:
    """Trace `traces` texts in `threads` threads, a share `fail` of them with a failure inside."""
    import psutil

    torch.set_num_threads(1)
    models = families()
    texts = [" ".join(random.Random(i).choices(WORDS, k=3 + i % 12)) for i in range(24)]
    alone = {(name, text): whence.trace(model, text).attention for name, model in models.items() for text in texts}
    strikers = {name: Striker(model.model) for name, model in models.items()}
    before = {name: appearance(model.model) for name, model in models.items()}
    modes = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
    problems: list[str] = []
    failures: list[int] = []
    process, sizes = psutil.Process(), []

    def one(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        name, text = draw.choice(list(models)), draw.choice(texts)
        striker = strikers[name]
        struck = draw.random() < fail
        striker.aim(draw.choice(striker.modules) if struck else None)
        try:
            attention = whence.trace(models[name], text).attention
        except Struck:
            failures.append(number)
            if not struck:
                problems.append(f"trace {number} ({name}) met another thread's failure")
        except Exception as problem:  # whatever else happens is what this looks for
            problems.append(f"trace {number} ({name}): {type(problem).__name__}: {problem}")
        else:
            if not torch.equal(attention, alone[name, text]):
                gap = float((attention - alone[name, text]).abs().max())
                problems.append(f"trace {number} ({name}) has other numbers: {gap:.1e}")
        finally:
            striker.aim(None)
        if number % max(1, traces // 10) == 0:
            gc.collect()
            sizes.append(process.memory_info().rss)

    begun = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(traces)))
    seconds = time.monotonic() - begun
    for name, model in models.items():
        if appearance(model.model) != before[name]:
            problems.append(f"the model {name} is not as it was")
    if (torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()) != modes:
        problems.append("torch's own settings are not as they were")
    growth = sizes[-1] - sizes[len(sizes) // 3] if len(sizes) > 3 else 0
    if growth > GROWTH:
        problems.append(f"memory grew by {growth / 1e6:.0f} MB over the last two thirds")
    return Soak(traces, len(failures), seconds, growth, tuple(problems))


def main(given: list[str] | None = None) -> int:
    """Soak as the command line asks; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m torture.soak", description=str(__doc__).splitlines()[0])
    parser.add_argument("--traces", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--fail", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(given)
    outcome = soak(asked.traces, asked.threads, asked.fail, asked.seed)
    print(
        f"{outcome.traces} traces in {asked.threads} threads, {outcome.failed} failed on purpose, "
        f"{outcome.seconds:.0f} s, memory {outcome.growth / 1e6:+.1f} MB"
    )
    for problem in outcome.problems[:20]:
        print(f"PROBLEM: {problem}")
    return int(bool(outcome.problems))


if __name__ == "__main__":
    sys.exit(main())
