"""Reading a transformer in one pass, and proving that it was understood."""
