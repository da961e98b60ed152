"""A run over many devices: one mesh, placements that follow logical axes, and the few operations that XLA cannot cut.

`mesh` makes the mesh and holds the one in use, `rules` says where everything lives, `attention` runs the kernels on
each device's rows and heads, `context` is attention over a row that is spread over devices, `vocabulary` the embedding
and the chunked loss.
Everything else (projections, norms, MLP, optimiser) is partitioned by XLA. docs/scaling.md explains all of it.
"""

from bampath.sharding.mesh import AXES, current, make_mesh, mesh_of, use
from bampath.sharding.rules import constrain, local_rows, place_batch, replicated, state_shardings, weight
from bampath.sharding.vocabulary import cross_entropy, lookup

__all__ = [
    "AXES",
    "constrain",
    "cross_entropy",
    "current",
    "local_rows",
    "lookup",
    "make_mesh",
    "mesh_of",
    "place_batch",
    "replicated",
    "state_shardings",
    "use",
    "weight",
]
