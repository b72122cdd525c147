"""Loading a model: the catalogue, the cache, foreign weights."""
