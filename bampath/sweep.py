"""Many small trainings as one program: the pure step of `bampath.step`, vmapped over stacked states.

Members of a program differ in what enters it as an array: the parameters that they start from, their random keys, their
batches, their learning rates (a table over steps, whatever the schedule). Everything else is part of the program, so
it must be the same for all of them; `same_program` compares what is lowered and says which key is to blame.

Members may be spread over devices (`spread`), each of which vmaps its share. A device with one member runs the step as
a run alone would, so its numbers are those of that run, bit for bit where the compiler makes the same choices for both;
in a batch of several, products are summed in another order.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bampath import params as tags
from bampath.config import Config
from bampath.optim import learning_rate, make_optimizer
from bampath.step import (
    Batch,
    Declared,
    Report,
    TrainState,
    batch_loss,
    build_model,
    declare,
    make_train_step,
    optimizer_of,
)

Array = jax.Array
Step = Callable[[TrainState, Batch, Array], tuple[TrainState, Report]]
AXIS = "member"


def make_step(config: Config, mesh: Mesh | None = None) -> Any:
    """The jitted step of all members: (states, batches, rates [M, steps]) -> (states, reports).

    Every leaf has a leading axis of M members; states are donated. config: any member's. mesh: from `spread`.
    """
    return jax.jit(over_members(one_step(config), mesh), donate_argnums=0)


def one_step(config: Config) -> Step:
    """A member's step (state, batch, rates [steps]) -> (state, report): that of a run alone, but that the learning rate
    of step n is rates[n] and not a constant of the program."""
    model = build_model(config)
    declared = declare(model)

    def step(state: TrainState, batch: Batch, rates: Array) -> tuple[TrainState, Report]:
        own: Any = lambda count: rates[count]
        optimizer = make_optimizer(config.optim, config.train.steps, declared.roles, declared.axes, own)
        after, report = make_train_step(config, model, declared, optimizer)(state, batch)
        return after, replace(report, lr=rates[state.step])

    return step


def make_evaluation(config: Config, mesh: Mesh | None = None) -> Any:
    """The jitted loss of all members on one batch each: (params, batches) -> Mean, leaves [M]."""
    model = build_model(config)
    return jax.jit(over_members(lambda params, batch: batch_loss(config, model, params, batch), mesh))


def over_members(function: Any, mesh: Mesh | None) -> Any:
    """`function` of one member, for stacked arguments, in parts on the devices of a mesh."""

    def local(*args: Any) -> Any:
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(args)}
        if sizes != {1}:
            return jax.vmap(function)(*args)
        alone = function(*jax.tree.map(lambda leaf: leaf[0], args))
        return jax.tree.map(lambda leaf: leaf[None], alone)

    if mesh is None:
        return local
    spec = PartitionSpec(AXIS)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def spread(members: int, devices: Sequence[Any]) -> Mesh | None:
    """A mesh of as many devices as divide the members evenly; None for one device."""
    count = max(n for n in range(1, len(devices) + 1) if members % n == 0)
    return None if count == 1 else Mesh(np.array(devices[:count]), (AXIS,), axis_types=(AxisType.Auto,))


def place(tree: Any, mesh: Mesh | None) -> Any:
    """Stacked arrays on their devices."""
    return jax.device_put(tree, None if mesh is None else NamedSharding(mesh, PartitionSpec(AXIS)))


def rates_of(config: Config) -> np.ndarray:
    """The learning rate of each step, float32 [steps], evaluated one by one as a run does."""
    schedule = learning_rate(config.optim, config.train.steps)
    return np.asarray(jax.jit(lambda: jax.lax.map(schedule, jnp.arange(config.train.steps, dtype=jnp.int32)))())


def first_states(configs: Sequence[Config], starts: Sequence[Mapping[str, float]]) -> TrainState:
    """The stacked states before the first step: those of runs alone, with positional parameters set as `starts` says.

    starts: one mapping per member, name of a positional parameter -> value for all heads and layers. ValueError for a
    name that the model does not have. Members of one model share one compiled initialisation.
    """
    compiled: dict[Any, Any] = {}
    states = []
    for config, start in zip(configs, starts, strict=True):
        if config.model not in compiled:
            compiled[config.model] = _initialisation(config)
        params, rest = compiled[config.model](config.train.seed)
        declared = declare(build_model(config))
        refuse_unknown(declared, start)
        states.append(rest(set_parameters(params, declared, start)))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def _initialisation(config: Config) -> Any:
    """seed -> (parameters, parameters -> state): as `bampath.step.init_state`, with the seed as an argument."""
    model = build_model(config)
    optimizer = optimizer_of(config, declare(model))

    @jax.jit
    def draw(seed: Array) -> tuple[Any, Array]:
        start, key = jax.random.split(jax.random.key(seed))
        return tags.unbox(model.init(start, jnp.zeros((1, 2), jnp.int32))["params"]), jax.random.key_data(key)

    empty = jax.jit(optimizer.init)

    def first(seed: int) -> Any:
        params, key = draw(seed)
        return params, lambda params: TrainState(jnp.int32(0), params, empty(params), key, jnp.bool_(True))

    return first


def set_parameters(params: Any, declared: Declared, start: Mapping[str, float]) -> Any:
    """`params` with the positional parameters called so filled with a value."""
    names = _positional(declared, params)
    filled: Any = lambda path, leaf: (
        jnp.full_like(leaf, start[path[-1].key]) if path[-1].key in set(start) & names else leaf
    )
    return jax.tree_util.tree_map_with_path(filled, params)


def refuse_unknown(declared: Declared, start: Mapping[str, float]) -> None:
    """ValueError for a name that no positional parameter of the model has."""
    names = _positional(declared, declared.shapes)
    unknown = sorted(set(start) - names)
    if unknown:
        has = ", ".join(sorted(names)) or "none"
        raise ValueError(f"init.{unknown[0]}: the model has no positional parameter {unknown[0]!r}; it has {has}")


def _positional(declared: Declared, params: Any) -> set[str]:
    """The names of positional parameters. params: the tree of `declared`, with any leaves."""
    roles = jax.tree.leaves(declared.roles)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {path[-1].key for (path, _), role in zip(leaves, roles, strict=True) if role in tags.POSITIONAL_ROLES}


def same_program(first: Config, other: Config) -> bool:
    """Whether the steps of two configurations are one program, apart from what enters as arrays."""
    return first == other or program_text(first) == program_text(other)


def program_text(config: Config) -> str:
    """A member's step, lowered, as text without the places in the source that it came from."""
    model = build_model(config)
    optimizer = optimizer_of(config, declare(model))
    params = declare(model).shapes
    key, step, sound = (jax.ShapeDtypeStruct(*kind) for kind in (((2,), jnp.uint32), ((), jnp.int32), ((), jnp.bool_)))
    parts: Any = (step, params, jax.eval_shape(optimizer.init, params), key, sound)
    state = TrainState(*parts)
    rates = jax.ShapeDtypeStruct((config.train.steps,), jnp.float32)
    lowered = jax.jit(one_step(config)).lower(state, abstract_batch(config), rates)
    return re.sub(r"loc\(.*\)", "", lowered.as_text())


def abstract_batch(config: Config) -> dict[str, Any]:
    """Shapes and types of what a step reads of one member's batch."""
    shape = (config.data.batch_size, config.data.sequence_length)
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    kinds |= {"segment_ids": jnp.int32} if config.data.document_mask else {}
    return {name: jax.ShapeDtypeStruct(shape, kind) for name, kind in kinds.items()}


def member(tree: Any, index: int) -> Any:
    """One member's leaves of stacked arrays, on the host."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[index]), tree)
