"""The mathematics: pure functions on tensors. Nothing here imports transformers."""
