"""bampath: positional schemes for long-context attention as beliefs about where to look, in JAX and Flax."""

__version__ = "0.1.0"
