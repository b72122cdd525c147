"""Is this attention identifiable? What the head output pins down of an attention map, and what it leaves free."""
