"""Study: which explanation is faithful, determined, plausible and robust? Writes docs/studies/faithfulness.md.

    python studies/faithfulness.py                        run what is missing, then write the page
    python studies/faithfulness.py --write                write the page from what has been run
    python studies/faithfulness.py --only sst2-minilm     one part (--only again for several)

Every finished text is a line of a file under $WHENCE_WORK (default ~/.cache/whence/studies); a study that was stopped goes
on. One thread. The classifiers are trained by studies/_classifiers.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import _classifiers as classifiers
import _corpora as corpora
import _faithfulness_page as page
import _faithfulness_texts as texts
import torch

import whence
from whence import method_table
from whence.results.files import write_atomically

WORK = corpora.WORK / "faithfulness"
SENTENCES = 300
SEEDS = 5


def hidden_token_attribution_16(model: Any, text: str) -> Any:
    """Hidden token attribution of [CLS]'s last state, ‖J‖_F by 16 orthonormal directions of that state (exact: all 384).

    Backwards, for one state: `whence.hidden_token_attribution` follows every token to every state, which takes ten times as long.
    """
    bert = model.model.bert
    found: dict[str, torch.Tensor] = {}

    def leaf(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        found["x"] = output.detach().requires_grad_()
        return found["x"]

    hook = bert.embeddings.register_forward_hook(leaf)
    try:
        with torch.enable_grad():
            state = bert(**model.tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0]
    finally:
        hook.remove()
    draw = torch.randn(len(state), 16, generator=torch.Generator().manual_seed(0))
    squares = [
        torch.autograd.grad(state, found["x"], direction, retain_graph=True)[0][0].pow(2).sum(-1)
        for direction in torch.linalg.qr(draw)[0].T
    ]
    return torch.stack(squares).sum(0).sqrt()


@lru_cache(maxsize=1)
def _integrated(model: Any, text: str) -> torch.Tensor:
    """Shared by the signed and the absolute form."""
    values: torch.Tensor = whence.attribute(model, text, "integrated-gradients").values
    return values


def _names() -> str:
    left_out = (
        "flow",
        "hidden-token-attribution",
        "alti-logit",
        "integrated-gradients",
        "absolute-integrated-gradients",
    )
    return ",".join(m.name for m in method_table.explaining() if m.name not in left_out)


METHODS: list[Any] = [
    _names(),
    {
        "integrated-gradients": _integrated,
        "absolute-integrated-gradients": lambda model, text: _integrated(model, text).abs(),
    },
    hidden_token_attribution_16,
]
"""All methods of the table but flow and exact hidden token attribution; ALTI-Logit reads decoders only."""
SOME = (
    "alti,norms,globenc,rollout,effective-rollout,last-attention,gradient,absolute-input-x-gradient,input-x-gradient,"
    "integrated-gradients,gradient-rollout,occlusion"
)
OF_DECODERS = "alti-logit,alti,norms,rollout,gradient,absolute-input-x-gradient,input-x-gradient,occlusion"


def bert_tiny() -> Any:
    return whence.load(str(classifiers.TINY))


def minilm(seed: int = 0) -> Any:
    classifiers.train(seed)
    return whence.load(str(classifiers.folder(seed)))


def curves(name: str, model: Any, given: list[str], methods: Any = METHODS, **settings: Any) -> None:
    """A run of `whence.faithfulness`, saved text by text."""
    whence.faithfulness(model, given, methods, save=WORK / f"{name}.jsonl", progress=True, **settings)


def stored(name: str, make: Callable[[], Any]) -> None:
    """Plain data, made once."""
    path = WORK / f"{name}.json"
    if not path.exists():
        write_atomically(path, json.dumps(make()).encode())


def reviews(name: str, model: Any, tokens: int, count: int, methods: Any) -> None:
    curves(name, model, texts.reviews(model.tokenizer, tokens, count), methods, random=2, ceiling="none")


def eraser(name: str, model: Any, count: int) -> None:
    """Passages with rationales; the gold class is explained."""
    given = texts.passages(count)
    curves(
        name, model, [p.text for p in given], "fast", target=[p.label for p in given], operators=("drop",), random=1,
        ceiling="none", rationales=[p.marks for p in given],
    )  # fmt: skip


def contrasts(name: str, model: Any, given: list[texts.Contrast]) -> None:
    """Why this verb form rather than the other: the output is logit(good) − logit(bad)."""
    curves(
        name, model, [c.text for c in given], OF_DECODERS, target=[c.good for c in given], foil=[c.bad for c in given],
        random=3, ceiling="none",
    )  # fmt: skip


def stories() -> Any:
    return whence.load(str(classifiers.MODELS / "stories15M"))


def seeds() -> None:
    """The same 40 sentences, explained by classifiers that differ in their training seed alone."""
    for seed in range(SEEDS):
        curves(f"seed-{seed}", minilm(seed), texts.sentences(40, 5, 10), SOME, random=2, ceiling="none")


def controls(name: str, model: Any, count: int) -> None:
    given = texts.sentences(count)
    stored(name, lambda: whence.attention_controls(model, given, 20, budget=1.5).to_dict())


def long_controls(name: str, model: Any, tokens: int, count: int) -> None:
    given = texts.reviews(model.tokenizer, tokens, count)
    stored(name, lambda: whence.attention_controls(model, given, 20, budget=3.0).to_dict())


def determinedness(name: str, model: Any, tokens: int, count: int) -> None:
    """Reviews cut at so many tokens, beyond the head size; rows of the first are bounded over every attention."""
    for i, text in enumerate(texts.reviews(model.tokenizer, tokens, count)):
        rows = [(0, 5), (len(whence.trace(model, text).of()) - 1, 0)] if i == 0 else []
        stored(
            f"determined-{name}-{tokens}-{i}",
            lambda text=text, rows=rows: whence.determined(  # type: ignore[misc]
                whence.trace(model, text), rows=rows, budget=8.0
            ).to_dict(),
        )


PARTS: dict[str, Callable[[], None]] = {
    "controls-bert-tiny": lambda: controls("controls-bert-tiny", bert_tiny(), 25),
    "blimp-stories15M": lambda: contrasts("blimp-stories15M", m := stories(), texts.blimp(m.tokenizer, 60)),
    "determined-bert-tiny": lambda: determinedness("bert-tiny", bert_tiny(), 128, 8),
    "determined-minilm-128": lambda: determinedness("minilm", minilm(), 128, 8),
    "controls-minilm": lambda: controls("controls-minilm", minilm(), 12),
    "agreement-stories15M": lambda: contrasts("agreement-stories15M", m := stories(), texts.agreement(m.tokenizer, 60)),
    "eraser-bert-tiny": lambda: eraser("eraser-bert-tiny", bert_tiny(), 100),
    "sst2-bert-tiny": lambda: curves(
        "sst2-bert-tiny", bert_tiny(), texts.sentences(SENTENCES), random=5, ceiling="none"
    ),
    "imdb-bert-tiny": lambda: reviews("imdb-bert-tiny", bert_tiny(), 80, 40, METHODS),
    "sst2-minilm": lambda: curves("sst2-minilm", minilm(), texts.sentences(SENTENCES, 5, 10), random=2, ceiling="none"),
    "blimp-smollm2": lambda: contrasts("blimp-smollm2", m := whence.load("smollm2"), texts.blimp(m.tokenizer, 30)),
    "eraser-minilm": lambda: eraser("eraser-minilm", minilm(), 60),
    "determined-minilm-64": lambda: determinedness("minilm", minilm(), 64, 8),
    "imdb-minilm": lambda: reviews("imdb-minilm", minilm(), 42, 32, SOME),
    "agreement-smollm2": lambda: contrasts(
        "agreement-smollm2", m := whence.load("smollm2"), texts.agreement(m.tokenizer, 30, 8)
    ),
    "determined-stories15M": lambda: determinedness("stories15M", stories(), 128, 4),
    "controls-imdb-minilm": lambda: long_controls("controls-imdb-minilm", minilm(), 64, 10),
    "seeds": seeds,
}
"""By name. What is quick comes first; "seeds" trains the classifiers that are missing, six processor minutes each."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=PARTS, action="append")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    WORK.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        if not asked.write and name in (asked.only or PARTS):
            print(name, flush=True)
            part()
    if asked.only is None:
        page.write(WORK)


if __name__ == "__main__":
    main()
