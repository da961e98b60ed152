"""Muon as bampath.optim has it, with the matrices of one shape orthogonalised as one batch.

A small model has dozens of small matrices. One after the other, their Newton-Schulz steps are thousands of tiny
kernels; stacked, they are a few batched ones that give the same numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from bampath import optim
from bampath.config import Config, OptimConfig
from bampath.step import Declared

Group = tuple[tuple[int, ...], Any]  # shape, and which axes are rows and columns


def optimizer_of(config: Config, declared: Declared) -> optax.GradientTransformation:
    """What bampath.step.optimizer_of gives, stacked if it is Muon."""
    c, roles = config.optim, declared.roles
    moved = stacked_muon(c, roles, declared.axes) if c.name == "muon" else optim.direction(c, roles, declared.axes)
    rate = optax.scale_by_learning_rate(optim.learning_rate(c, config.train.steps))
    return optax.chain(optim.clip(c, roles), moved, optim.decay(c, roles), optim.scale_by_role(c, roles), rate)


def stacked_muon(config: OptimConfig, roles: Any, axes: Any) -> optax.GradientTransformation:
    """`bampath.optim.direction` for Muon: the matrices by groups, Adam for the rest."""
    dims = optim.muon_dimensions(roles, axes)
    flat, tree = jax.tree.flatten(dims, is_leaf=_is_dimensions)
    labels = jax.tree.unflatten(tree, ["adam" if own is None else "muon" for own in flat])
    muon = _grouped(config, [own for own in flat if own is not None])
    return optax.partition({"muon": muon, "adam": optax.scale_by_adam(config.b1, config.b2, config.eps)}, labels)


def _grouped(config: OptimConfig, dims: list[contrib.MuonDimensionNumbers]) -> optax.GradientTransformation:
    """Muon of a tree whose leaves have `dims`, in the order of the leaves."""

    def groups(tree: Any) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index, (leaf, own) in enumerate(zip(jax.tree.leaves(tree), dims, strict=True)):
            found.setdefault(repr((leaf.shape, own)), []).append(index)
        return found

    def stack(tree: Any) -> dict[str, jax.Array]:
        leaves = jax.tree.leaves(tree)
        return {name: jnp.stack([leaves[index] for index in members]) for name, members in groups(tree).items()}

    def inner(tree: Any) -> optax.GradientTransformation:
        behind = {name: _behind_stack(dims[members[0]]) for name, members in groups(tree).items()}
        return optax.chain(
            optim.orthogonal_momentum(config, behind),
            optax.stateless(
                lambda updates, _: {name: optim.match_adam(u, behind[name]) for name, u in updates.items()}
            ),
        )

    def init(params: Any) -> Any:
        return inner(params).init(stack(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        made, state = inner(updates).update(stack(updates), state)
        leaves: list[Any] = [None] * len(dims)
        for name, members in groups(updates).items():
            for place, index in enumerate(members):
                leaves[index] = made[name][place]
        return jax.tree.unflatten(jax.tree.structure(updates), leaves), state

    return optax.GradientTransformation(init, update)


def _behind_stack(dims: contrib.MuonDimensionNumbers) -> contrib.MuonDimensionNumbers:
    """The same axes behind one more."""
    shift = lambda axes: tuple(a + 1 for a in axes) if isinstance(axes, tuple) else axes + 1
    return contrib.MuonDimensionNumbers(shift(dims.reduction_axis), shift(dims.output_axis))


def _is_dimensions(node: Any) -> bool:
    return node is None or isinstance(node, contrib.MuonDimensionNumbers)
