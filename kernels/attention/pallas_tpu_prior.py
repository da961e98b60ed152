"""A log-prior as a program for a tile: what depends on the parameters alone runs outside, the rest inside the kernel.

`inline` traces log_prior and its derivative by every scalar parameter, and splits the equations. Those that only see
parameters (exp(theta), say) are evaluated once per head in XLA; a TensorCore has no scalar exponential, and the tile
need not repeat them. What is left is elementwise in the distance and reads a handful of float32 scalars.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

CALLS = frozenset(
    {"pjit", "jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat", "remat2"}
)
ELEMENTWISE = frozenset(
    {"abs", "add", "add_any", "and", "atan2", "broadcast_in_dim", "ceil", "clamp", "convert_element_type", "copy"}
    | {"cos", "div", "eq", "erf", "exp", "exp2", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p"}
    | {"logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "rem", "round", "rsqrt", "select_n"}
    | {"sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"}
)
MOST = 80  # operations per score; a table is cheaper long before


class Refused(ValueError):
    """The log-prior cannot be evaluated inside a TPU tile; the message says why."""


class Value(NamedTuple):
    """A variable of the flattened program."""

    number: int


class Equation(NamedTuple):
    """One equation of the flattened program."""

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Any, ...]  # Value or numpy constant
    outputs: tuple[Value, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]


@dataclass(eq=False)
class _Flattener:
    """Inlines nested calls and merges equations that compute the same thing."""

    equations: list[Equation]
    seen: dict[Any, tuple[Value, ...]]
    count: int = 0

    def fresh(self) -> Value:
        self.count += 1
        return Value(self.count)

    def run(self, jaxpr: Any, consts: Any, arguments: list[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= dict(zip(jaxpr.invars, arguments, strict=True))
        read = lambda v: _constant(v) if hasattr(v, "val") else env[v]
        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            if eqn.primitive.name in CALLS:
                inner = eqn.params.get("call_jaxpr") or eqn.params.get("jaxpr") or eqn.params.get("fun_jaxpr")
                closed = hasattr(inner, "consts")
                outputs = self.run(inner.jaxpr if closed else inner, inner.consts if closed else (), inputs)
            else:
                outputs = list(self.add(eqn, tuple(inputs)))
            env |= dict(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def add(self, eqn: Any, inputs: tuple[Any, ...]) -> tuple[Value, ...]:
        key = (eqn.primitive, str(sorted(eqn.params.items(), key=lambda p: p[0])), tuple(map(_key, inputs)))
        if key not in self.seen:
            outputs = tuple(self.fresh() for _ in eqn.outvars)
            shapes = tuple(tuple(v.aval.shape) for v in eqn.outvars)
            dtypes = tuple(v.aval.dtype for v in eqn.outvars)
            self.equations.append(Equation(eqn.primitive, dict(eqn.params), inputs, outputs, shapes, dtypes))
            self.seen[key] = outputs
        return self.seen[key]


def _constant(literal: Any) -> Any:
    return np.asarray(literal.val, literal.aval.dtype)[()]


def _key(x: Any) -> Any:
    if isinstance(x, Value):
        return x
    return (id(x),) if np.ndim(x) else (str(x.dtype), x.tobytes() if hasattr(x, "tobytes") else x)


def _sign(x: Array) -> Array:
    # The lowering of lax.sign asks for the kind of chip, and finds the host's CPU when compiling ahead.
    one, zero = jnp.ones((), x.dtype), jnp.zeros((), x.dtype)
    return jnp.where(x > 0, one, jnp.where(x < 0, -one, zero))


def _evaluate(equations: list[Equation], env: dict[Value, Any]) -> None:
    signs = {eqn.outputs[0]: eqn.inputs[0] for eqn in equations if eqn.primitive.name == "sign"}
    for eqn in equations:
        inputs = [env[x] if isinstance(x, Value) else x for x in eqn.inputs]
        out: Any
        if eqn.primitive.name == "sign":
            out = _sign(inputs[0])
        elif eqn.primitive.name == "mul" and signs.get(eqn.inputs[1]) == eqn.inputs[0]:
            out = jnp.abs(inputs[0])  # x · sign(x), one operation instead of five
        else:
            out = eqn.primitive.bind(*inputs, **eqn.params)
        env |= dict(zip(eqn.outputs, out if eqn.primitive.multiple_results else [out], strict=True))


@dataclass(frozen=True, eq=False)
class Program:
    """`scalars(leaves of one head)` outside the kernel, then `tile(scalars, d)` inside it."""

    outside: list[Equation]
    inside: list[Equation]
    leaves: list[Value]
    distance: Value
    passed: list[tuple[Value, Any]]  # scalars handed to the tile, with their dtypes
    outputs: list[Any]
    shape: tuple[int, int]

    def scalars(self, leaves: list[Array]) -> Array:
        """float32 [n], n at least 1, from the parameters of one head."""
        env: dict[Value, Any] = dict(zip(self.leaves, leaves, strict=True))
        _evaluate(self.outside, env)
        values = [jnp.asarray(env[v], jnp.float32) for v, _ in self.passed]
        return jnp.stack(values or [jnp.zeros((), jnp.float32)])

    def tile(self, scalar: Callable[[int], Array], d: Array) -> list[Array]:
        """The log-prior and its derivatives at distances d (of the shape traced); scalar(n) reads the n-th scalar."""
        env: dict[Value, Any] = {self.distance: d}
        for n, (value, dtype) in enumerate(self.passed):
            x = scalar(n)
            env[value] = x != 0 if dtype == jnp.bool_ else x.astype(dtype)
        _evaluate(self.inside, env)
        read = lambda x: env[x] if isinstance(x, Value) else x
        return [jnp.broadcast_to(jnp.asarray(read(x), jnp.float32), self.shape) for x in self.outputs]


def _derivatives(log_prior: Any, tree: Any, leaves: list[Array], d: Array) -> list[Array]:
    """The log-prior, then its derivative by each scalar parameter."""
    value = log_prior(jax.tree.unflatten(tree, leaves), d)
    out = [value]
    for n, leaf in enumerate(leaves):
        at = lambda x, n=n: log_prior(jax.tree.unflatten(tree, [*leaves[:n], x, *leaves[n + 1 :]]), d)
        out.append(jax.jvp(at, (leaf,), (jnp.ones_like(leaf),))[1])
    return out


def _needed(equations: list[Equation], wanted: list[Any]) -> list[Equation]:
    alive, kept = {x for x in wanted if isinstance(x, Value)}, []
    for eqn in reversed(equations):
        if alive & set(eqn.outputs):
            kept.append(eqn)
            alive |= {x for x in eqn.inputs if isinstance(x, Value)}
    return kept[::-1]


def _check_tile(equations: list[Equation], known: dict[Value, Any], shape: tuple[int, int]) -> None:
    for eqn in equations:
        name = eqn.primitive.name
        if name not in ELEMENTWISE:
            raise Refused(f"its log_prior uses {name!r} on distances, which a TPU tile cannot")
        sizes = list(eqn.shapes)
        sizes += [
            known[x] if isinstance(x, Value) else np.shape(x)
            for x in eqn.inputs
            if not isinstance(x, Value) or x in known
        ]
        for size in sizes:
            if size not in ((), shape):
                raise Refused(f"its log_prior combines distances with an array of shape {size} (in {name!r})")


def inline(
    log_prior: Any, tree: Any, leaves: tuple[tuple[Any, Any], ...], shape: tuple[int, int], derivatives: bool
) -> Program:
    """The program of a tile of `shape`, for parameters of one head given as their tree and leaves of (shape, dtype).

    With `derivatives` the tile also gives d(log prior)/d(parameter) for every leaf. Raises Refused. Not to be cached:
    the equations name the mesh that they were traced under.
    """
    vectors = [size for size, _ in leaves if size]
    if derivatives and vectors:
        raise Refused(f"it has a parameter of shape {vectors[0]} per head")

    def fn(values: list[Array], d: Array) -> list[Array]:
        if derivatives:
            return _derivatives(log_prior, tree, values, d)
        return [log_prior(jax.tree.unflatten(tree, values), d)]

    avals = [jax.ShapeDtypeStruct(size, dtype) for size, dtype in leaves]
    closed = jax.make_jaxpr(fn)(avals, jax.ShapeDtypeStruct(shape, jnp.int32))
    flat = _Flattener([], {})
    parameters, distance = [flat.fresh() for _ in avals], flat.fresh()
    consts = [np.asarray(c) for c in closed.consts]
    outputs = flat.run(closed.jaxpr, consts, [*parameters, distance])
    sizes = [size for size, _ in leaves]
    return _split(_needed(flat.equations, outputs), parameters, sizes, distance, outputs, shape)


def _split(
    equations: list[Equation],
    leaves: list[Value],
    sizes: list[Any],
    distance: Value,
    outputs: list[Any],
    shape: tuple[int, int],
) -> Program:
    known: dict[Value, Any] = dict(zip(leaves, sizes, strict=True))
    dtypes: dict[Value, Any] = {v: jnp.dtype(jnp.float32) for v in leaves}
    outside: list[Equation] = []
    inside: list[Equation] = []
    for eqn in equations:
        early = all(x in known for x in eqn.inputs if isinstance(x, Value)) and shape not in eqn.shapes
        (outside if early else inside).append(eqn)
        if early:
            known |= dict(zip(eqn.outputs, eqn.shapes, strict=True))
            dtypes |= dict(zip(eqn.outputs, eqn.dtypes, strict=True))
    _check_tile(inside, known, shape)
    if len(inside) > MOST:
        raise Refused(f"its log_prior takes {len(inside)} operations per score, more than {MOST}")
    used = [x for eqn in inside for x in eqn.inputs] + outputs
    passed = list(dict.fromkeys(x for x in used if isinstance(x, Value) and x in known))
    return Program(_needed(outside, passed), inside, leaves, distance, [(v, dtypes[v]) for v in passed], outputs, shape)
