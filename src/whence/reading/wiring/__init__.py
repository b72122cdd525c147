"""What surrounds attention: projection, residual, norms, and the proof that they were read right."""
