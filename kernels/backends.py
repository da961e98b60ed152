"""Which implementation serves a call: one rule for all operations."""

import importlib
from collections.abc import Mapping
from typing import Any

import jax


def load(backends: Mapping[str, str], name: str) -> Any:
    """The module of a backend, imported only when it is first considered."""
    return importlib.import_module(backends[name])


def choose(
    backends: Mapping[str, str], preference: Mapping[str, tuple[str, ...]], implementation: str | None, *call: Any
) -> str:
    """The name of the backend that serves a call: the one asked for, or the first of this platform's that can.

    backends: name -> module; preference: platform -> names, best first; call: what the modules' `supports` take, which
    answers None or the reason why not. ValueError for an unknown name, for a named backend that cannot serve the call
    (with its reason; it never falls back), and when no backend can.
    """
    if implementation is not None and implementation not in backends:
        raise ValueError(f"implementation={implementation!r} is not one of {', '.join(map(repr, backends))} or None")
    names = (implementation,) if implementation else preference.get(jax.default_backend(), ("xla",))
    reasons = {}
    for name in names:
        reason = load(backends, name).supports(*call)
        if reason is None:
            return name
        reasons[name] = reason
    if implementation:
        raise ValueError(f"implementation={implementation!r} cannot serve this call: {reasons[implementation]}")
    raise ValueError("no backend can serve this call: " + "; ".join(f"{n}: {why}" for n, why in reasons.items()))
