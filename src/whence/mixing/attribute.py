"""Input scores for one prediction: the mixing methods read at the right row, and Captum's, through one function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from whence.errors import InputError, MissingExtraError
from whence.mixing.alti_logit import LogitContributions, _target
from whence.mixing.contributions import contributions
from whence.mixing.hidden_token_attribution import hidden_token_attribution
from whence.model.load import Model, as_model
from whence.reading.capture.attach import accepted, evaluating
from whence.reading.labels import Tokens
from whence.reading.rerun.replay import repeated
from whence.reading.rerun.run import on_device
from whence.reading.trace import Trace
from whence.reading.tracing import trace
from whence.results.result import Result

CAPTUM = ("gradient", "input-x-gradient", "integrated-gradients", "occlusion", "lime", "kernel-shap")
MIXING = (
    "attention", "effective", "rollout", "effective-rollout", "flow", "norms", "alti", "globenc", "value-zeroing", "decompx",
    "alti-logit", "hidden-token-attribution",
)  # fmt: skip
_ALIASES = {
    "ig": "integrated-gradients",
    "leave-one-out": "occlusion",
    "inputxgradient": "input-x-gradient",
    "shap": "kernel-shap",
}


@dataclass(frozen=True)
class Attribution(Result):
    """`values` [input]: a score per input token. Mixing methods: shares; Captum's: signed (but "gradient", a length)."""

    kind: ClassVar[str] = "attribution"

    def ranked(self) -> list[tuple[str, float]]:
        """Tokens with their scores, the highest first."""
        tokens = self.key_tokens or self.tokens
        order = self.values.argsort(descending=True).tolist()
        return [(tokens[i], float(self.values[i])) for i in order]


def attribute(
    model: Any,
    text: Any,
    method: str = "alti",
    target: int | str | None = None,
    *,
    text_pair: str | None = None,
    position: int | None = None,
    output: str = "logit",
    baseline: str = "mask",
    steps: int = 50,
    samples: int | None = None,
    seed: int = 0,
    batch_size: int = 16,
    **options: Any,
) -> Attribution:
    """Which input tokens made the model predict what it predicts?

    method: a mixing method (attention, rollout, norms, alti, globenc, value-zeroing, decompx, alti-logit,
    hidden-token-attribution, …), rolled out and read at the row the prediction is made from: [CLS] (encoder classifiers),
    the last position (decoders), [MASK] (masked language models), the mean of all rows (no head). `options` go to it.
    Or one of Captum's (extra `explain`): gradient, input-x-gradient, integrated-gradients, occlusion (leave one out), lime,
    kernel-shap. These replace the output of the model's own word-embedding layer, so that positions are added once.

    target: a class (name or number) or a token (or its id); None: what the model itself prefers.
    position: which position predicts, for models with one prediction per token. output: explain the "logit" or the
    "probability". baseline: what stands for a token that is not there: "mask" (the mask token, else the padding token, else
    zeros), "pad" or "zero"; special tokens always stay. steps: of integrated gradients. samples: of lime and kernel-shap.

    >>> import whence
    >>> scores = whence.attribute(whence.load(), "The bank raised its rates.", method="alti")
    >>> len(scores.tokens), round(float(scores.values.sum()), 4)
    (8, 1.0)
    """
    name = _ALIASES.get(method.strip().lower(), method.strip().lower())
    if name not in MIXING + CAPTUM:
        raise InputError(f"method={method!r} is not one of {', '.join(MIXING + CAPTUM)}.")
    chosen = as_model(model)
    traced = text if isinstance(text, Trace) else trace(chosen, text, text_pair)
    if not isinstance(traced, Trace):
        raise InputError("attribute explains one prediction: give one text, not a list.")
    if name in MIXING:
        return _mixing(chosen, traced, name, target, position, options)
    if options:
        raise InputError(f"method {name!r} has no option {next(iter(options))!r}.")
    if output not in ("logit", "probability"):
        raise InputError(f"output={output!r} is not 'logit' or 'probability'.")
    return _captum(chosen, traced, name, target, position, output, baseline, steps, samples, seed, batch_size)


def _alone(name: str) -> Any:
    """One of Captum's methods as a function of its own, for the registry."""

    def function(model: Any, text: Any, target: int | str | None = None, **options: Any) -> Attribution:
        return attribute(model, text, name, target, **options)

    function.__name__ = function.__qualname__ = name.replace("-", "_")
    function.__doc__ = f"`whence.attribute` with method {name!r}."
    return function


