from __future__ import annotations

from pathlib import Path

import pytest

from tests.surveys.survey_models import save_tiny, some_texts

pytest.importorskip("pyarrow")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "corpus.txt"
    file.write_text("\n".join(some_texts()) + "\n")
    return file
