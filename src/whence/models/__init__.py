"""A model whose attention means something: the identifiable transformer, trained and converted."""
