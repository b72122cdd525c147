"""Sound, as a speech model reads it: samples, features, the decoder's tokens, and the words that these make."""

from __future__ import annotations

import os
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.errors import InputError
from whence.model.load import Model

RATE = 16_000  # Whisper hears 16,000 samples a second
FRAME = 0.02  # ... and its encoder gives a frame every two hundredths


def read_audio(audio: Any) -> Tensor:
    """Mono samples at 16,000 a second, between −1 and 1."""
    rate = RATE
    if isinstance(audio, (str, os.PathLike)):
        try:
            with wave.open(str(Path(audio).expanduser()), "rb") as file:
                rate, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
                raw = file.readframes(file.getnframes())
        except (OSError, wave.Error, EOFError) as problem:
            raise InputError(f"{str(audio)!r} cannot be read as a WAV file: {problem}.") from problem
        if width != 2:
            raise InputError(f"{str(audio)!r} has samples of {width} bytes; 16-bit WAV files are read.")
        samples = np.frombuffer(raw, dtype="<i2").reshape(-1, channels).mean(1) / 32768.0
    else:
        given, rate = audio if isinstance(audio, tuple) else (audio, RATE)
        samples = np.asarray(given, dtype=np.float64)
    if samples.ndim != 1 or not len(samples) or not np.isfinite(samples).all():
        raise InputError(f"sound of shape {samples.shape}: give finite samples of one channel.")
    if rate != RATE:
        from math import gcd

        from scipy.signal import resample_poly

        common = gcd(int(rate), RATE)
        samples = resample_poly(samples, RATE // common, int(rate) // common)
    if len(samples) > 30 * RATE:
        raise InputError(f"the recording lasts {len(samples) / RATE:.1f} s; Whisper hears 30 s at a time: cut it.")
    return torch.tensor(np.asarray(samples), dtype=torch.float32)


def speech_inputs(model: Model, samples: Tensor, words: str | None) -> tuple[dict[str, Tensor], int, int]:
    """What the model reads, how many of the decoder's tokens come before the words, and how many frames have sound."""
    if model.processor is None or model.tokenizer is None:
        raise InputError(
            f"{model.name} has no feature extractor and tokenizer: align needs a speech model like 'whisper'."
        )
    features = model.processor(samples.numpy(), sampling_rate=RATE, return_tensors="pt")["input_features"]
    prompt = model.tokenizer("")["input_ids"][:-1]
    if words is None:
        with torch.no_grad():
            text = model.model.generate(features.to(model.device), do_sample=False, num_beams=1).cpu()[0].tolist()
        special = set(model.tokenizer.all_special_ids) | set(range(min(prompt), model.model.config.vocab_size))
        text = [t for t in text if t not in special]
    else:
        text = model.tokenizer(words if words.startswith(" ") else f" {words}")["input_ids"][len(prompt) : -1]
    ids = torch.tensor([[*prompt, *text, model.tokenizer.eos_token_id]])
    frames = max(1, min(-(-len(samples) // 160) // 2, features.shape[-1] // 2))
    return {"input_features": features, "decoder_input_ids": ids}, len(prompt), frames


def alignment_heads(model: Model) -> list[tuple[int, int]]:
    """The (layer, head) pairs that the model's generation configuration names."""
    known = getattr(getattr(model.model, "generation_config", None), "alignment_heads", None)
    if not known:
        raise InputError(f"{model.name} does not say which heads align: give them with heads=[(layer, head), …].")
    return [(a, b) for a, b in known]


def words_of(model: Model, ids: Sequence[int]) -> list[tuple[str, int]]:
    """(word, its first token): a token that begins with a space begins a word, punctuation stays with the word before."""
    words: list[tuple[str, int]] = []
    for i, number in enumerate(ids):
        piece = model.tokenizer.decode([number])
        if not words or (piece.startswith(" ") and piece.strip(" .,!?;:'\"")):
            words.append((piece.strip(), i))
        else:
            words[-1] = (words[-1][0] + piece.strip(), words[-1][1])
    return words