gradient, input_x_gradient, integrated_gradients, occlusion, lime, kernel_shap = (_alone(name) for name in CAPTUM)


# -- mixing methods ------------------------------------------------------------------------------------------------


def _mixing(
    model: Model, traced: Trace, name: str, target: Any, position: int | None, options: Mapping[str, Any]
) -> Attribution:
    if name == "alti-logit":
        found = contributions(traced, name, target=target, position=-1 if position is None else position, **options)
        assert isinstance(found, LogitContributions)
        return _result(traced, name, found.by_input(), found.tokens, {**found.provenance.settings})
    mixed: Any
    if name == "hidden-token-attribution":
        mixed = hidden_token_attribution(traced, **options)
    else:
        mixed = contributions(traced, name, **options).rollout()
    rows = _rows(model, traced, position)
    scores = mixed.values[-1].mean(0) if rows is None else mixed.values[-1, rows]
    settings = {"row": "mean" if rows is None else rows, **mixed.provenance.settings}
    return _result(traced, name, scores, mixed.key_tokens or mixed.tokens, settings)


def _rows(model: Model, traced: Trace, position: int | None) -> int | None:
    """The row that the prediction is made from; None: all of them."""
    stack = traced.of("decoder") if "decoder" in traced.stacks else traced.of()
    n = len(stack.tokens)
    if position is not None:
        if not -n <= position < n:
            raise InputError(f"position={position} is out of range: there are {n} tokens.")
        return position % n
    if stack.name == "decoder":
        return n - 1
    if traced.logits is None:
        return None
    return 0 if traced.logits.dim() == 1 else _mask_position(model, stack.tokens)


def _mask_position(model: Model, tokens: Tokens) -> int:
    mask = getattr(model.tokenizer, "mask_token_id", None)
    at = [i for i, token in enumerate(tokens.ids or ()) if mask is not None and token == mask]
    if len(at) != 1:
        raise InputError(f"the text has {len(at)} mask tokens: say which position predicts, with position=.")
    return at[0]


# -- Captum --------------------------------------------------------------------------------------------------------


def _captum(
    model: Model,
    traced: Trace,
    name: str,
    target: Any,
    position: int | None,
    output: str,
    baseline: str,
    steps: int,
    samples: int | None,
    seed: int,
    batch_size: int,
) -> Attribution:
    try:
        import captum.attr as captum
    except ImportError as problem:
        raise MissingExtraError(
            f"method {name!r} comes from Captum, which is not installed: pip install 'whence[explain]'."
        ) from problem
    if traced.logits is None:
        raise InputError(
            f"{model.name} makes no prediction (it has no head): load it with a task, or use a mixing method."
        )
    place, word = _prediction(model, traced, target, position)
    inputs = accepted(model.model, on_device(model, traced.inputs))
    layer, embedded = _word_embedding(model.model, inputs)
    tokens = traced.of("encoder").tokens if "encoder" in traced.stacks else traced.tokens
    absent = _absent(model, layer, embedded, tokens, baseline)

    def score(embeddings: Tensor) -> Tensor:
        with _replaced(layer, embeddings):
            logits = model.model(**repeated_all(inputs, len(embeddings))).logits
        logits = logits if place is None else logits[:, place]
        logits = logits if output == "logit" else torch.softmax(logits, dim=-1)
        return logits[:, word]

    special = torch.tensor(tokens.special)
    features = torch.where(special, 0, (~special).cumsum(0))  # special tokens are one feature, which never changes
    mask = features[None, :, None].expand_as(embedded).to(embedded.device)
    single = torch.arange(len(tokens), device=embedded.device)[None, :, None].expand_as(embedded)
    extra: dict[str, Tensor] = {}
    with evaluating(model.model), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        start = embedded.detach()
        if name == "gradient":
            made = captum.Saliency(score).attribute(start.requires_grad_(), abs=False).norm(dim=-1)[0]
        elif name == "input-x-gradient":
            made = captum.InputXGradient(score).attribute(start.requires_grad_()).sum(-1)[0]
        elif name == "integrated-gradients":
            made, gap = captum.IntegratedGradients(score).attribute(
                start, absent, n_steps=steps, internal_batch_size=batch_size, return_convergence_delta=True
            )
            made, extra["gap"] = made.sum(-1)[0], gap.detach()
        elif name == "occlusion":
            ablation = captum.FeatureAblation(score)
            many = {"perturbations_per_eval": batch_size}
            with torch.no_grad():
                made = ablation.attribute(start, absent, feature_mask=single, **many)[0, :, 0]
            made = torch.where(special.to(made.device), 0.0, made)
        else:
            kind = captum.Lime if name == "lime" else captum.KernelShap
            try:
                explainer = kind(score)
            except (ImportError, AssertionError) as problem:
                raise MissingExtraError(
                    f"method {name!r} also needs scikit-learn: pip install 'whence[explain]'."
                ) from problem
            many = {"n_samples": samples or max(64, 8 * len(tokens)), "perturbations_per_eval": batch_size}
            with torch.no_grad():
                made = explainer.attribute(start, absent, feature_mask=mask, **many)[0, :, 0]
            made = torch.where(special.to(made.device), 0.0, made)
    settings = {"target": word, "position": place, "output": output, "baseline": baseline, "seed": seed}
    return _result(traced, name, made.detach(), tokens, settings, extra)


