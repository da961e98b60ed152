"""Optimisers of the papers, built from optax; what decays and at which rate follows a parameter's role.

update = −lr(t) · factor[role] · (direction(clip(gradient)) + decay[role] · parameter)

direction is RAdam's (Liu et al., arXiv 1908.03265; BAM trains with it), Adam's (PaTH) or, for matrices only, Muon's.
Roles are set where a parameter is declared (`bampath.params.tagged`); names play no part.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from bampath.config import OptimConfig
from bampath.params import POSITIONAL_ROLES

MUON_RMS = 0.2


def make_optimizer(
    config: OptimConfig, steps: int, roles: Any, axes: Any, rate: optax.Schedule | None = None
) -> optax.GradientTransformation:
    """The optimiser for a run of `steps` steps.

    roles, axes: trees with the parameters' structure, from `bampath.params.roles` and `.axes` of the tagged parameters.
    rate: step -> learning rate, instead of the configuration's own schedule.
    """
    return optax.chain(
        clip(config, roles),
        direction(config, roles, axes),
        decay(config, roles),
        scale_by_role(config, roles),
        optax.scale_by_learning_rate(rate or learning_rate(config, steps)),
    )


def learning_rate(config: OptimConfig, steps: int) -> optax.Schedule:
    """step -> rate: a linear ramp from lr·lr_start, then the schedule, which reaches lr·lr_end at `steps`.

    A run shorter than its ramp ends on the ramp. ValueError if a "wsd" decay does not fit behind the ramp.
    """
    c, rest = config, max(1, steps - config.warmup_steps)
    if c.schedule == "wsd" and c.decay_steps > rest:
        raise ValueError(
            f"optim.decay_steps={c.decay_steps} is more than the {rest} steps that train.steps={steps} leaves after "
            f"optim.warmup_steps={c.warmup_steps}"
        )
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(c.lr, rest, alpha=c.lr_end),
        "linear": lambda: optax.linear_schedule(c.lr, c.lr * c.lr_end, rest),
        "constant": lambda: optax.constant_schedule(c.lr),
        "wsd": lambda: optax.linear_schedule(c.lr, c.lr * c.lr_end, c.decay_steps, rest - c.decay_steps),
    }[c.schedule]()
    if not c.warmup_steps:
        return after
    ramp = optax.linear_schedule(c.lr * c.lr_start, c.lr, c.warmup_steps)
    return optax.join_schedules([ramp, after], [c.warmup_steps])


def clip(config: OptimConfig, roles: Any) -> optax.GradientTransformation:
    """Clipping by the global norm, of all gradients or of all but the positional parameters'."""
    if not config.clip_norm:
        return optax.identity()
    clipping = optax.clip_by_global_norm(config.clip_norm)
    if config.clip_positional:
        return clipping
    return optax.masked(clipping, jax.tree.map(lambda role: role not in POSITIONAL_ROLES, roles))


def direction(config: OptimConfig, roles: Any, axes: Any) -> optax.GradientTransformation:
    """Gradient -> unscaled step."""
    c = config
    if c.name == "radam":
        return optax.scale_by_radam(c.b1, c.b2, c.eps, threshold=5.0)
    adam = optax.scale_by_adam(c.b1, c.b2, c.eps)
    if c.name == "adamw":
        return adam
    dims = muon_dimensions(roles, axes)
    labels = jax.tree.map(lambda d: "adam" if d is None else "muon", dims, is_leaf=_is_dimensions)
    masked = jax.tree.map(lambda d: optax.MaskedNode() if d is None else d, dims, is_leaf=_is_dimensions)
    muon = optax.chain(
        orthogonal_momentum(c, masked), optax.stateless(lambda updates, _: jax.tree.map(match_adam, updates, masked))
    )
    return optax.partition({"muon": muon, "adam": adam}, labels)


