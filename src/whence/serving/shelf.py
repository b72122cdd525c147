"""The models that were named at the start, each loaded once and used by one caller at a time; and the traces made with them."""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from whence.errors import InputError
from whence.model.load import Model, load
from whence.reading.trace import Trace
from whence.results.provenance import Provenance


class Shelf:
    """Models by the name that callers use. A name from a request is looked up here and never read as a path."""

    def __init__(self, names: Sequence[str | Model], load: Callable[[str], Model] = load) -> None:
        self._load = load
        self._places: dict[str, str | Model] = {}
        for place in names:
            if place not in self._places.values():
                self._places[self._free_name(place.name if isinstance(place, Model) else public_name(place))] = place
        self._locks = {name: threading.Lock() for name in self._places}
        self._loaded: dict[str, Model] = {}

    def _free_name(self, name: str) -> str:
        """`name`, or with a number where another folder has it already."""
        numbered = (name if i == 1 else f"{name} ({i})" for i in count(1))
        return next(free for free in numbered if free not in self._places)

    @property
    def names(self) -> list[str]:
        return list(self._places)

    @contextmanager
    def borrowed(self, name: str) -> Iterator[Model]:
        """The model, loaded, for one caller alone."""
        if name not in self._places:
            raise InputError(f"no model is called {name!r} here; there are: {', '.join(self._places)}.")
        with self._locks[name]:
            if name not in self._loaded:
                place = self._places[name]
                self._loaded[name] = place if isinstance(place, Model) else self._load(place)
            yield self._loaded[name]

    def is_loaded(self, name: str) -> bool:
        return name in self._loaded


def public_name(source: str) -> str:
    """A folder is known by its own name only, so that no path is shown."""
    folder = Path(source).expanduser()
    return folder.resolve().name if folder.is_dir() else source


def content_key(*parts: Any) -> str:
    """The same content, the same key."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:32]


@dataclass
class Entry:
    """One trace, what the page knows of it, and blocks made so far."""

    model: str
    trace: Trace
    manifest: dict[str, Any]
    blocks: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    serial: str = field(default_factory=lambda: uuid.uuid4().hex)  # another one when the trace is made again

    @cached_property
    def _own_bytes(self) -> int:
        return tensor_bytes(self.trace) + len(json.dumps(self.manifest))

    @property
    def bytes(self) -> int:
        """What it takes in memory: the tensors of the trace, the manifest, the blocks made so far."""
        return self._own_bytes + sum(map(len, list(self.blocks.values())))


def tensor_bytes(thing: Any) -> int:
    """Bytes of all tensors that hang on a result, each storage once; the model is nobody's own and is not counted."""
    storages: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, Mapping):
            for part in value.values():
                walk(part)
        elif isinstance(value, (tuple, list)):
            for part in value:
                walk(part)
        elif is_dataclass(value) and not isinstance(value, (Model, Provenance)):
            for part in fields(value):
                walk(getattr(value, part.name))

    walk(thing)
    return sum(storages.values())


class Traces:
    """The traces in memory; beyond `limit` bytes the one not used for longest goes. The newest always stays."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def get(self, key: str) -> Entry | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: str, entry: Entry) -> None:
        with self._lock:
            self._entries[key] = entry
            self._entries.move_to_end(key)
        self.trim()

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(entry.bytes for entry in self._entries.values())

    def trim(self) -> None:
        """Let traces go until the rest fits; called when one was added, or has grown."""
        with self._lock:
            total = sum(entry.bytes for entry in self._entries.values())
            while total > self.limit and len(self._entries) > 1:
                total -= self._entries.popitem(last=False)[1].bytes
