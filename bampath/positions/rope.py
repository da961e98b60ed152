"""RoPE: keys and queries are rotated by angles proportional to their positions; rescalings for longer contexts."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from bampath.positions.options import option
from bampath.positions.phases import cos_sin
from bampath.positions.slots import Geometry, Part, SlotName, Slots, Tokens

Array = jax.Array

# Options that only one rescaling reads: set with another one they would silently do nothing.
_ONLY = {
    "length": ("ntk",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "truncate": ("yarn",),
    "attention_factor": ("yarn", "longrope"),
    "low_freq": ("llama3",),
    "high_freq": ("llama3",),
    "factor": ("linear", "ntk", "yarn", "llama3", "longrope"),
    "factors": ("longrope",),
    "original": ("ntk", "yarn", "llama3", "longrope"),
}


@dataclass(frozen=True)
class RoPE(Part):
    """⟨R(i) q_i, R(j) k_j⟩ depends on j - i only: R(p) turns pair n of a head by the angle p · ω_n, ω_n = base^(-2n/D).

    Rotary embedding (RoFormer, arXiv 2104.09864, section 3.2.2). base defaults to 500,000, the RoPE baseline of BAM
    and of FoX (RoFormer itself used 10,000). Phases are exact to 1e-6 at any int32 position;
    the rotation is done in float32.

    scaling, with s = factor and L = original (default: the training length):
    - linear: ω / s (position interpolation, arXiv 2306.15595).
    - ntk: base · ((s · length / L) - (s - 1))^(D / (D-2)) if length > L ("dynamic NTK"). The published form takes the
      length from the running sequence, which makes cached keys disagree with new ones; here `length` is fixed (default
      s · L), so that prefill, decode and the full forward are the same function.
    - yarn: ω / s for pairs that turn less than beta_slow times over L, ω for more than beta_fast, a ramp between; q and
      k times attention_factor, 0.1 ln s + 1 by default (arXiv 2309.00071, section 3).
    - llama3: ω / s for wavelengths over L / low_freq, ω for those under L / high_freq, a blend between (Llama 3.1).
    - longrope: ω_n / factors[n], found by search; q and k times attention_factor, √(1 + ln s / ln L) by default (arXiv
      2402.13753). The published form has a second list for rows of at most L tokens, chosen by the running length; here
      it is one list for all rows.
    fraction: rotate only the fastest pairs, a share `fraction` of them, and leave the others at angle 0 (p-RoPE,
    arXiv 2410.06205). layout: pair n is (n, n + D/2) (half) or (2n, 2n + 1) (interleaved, the complex form of BAM's
    code); they differ by a permutation of the head's dimensions.
    """

    NAME: ClassVar[str] = "rope"
    SLOT: ClassVar[SlotName] = "transport"
    MAIN: ClassVar[str | None] = "base"

    base: float = option(500000.0, doc="ratio of the slowest wavelength to the fastest", examples=("10000",))
    scaling: Literal["none", "linear", "ntk", "yarn", "llama3", "longrope"] = option(
        "none", doc="rescaling for longer contexts"
    )
    factor: float = option(1.0, doc="s, the stretch of the context", examples=("scaling=linear,factor=4",))
    original: int | None = option(
        None, doc="L; none: the training length", examples=("scaling=llama3,factor=8,original=64",)
    )
    length: int | None = option(
        None, doc="context that ntk serves; none: factor × L", examples=("scaling=ntk,factor=2,length=100",)
    )
    beta_fast: float = option(
        32.0, doc="yarn: turns over L beyond which a pair is kept", examples=("scaling=yarn,factor=4,beta_fast=8",)
    )
    beta_slow: float = option(
        1.0, doc="yarn: turns over L below which a pair is slowed by s", examples=("scaling=yarn,factor=4,beta_slow=2",)
    )
    truncate: bool = option(
        True,
        doc="yarn: round the ends of the ramp outwards to whole pairs",
        examples=("scaling=yarn,factor=4,truncate=false",),
    )
    attention_factor: float | None = option(
        None,
        doc="factor of q and k; none: yarn 0.1 ln s + 1, longrope √(1 + ln s / ln L)",
        examples=("scaling=yarn,factor=4,attention_factor=1.5",),
    )
    factors: tuple[float, ...] | None = option(
        None,
        doc="longrope: what each pair is slowed by, or one number for all",
        examples=("scaling=longrope,factors=3,factor=4",),
    )
    low_freq: float = option(
        1.0,
        doc="llama3: L / low_freq is the longest wavelength not slowed by s",
        examples=("scaling=llama3,factor=8,low_freq=2",),
    )
    high_freq: float = option(
        4.0,
        doc="llama3: L / high_freq is the longest wavelength kept",
        examples=("scaling=llama3,factor=8,high_freq=8",),
    )
    fraction: float = option(1.0, doc="share of pairs that are rotated, fastest first", examples=("fraction=0.5",))
    layout: Literal["half", "interleaved"] = option("half", doc="which dimensions form a pair")

    def validate(self) -> None:
        for name, readers in _ONLY.items():
            changed = getattr(self, name) != type(self).__dataclass_fields__[name].default
            if changed and self.scaling not in readers:
                raise ValueError(
                    f"rope: option {name} has no effect with scaling={self.scaling}; it is read by {', '.join(readers)}"
                )
        if self.scaling == "longrope" and self.factors is None:
            raise ValueError("rope: scaling=longrope needs factors, one per pair joined by ':', or one number for all")
        given = (self.length, self.factors)
        idle = self.factor == 1 and given == (None, None) and self.attention_factor in (None, 1)
        if self.scaling != "none" and idle:
            raise ValueError(
                f"rope: scaling={self.scaling} has no effect with factor 1; give factor, the stretch of the context, "
                f"as in rope(scaling={self.scaling},factor=4)"
            )
        rules = [
            ("base", self.base > 1, "greater than 1"),
            ("factor", self.factor >= 1, "at least 1"),
            ("original", self.original is None or self.original >= 1, "at least 1"),
            ("length", self.length is None or self.length >= 1, "at least 1"),
            ("beta_slow", 0 < self.beta_slow < self.beta_fast, f"between 0 and beta_fast={self.beta_fast}"),
            ("attention_factor", self.attention_factor is None or self.attention_factor > 0, "positive"),
            ("factors", min(self.factors or (1,)) > 0, "positive"),
            ("low_freq", 0 < self.low_freq < self.high_freq, f"between 0 and high_freq={self.high_freq}"),
            ("fraction", 0 <= self.fraction <= 1, "between 0 and 1"),
        ]
        for name, ok, wanted in rules:
            if not ok:
                raise ValueError(f"rope: option {name} is {getattr(self, name)} but must be {wanted}")

    def fill(
        self, params: dict[str, Array], geometry: Geometry, slots: Slots, tokens: Tokens, carry: Any
    ) -> tuple[Slots, Any]:
        frequencies, amplitude = rope_frequencies(self, geometry.head_dim, geometry.train_length)
        cos, sin = cos_sin(tokens.positions, frequencies)
        turn = lambda x: rotate(x, amplitude * cos, amplitude * sin, self.layout)
        return replace(slots, q=turn(slots.q), k=turn(slots.k)), carry


def rotate(x_BTHD: Array, cos_BTN: Array, sin_BTN: Array, layout: str) -> Array:
    """Turn the N = D/2 pairs of every head by the given angles, in float32 or better; returns x's dtype."""
    x = x_BTHD.astype(jnp.promote_types(x_BTHD.dtype, jnp.float32))
    cos, sin = cos_BTN[:, :, None, :], sin_BTN[:, :, None, :]
    pairs = (
        x.reshape(*x.shape[:-1], -1, 2) if layout == "interleaved" else x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2)
    )
    a, b = pairs[..., 0], pairs[..., 1]
    turned = (a * cos - b * sin, a * sin + b * cos)
    out = jnp.stack(turned, axis=-1).reshape(x.shape) if layout == "interleaved" else jnp.concatenate(turned, axis=-1)
    return out.astype(x_BTHD.dtype)


