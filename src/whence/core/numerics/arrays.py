"""The NumPy arrays that signatures speak of. Shapes are in the docstrings: (row, column), named as in docs/methods.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
AnyArray = np.ndarray[Any, Any]
