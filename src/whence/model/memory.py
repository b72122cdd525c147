"""What is known of a model, for as long as it holds: one lock, one fingerprint and one memory for each model.

A fact (a proof, a position limit, …) is kept under the fingerprint of the model it was found on and is forgotten when
the fingerprint changes: other weights, other adapters, other hooks, another attention implementation.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from whence.errors import InputError
from whence.model.offload import stored_elsewhere

T = TypeVar("T")


# -- parts and configurations ------------------------------------------------------------------------------------------------


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The model and every module in it, each once. `model.modules()` makes their names too, which takes four times as long,
    and a trace walks through the model a dozen times."""
    modules, seen = [model], {id(model)}
    for module in modules:  # which grows on the way
        for part in module._modules.values():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                modules.append(part)
    return modules


def configs_of(model: nn.Module) -> list[Any]:
    """Every distinct configuration that decides which attention some part of the model uses."""
    configs: dict[int, Any] = {}
    todo = list({id(c): c for c in (m.__dict__.get("config") for m in modules_of(model)) if c is not None}.values())
    todo.append(getattr(model, "config", None))
    while todo:
        config = todo.pop()
        if config is None or id(config) in configs or not hasattr(config, "_attn_implementation_internal"):
            continue
        configs[id(config)] = config
        todo += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return list(configs.values())


# -- locks ---------------------------------------------------------------------------------------------------------

_locks: dict[int, ModelLock] = {}


class ModelLock:
    """A lock that its thread may take again. A thread that steps through a stream is refused: it would wait for itself."""

    def __init__(self) -> None:
        # Entered and left in C: an interruption that met a line of Python here would leave it locked for ever.
        self.lock = threading.RLock()
        self.stepping: dict[int, threading.Thread] = {}  # by a thread that steps through a stream, the one that runs it

    def steps(self, thread: int) -> bool:
        """Whether this thread steps through a stream. Where the one that ran it has ended, an interrupted loop left its name."""
        running = self.stepping.get(thread)
        return running is not None and running.is_alive()

    def refuse_stepping(self) -> None:
        """Refuse a thread that would wait for itself."""
        if self.steps(threading.get_ident()):
            raise InputError(
                "this model is in the middle of a stream that this thread steps through: finish the loop (or leave it) before "
                "the model is run again, or use stream.measure(…)."
            )


@contextmanager
def refusing_lock(model: nn.Module, thread: threading.Thread) -> Iterator[None]:
    """While the block runs, this thread is refused the model's lock, which `thread` holds for its sake."""
    locks = _locks_of(model)
    mine = threading.get_ident()
    for lock in locks:
        if lock.steps(mine):
            raise InputError("this model is already in the middle of a stream that this thread steps through.")
    try:
        for lock in locks:
            lock.stepping[mine] = thread
        yield
    finally:
        for lock in locks:
            lock.stepping.pop(mine, None)


@contextmanager
def _all(locks: list[ModelLock]) -> Iterator[None]:
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock.lock)
        yield


def lock_of(model: nn.Module) -> AbstractContextManager[Any]:
    """Two threads may trace two models at once, but not the same one, nor two that share a configuration.

    The attention implementation is a field of the configuration, so the lock belongs to the configuration.
    """
    locks = _locks_of(model)
    for lock in locks:
        lock.refuse_stepping()
    return locks[0].lock if len(locks) == 1 else _all(locks)


def _locks_of(model: nn.Module) -> list[ModelLock]:
    """One for all its configurations, unless some are shared with models that have different ones.

    `setdefault` is one step for all threads: a lock around this could be left locked by an interruption. Whoever finds
    several locks, because another thread was here too, takes them all.
    """
    things = configs_of(model) or [model]
    lock = next((lock for lock in (_locks.get(id(thing)) for thing in things) if lock is not None), None) or ModelLock()
    locks: dict[int, ModelLock] = {}
    for thing in things:
        if id(thing) not in _locks:
            weakref.finalize(thing, _locks.pop, id(thing), None)
        own = _locks.setdefault(id(thing), lock)
        locks[id(own)] = own
    return [locks[key] for key in sorted(locks)]  # in one order everywhere, so that two threads never wait in a ring


# -- fingerprint ---------------------------------------------------------------------------------------------------

