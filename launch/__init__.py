"""Runs on many machines: what is checked before they start."""
