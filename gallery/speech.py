"""Speech with known word times: espeak-ng (Debian: apt-get install espeak-ng) speaks, and says when each word begins."""

from __future__ import annotations

import ctypes
import ctypes.util
from dataclasses import dataclass

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


def speak(text: str, *, voice: bytes = b"en-us", speed: int = 140, lead: float = 0.3) -> Speech:
    """The text as espeak-ng says it, after `lead` seconds of silence."""
    name = ctypes.util.find_library("espeak-ng")
    if name is None:
        raise SystemExit("this page needs espeak-ng: apt-get install espeak-ng")
    library = ctypes.CDLL(name)
    rate = library.espeak_Initialize(2, 0, None, 0)  # 2: synchronous, the sound goes to the callback
    parts, starts = [], {}
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))

    def hear(wave, count, events):  # type: ignore[no-untyped-def]
        if count > 0:
            parts.append(np.ctypeslib.as_array(wave, (count,)).copy())
        i = 0
        while events[i].type != 0:
            if events[i].type == 1:
                starts[events[i].text_position - 1] = events[i].audio_position / 1000.0 + lead
            i += 1
        return 0

    callback = kind(hear)
    library.espeak_SetSynthCallback(callback)
    library.espeak_SetVoiceByName(voice)
    library.espeak_SetParameter(1, speed, 0)
    data = text.encode()
    library.espeak_Synth(data, len(data) + 1, 0, 1, 0, 1, None, None)
    library.espeak_Synchronize()
    library.espeak_Terminate()
    sound = np.concatenate([np.zeros(int(lead * rate)), np.concatenate(parts) / 32768.0, np.zeros(int(0.3 * rate))])
    return Speech(sound, rate, starts)
