"""The hub: is a model in its cache here, and does it answer at all?"""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit


def in_hub_cache(name: str) -> bool:
    """Whether the hub's cache on this machine has the model's configuration."""
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # not the form of a hub id
        return False


def hub_reachable() -> bool:
    """Whether the hub answers at all: a name that is misspelt should not wait for five retries without a network."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # only the proxy knows
    place = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((place.hostname or "", place.port or 443), timeout=3).close()
    except OSError:
        return False
    return True
