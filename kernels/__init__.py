"""Attention kernels, a folder per operation; docs/architecture.md says how they are cut. Nothing imports bampath."""
