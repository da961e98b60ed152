"""Studies, a folder each, and the command that trains (`experiments.train`)."""
