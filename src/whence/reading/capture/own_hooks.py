"""Hooks of one thread: whoever else runs the same model meanwhile is not overheard, and nothing is put into their pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


def on_enter(module: nn.Module, hook: Callable[[nn.Module, Any, Any], Any]) -> RemovableHandle:
    """`hook(module, args, kwargs)` before each call in this thread; what it returns, (args, kwargs), takes their place."""
    return module.register_forward_pre_hook(_of_this_thread(hook), with_kwargs=True)


def on_leave(module: nn.Module, hook: Callable[[nn.Module, Any, Any, Any], Any]) -> RemovableHandle:
    """`hook(module, args, kwargs, output)` after each call in this thread; what it returns takes the output's place."""
    return module.register_forward_hook(_of_this_thread(hook), with_kwargs=True)


def _of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, silent elsewhere.

    torch notes a hook and that it takes keyword arguments one after the other: a pass of another thread that comes in
    between calls it without them. So any arguments are taken there.
    """
    mine = threading.get_ident()

    def own(*given: Any) -> Any:
        return hook(*given) if threading.get_ident() == mine else None

    own.thread = mine  # type: ignore[attr-defined]  # whose it is, for whoever tidies up after a pass
    return own
