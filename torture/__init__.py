"""Hardship, on purpose: kills, damaged files, failures in many threads, a crowd of clients. `make torture` runs it all."""
