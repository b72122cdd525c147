"""Alignments: the path rule on a tiny model, and Whisper's words in time where the model is at hand."""

from __future__ import annotations

import wave
from dataclasses import replace

import numpy as np
import pytest
import torch

import whence
from conformance.zoo import build
from whence import rules
from whence.attention.recording import read_audio
from whence.errors import InputError, UnavailableError
from whence.model.load import Model


@pytest.fixture(scope="module")
def bart():
    specimen = build("bart")
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "input_ids": torch.randint(5, 60, (1, 30), generator=generator),
        "decoder_input_ids": torch.randint(5, 60, (1, 6), generator=generator),
    }
    return whence.trace(Model(specimen.model), inputs)


@pytest.fixture(scope="module", params=[1, 3])
def path(request, bart):
    return whence.decide(bart, rules.path(median=request.param), heads=[(0, 0), (1, 1)], attention="cross")


def test_the_path_rule_aligns_checks_and_is_verified(path):
    assert path.check()
    assert len(path.verdicts) == 6
    assert path.first.tolist() == sorted(path.first.tolist())
    assert bool((path.earliest <= path.plain).all())
    assert bool((path.plain <= path.latest).all())
    assert torch.equal(path.plain, path.first)  # not standardised
    assert any(outcome is not None for outcome in path.verifications)
    for outcome in path.verifications:
        assert outcome is None or outcome.logits < 1e-5
    assert "refuted" in path.verdicts
    assert len(path.to_frame()) == len(path.sentences()) == 6
    assert path.plot().get_title()


def test_a_check_refuses_other_paths_and_other_rows(path):
    assert not replace(path, first=path.first + 1).check()
    assert not replace(path, early_rows=path.rows.roll(1, -1)).check()
    assert not replace(path, latest=path.latest - 1).check()
    assert not replace(path, plain=path.plain + 1).check()
    assert not replace(path, verdicts=("certified",) * len(path.names)).check()
    assert not replace(path, late=path.late - 1).check()


def test_without_a_model_no_time_is_called_refuted(bart, path):
    again = whence.decide(bart, rules.path(median=path.median), heads=[(0, 0), (1, 1)], attention="cross", verify=False)
    assert "refuted" not in again.verdicts
    assert again.check()


def test_a_path_that_is_unique_is_certified(bart):
    """The first keys of a causal decoder's long values: rows of eight keys are unique, and so is their path."""
    ids = torch.randint(5, 60, (1, 8), generator=torch.Generator().manual_seed(1))
    trace = whence.trace(Model(build("bert").model), {"input_ids": ids})
    found = whence.decide(trace, rules.path(within=1), heads=[(0, 0), (0, 1)])
    assert set(found.verdicts) == {"certified"}
    assert found.check()
    assert "certified" in found.summary()


def test_sounds_are_read_or_refused(tmp_path):
    tone = (3000 * np.sin(np.arange(8000) / 5)).astype("<i2")
    file = tmp_path / "a.wav"
    with wave.open(str(file), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(8000)
        out.writeframes(tone.tobytes())
    assert len(read_audio(file)) == 16_000
    assert len(read_audio((np.zeros(100), 16_000))) == 100
    with pytest.raises(InputError, match="cannot be read"):
        read_audio(tmp_path / "none.wav")
    with pytest.raises(InputError, match="30 s"):
        read_audio(np.zeros(31 * 16_000))
    with pytest.raises(InputError, match="one channel"):
        read_audio(np.zeros((2, 50)))
    with pytest.raises(InputError, match="feature extractor"):
        whence.align(Model(build("bart").model), np.zeros(16_000))
    with pytest.raises(InputError, match="rows='after'"):
        whence.align(Model(build("bart").model), np.zeros(16_000), rows="after")


@pytest.mark.long
def test_whispers_times_are_those_of_transformers():
    try:
        model = whence.load("whisper")
    except UnavailableError as problem:
        pytest.skip(str(problem))
    time = np.arange(3 * 16_000) / 16_000
    sound = (0.3 * np.sin(2 * np.pi * 200 * time) * (np.sin(6 * time) > 0)).astype(np.float32)
    features = model.processor(sound, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True)
    theirs = model.model.generate(
        **features, return_token_timestamps=True, return_dict_in_generate=True, max_new_tokens=12, min_new_tokens=8
    )
    ids = theirs["sequences"][0].tolist()
    text = [t for t in ids if t < 50256]
    words = model.tokenizer.decode(text)
    again = model.tokenizer(words)["input_ids"][2:-1]
    if again != text:
        pytest.skip(f"what was heard, {words!r}, is not tokenised back to itself")
    found = whence.align(model, sound, words)
    stamps = theirs["token_timestamps"][0].tolist()
    begins = [stamps[2 + start] for start in found.starts[:-1]]
    np.testing.assert_allclose(found.times.numpy(), begins, atol=1e-6)
    assert found.check()
