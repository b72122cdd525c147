"""What every test may use. Nothing here, and no test, reaches a hub."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from whence import embedded
from whence.errors import UnavailableError


def _located(name: str) -> Path:
    try:
        return embedded.locate(name)
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The folder of the embedded encoder; tests that ask for it are skipped where it was not fetched."""
    return _located("minilm")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of the embedded decoder, whose GGUF file is `embedded.get("smollm2").gguf_file`."""
    return _located("smollm2")
