"""Log-priors read as what they are: a belief, before any content is seen, about where to look.

For a query at position i the normalised prior of a head is p(j) = exp(log π(j - i)) / Z over its visible keys j, with
Z = Σ_j exp(log π(j - i)). With an additive prior, attention is the product of this belief and the softmax of the
content logits, renormalised (BAM, arXiv 2505.22842, Theorem 1; `posterior`). Everything here is float64 numpy, for
inspection and figures.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bampath.params import unbox
from bampath.positions.bam import BAM
from bampath.positions.registry import Composition

Regime = Literal["local", "uniform", "retrieval", "anti-local"]
RETRIEVAL_BOUND = -0.6  # exponents below it are called aggressive in BAM's analysis of heads
_FLAT = 0.1  # nats between the likeliest and the least likely key (the query itself aside) that count as no preference
_BOUND_SLACK = 1e-3  # float32 noise of an exponent that is read off a curve


@dataclass(frozen=True)
class Belief:
    """The priors of H heads over the n keys that one query sees, key j at distance n - 1 - j.

    log_p [H, n] normalised; log_z, entropy (nats), mean_distance (tokens), effective_keys = exp(entropy),
    effective_window (smallest w such that the w nearest keys hold `mass` of the probability) [H].
    """

    log_p: np.ndarray
    log_z: np.ndarray
    entropy: np.ndarray
    mean_distance: np.ndarray
    effective_keys: np.ndarray
    effective_window: np.ndarray

    @property
    def p(self) -> np.ndarray:
        """Probabilities [H, n]."""
        return np.exp(self.log_p)


def belief(
    composition: Composition,
    params: Any,
    keys: int,
    *,
    heads: int | None = None,
    sharpness: float | np.ndarray = 1.0,
    mass: float = 0.95,
) -> Belief:
    """The normalised distance prior of every head for a query that sees `keys` keys, itself included.

    params, heads: as in `Composition.log_prior`. sharpness: r of that query, a number or [H]; with SSMax inside it is
    s_h ln(keys), outside (and without SSMax) 1. A window cuts the keys; gates are no function of distance and stay out.
    """
    if keys < 1:
        raise ValueError(f"keys={keys} must be at least 1")
    if not 0 < mass <= 1:
        raise ValueError(f"mass={mass} must be in (0, 1]")
    seen = keys if composition.window is None else min(keys, composition.window)
    positions = np.arange(keys - seen, keys, dtype=np.int32)
    log_prior = np.asarray(composition.log_prior(params, positions[-1:], positions, heads), np.float64)[:, 0]
    scaled = log_prior * np.broadcast_to(np.asarray(sharpness, np.float64), log_prior.shape[:1])[:, None]
    return describe(scaled, mass)


def describe(log_prior: np.ndarray, mass: float = 0.95) -> Belief:
    """The Belief of unnormalised log-priors [H, n] over keys in order, the query's own last."""
    log_z = _logsumexp(log_prior)
    log_p = log_prior - log_z[:, None]
    p = np.exp(log_p)
    distance = np.arange(log_prior.shape[1] - 1, -1, -1, dtype=np.float64)
    entropy = -np.sum(p * np.where(p > 0, log_p, 0), axis=1)
    nearest_first = np.cumsum(p[:, ::-1], axis=1)
    window = 1 + np.sum(nearest_first < mass - 1e-12, axis=1)
    return Belief(log_p, log_z, entropy, p @ distance, np.exp(entropy), np.minimum(window, log_prior.shape[1]))


def posterior(content: np.ndarray, log_prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """softmax(content + log π) over the last axis as softmax(content) · p · Z: the weights, and Z [...].

    Z = 1 / Σ_j softmax(content)_j p_j only renormalises; it is large when content and prior disagree.
    """
    content, log_prior = np.asarray(content, np.float64), np.asarray(log_prior, np.float64)
    log_joint = content - _logsumexp(content)[..., None] + log_prior - _logsumexp(log_prior)[..., None]
    log_z = -_logsumexp(log_joint)
    return np.exp(log_joint + log_z[..., None]), np.exp(log_z)


def regime_of_exponent(theta_beta: float) -> Regime:
    """How a GGD head looks at its past: the exponent's sign and size decide (BAM, arXiv 2505.22842).

    > 0 local (nearer is likelier); 0 uniform; [-0.6, 0) retrieval (only the nearest tokens are suppressed, the rest is
    almost flat); < -0.6 anti-local (suppression reaches further and is strong).
    """
    if theta_beta == 0:
        return "uniform"
    if theta_beta > 0:
        return "local"
    return "retrieval" if theta_beta >= RETRIEVAL_BOUND else "anti-local"


def exponent(log_prior: np.ndarray) -> np.ndarray:
    """The exponent β of a log-prior that behaves like c - a·d^β near the query: [H] from values [H, n >= 5], own last.

    log2 of (g(4) - g(2)) / (g(2) - g(1)), g the value at distance 1, 2, 4: exact for GGD with mu = 0 whatever its
    scale, 1 for ALiBi. NaN where g is flat or turns around.
    """
    at = lambda d: log_prior[:, -1 - d]
    near, far = at(2) - at(1), at(4) - at(2)
    same_way = near * far > 0
    return np.where(same_way, np.log2(np.where(same_way, far / np.where(near == 0, 1, near), 1)), np.nan)


def regimes(composition: Composition, params: Any, keys: int = 512, heads: int | None = None) -> list[Regime]:
    """One regime per head, for any composition.

    A head whose prior varies by less than 0.1 nats over `keys` keys (the query itself aside), so that none weighs more
    than 1.11 times as much as another, is uniform. Otherwise a GGD-BAM prior that stands alone goes by its theta_beta,
    and any other prior by its shape: falling with distance is local, rising is retrieval or anti-local by the exponent
    of its rise.
    """
    if keys < 6:
        raise ValueError(f"keys={keys} must be at least 6 to show a shape")
    positions = np.arange(keys, dtype=np.int32)
    values = np.asarray(composition.log_prior(params, positions[-1:], positions, heads), np.float64)[:, 0]
    flat = np.ptp(values[:, :-1], axis=1) < _FLAT
    bare = [part for part in composition.layer_parts if part.SLOT == "prior"]
    if len(bare) == 1 and isinstance(bare[0], BAM):
        own = unbox(params)
        betas = np.atleast_1d(np.asarray(own.get(bare[0].NAME, own)["theta_beta"], np.float64))
        return ["uniform" if still else regime_of_exponent(float(b)) for b, still in zip(betas, flat, strict=True)]
    return [_regime_of_shape(row, still) for row, still in zip(values, flat, strict=True)]


def _regime_of_shape(values: np.ndarray, flat: bool) -> Regime:
    if flat:
        return "uniform"
    past = values[:-1]
    half = len(past) // 2
    if past[half:].mean() >= past[:half].mean():
        return "local"
    steep = exponent(values[None])[0] < RETRIEVAL_BOUND - _BOUND_SLACK
    return "anti-local" if steep else "retrieval"


def _logsumexp(x: np.ndarray) -> np.ndarray:
    top = np.max(x, axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    return (np.log(np.sum(np.exp(x - top), axis=-1, keepdims=True)) + top)[..., 0]
