"""Checks of arguments that the kernels share: each error names the argument, its value and what would be right."""

import math
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp

Kind = Literal["activation", "float32", "integer"]
LARGEST_WINDOW = 2**31 - 1


def check_array(name: str, value: Any, want: dict[str, int | None], kind: Kind = "activation") -> None:
    """Raise unless `value` is an array with the named dimensions (None: any size) and a dtype of the given kind.

    "float32" is for what is positional: half precision is refused, float64 accepted.
    """
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}")
    allowed = {
        "activation": ("bfloat16", "float16", "float32", "float64"),
        "float32": ("float32", "float64"),
        "integer": ("int8", "int16", "int32", "int64", "uint8", "uint16"),
    }[kind]
    if jnp.dtype(value.dtype).name not in allowed:
        words = {
            "activation": "bfloat16, float16, float32 or float64",
            "float32": "float32",
            "integer": "int32",
        }
        raise TypeError(f"{name} has dtype {value.dtype}, must be {words[kind]}")
    fits = [size is None or got == size for got, size in zip(value.shape, want.values(), strict=False)]
    if len(value.shape) != len(want) or not all(fits):
        spec = ", ".join(dim if size is None else f"{dim}={size}" for dim, size in want.items())
        raise ValueError(f"{name} has shape {tuple(value.shape)}, must be [{spec}]")


def check_window(window: Any) -> int | None:
    """A static window as a Python int, or None. TypeError or ValueError that says what it must be."""
    if window is None:
        return None
    try:
        size = operator.index(window)
    except (TypeError, jax.errors.TracerIntegerConversionError):
        size = None
    if size is None or isinstance(window, bool):
        raise TypeError(f"window must be a Python int (it is static) or None, got {window!r}")
    if size < 1:
        raise ValueError(f"window={size} must be at least 1 (1: a query sees its own position only)")
    if size > LARGEST_WINDOW:
        raise ValueError(f"window={size} must be at most {LARGEST_WINDOW}: distances are int32 (None: no window)")
    return size


def check_scale(scale: Any, dim: int) -> float:
    """A static scale as a Python float; None: 1/√dim. TypeError or ValueError that says what it must be."""
    if scale is None:
        return 1.0 / math.sqrt(dim)
    try:
        if isinstance(scale, str | bool):
            raise TypeError
        value = float(scale)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise TypeError(
            f"scale must be a Python float (it is static), got {scale!r}; use sharpness to learn it"
        ) from None
    if not math.isfinite(value):
        raise ValueError(f"scale={value} must be finite")
    return value


def check_flag(name: str, value: Any) -> bool:
    """A static option that is True or False. TypeError that names it otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value
