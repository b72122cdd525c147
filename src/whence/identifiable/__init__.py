"""A model whose attention means something: the identifiable transformer, trained and converted.

Importing this package makes the architectures "identifiable" (an encoder) and "identifiable_decoder" (a language model)
known to transformers' Auto classes; `whence.load` does so by itself where a folder asks for it.
"""

from whence.identifiable.configuration_identifiable import IdentifiableConfig
from whence.identifiable.configuration_identifiable_decoder import IdentifiableDecoderConfig
from whence.identifiable.modeling_identifiable import IdentifiableForSequenceClassification, IdentifiableModel
from whence.identifiable.modeling_identifiable_decoder import IdentifiableDecoderModel, IdentifiableForCausalLM

__all__ = [
    "IdentifiableConfig",
    "IdentifiableDecoderConfig",
    "IdentifiableDecoderModel",
    "IdentifiableForCausalLM",
    "IdentifiableForSequenceClassification",
    "IdentifiableModel",
]
