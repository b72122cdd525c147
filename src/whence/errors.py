"""What can go wrong, by kind. Every message quotes what was given and says what to do next."""

from __future__ import annotations


class WhenceError(Exception):
    """The base of every error that whence raises on purpose."""


class InputError(WhenceError, ValueError):
    """What the user gave cannot be used: an empty text, a wrong layer, a text that is too long."""


class WhenceWarning(UserWarning):
    """Something can be measured but may mislead, as a text of unknown tokens."""


class ModelError(WhenceError):
    """The model cannot be used: NaN weights, no attention, a tokenizer that belongs to another model."""


class WiringError(ModelError):
    """The model ran, but how it is wired could not be proved; a measure that needs the proof refuses."""


class UnavailableError(WhenceError):
    """Something is not on this machine: a model that is not cached, a wheel that could not be fetched."""


class MissingExtraError(WhenceError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""
