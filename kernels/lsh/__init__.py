"""Attention under random block-diagonal masks (positional LSH). `api` is the entry; docs/lsh.md."""
