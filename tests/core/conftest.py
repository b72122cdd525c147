"""One thread: the tests share two cores with others, and small problems gain nothing from more."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("core", deadline=None, max_examples=60)
settings.load_profile("core")