_SCALARS = (str, int, float, bool, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TORCH = frozenset(nn.Module().__dict__) | {"config"}


def _plain_value(value: Any) -> Hashable:
    """A value that can be compared later; other objects count by identity."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, (list, tuple, set)):
        return tuple(_plain_value(v) for v in value)
    if isinstance(value, Tensor):
        return _storage_of(value), _contents([value])
    if isinstance(value, dict):
        return tuple((str(k), _plain_value(v)) for k, v in value.items())
    return id(value)


def fingerprint(model: nn.Module) -> int:
    """Changes when the model computes something else: weights, adapters, hooks, settings, attention implementation.

    Every entry of every weight and buffer counts, however it was written (`.data` leaves torch's own version counter as
    it was): see `_contents`. Adapters (PEFT's active, merged and disabled ones, their scales) and settings count as the
    plain attributes of their modules; hooks, functions, classes with their `forward` and other objects by identity. Not
    noticed: what a hook or a function reads from elsewhere, weights that accelerate keeps on disk when a file is rewritten
    within the clock's tick, and a change of weights that keeps all 251 sums, which nobody makes by accident.
    """
    fixed = _FIXED.get()
    if fixed is not None and fixed[0] is model:
        return fixed[1]
    with lock_of(model):
        return hash(tuple(_marks(model)))


# The model that this thread works on, with its fingerprint: reading all weights once for each trace is enough.
_FIXED: ContextVar[tuple[nn.Module, int] | None] = ContextVar("whence_fixed", default=None)


@contextmanager
def fixed(model: nn.Module | None) -> Iterator[int | None]:
    """Take the fingerprint once; it stands while the block runs. None: there is no model to look at."""
    if model is None:
        yield None
        return
    mark = fingerprint(model)
    token = _FIXED.set((model, mark))
    try:
        yield mark
    finally:
        _FIXED.reset(token)


def as_remembered(model: nn.Module) -> bool:
    """Whether the model, looked at anew, has the fingerprint under which facts of it are remembered; False if none are."""
    known = _facts.get(model)
    return known is not None and hash(tuple(_marks(model))) == known[0]


def _marks(model: nn.Module) -> list[Hashable]:
    parts: list[Hashable] = []
    tensors: list[Tensor] = []
    for module in modules_of(model):
        attributes = module.__dict__
        # A class may be put in another's place, and its forward, too, as libraries of faster kernels do.
        parts += [id(module), module.training, id(type(module)), id(type(module).forward)]
        for name, value in attributes.items():
            if name not in _TORCH:
                parts.append((name, _plain_value(value)))
        # whence's own hooks are there only while a pass runs.
        parts += [id(hook) for name in _HOOKS for hook in attributes[name].values() if not is_ours(hook)]
        for held in (attributes["_parameters"], attributes["_buffers"]):
            tensors += [t for t in held.values() if t is not None]
        if "_hf_hook" in attributes:
            elsewhere, files = stored_elsewhere(module)
            tensors += elsewhere
            parts += files
    parts += [_storage_of(t) for t in tensors]
    parts.append(_contents(tensors))
    for config in configs_of(model):
        parts += [(name, _plain_value(value)) for name, value in vars(config).items() if isinstance(value, _SCALARS)]
    return parts


def is_ours(hook: Any) -> bool:
    """Whether a hook was put there by whence."""
    return str(getattr(hook, "__module__", "")).startswith("whence.")


def _storage_of(tensor: Tensor) -> Hashable:
    """Where a tensor lies. Weights that are offloaded have no place until they are used."""
    if tensor.is_meta:
        return tensor.shape
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device


_COLUMNS = 251  # a prime, so that rows of a weight that change places fall into other columns
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _contents(tensors: list[Tensor]) -> int:
    """A hash of all entries: of each tensor's words, written in 251 columns, the sums of the columns modulo 2⁶⁴.

    Exact integer sums in one pass at the speed of memory: 90 MB in about 10 ms.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in dict.fromkeys(tensors):
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
            continue
        with torch.no_grad():
            try:
                flat = tensor.detach().contiguous().view(-1)
                even = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
                words = flat.view(torch.int64 if even else _WORDS[flat.element_size()])
                whole = len(words) // _COLUMNS * _COLUMNS
                sums.setdefault(tensor.device, []).append(words[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64))
                sums[tensor.device].append(words[whole:].to(torch.int64))
            except (RuntimeError, NotImplementedError, KeyError):  # packed weights of other libraries: by their place
                continue
    return hash(tuple(torch.cat(parts).cpu().numpy().tobytes() for parts in sums.values()))


# -- memory --------------------------------------------------------------------------------------------------------

_facts: WeakKeyDictionary[nn.Module, tuple[int, dict[Hashable, Any]]] = WeakKeyDictionary()


def remembered(model: nn.Module, fact: Hashable, find: Callable[[], T], mark: int | None = None) -> T:
    """What `find` gives, found once for as long as the model stays as it is. `mark`: its fingerprint, where known."""
    with lock_of(model):
        mark = fingerprint(model) if mark is None else mark
        known = _facts.get(model)
        if known is None or known[0] != mark:
            known = _facts[model] = (mark, {})
        if fact not in known[1]:
            known[1][fact] = find()
        result: T = known[1][fact]
        return result
