"""The mathematics: pure functions on tensors. Nothing here imports transformers.

Shapes are written in the docstring of every function and of every field, one letter or name an axis:
attention (…, n_query, n_key), values (…, n_key, d_v), keys (…, n_key, d_k), outputs (…, n_query, d_v), visible boolean and
broadcastable to attention, True where a row may look; row and attention_row (n_key,) are one row of one head. "…" are leading
dimensions that broadcast (layers, heads, groups of heads). In `numerics` (u, …) are u independent problems, each one value
head with one visible set. Results are float64, or of the input's dtype, float32 at the coarsest.
"""
