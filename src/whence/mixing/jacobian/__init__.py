"""How a small change of the embeddings travels through the layers."""
