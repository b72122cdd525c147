"""What every test may use. Nothing here, and no test, reaches a hub."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests.versions import older_than_locked
from whence.errors import UnavailableError
from whence.model.cache import locate
from whence.model.load import Model, load

torch.set_num_threads(1)  # several workers share the machine; more threads each would only wait for each other


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Under an older transformers than the locked one, a test of a family that it lacks is skipped. Never else."""
    try:
        yield
    except KeyError as problem:
        from conformance.zoo import UnknownFamily

        if not isinstance(problem, UnknownFamily) or not older_than_locked("transformers"):
            raise
        pytest.skip(f"not in this version: {problem}")


def _located(name: str) -> Path:
    try:
        return locate(name)
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The folder of the embedded encoder; tests that ask for it are skipped where it was not fetched."""
    return _located("minilm")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of the embedded decoder, whose GGUF file is `catalogue.get("smollm2").gguf_file`."""
    return _located("smollm2")


@pytest.fixture(scope="session")
def minilm(minilm_path: Path) -> Model:
    """The embedded encoder, loaded once. Tests must leave it as they found it."""
    return load("minilm")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Model:
    """The embedded decoder, loaded once."""
    return load("smollm2")


SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_models() -> Path:
    """Real small models beside the project; tests that use them are skipped where they are absent."""
    folder = SHARED / "models"
    if not folder.is_dir():
        pytest.skip("no ../shared/models beside the project")
    return folder


LONG_TEXT = (
    "The old doctor told the nurse that she would not leave the ward before the storm was over, because the roads to "
    "the village had been closed since noon and nobody knew when they would open again."
)


@pytest.fixture(scope="session")
def long_text() -> str:
    """A sentence of more tokens than a MiniLM head has dimensions."""
    return LONG_TEXT
