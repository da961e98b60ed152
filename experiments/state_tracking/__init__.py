"""The state-tracking study; see README.md."""
