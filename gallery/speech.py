"""Speech with known word times: espeak-ng (Debian: apt-get install espeak-ng) speaks, and says when each word begins."""

from __future__ import annotations

import ctypes
import ctypes.util
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np


class _Event(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    ]


@dataclass(frozen=True)
class Speech:
    """Samples between −1 and 1, their rate, and when words begin: (place in the text, seconds).

    espeak-ng speaks some little words together ("in the") and then reports only the first.
    """

    samples: np.ndarray
    rate: int
    starts: dict[int, float]


def speak(text: str, *, voice: str = "en-us", speed: int = 140, lead: float = 0.3) -> Speech:
    """The text as espeak-ng says it, after `lead` seconds of silence.

    A process of its own for each text: the library hangs when it is initialised twice.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        sound, rate, starts = pool.submit(_synthesise, text, voice, speed).result(timeout=60)
    silence = np.zeros(int(lead * rate))
    return Speech(np.concatenate([silence, sound, silence]), rate, {place: t + lead for place, t in starts.items()})


def _synthesise(text: str, voice: str, speed: int) -> tuple[np.ndarray, int, dict[int, float]]:
    name = ctypes.util.find_library("espeak-ng")
    if name is None:
        raise SystemExit("this page needs espeak-ng: apt-get install espeak-ng")
    library = ctypes.CDLL(name)
    rate = library.espeak_Initialize(2, 0, None, 0)  # 2: synchronous, the sound goes to the callback
    parts: list[np.ndarray] = []
    starts: dict[int, float] = {}
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))

    def hear(wave, count, events):  # type: ignore[no-untyped-def]
        if count > 0:
            parts.append(np.ctypeslib.as_array(wave, (count,)).copy())
        i = 0
        while events[i].type != 0:
            if events[i].type == 1:
                starts[events[i].text_position - 1] = events[i].audio_position / 1000.0
            i += 1
        return 0

    callback = kind(hear)
    library.espeak_SetSynthCallback(callback)
    library.espeak_SetVoiceByName(voice.encode())
    library.espeak_SetParameter(1, speed, 0)
    data = text.encode()
    library.espeak_Synth(data, len(data) + 1, 0, 1, 0, 1, None, None)
    return np.concatenate(parts) / 32768.0, rate, starts
