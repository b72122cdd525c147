"""Turning a pretrained encoder into one with tied keys: closed form, distillation, fidelity."""
