"""Bases, masks, checks and tolerances: what the measures of the core stand on."""
