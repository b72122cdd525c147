"""The models that were named at the start, each loaded once and used by one caller at a time; and the traces made with them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whence.errors import InputError
from whence.model.load import Model, load
from whence.reading.trace import Trace


class Shelf:
    """Models by the name that callers use. A name from a request is looked up here and never read as a path."""

    def __init__(self, names: Sequence[str | Model]) -> None:
        self._places: dict[str, str | Model] = {}
        for place in names:
            self._places.setdefault(place.name if isinstance(place, Model) else public_name(place), place)
        self._locks = {name: threading.Lock() for name in self._places}
        self._loaded: dict[str, Model] = {}

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
                self._loaded[name] = place if isinstance(place, Model) else load(place)
            yield self._loaded[name]

    def is_loaded(self, name: str) -> bool:
        return name in self._loaded


def public_name(place: str) -> str:
    """A folder is known by its own name only, so that no path is shown."""
    folder = Path(place).expanduser()
    return folder.resolve().name if folder.is_dir() else place


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


class Traces:
    """The traces in memory; beyond `size` the one not used for longest goes."""

    def __init__(self, size: int) -> None:
        self.size = size
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
            while len(self._entries) > self.size:
                self._entries.popitem(last=False)
