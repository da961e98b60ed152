"""Attention kernels, a folder per operation. Nothing here imports bampath; docs/architecture.md says how they are cut."""
