"""Which parameters of a prior have the prior itself as their derivative, read off its jaxpr.

The scale of a GGD is such a one: d/dα of −exp(α + β ln x) is the same expression. The gradient of such a parameter
needs no table and no pass of its own, because the sharpness needs the sum of d(logits) times the prior anyway. The test
is structural: both expressions must be the same after 1 · x = x and −x · y = −(x · y), so it holds for every value.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

Expression = tuple[bool, Any]  # (negated, hashable tree)
ONE = ("one",)


def own_slopes(log_prior: Any, params: Any) -> tuple[int, ...]:
    """Places in the flattened parameters of one head (`params`: arrays or their shapes) whose slope is the prior."""
    leaves, treedef = jax.tree.flatten(params)
    found = []
    place = 0
    for n, leaf in enumerate(leaves):
        if leaf.shape == () and _is_own(log_prior, leaves, treedef, n):
            found.append(place)
        place += int(np.prod(leaf.shape))
    return tuple(found)


def _is_own(log_prior: Any, leaves: list[Any], treedef: Any, n: int) -> bool:
    def both(d: Any, *values: Any) -> tuple[Any, Any]:
        of_leaf = lambda leaf: log_prior(treedef.unflatten([*values[:n], leaf, *values[n + 1 :]]), d)
        return jax.jvp(of_leaf, (values[n],), (jnp.ones((), values[n].dtype),))

    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    closed = jax.make_jaxpr(both)(jax.ShapeDtypeStruct((8,), jnp.int32), *shapes)
    inputs: list[Expression] = [(False, ("in", i)) for i in range(len(closed.jaxpr.invars))]
    value, slope = _outputs(closed.jaxpr, [_constant(c) for c in closed.consts], inputs)
    return value == slope


def _constant(value: Any) -> Expression:
    array = np.asarray(value)
    if array.size and (array == 1).all():
        return False, ONE
    return False, ("const", array.dtype.str, array.shape, array.tobytes())


def _outputs(jaxpr: Any, consts: list[Expression], inputs: list[Expression]) -> list[Expression]:
    known: dict[Any, Expression] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    read = lambda v: _constant(v.val) if isinstance(v, jex.Literal) else known[v]
    for eqn in jaxpr.eqns:
        for var, out in zip(eqn.outvars, _apply(eqn, [read(v) for v in eqn.invars]), strict=True):
            known[var] = out
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: Any, args: list[Expression]) -> list[Expression]:
    name = eqn.primitive.name
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if name in ("jit", "pjit", "closed_call", "core_call") and hasattr(inner, "jaxpr"):
        return _outputs(inner.jaxpr, [_constant(c) for c in inner.consts], args)
    if name == "neg":
        return [(not args[0][0], args[0][1])]
    if name == "mul":
        (na, a), (nb, b) = args
        product = b if a == ONE else a if b == ONE else ("mul", *sorted((a, b), key=repr))
        return [(na != nb, product)]
    keeps_one = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "copy_p")
    if name in keeps_one and args[0][1] == ONE and not args[0][0]:
        return [args[0]]
    tree = (name, repr(sorted(eqn.params.items(), key=lambda item: item[0])), tuple(args))
    return [(False, (*tree, i)) for i in range(len(eqn.outvars))]
