"""How the kernels written in Pallas-Triton are called: every array whole, by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

Array = jax.Array


def launch(
    body: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    arrays: dict[str, Array],
    outputs: dict[str, Any],
    *,
    warps: int,
    stages: int,
    interpret: bool,
) -> dict[str, Array]:
    """Run `body(names, *refs)` on a grid; refs and names are those of `arrays`, then of `outputs` (their shapes).

    name: what profiles show. warps, stages: of a program; interpret: emulate it instead of compiling it.
    """
    kernel = partial(body, (*arrays, *outputs))
    kernel.__name__ = name  # type: ignore[attr-defined]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    params: Any = {}
    if not interpret:
        params["compiler_params"] = plgpu.CompilerParams(num_warps=warps, num_stages=stages)
    run = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[whole] * len(arrays),
        out_specs=[whole] * len(outputs),
        out_shape=list(outputs.values()),
        interpret=interpret,
        **params,
    )
    return dict(zip(outputs, run(*arrays.values()), strict=True))
