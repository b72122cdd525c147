"""Capturing attention: how a forward pass is overheard."""
