"""Where labels used to be."""

from whence.results.labels import Tokens, readable  # noqa: F401
