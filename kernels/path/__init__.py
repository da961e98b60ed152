"""Attention whose keys are carried by a product of transitions (PaTH). `api` is the entry; docs/path.md."""
