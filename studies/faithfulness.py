"""Study: which explanation is faithful, determined, plausible and robust? Writes docs/studies/faithfulness.md.

    python studies/faithfulness.py             run what is missing, then write the page
    python studies/faithfulness.py --write     write the page from what has been run
    python studies/faithfulness.py --only sst2-bert-tiny --limit 100     one part, so many texts

Every finished text is a line of a file under $WHENCE_WORK (default ~/.cache/whence/studies); a study that was stopped goes
on. One thread. The classifiers are trained by studies/_classifiers.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _classifiers as classifiers
import _corpora as corpora
import torch

import whence
from whence.faithful.result import Faithfulness

WORK = corpora.WORK / "faithfulness"
PAGE = corpora.ROOT / "docs" / "studies" / "faithfulness.md"
MODELS = Path(os.environ.get("WHENCE_MODELS", corpora.ROOT.parent / "shared" / "models"))
SENTENCES = 300


def hidden_token_attribution_16(model: Any, text: str) -> Any:
    """Hidden token attribution at [CLS] by 16 probes per token: the exact one would take hours."""
    found = whence.hidden_token_attribution(whence.trace(model, text), "probes", probes=16)
    return found.values[-1, 0]


METHODS: list[Any] = ["all", hidden_token_attribution_16]


def bert_tiny() -> Any:
    return whence.load(str(MODELS / "bert-tiny-sst2"))


def minilm(seed: int = 0) -> Any:
    classifiers.train(seed)
    return whence.load(str(classifiers.folder(seed)))


def sentences(limit: int) -> list[str]:
    return [text for text, _ in corpora.sst2().test[:limit]]


def sst2(model: Callable[[], Any], name: str, limit: int, **settings: Any) -> Faithfulness:
    """Curves of all methods on the first test sentences."""
    return whence.faithfulness(
        model(), sentences(limit), METHODS, save=WORK / f"{name}.jsonl", progress=True, **settings
    )


PARTS: dict[str, Callable[[int], Any]] = {
    "sst2-bert-tiny": lambda limit: sst2(bert_tiny, "sst2-bert-tiny", limit, ceiling="exact"),
    "sst2-minilm": lambda limit: sst2(minilm, "sst2-minilm", limit, ceiling="none", random=5),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--limit", type=int, default=SENTENCES)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    WORK.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        if asked.only in (None, name):
            part(asked.limit)


if __name__ == "__main__":
    main()