def repeated_all(inputs: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Tensors repeated in a batch, settings as they are."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    return {**inputs, **repeated(tensors, times)}


def _prediction(model: Model, traced: Trace, target: Any, position: int | None) -> tuple[int | None, int]:
    """(position, class or token) of the prediction to explain; no position where there is one for the whole text."""
    assert traced.logits is not None
    if traced.logits.dim() == 1:
        return None, _class(model, traced.logits, target)
    place = _rows(model, traced, position)
    assert place is not None
    return place, _target(model, traced.logits[place], target)


def _class(model: Model, logits: Tensor, target: Any) -> int:
    if target is None:
        return int(logits.argmax())
    labels = dict(getattr(getattr(model.model, "config", None), "label2id", None) or {})
    if isinstance(target, str) and target in labels:
        target = labels[target]
    if isinstance(target, str) or not 0 <= int(target) < len(logits):
        raise InputError(
            f"target={target!r} is no class of {model.name}; there are: {', '.join(labels) or len(logits)}."
        )
    return int(target)


def _word_embedding(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[nn.Module, Tensor]:
    """The layer that turns this text's ids into vectors, and what it gives, (1, n, d): found by what it is given."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        raise InputError("gradient and perturbation methods explain texts: these inputs have no input_ids.")
    found: list[tuple[nn.Module, Tensor]] = []

    def watch(module: nn.Module, args: Any, made: Any) -> None:
        given = args[0] if args else None
        if found or not isinstance(given, Tensor) or not isinstance(made, Tensor) or made.dim() != 3:
            return
        if given.dtype == ids.dtype and given.shape == ids.shape == made.shape[:2] and torch.equal(given, ids):
            found.append((module, made.detach()))  # the innermost layer is the first to be done

    hooks = [module.register_forward_hook(watch) for module in model.modules()]
    try:
        with evaluating(model):
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        raise InputError("no layer of the model turns the token ids into vectors, so gradients cannot be read there.")
    return found[0]


def _absent(model: Model, layer: nn.Module, embedded: Tensor, tokens: Tokens, baseline: str) -> Tensor:
    """(1, n, d): every token replaced by one that says nothing, special tokens kept."""
    if baseline not in ("mask", "pad", "zero"):
        raise InputError(f"baseline={baseline!r} is not 'mask', 'pad' or 'zero'.")
    names = {"mask": ("mask_token_id", "pad_token_id"), "pad": ("pad_token_id",), "zero": ()}[baseline]
    ids = [i for i in (getattr(model.tokenizer, name, None) for name in names) if i is not None]
    nothing = torch.zeros_like(embedded)
    if ids:
        with torch.no_grad():
            nothing = layer(torch.full(embedded.shape[:2], ids[0], device=embedded.device))
    keep = torch.tensor(tokens.special, device=embedded.device)[None, :, None]
    return torch.where(keep, embedded, nothing).detach()


@contextmanager
def _replaced(layer: nn.Module, embeddings: Tensor) -> Iterator[None]:
    """The word-embedding layer's first output (an encoder–decoder's source) replaced; positions are added after it."""
    calls = 0

    def hook(_module: nn.Module, _args: Any, made: Any) -> Any:
        nonlocal calls
        calls += 1
        return embeddings if calls == 1 else made

    handle = layer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _result(
    traced: Trace,
    name: str,
    scores: Tensor,
    tokens: Tokens,
    settings: Mapping[str, Any],
    extra: Mapping[str, Tensor] | None = None,
) -> Attribution:
    return Attribution(
        values=scores,
        axes=("input",),
        tokens=tokens,
        provenance=traced.provenance.by(name, **settings),
        extra=extra or {},
    )
