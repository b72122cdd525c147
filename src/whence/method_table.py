"""The one table of methods: `contributions`, `attribute`, the command line, the page, the docs and the citations derive from it.

A method is one entry here and one object elsewhere, named by its location, so that listing methods imports nothing
heavy. What the object is, `gives` says:

    "matrix"         one layer's (query, source): a class, `Class(**options).matrix(layer)`, or a function,
                     `f(layer, **options)`; `layer` is a `whence.mixing.layerwise.LayerView`
    "contributions"  a function of a trace, `f(trace, **options)`, that gives a `Mixture` [layer, hidden, input]
    "scores"         a function of a prediction, `f(prediction, **options)`, that gives a number per input token
    "measure"        anything else; it has a public function of its own

Others add methods with `register`, or by an entry point of the group "whence.methods" that names a `Method`:

    @whence.method_table.register("mine", gives="matrix", title="Mine", paper="Me 2026", cost="trace",
                                  summary="the first head", determined="weights")
    def mine(layer): return layer.attention[0]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points
from threading import RLock
from typing import Any, TypeVar

from whence.errors import InputError
from whence.results.method import COSTS, DETERMINED, GIVES, QUESTIONS, Method

__all__ = ["COSTS", "DETERMINED", "QUESTIONS", "Method", "declare", "explaining", "method", "methods", "register"]

F = TypeVar("F", bound=Callable[..., Any])

_registered: dict[str, Method] = {}
_lock = RLock()
_complete = False


def register(name: str, *, question: str = "mixing", **about: Any) -> Callable[[F], F]:
    """Register the decorated class or function, which is returned unchanged. Its options are read from its signature."""

    def decorate(function: F) -> F:
        location = f"{function.__module__}:{function.__qualname__}"
        takes = {"options": options_of(function, about.get("gives", "measure")), **about}
        add(Method(name, question, location=location, _function=function, **takes))
        return function

    return decorate


def declare(name: str, location: str, **about: Any) -> Method:
    """Register an object by its location, 'package.module:object', without importing it."""
    return add(Method(name, location=location, **about))


def options_of(function: Callable[..., Any], gives: str) -> tuple[str, ...]:
    """The names of what it takes besides a trace or a prediction; which stack is read is an option of every matrix."""
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = known if isinstance(function, type) else known[1:]
    return ("attention", *own) if gives == "matrix" else tuple(own)


def add(new: Method) -> Method:
    """No two methods share a name; the same object may come twice, declared and decorated, or reloaded."""
    with _lock:
        old = _registered.get(new.name)
        if old is not None and old.location != new.location:
            raise InputError(f"The method name {new.name!r} is taken by {old.location}; {new.location} needs another.")
        _registered[new.name] = new
    return new


def methods(question: str | None = None) -> tuple[Method, ...]:
    """Every method, or those that answer one question: in the order of the questions, then by name."""
    if question is not None and question not in QUESTIONS:
        raise InputError(_unknown("question", question, QUESTIONS))
    _read_all()
    order = list(QUESTIONS)
    answering = (m for m in _registered.values() if question in (None, m.question))
    return tuple(sorted(answering, key=lambda m: (order.index(m.question), m.name)))


def method(name: str, gives: tuple[str, ...] = GIVES) -> Method:
    """The method of that name (or alias); an InputError with the nearest names where there is none."""
    _read_all()
    asked = name.strip().lower()
    by_name = {m.name: m for m in _registered.values() if m.gives in gives}
    names = by_name | {alias: m for m in by_name.values() for alias in m.aliases}
    if asked in names:
        return names[asked]
    elsewhere = _registered.get(asked)
    if elsewhere is not None:
        raise InputError(
            f"method={name!r} is not one of {', '.join(by_name)}: {asked} gives {_PEOPLE[elsewhere.gives]}."
        )
    raise InputError(_unknown("method", name, names, by_name))


def explaining() -> tuple[Method, ...]:
    """The methods that `whence.attribute` takes."""
    return tuple(m for m in methods("mixing") if m.gives != "measure")


_PEOPLE = {
    "matrix": "shares by layer: ask whence.contributions (whence mix)",
    "contributions": "shares by layer: ask whence.contributions (whence mix)",
    "scores": "a score per input token of one prediction: ask whence.attribute (whence attribute)",
    "measure": "a measure of its own: see whence methods",
}


def _read_all() -> None:
    """whence's own methods, and those that installed packages name."""
    global _complete
    with _lock:
        if _complete:
            return
        _complete = True
        _declare_own()
        for point in entry_points(group="whence.methods"):
            found = point.load()
            if not isinstance(found, Method):
                raise InputError(
                    f"the entry point {point.name!r} of {point.dist.name if point.dist else 'a package'} is a "
                    f"{type(found).__name__}, not a whence.method_table.Method."
                )
            add(found)