def orthogonal_momentum(config: OptimConfig, dims: Any) -> optax.GradientTransformation:
    """Muon before its step is scaled: Nesterov momentum, made orthogonal by Newton-Schulz steps in `muon_dtype`.

    In bfloat16, as Muon's authors run them: a GPU then moves half the bytes and multiplies at twice the rate.
    """
    muon = partial(contrib.scale_by_muon, weight_dimension_numbers=dims)
    if config.muon_dtype == "float32":
        return muon(beta=config.muon_momentum, ns_steps=config.muon_steps)
    momentum = muon(beta=config.muon_momentum, ns_steps=0)  # of norm 1
    steps = muon(beta=0.0, nesterov=False, ns_steps=config.muon_steps)

    def orthogonalise(updates: Any, _: Any) -> Any:
        narrow = optax.tree.cast(updates, config.muon_dtype)
        return optax.tree.cast_like(steps.update(narrow, steps.init(narrow))[0], updates)

    return optax.chain(momentum, optax.stateless(orthogonalise))


def muon_dimensions(roles: Any, axes: Any) -> Any:
    """Per parameter the axes that Muon treats as rows and columns, or None where Adam serves.

    Muon is for maps between hidden states: role "matrix", not the embedding or the head. Attention weights keep their
    heads apart in storage but act as one matrix, [dim, (heads, head_dim)] in and [(heads, head_dim), dim] out: a weight
    that ends in "embed" maps to it from all other axes, every other one maps from its first axis to the rest.
    """
    return jax.tree.map(_muon_axes, roles, axes, is_leaf=lambda node: isinstance(node, str))


def _muon_axes(role: str, axes: tuple[str | None, ...]) -> contrib.MuonDimensionNumbers | None:
    if role != "matrix" or "vocab" in axes:
        return None
    own = tuple(i for i, name in enumerate(axes) if name != "layers")  # each layer of a stack is a matrix of its own
    split = -1 if len(own) > 2 and axes[own[-1]] == "embed" else 1
    rows, columns = own[:split], own[split:]
    return contrib.MuonDimensionNumbers(
        rows[0] if len(rows) == 1 else rows, columns[0] if len(columns) == 1 else columns
    )


def match_adam(update: jax.Array, dims: contrib.MuonDimensionNumbers) -> jax.Array:
    """An orthogonal matrix has RMS 1/√max(rows, columns); Adam's steps have about 0.2 (arXiv 2502.16982, section 2)."""
    sizes = [np.prod([update.shape[i] for i in np.atleast_1d(axes)]) for axes in dims]
    return MUON_RMS * float(max(sizes)) ** 0.5 * update


def _is_dimensions(node: Any) -> bool:
    return node is None or isinstance(node, contrib.MuonDimensionNumbers)


def decay(config: OptimConfig, roles: Any) -> optax.GradientTransformation:
    """Decoupled weight decay: matrices, convolutions and (optionally) embeddings; priors by their own rate."""
    by_role: Mapping[str, float] = {
        "matrix": config.weight_decay,
        "conv": config.weight_decay,
        "embedding": config.weight_decay if config.decay_embedding else 0.0,
        "prior": config.prior_decay,
    }
    transforms = [optax.identity()]
    for rate in sorted({rate for rate in by_role.values() if rate}):
        mask = jax.tree.map(lambda role, rate=rate: by_role.get(role, 0.0) == rate, roles)
        transforms.append(optax.add_decayed_weights(rate, mask))
    return optax.chain(*transforms)


def scale_by_role(config: OptimConfig, roles: Any) -> optax.GradientTransformation:
    """Factors on the learning rate of positional parameters."""
    by_role = {"prior": config.prior_lr, "sharpness": config.sharpness_lr, "position": config.position_lr}
    if all(factor == 1.0 for factor in by_role.values()):
        return optax.identity()
    factors = jax.tree.map(lambda role: by_role.get(role, 1.0), roles)
    return optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, factors))
