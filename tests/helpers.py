"""Small things that several test files share."""

import contextlib
from collections.abc import Callable, Iterator

import jax
import numpy as np


@contextlib.contextmanager
def x64() -> Iterator[None]:
    """Double precision inside the block, on every supported JAX."""
    enable = getattr(jax, "enable_x64", None)
    if enable is None:
        from jax.experimental import enable_x64 as enable
    with enable(True):
        yield


def relative_rms(got: object, want: object) -> float:
    """RMS(got - want) / RMS(want), in float64."""
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((a - b) ** 2)) / max(np.sqrt(np.mean(b**2)), 1e-30))


def central_difference(
    f: Callable[[np.ndarray], float], x: np.ndarray, direction: np.ndarray, eps: float = 1e-5
) -> float:
    """Directional derivative of f at x by a central difference; call under `x64()`."""
    return (float(f(x + eps * direction)) - float(f(x - eps * direction))) / (2 * eps)
