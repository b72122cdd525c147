"""A model whose attention means something: the identifiable transformer, trained and converted.

Importing this package makes the architecture "identifiable" known to transformers' Auto classes; `whence.load` does
so by itself where a folder asks for it.
"""

from whence.identifiable.configuration_identifiable import IdentifiableConfig
from whence.identifiable.modeling_identifiable import IdentifiableForSequenceClassification, IdentifiableModel

__all__ = ["IdentifiableConfig", "IdentifiableForSequenceClassification", "IdentifiableModel"]
