"""Softmax attention with distance priors, gates and sharpness. `api` is the entry; docs/kernels.md."""