def _unknown(what: str, name: str, known: Mapping[str, Any], listed: Mapping[str, Any] | None = None) -> str:
    near = get_close_matches(name.strip().lower(), known, n=3, cutoff=0.5)
    all_of_them = ", ".join(known if listed is None else listed) or "none"
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are: {all_of_them}."
    return f"No {what} is called {name!r}; {hint}"


# -- whence's own methods ------------------------------------------------------------------------------------------

BRUNNER, BHARDWAJ, ABNAR = "Brunner et al. 2020", "Bhardwaj et al. 2021", "Abnar & Zuidema 2020"
EXPLAIN = ("model", "head", "extra:explain")
OUTPUT = ("output", "baseline")


# fmt: off
def _declare_own() -> None:
    def attention(name: str, location: str, paper: str, cost: str, summary: str, **more: Any) -> None:
        declare(name, f"whence.attention.{location}", question="attention", paper=paper, cost=cost, summary=summary, **more)

    def mixing(name: str, location: str, title: str, paper: str, summary: str, **more: Any) -> None:
        about = {"question": "mixing", "cost": "trace", "gives": "matrix", "determined": "weights", "shown": True, **more}
        about["options"] = ("attention", *about.get("options", ())) if about["gives"] == "matrix" else about["options"]
        declare(name, f"whence.mixing.{location}", title=title, paper=paper, summary=summary, **about)

    def scores(name: str, location: str, title: str, paper: str, summary: str, **more: Any) -> None:
        about = {"gives": "scores", "options": (), "signed": True, "contrast": True, "determined": "map"}
        mixing(name, location, title, paper, summary, **{**about, "cost": "gradients", "needs": EXPLAIN, **more})

    attention("effective-attention", "effective_attention:effective_attention", f"{BRUNNER}; Sun & Marasović 2021", "trace",
              "the part of attention that the head output depends on")
    attention("identifiability", "identifiability:identifiability", BRUNNER, "trace",
              "rank, null space, condition, leverage and null share of every row")
    attention("certify", "certify:certify", "whence", "solver",
              "the exact interval in which each weight could lie, with a proof")
    attention("witness", "witness:witness", "whence", "solver",
              "another attention row with the same output, verified in the model", needs=("model",))
    attention("doppelganger", "doppelganger:doppelganger", "whence", "solver",
              "other attention for every row of every head at once, the same computation", needs=("model",))
    attention("key-constraint", "key_constraint:key_constraint", BHARDWAJ, "trace",
              "alternatives that some query could have produced: local dimension, near-tied bound", needs=("keys",))
    attention("layer-statement", "joint:layer_statement", BHARDWAJ, "trace",
              "what a whole layer's output determines of all its heads", needs=("projection",))
    attention("uniqueness", "uniqueness:uniqueness", "whence", "solver",
              "whether a theorem makes a model's attention unique, or a second row that shows it is not", needs=("model",))
    declare("token-identifiability", "whence.tokens.token_identifiability:token_identifiability", question="tokens",
            paper=BRUNNER, cost="training", needs=("model", "texts"),
            summary="how often a hidden state still tells which input token it was, layer by layer")
    for name, location, paper, cost, summary in (
        ("faithfulness", "evaluate:faithfulness", "DeYoung et al. 2020; Edin et al. 2024", "passes",
         "which explanation orders the words as the prediction does: removal curves with ceilings, and verdicts"),
        ("determined", "determined:determined", "whence", "solver",
         "how far an explanation moves between attentions that give the same outputs"),
        ("attention-controls", "controls:attention_controls", "Jain & Wallace 2019; Wiegreffe & Pinter 2019", "passes",
         "permuted, uniform and equal-output attention against the prediction, beside gradients and leave-one-out"),
        ("plausibility", "plausibility:plausibility", "DeYoung et al. 2020", "passes",
         "agreement of explanations with words that people marked, beside exact chance"),
        ("robustness", "robustness:robustness", "whence", "passes",
         "whether models that agree on the predictions agree on the explanations"),
    ):
        declare(name, f"whence.faithful.{location}", question="faithfulness", paper=paper, cost=cost, summary=summary,
                needs=("model", "texts"))
    declare("identifiable-transformer", "whence.identifiable.training.fit:train", question="models", paper=BHARDWAJ,
            cost="training", needs=("labelled texts",),
            summary="a text classifier whose attention weights are the only ones that give its output")
    declare("identifiable-decoder", "whence.identifiable.training.language_model:train_language_model",
            question="models", paper="whence", cost="training", needs=("texts",),
            summary="a language model whose key is its value, so that every attention row is unique at every length")
    declare("tie-keys", "whence.identifiable.conversion.convert:tie_keys", question="models", paper="whence",
            cost="training", needs=("model", "texts"),
            summary="a pretrained encoder converted so that its attention is unique at every length")

    mixing("attention", "raw_attention:RawAttention", "Attention, no residual", "Vaswani et al. 2017",
           "the mean over heads of the attention weights, layer by layer")
    mixing("effective", "effective:Effective", "Effective attention, no residual", BRUNNER,
           "effective attention (mean over heads) as the mixing matrix",
           options=("constraint",), determined="theorem", signed=True)
    mixing("rollout", "rollout:Rollout", "Attention rollout", ABNAR,
           "attention with the residual as one half, multiplied through the layers")
    mixing("effective-rollout", "effective:EffectiveRollout", "Effective attention rollout", f"{ABNAR}; {BRUNNER}",
           "rollout of effective attention", options=("constraint",), determined="theorem", signed=True)
    mixing("flow", "flow:flow", "Attention flow", ABNAR,
           "maximum flow through the layers, attention as the width of pipes",
           gives="contributions", cost="solver", options=("layers", "attention", "progress"), shown=False)
    mixing("norms", "norms:Norms", "Norms", "Kobayashi et al. 2020; Kobayashi et al. 2021",
           "the length of each token's part of a state", needs=("wiring",), options=("residual",))
    mixing("alti", "alti:Alti", "ALTI", "Ferrando et al. 2022",
           "how much closer each token's part brings the state; ALTI+ for encoder–decoders",
           needs=("wiring",), options=("distance", "second_norm", "model"))
    mixing("globenc", "globenc:GlobEnc", "GlobEnc", "Modarressi et al. 2022",
           "the length of each token's part after the block's second norm", needs=("wiring", "model"), options=("model",))
    mixing("value-zeroing", "value_zeroing:value_zeroing", "Value zeroing", "Mohebbi et al. 2023",
           "how a token's state turns without another token's value", gives="contributions", cost="passes",
           needs=("wiring", "model"), options=("attention", "model", "memory", "progress"), determined="map")
    mixing("decompx", "decompx:decompx", "DecompX", "Modarressi et al. 2023",
           "one vector per input token, carried through every layer", gives="contributions", needs=("wiring", "model"),
           options=("attention", "model", "memory"))
    mixing("hidden-token-attribution", "hidden_token_attribution:hidden_token_attribution", "Hidden token attribution",
           BRUNNER, "how strongly each hidden state reacts to each input embedding", gives="contributions",
           cost="passes", needs=("wiring", "model"), determined="map", aliases=("hta",),
           options=("mode", "probes", "norm", "of", "embeddings", "attention", "seed", "memory", "progress", "model"))
    mixing("local-vs-global", "local_vs_global:local_vs_global", "Local and global attention", "Pascual et al. 2021",
           "attention rows against the attribution of the head outputs", gives="measure", cost="passes",
           needs=("wiring", "model"), options=(), shown=False)
    mixing("alti-logit", "alti_logit:alti_logit", "ALTI-Logit", "Ferrando et al. 2023",
           "decoders: which inputs pushed a logit, by layer and head", gives="contributions",
           needs=("wiring", "model", "head"), signed=True, contrast=True, options=("target", "foil", "position", "model"))
    scores("gradient", "gradients:gradient", "Gradient norm", "Simonyan et al. 2014",
           "the length of the gradient at each word embedding", signed=False, needs=("model", "head"), options=("output",))
    scores("input-x-gradient", "gradients:input_x_gradient", "Input × gradient", "Shrikumar et al. 2016",
           "embedding times gradient, summed", aliases=("inputxgradient",), needs=("model", "head"), options=("output",))
    scores("absolute-input-x-gradient", "gradients:absolute_input_x_gradient", "|Input × gradient|",
           "Shrikumar et al. 2016", "embedding times gradient, summed, without its sign", signed=False,
           needs=("model", "head"), options=("output",), shown=False)
    scores("integrated-gradients", "gradients:integrated_gradients", "Integrated gradients", "Sundararajan et al. 2017",
           "gradients along the way from a baseline to the text", aliases=("ig",),
           options=(*OUTPUT, "steps", "batch_size"))
    scores("absolute-integrated-gradients", "gradients:absolute_integrated_gradients", "|Integrated gradients|",
           "Sundararajan et al. 2017", "integrated gradients without their signs", signed=False, aliases=("absolute-ig",),
           options=(*OUTPUT, "steps", "batch_size"), shown=False)
    scores("last-attention", "last_attention:last_attention", "Last layer's attention", "Vaswani et al. 2017",
           "the last layer's attention (mean over heads) at the rows that the head reads", signed=False, contrast=False,
           cost="trace", needs=("model",), determined="weights")
    scores("last-effective", "last_attention:last_effective", "Last layer's effective attention", BRUNNER,
           "the last layer's effective attention at the rows that the head reads", contrast=False, cost="trace",
           needs=("model",), determined="theorem", options=("constraint",))
    scores("gradient-rollout", "gradient_rollout:gradient_rollout", "Gradient × attention rollout", "Chefer et al. 2021",
           "attention weighed by its gradient, multiplied through the layers", signed=False, needs=("model", "head"),
           determined="weights", options=("output",), shown=False)
    scores("occlusion", "perturbations:occlusion", "Occlusion", "Zeiler & Fergus 2014",
           "what the prediction loses without each token", cost="passes", aliases=("leave-one-out",),
           needs=("model", "head"),
           options=(*OUTPUT, "batch_size"))
    scores("lime", "perturbations:lime", "LIME", "Ribeiro et al. 2016",
           "a sparse linear model of the prediction around the text", cost="passes", shown=False,
           options=(*OUTPUT, "samples", "seed", "batch_size"))
    scores("kernel-shap", "perturbations:kernel_shap", "Kernel SHAP", "Lundberg & Lee 2017",
           "Shapley values by weighted regression", cost="passes", shown=False, aliases=("shap",),
           options=(*OUTPUT, "samples", "seed", "batch_size"))
# fmt: on
