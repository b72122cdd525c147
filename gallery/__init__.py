"""The gallery: decisions that people make from attention, asked of real models. `python -m gallery [page …]` makes docs/gallery/."""
