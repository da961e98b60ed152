"""A model of one positional scheme taught to be a model of another: `plan`, then `distill`."""

from bampath.convert.distill.options import Stage, stages_of
from bampath.convert.distill.run import Plan, distill, plan

__all__ = ["Plan", "Stage", "distill", "plan", "stages_of"]
