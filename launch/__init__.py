"""Runs on machines that are not here: compiled for them, started there, and kept going. docs/scaling.md."""
