"""What went wrong in a step that was not finite: the first bad parameter group, in words."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from bampath import sharding
from bampath.checkpoint import index
from bampath.config import Config
from bampath.step import Batch, Declared, Report, TrainState, build_model


def explain(config: Config, declared: Declared, report: Report, batch: Batch, state: TrainState) -> str:
    """Names the first parameter that is not finite, else the first module whose output is not, else the first gradient.

    state: as it was before the step; batch: the step's. The forward pass is repeated, part by part of the batch,
    to find the module.
    """
    loss = report.loss.value()
    names = [array.name for array in index(declared.shapes)]
    text = f"the loss is {loss:.4g}, the gradient norm {float(report.grad_norm):.4g}"
    bad = [name for name, leaf in zip(names, jax.tree.leaves(state.params), strict=True) if not _finite(leaf)]
    if bad:
        return f"{text}. First bad parameter group: {bad[0]}, whose values are not finite{_others(bad)}"
    if not math.isfinite(loss):
        where = first_bad_module(config, state.params, batch)
        if where:
            return f"{text}. First bad parameter group: {where}, whose output is not finite{_extremes(report)}"
    squares = np.asarray(report.squares)
    bad = [name for name, value in zip(names, squares, strict=True) if not math.isfinite(value)]
    if bad:
        which = f"{bad[0]}, whose gradient is not finite{_others(bad)}"
        return f"{text}. First bad parameter group: {which}{_extremes(report)}"
    return f"{text}. Gradients are finite, the update (norm {float(report.update_norm):.4g}) is not: lower optim.lr"


def first_bad_module(config: Config, params: Any, batch: Batch) -> str | None:
    """Path of the first module, in order of completion, that returns something not finite; None if all are finite."""
    model = build_model(replace(config, model=replace(config.model, remat="none", scan=False)))
    names: list[str] = []

    @jax.jit
    def soundness(params: Any, part: Batch) -> Any:
        """One flag per output of a module, in order; the module's path is left in `names` while tracing."""
        names.clear()
        flags = []

        def look(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            output = call(*args, **kwargs)
            for leaf in jax.tree.leaves(output):
                names.append("/".join(context.module.path) or "final_norm")
                flags.append(jnp.isfinite(leaf).all())
            return output

        with nn.intercept_methods(look), sharding.use(sharding.mesh_of(config)):
            model.apply({"params": params}, part["tokens"], part.get("segment_ids"), method="features")
        return jnp.stack(flags)

    rows = batch["tokens"].shape[0] // config.train.accumulate
    for first in range(0, batch["tokens"].shape[0], rows):
        flags = np.asarray(soundness(params, {name: array[first : first + rows] for name, array in batch.items()}))
        if not flags.all():
            return names[int(np.argmin(flags))]
    return None


def _finite(leaf: Any) -> bool:
    return not jnp.issubdtype(leaf.dtype, jnp.floating) or bool(jnp.isfinite(leaf).all())


def _others(bad: list[str]) -> str:
    return f" (nor are those of {len(bad) - 1} more)" if len(bad) > 1 else ""


def _extremes(report: Report) -> str:
    ranges = [f"{name} {low:.4g} to {high:.4g}" for name, (low, high) in report.ranges.items()]
    return f"; ranges of the positional parameters: {', '.join(ranges)}" if ranges else ""
