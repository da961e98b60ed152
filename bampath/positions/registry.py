"""All parts by name, what may be combined, and `parse`: spec string -> Scheme."""

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from bampath.params import unbox
from bampath.positions import options
from bampath.positions.alibi import ALiBi
from bampath.positions.bam import BAM
from bampath.positions.fox import FoX
from bampath.positions.grammar import GRAMMAR, Term, parse_pattern
from bampath.positions.kerple import Kerple
from bampath.positions.learned import Learned
from bampath.positions.llama4 import Llama4
from bampath.positions.logn import LogN
from bampath.positions.lsh import LSH
from bampath.positions.nope import NoPE
from bampath.positions.path import PaTH
from bampath.positions.priors import combine, evaluate
from bampath.positions.rope import RoPE
from bampath.positions.sandwich import Sandwich
from bampath.positions.sinusoidal import Sinusoidal
from bampath.positions.slots import Carry, Geometry, Part, SlotName
from bampath.positions.ssmax import SSMax
from bampath.positions.t5 import T5
from bampath.positions.window import Window
from kernels.attention.api import DistancePrior

Array = jax.Array

# Every part. Within a slot, the order here is the order of the canonical name.
PARTS: dict[str, type[Part]] = {
    part.NAME: part
    for part in (
        Sinusoidal,
        Learned,
        NoPE,
        RoPE,
        PaTH,
        ALiBi,
        BAM,
        Kerple,
        T5,
        Sandwich,
        LSH,
        FoX,
        SSMax,
        LogN,
        Llama4,
        Window,
    )
}
_SLOT_ORDER: tuple[SlotName, ...] = get_args(SlotName)
_NAME_ORDER = {name: rank for rank, name in enumerate(PARTS)}
_SMALLEST = Geometry(dim=2, heads=1, kv_heads=1, head_dim=2)  # enough to ask a part for its parameters' names
_EXCLUSIVE: tuple[SlotName, ...] = ("transport", "sharpness", "visibility")


@dataclass(frozen=True)
class Composition:
    """The parts that serve one layer, in canonical order; equal for equal meaning, hashable.

    A composition that fills neither input, transport nor prior holds an explicit `nope`.
    """

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        parts = self.parts
        if not any(part.SLOT in ("input", "transport", "prior") for part in parts):
            parts = (NoPE(), *parts)
        ordered = sorted(parts, key=lambda part: (_SLOT_ORDER.index(part.SLOT), _NAME_ORDER[part.NAME]))
        object.__setattr__(self, "parts", tuple(ordered))
        _refuse_contradictions(self.parts)

    @property
    def name(self) -> str:
        """Canonical spec, read back by `parse`."""
        return "+".join(part.spec for part in self.parts)

    @property
    def input_parts(self) -> tuple[Part, ...]:
        """Parts added to the token embeddings, once for all layers."""
        return tuple(part for part in self.parts if part.SLOT == "input")

    @property
    def layer_parts(self) -> tuple[Part, ...]:
        """Parts that fill slots of the attention layer."""
        return tuple(part for part in self.parts if part.SLOT != "input")

    @property
    def has_gates(self) -> bool:
        """A forget gate is part of the state that a cache keeps."""
        return any(part.GATES for part in self.parts)

    @property
    def carries_keys(self) -> bool:
        """Cached keys move with every new token (PaTH)."""
        return any(part.CARRIES_KEYS for part in self.parts)

    @property
    def window(self) -> int | None:
        """Size of the sliding window, None without one."""
        return next((part.size for part in self.parts if isinstance(part, Window)), None)

    def reach(self, geometry: Geometry) -> int | None:
        """The bound that a part sets on how many keys a query outside training looks back at; None without one."""
        bounds = [bound for part in self.layer_parts if (bound := part.reach(geometry)) is not None]
        return min(bounds, default=None)

    def init_carry(self, geometry: Geometry, batch: int, dtype: Any) -> Carry:
        """State of the stateful parts before the first token: {part name: pytree with leading axis [batch]}."""
        states = {part.NAME: part.init_carry(geometry, batch, dtype) for part in self.layer_parts}
        return {name: state for name, state in states.items() if state is not None}

    def distance_prior(self, params: Any = None, heads: int | None = None) -> DistancePrior | None:
        """The product of the distance priors of all parts, for `kernels.attention`; None without one.

        params: {part name: its parameters}, boxed or not, or the parameters of the only prior alone; parts that learn
        nothing need none. Gates are no function of distance and are not in it. ValueError if parameters are missing or
        have a name that does not exist.
        """
        having = [part for part in self.layer_parts if type(part).log_prior is not Part.log_prior]
        given = {} if params is None else unbox(params)
        if not isinstance(given, dict):
            raise TypeError(f"params is a {type(given).__name__}; it must be a dict of parameters")
        _refuse_unknown_params(self, given)
        own = [_own_params(part, given, alone=len(having) == 1) for part in having]
        known = {leaf.shape[0] for leaf in jax.tree.leaves(own)} | ({heads} if heads is not None else set())
        if len(known) > 1:
            raise ValueError(
                f"{self.name}: the parameters (and heads=) disagree on the number of heads: {sorted(known)}"
            )
        heads = next(iter(known), None)
        return combine([part.distance_prior(p, heads) for part, p in zip(having, own, strict=True)])

    def log_prior(self, params: Any, q_positions: ArrayLike, k_positions: ArrayLike, heads: int | None = None) -> Array:
        """Σ_a log π_a(j - i) before masking and sharpness, dense: [H, T, S] float32 (0 without a prior).

        q_positions [T], k_positions [S] integers. params as in `distance_prior`; heads is needed when they do not tell.
        """
        at_q, at_k = jnp.asarray(q_positions), jnp.asarray(k_positions)
        prior = self.distance_prior(params, heads)
        if prior is None:
            if heads is None:
                raise ValueError(f"{self.name} has no prior whose parameters say how many heads there are: pass heads=")
            return jnp.zeros((heads, at_q.shape[0], at_k.shape[0]), jnp.float32)
        return evaluate(prior, at_q, at_k)

    def init_params(self, key: Array, geometry: Geometry) -> dict[str, dict[str, Array]]:
        """Fresh parameters {part name: {name: float32 array}}, as a layer (and the embedding) would hold them."""
        found: dict[str, dict[str, Array]] = {}
        for part in self.parts:
            declared = part.parameters(geometry)
            keys = jax.random.split(jax.random.fold_in(key, _NAME_ORDER[part.NAME]), max(len(declared), 1))
            made = {name: p.init(k, p.shape, jnp.float32) for (name, p), k in zip(declared.items(), keys, strict=False)}
            if made:
                found[part.NAME] = made
        return found


