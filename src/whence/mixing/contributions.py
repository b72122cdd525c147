"""Per layer, and from the embeddings: which tokens is each hidden token made of? Every method behind one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from whence import method_table
from whence.errors import InputError
from whence.mixing.mixture import Mixture
from whence.mixing.rollout import rollout as roll_out
from whence.reading.refusals import refuse_following
from whence.reading.streaming import Stream
from whence.reading.trace import Trace
from whence.results.declared import Array

LAYER, EMBEDDINGS = "layer", "embeddings"


@dataclass(frozen=True)
class Contributions(Mixture):
    """`values` [layer, hidden, input]: of each layer's own input, or of the embeddings where `origin` says so.

    `extra`: "degenerate", how many rows of each layer had no positive contribution and were given to the token itself;
    "encoder", for encoder–decoders, the encoder's own layers.
    """

    kind: ClassVar[str] = "contributions"
    arrays: ClassVar[Mapping[str, Array]] = {
        "values": Array("layer hidden input"),
        "degenerate": Array("layer", "integer", needed=False),
        "encoder": Array("encoder_layer source source", needed=False),
        "change": Array("layer hidden input", needed=False),
    }

    @property
    def method(self) -> str:
        return self.provenance.method

    @property
    def origin(self) -> str:
        """What the columns are: "layer", the tokens of that layer's input, or "embeddings"."""
        return str(self.provenance.settings.get("origin", LAYER))

    @property
    def source_length(self) -> int:
        """How many columns come before the rows' own tokens: an encoder–decoder's source."""
        return self.values.shape[-1] - self.values.shape[-2]

    def rollout(self) -> Contributions:
        """The aggregate from the embeddings to every layer's output: R_0 = I, R_l = C_l R_{l−1}.

        Encoder–decoders: what comes through cross-attention is followed through the encoder, the rest through the
        decoder's own tokens. Methods that already reach back to the embeddings return themselves.
        """
        if self.origin == EMBEDDINGS:
            return self
        if self.layers != tuple(range(len(self.layers))):
            raise InputError(f"rollout needs every layer from 0 on; this result has layers {list(self.layers)}.")
        refuse_following(f"the rollout of {self.method}", self.provenance.settings.get("mixes"))
        values = self._through_encoder() if self.source_length else roll_out(self.values)
        settings = {**self.provenance.settings, "origin": EMBEDDINGS}
        return replace(self, values=values, provenance=self.provenance.by(self.method, **settings))

    def _through_encoder(self) -> Tensor:
        """ALTI+: R_l = [C_source · E | 0] + C_target · R_{l−1}, with E the encoder's rollout and R_0 = [0 | I]."""
        if "encoder" not in self.extra:
            raise InputError(
                "this result has lost its encoder's layers (after select or words): roll it out before that."
            )
        source = self.source_length
        encoder = roll_out(self.extra["encoder"].to(self.values))[-1]
        before = torch.cat(
            [self.values.new_zeros(self.shape[1], source), torch.eye(self.shape[1]).to(self.values)], dim=1
        )
        out = torch.empty_like(self.values)
        for i, layer in enumerate(self.values):
            out[i] = layer[:, source:] @ before
            out[i, :, :source] += layer[:, :source] @ encoder
            before = out[i]
        return out


