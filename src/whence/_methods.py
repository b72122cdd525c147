"""whence's own methods, declared by place, so that listing them imports nothing heavy.

One `declare("name", "whence.module:function", question=…, paper=…, cost=…, needs=…, summary=…)` per method.
"""

from __future__ import annotations
