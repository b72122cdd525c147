"""Attention and its alternatives, as pure functions on tensors."""
