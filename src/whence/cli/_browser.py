"""Opening a page in the user's browser, where there is a screen to show it."""

from __future__ import annotations

import os
import sys


def has_display() -> bool:
    """Whether a browser could show anything: a desktop, and no remote shell without one."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def open_in_browser(address: str) -> bool:
    """Open it; False, without trying, where there is no display."""
    if not has_display():
        return False
    import webbrowser

    return webbrowser.open(address)