@dataclass(frozen=True)
class Scheme:
    """What a spec means: the compositions of a repeating pattern of layers (one, unless layers differ).

    Hashable and equal for equal meaning: `ssmax+bam` is `bam+ssmax`, and `rope,rope` is `rope`.
    """

    layers: tuple[Composition, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a scheme needs at least one layer")
        object.__setattr__(self, "layers", _shortest_period(self.layers))
        inputs = {c.input_parts for c in self.layers}
        if len(inputs) > 1:
            specs = sorted({part.spec for parts in inputs for part in parts})
            raise ValueError(
                f"{self.name}: {', '.join(specs)} is added to the embeddings once for all layers, so every layer of "
                "the pattern must name it"
            )
        self.shared_parts  # noqa: B018  raises if layers disagree

    @property
    def name(self) -> str:
        """Canonical spec: parts in slot order, defaults left out, repeated layers counted; parse reads it back."""
        runs: list[list[Any]] = []
        for composition in self.layers:
            if runs and runs[-1][1] == composition:
                runs[-1][0] += 1
            else:
                runs.append([1, composition])
        return ",".join(f"{count}*{c.name}" if count > 1 else c.name for count, c in runs)

    def at(self, layer: int) -> Composition:
        """The composition of a layer; the pattern repeats over the depth."""
        return self.layers[layer % len(self.layers)]

    @property
    def input_parts(self) -> tuple[Part, ...]:
        """Parts added to the token embeddings."""
        return self.layers[0].input_parts

    @property
    def shared_parts(self) -> tuple[Part, ...]:
        """Parts of the layers that keep one set of parameters for the whole model."""
        shared = {part for c in self.layers for part in c.layer_parts if part.shared}
        names = sorted(part.NAME for part in shared)
        if len(set(names)) < len(names):
            raise ValueError(f"{self.name}: layers share the parameters of {names} but disagree on its options")
        return tuple(sorted(shared, key=lambda part: part.NAME))

    @property
    def single(self) -> Composition:
        """The composition, if all layers have the same; ValueError otherwise."""
        if len(self.layers) > 1:
            raise ValueError(f"{self.name} differs between layers: take the composition of one of them with .at(layer)")
        return self.layers[0]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of a scheme that is the same in every layer."""
        return self.single.parts

    def log_prior(self, params: Any, q_positions: ArrayLike, k_positions: ArrayLike, heads: int | None = None) -> Array:
        """`Composition.log_prior` of a scheme that is the same in every layer: [H, T, S] float32."""
        return self.single.log_prior(params, q_positions, k_positions, heads)

    def init_params(self, key: Array, geometry: Geometry) -> dict[str, dict[str, Array]]:
        """`Composition.init_params` of a scheme that is the same in every layer."""
        return self.single.init_params(key, geometry)


@functools.lru_cache(maxsize=512)
def parse(spec: str) -> Scheme:
    """The scheme that a spec string describes: `bam(init=laplace)+ssmax`, `3*rope+window(512),nope`.

    ValueError at once for anything unknown, misplaced or contradictory, with what would be right.
    """
    if not isinstance(spec, str):
        raise TypeError(f"spec is a {type(spec).__name__}; it must be a string such as 'bam+ssmax'")
    if not spec.strip():
        raise ValueError(f"position spec {spec!r} is empty; {GRAMMAR}. Parts: {', '.join(PARTS)}")
    pattern = parse_pattern(spec)
    try:
        return Scheme(tuple(Composition(tuple(_part(term) for term in terms)) for terms in pattern))
    except ValueError as error:
        raise ValueError(f"position spec {spec!r}: {error}") from None


def _part(term: Term) -> Part:
    if term.name not in PARTS:
        listing = "; ".join(f"{name}({', '.join(options.hints(part))})" for name, part in PARTS.items())
        raise ValueError(f"unknown part {term.name!r}{_nearest(term.name, PARTS)}. Parts and their options: {listing}")
    kind = PARTS[term.name]
    accepted = options.hints(kind)
    given = list(term.options)
    if term.main is not None:
        if kind.MAIN is None:
            raise ValueError(f"{term.name} takes no value without a name, got {term.main!r}; {_options_of(kind)}")
        given.insert(0, (kind.MAIN, term.main))
    values: dict[str, Any] = {}
    for name, text in given:
        if name not in accepted:
            raise ValueError(f"{term.name} has no option {name!r}{_nearest(name, accepted)}; {_options_of(kind)}")
        if name in values:
            raise ValueError(f"{term.name}: option {name} is given twice")
        try:
            values[name] = options.parse_value(text, accepted[name])
        except ValueError as error:
            raise ValueError(f"{term.name}: option {name} {error}") from None
    missing = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise ValueError(f"{term.name} needs {', '.join(missing)}, as in {term.name}(512); {_options_of(kind)}")
    return kind(**values)


def _options_of(kind: type[Part]) -> str:
    listing = [f"{name} ({options.describe(hint)})" for name, hint in options.hints(kind).items()]
    return f"its options: {'; '.join(listing)}" if listing else "it has no options"


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _refuse_contradictions(parts: tuple[Part, ...]) -> None:
    names = [part.NAME for part in parts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice")
    for slot in _EXCLUSIVE:
        filling = [part.NAME for part in parts if slot == part.SLOT]
        if len(filling) > 1:
            raise ValueError(f"{' and '.join(filling)} both fill the {slot} slot, which takes one part")
    for part in parts:
        part.check(tuple(other for other in parts if other is not part))


def _shortest_period(layers: tuple[Composition, ...]) -> tuple[Composition, ...]:
    count = len(layers)
    for period in range(1, count + 1):
        if count % period == 0 and layers == layers[:period] * (count // period):
            return layers[:period]
    return layers


def _refuse_unknown_params(composition: Composition, given: dict[str, Any]) -> None:
    """ValueError for a name in {part: {parameter: …}} or {parameter: …} that means nothing.

    Parameters of parts that this composition lacks may stand there: a prior can be looked at without the others.
    """
    names = {part.NAME: [*part.parameters(_SMALLEST), *part.BY_HAND] for part in composition.parts}
    flat = list(dict.fromkeys(own for part in names.values() for own in part))
    for name, value in given.items():
        if not isinstance(value, dict):
            _refuse_unknown(name, flat, f"{composition.name} has no parameter")
        elif name in names:
            for inner in value:
                _refuse_unknown(inner, names[name], f"{name} has no parameter")
        else:
            _refuse_unknown(name, list(PARTS), "there is no part")


def _refuse_unknown(name: str, known: list[str], what: str) -> None:
    if name not in known:
        raise ValueError(f"{what} {name!r}{_nearest(name, known)}; there are: {', '.join(known) or 'none'}")


def _own_params(part: Part, given: dict[str, Any], alone: bool) -> dict[str, Array]:
    """The parameters of one part out of {part name: params}, or out of bare parameters if no other part has a prior."""
    needed = set(part.parameters(_SMALLEST))
    own = given.get(part.NAME, given if alone and not set(given) & set(PARTS) else {})
    missing = sorted(needed - set(own))
    if missing:
        form = "" if alone else "; with several priors params is {part name: its parameters}"
        raise ValueError(
            f"{part.NAME} needs the parameters {', '.join(sorted(needed))}; missing: {', '.join(missing)}{form}"
        )
    return {name: jnp.atleast_1d(jnp.asarray(value)) for name, value in own.items()}
