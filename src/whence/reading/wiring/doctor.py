"""How was this model read, and can the reading be trusted? The proof, layer by layer, for people and machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from whence.errors import InputError
from whence.model.load import Model, as_model
from whence.reading.inputs import Prepared, beginning, prepare
from whence.reading.wiring.proof import Proof, proof_of
from whence.reading.wiring.sites import AttentionSite
from whence.results.provenance import Provenance
from whence.results.short_repr import short_repr

TEXT = "The doctor asked whence the numbers came, and checked every one of them twice."


@dataclass(frozen=True)
class Diagnosis:
    """The errors of the six checks; `trusted` only if all that was claimed was proved."""

    __repr__ = short_repr

    proof: Proof
    provenance: Provenance

    @property
    def trusted(self) -> bool:
        """Attention, values, head outputs and projection are proved and the recorder changes nothing: (a), (b), (d) and (e)."""
        holds = self.proof.holds
        return all(holds[check] for check in "abde")

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why something is refused, each once."""
        found: dict[str, None] = {}
        for site in self.proof.sites:
            for check, reason in (("(b)", site.reason_b), ("(c)", site.reason_c)):
                if reason is not None and not (check == "(c)" and site.reason_b is not None):
                    found[f"{check} {reason}"] = None
        if self.proof.mixes is not None:
            found[f"(f) {self.proof.mixes}"] = None
        return tuple(found)

    @property
    def following(self) -> str:
        """One sentence: whether tokens may be followed through the layers by way of attention."""
        if self.proof.mixes is None:
            return "Tokens may be followed through its layers: with attention held, none moves another."
        return (
            f"Tokens may not be followed through its layers (rollout, ALTI+, ALTI-logit, DecompX): {self.proof.mixes}; "
            "attention, identifiability, certificates and each layer's own contributions stay."
        )

    def to_dict(self) -> dict[str, Any]:
        proof = self.proof
        return {
            **self.provenance.to_dict(),
            "capture": proof.capture,
            "tried": list(proof.tried),
            "tolerance": proof.tolerance,
            "holds": proof.holds,
            "trusted": self.trusted,
            "reasons": list(self.reasons),
            "error_d": proof.error_d,
            "error_f": proof.error_f,
            "following": self.following,
            "layers": [_layer(site) for site in proof.sites],
        }


def _layer(site: AttentionSite) -> dict[str, Any]:
    return {
        "stack": site.stack,
        "layer": site.layer,
        "module": site.module,
        "heads": site.heads,
        "key_value_heads": site.groups,
        "head_size": site.head_size,
        "causal": site.causal,
        "wiring": None if site.proved_wiring is None else site.proved_wiring.kind,
        "a": site.error_a,
        "b": site.error_b,
        "c": site.error_c,
        "e": site.error_e,
        "keys": site.keys_error,
        "reason": site.reason_b or site.reason_c or site.reason_e,
    }


def doctor(model: Any = None, text: Any = None, *, truncate: bool = False) -> Diagnosis:
    """Prove the reading of a model, on `text` (`truncate`: cut where it is too long) or on a sentence of its own.

    >>> import whence
    >>> whence.doctor(whence.load()).trusted
    True
    """
    chosen = as_model(model)
    inputs = beginning(example(chosen, text, truncate=truncate).inputs)
    from whence.reading.rerun.run import on_device

    proof = proof_of(chosen.model, on_device(chosen, inputs))
    return Diagnosis(proof, Provenance(chosen.name, "doctor", {}, source=chosen))


def example(model: Model, text: Any = None, *, truncate: bool = False) -> Prepared:
    """Something the model can read: the text given, a sentence, or random ids or pixels where it has no tokenizer."""
    if text is not None or model.tokenizer is not None:
        # A sentence of our own may be cut to fit; a user's text is not unless they say so.
        return prepare(model, TEXT if text is None else text, truncate=truncate or text is None)[0][0]
    config: Any = getattr(model.model, "config", None)
    generator = torch.Generator().manual_seed(0)
    if getattr(config, "num_channels", None) and getattr(config, "image_size", None):
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return Prepared({"pixel_values": torch.randn(1, config.num_channels, height, width, generator=generator)}, None)
    embedding = model.model.get_input_embeddings() if hasattr(model.model, "get_input_embeddings") else None
    if isinstance(embedding, torch.nn.Embedding):
        ids = torch.randint(
            min(5, embedding.num_embeddings - 1), embedding.num_embeddings, (1, 12), generator=generator
        )
        return prepare(model, {"input_ids": ids})[0][0]
    raise InputError(f"{model.name} has no tokenizer and whence cannot invent an input for it: give one with text=.")