@overload
def contributions(trace: Trace, method: str = ..., **options: Any) -> Contributions: ...
@overload
def contributions(trace: Trace, method: list[str] | tuple[str, ...], **options: Any) -> dict[str, Contributions]: ...
@overload
def contributions(trace: Sequence[Trace], method: str = ..., **options: Any) -> list[Contributions]: ...
@overload
def contributions(trace: Stream, method: str = ..., **options: Any) -> Any: ...
def contributions(
    trace: Trace | Stream | Sequence[Trace],
    method: str | list[str] | tuple[str, ...] = "alti",
    *,
    rollout: bool = False,
    layers: Sequence[int] | None = None,
    each: Callable[[Contributions], Any] | None = None,
    **options: Any,
) -> Any:
    """Which tokens each hidden token is made of, by `method`; `.rollout()` follows it back to the embeddings.

    method: one of `whence.methods("mixing")` that gives shares by layer: alti, norms, rollout, decompx, …. The command
    `whence methods` lists them with their papers and options; the class or function of each says what it computes.

    Several methods at once (a list of names) share the work on each layer and come back by name; several traces, in order.

    rollout: the aggregate from the embeddings, as `.rollout()` gives it. layers: which ones are given back (negative from the
    end), all by default. each: a summary that is given back in place of each layer's shares (`Contributions.own_share`),
    the frames one below the other.

    On a stream (`whence.stream`), with the methods that read one layer at a time: every layer is dropped before the next, and
    no more is held than what was asked for.

    attention: "encoder" or "decoder" of an encoder–decoder; None: both together (ALTI+), where the method can.
    model: needed by the methods that run it again, where the trace came from a file.

    >>> import whence
    >>> trace = whence.trace(whence.load(), "The bank raised its rates.")
    >>> mixed = whence.contributions(trace, method="alti")
    >>> mixed.values.shape                                     # [layer, hidden, input of that layer]
    torch.Size([6, 8, 8])
    >>> mixed.rollout().values[-1].sum(-1).round(decimals=4).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    from whence.mixing.layerwise import by_layer, layer_method

    if isinstance(trace, Stream):
        return _of_stream(trace, method, rollout, layers, each, options)
    if rollout or layers is not None or each is not None:
        found: Any = contributions(trace, method, **options)  # type: ignore[arg-type]
        narrowed = partial(_narrowed, rolled=rollout, layers=layers, each=each)
        if isinstance(found, dict):
            return {name: _each_of(narrowed, one) for name, one in found.items()}
        return _each_of(narrowed, found)
    traces = [trace] if isinstance(trace, Trace) else list(trace)
    for given in traces:
        if not isinstance(given, Trace):
            raise InputError(
                f"contributions takes what whence.trace or whence.stream gives, not a {type(given).__name__}."
            )
    entries = {
        given: method_table.method(given, BY_LAYER) for given in ([method] if isinstance(method, str) else method)
    }
    for entry in entries.values():
        entry.check_options(options)
    # Methods that read one layer at a time share the work on each layer; the others go one by one.
    shared = {given: entry for given, entry in entries.items() if entry.gives == "matrix"}
    own = {name: value for name, value in options.items() if name != "attention"}
    named = [(entry.name, layer_method(entry.function, own)) for entry in shared.values()]
    results: dict[str, list[Any]] = {
        given: [entry(one, **options) for one in traces] for given, entry in entries.items() if given not in shared
    }
    results |= zip(shared, by_layer(traces, named, options.get("attention")), strict=True)
    if isinstance(trace, Trace):
        first = {given: results[given][0] for given in entries}
        return first[method] if isinstance(method, str) else first
    in_order: dict[str, Any] = {given: results[given] for given in entries}
    return in_order[method] if isinstance(method, str) else in_order


BY_LAYER = ("matrix", "contributions")


def _each_of(change: Callable[[Contributions], Any], shares: Contributions | list[Contributions]) -> Any:
    return [change(one) for one in shares] if isinstance(shares, list) else change(shares)


def _narrowed(
    shares: Contributions,
    *,
    rolled: bool,
    layers: Sequence[int] | None,
    each: Callable[[Contributions], Any] | None,
) -> Any:
    """The result as it was asked for: rolled out, some layers of it, or a summary."""
    shares = shares.rollout() if rolled else shares
    if layers is not None:
        count = len(shares.layers)
        bad = [i for i in layers if not -count <= i < count]
        if bad:
            raise InputError(f"there is no layer {bad[0]}; there are {count} (0 … {count - 1}).")
        shares = shares.select(layer=[shares.layers[i] for i in layers])
    return shares if each is None else each(shares)


def _of_stream(
    stream: Stream,
    method: str | list[str] | tuple[str, ...],
    rolled: bool,
    layers: Sequence[int] | None,
    each: Callable[[Contributions], Any] | None,
    options: dict[str, Any],
) -> Any:
    from whence.mixing.streamed import LayerContributions

    names = [method] if isinstance(method, str) else list(method)
    for given in names:
        entry = method_table.method(given, BY_LAYER)
        if entry.gives != "matrix":
            raise InputError(
                f"{given} runs the model again or follows all layers at once, and takes a trace: stream.collect() gives one."
            )
        entry.check_options(options)
    attention = options.get("attention")
    own = {name: value for name, value in options.items() if name != "attention"}

    def of_layer(piece: Trace) -> dict[str, Contributions]:
        shares: dict[str, Contributions] = contributions(replace(piece, model=None), names, **own)
        return shares

    results = stream.read(LayerContributions(of_layer, rollout=rolled, layers=layers, each=each), attention)
    return results[method] if isinstance(method, str) else results