def rope_frequencies(rope: RoPE, head_dim: int, train_length: int) -> tuple[np.ndarray, float]:
    """ω [head_dim / 2] float64 in radians per position, fastest first, and the factor of q and k."""
    if head_dim % 2:
        raise ValueError(f"rope needs an even head_dim, got {head_dim}")
    original = rope.original or train_length
    frequencies = _plain(rope.base, head_dim)
    amplitude = 1.0
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "ntk":
        frequencies = _plain(_ntk_base(rope, head_dim, original), head_dim)
    elif rope.scaling == "yarn":
        frequencies = _yarn(rope, frequencies, original)
        given = rope.attention_factor
        amplitude = 0.1 * math.log(rope.factor) + 1 if given is None else given
    elif rope.scaling == "llama3":
        frequencies = _llama3(rope, frequencies, original)
    elif rope.scaling == "longrope":
        frequencies, amplitude = _longrope(rope, frequencies, original)
    rotated = math.floor(rope.fraction * len(frequencies) + 1e-9)
    return np.where(np.arange(len(frequencies)) < rotated, frequencies, 0.0), amplitude


def _plain(base: float, head_dim: int) -> np.ndarray:
    return base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _ntk_base(rope: RoPE, head_dim: int, original: int) -> float:
    if head_dim < 4:
        raise ValueError(f"rope(scaling=ntk) needs head_dim >= 4, got {head_dim}")
    length = rope.factor * original if rope.length is None else rope.length
    if length <= original:
        return rope.base
    stretch = rope.factor * length / original - (rope.factor - 1)
    return rope.base * stretch ** (head_dim / (head_dim - 2))


def _yarn(rope: RoPE, frequencies: np.ndarray, original: int) -> np.ndarray:
    """Pairs are told apart by index: the (real) index at which a pair turns `turns` times over L."""
    head_dim = 2 * len(frequencies)

    def index_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # a step, as in the published code
    slowed = np.clip((np.arange(len(frequencies)) - low) / width, 0, 1)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)


def _llama3(rope: RoPE, frequencies: np.ndarray, original: int) -> np.ndarray:
    turns = original * frequencies / (2 * math.pi)  # over L
    kept = np.clip((turns - rope.low_freq) / (rope.high_freq - rope.low_freq), 0, 1)
    return frequencies / rope.factor * (1 - kept) + frequencies * kept


def _longrope(rope: RoPE, frequencies: np.ndarray, original: int) -> tuple[np.ndarray, float]:
    factors = np.asarray(rope.factors, np.float64)
    if len(factors) not in (1, len(frequencies)):
        raise ValueError(
            f"rope: option factors has {len(factors)} numbers but must have {len(frequencies)}, one per pair of a "
            "head, or 1"
        )
    amplitude = rope.attention_factor
    if amplitude is None and rope.factor > 1 and original < 2:
        raise ValueError(f"rope: longrope divides by ln L, and original={original}; give it, or attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(rope.factor) / math.log(original)) if rope.factor > 1 else 1.0
    return frequencies / factors, amplitude
