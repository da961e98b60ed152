"""Positional schemes: `parse("bam+ssmax")` gives the scheme, `slots` what it may fill, `module` the Flax side."""

from bampath.positions.registry import Composition, Scheme, parse
from bampath.positions.slots import Geometry, Part, Slots, Tokens

__all__ = ["Composition", "Geometry", "Part", "Scheme", "Slots", "Tokens", "parse"]
