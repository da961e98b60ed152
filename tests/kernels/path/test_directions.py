"""The fused kernels of PaTH's directions, interpreted on CPU, and where the model takes them."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from bampath.config import MeshConfig, get
from bampath.positions import Tokens
from bampath.positions import directions as model
from bampath.sharding.mesh import make_mesh, use
from bampath.step import build_model
from kernels.path import gpu_directions
from kernels.path.gpu_directions import Cut, Options, units
from tests.helpers import relative_rms, x64

EPS = 1e-6
HOPPER = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="PaTH's fused kernels need jax >= 0.11.2")
# Stretches of a few tokens, so that short rows have several, and tiles with rows to spare.
SMALL: dict[str, Any] = {
    "forward": Cut(1, 8),
    "backward": Cut(1, 4, stretch=5),
    "interpret": True,
}


def exact(w: Any, taps: Any, document: Any, silu: bool) -> Any:
    """The directions from their formula; tokens that look back are matrices [T, T]."""
    length, width = w.shape[1], taps.shape[0]
    same = document[:, :, None] == document[:, None, :]
    mixed = 0
    for back in range(width):
        before = same * np.eye(length, k=-back)[None]
        mixed = mixed + jnp.einsum("bts,bshd->bthd", before, w) * taps[width - 1 - back][None, None]
    x = mixed * (1 + jnp.tanh(mixed / 2)) / 2 if silu else mixed
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True) + EPS)


def rows(rng: Any, length: int) -> np.ndarray:
    """Document numbers of three rows: documents and padding at both ends, one document, short ones of 1 to 3 tokens."""
    packed = np.cumsum(rng.random(length) < 0.15)
    packed[: length // 8] = packed[length - length // 6 :] = -1
    return np.stack([packed, np.full(length, 1), np.cumsum(rng.random(length) < 0.6)]).astype(np.int32)


def with_gradients(run: Any) -> Any:
    def both(w: Any, taps: Any, document: Any, d: Any) -> Any:
        out, pull = jax.vjp(lambda w, taps: run(w, taps, document), w, taps)
        return out, *pull(d)

    return both


CASES = {
    "as in the model": (3, "bfloat16", 64, 67, Options(True, EPS, interpret=True)),
    "no SiLU": (3, "float32", 16, 23, Options(False, EPS, **SMALL)),
    "width 1": (1, "float32", 16, 11, Options(True, EPS, **SMALL)),
    "width 2, wide heads": (2, "float32", 128, 17, Options(True, EPS, **SMALL)),
    "width 4, float16": (4, "float16", 16, 29, Options(True, EPS, **SMALL)),
    "48 of 64 columns": (3, "bfloat16", 48, 67, Options(True, EPS, interpret=True)),
    "48 of 64 columns, small tiles": (4, "float32", 48, 23, Options(True, EPS, **SMALL)),
    "40 of 64 columns, no SiLU": (2, "float32", 40, 19, Options(False, EPS, **SMALL)),
    "24 of 32 columns, width 1": (1, "bfloat16", 24, 11, Options(True, EPS, **SMALL)),
    "200 of 256 columns": (2, "float16", 200, 9, Options(True, EPS, **SMALL)),
    "8 columns": (3, "float32", 8, 13, Options(True, EPS, **SMALL)),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str) -> None:
    """Of w and taps, against the formula in float64, at every token, for w of all sizes; padding may hold anything."""
    width, dtype, dim, length, options = CASES[case]
    run = jax.jit(with_gradients(partial(units, options)))
    oracle = jax.jit(with_gradients(partial(exact, silu=options.silu)))
    for seed, scale in enumerate((1.0, 1e-3, 1e3)):
        rng = np.random.default_rng([width, seed])
        document = rows(rng, length)
        w = jnp.asarray(scale * rng.normal(size=(3, length, 2, dim)), dtype)
        taps = jnp.asarray(rng.normal(size=(width, 2, dim)), jnp.float32)
        d = jnp.asarray(rng.normal(size=w.shape), jnp.float32)
        got = run(w, taps, document, d)
        assert [x.dtype for x in got] == [jnp.float32, dtype, jnp.float32]
        with x64():
            wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (w, taps, d)]
            want = oracle(*wide[:2], document, wide[2])
        rounded = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 3e-3}[dtype]
        errors = [relative_rms(a, b) for a, b in zip(got, want, strict=True)]
        assert np.less(errors, [1e-6, rounded, 1e-5]).all(), (scale, errors)
        padding = (document < 0)[:, :, None, None]
        spoilt = run(jnp.where(padding, jnp.asarray(np.nan, dtype), w), taps, document, d)
        for a, b in zip(got[:2], spoilt[:2], strict=True):
            np.testing.assert_array_equal(*(np.where(padding, 0, np.asarray(x, np.float32)) for x in (a, b)))


def test_a_zero_vector_has_no_direction_and_a_gradient() -> None:
    taps, document = jnp.ones((1, 1, 16)), jnp.zeros((1, 2), jnp.int32)
    run = jax.jit(with_gradients(partial(units, Options(False, EPS, **SMALL))))
    d = jnp.zeros((1, 2, 1, 16)).at[0, 0, 0, 0].set(1)
    out, dw, dtaps = run(jnp.zeros((1, 2, 1, 16)), taps, document, d)
    np.testing.assert_array_equal(out, np.zeros((1, 2, 1, 16)))
    np.testing.assert_allclose(dw, 1000 * d, rtol=1e-6)
    np.testing.assert_array_equal(dtaps, np.zeros((1, 1, 16)))


class Flat:
    """An array [2, 3, 2, dim] as a GPU has it: neighbours in memory, of which an index may go past its row."""

    dtype = jnp.float32
    at = property(lambda self: self)

    def __init__(self, dim: int) -> None:
        self.shape = (2, 3, 2, dim)
        self.array = np.random.default_rng(dim).normal(size=self.shape).astype(np.float32)
        self.memory = self.array.reshape(-1)

    def __getitem__(self, index: Any) -> Any:
        strides = [stride // 4 for stride in self.array.strides]
        return self, sum(np.asarray(i) * stride for i, stride in zip(index, strides, strict=True))


def flat_load(place: Any, mask: Any, other: float) -> Any:
    return jnp.where(mask, jnp.asarray(place[0].memory)[place[1]], other)


def flat_store(place: Any, value: Any, mask: Any) -> None:
    places, some = np.broadcast_arrays(place[1], np.asarray(mask))
    place[0].memory[places[some]] = np.asarray(value)[some]


@pytest.mark.parametrize("dim", [24, 40, 48])
def test_columns_beyond_the_head_are_zeros_and_leave_the_next_head_alone(
    monkeypatch: pytest.MonkeyPatch, dim: int
) -> None:
    """The interpreter has nothing behind a head."""
    monkeypatch.setattr(gpu_directions, "plgpu", SimpleNamespace(load=flat_load, store=flat_store))
    some, spare = np.asarray([[True], [False], [True]]), [(0, 0), (0, pl.next_power_of_2(dim) - dim)]
    token, ref = np.arange(3)[:, None], Flat(dim)
    tile = gpu_directions._load(ref, 0, token, 1, some)  # type: ignore[arg-type]
    np.testing.assert_array_equal(tile, np.pad(ref.array[0, :, 1] * some, spare))
    np.testing.assert_array_equal(gpu_directions._read(ref, 0, 2, 1), np.pad(ref.array[0, 2, 1], spare[1]))
    want = ref.array.copy()
    want[0, ::2, 0], want[0, 1, 1] = 7, 8
    gpu_directions._store(ref, 0, token, 0, some, jnp.full(tile.shape, 7.0))  # type: ignore[arg-type]
    gpu_directions._write(ref, jnp.full(tile.shape[1:], 8.0), 0, 1, 1)
    np.testing.assert_array_equal(ref.array, want)


def test_what_is_refused_is_told() -> None:
    """With the reason; None is a call that is served."""

    def refusal(dim: int = 48, dtype: Any = jnp.bfloat16, taps: Any = jnp.float32) -> str | None:
        kernel = None if taps is None else jax.ShapeDtypeStruct((3, 2, dim), taps)
        return gpu_directions.refusal(jax.ShapeDtypeStruct((1, 5, 2, dim), dtype), kernel)  # type: ignore[arg-type]

    assert refusal() is None
    assert refusal(256, jnp.float32, jnp.bfloat16) is None
    assert refusal(44) == "head_dim must be a multiple of 8, at most 256, got 44"
    assert refusal(264) == "head_dim must be a multiple of 8, at most 256, got 264"
    assert refusal(taps=None) == "no convolution"
    assert refusal(dtype=jnp.int8) == "w must be bfloat16, float16 or float32, got int8"
    assert refusal(taps=np.float64) == "float64"


# ---- In the model ----


def call(batch: int = 2, length: int = 7, heads: int = 2, dim: int = 16, dtype: Any = jnp.bfloat16) -> Any:
    """(w, taps, tokens, d) of packed rows."""
    rng = np.random.default_rng(0)
    ids = jnp.asarray(np.sort(rng.integers(-1, 3, (batch, length)), axis=1), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
    w, d = rng.normal(size=(2, batch, length, heads, dim))
    taps = jnp.asarray(rng.normal(size=(3, heads, dim)), jnp.float32)
    tokens = Tokens(jnp.zeros((batch, length, 1)), positions, positions + 1, ids)
    return jnp.asarray(w, dtype), taps, tokens, jnp.asarray(d, jnp.float32)


def directions(w: Any, taps: Any, tokens: Any) -> Any:
    return model.directions(w, taps, tokens, None, True, EPS)[0]


def fused(*arguments: Any) -> bool:
    fresh = lambda *arguments: directions(*arguments)
    return "pallas_call" in str(jax.make_jaxpr(fresh)(*arguments))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that passes for one with a Hopper GPU; its kernels are interpreted."""
    monkeypatch.setattr(model, "machine_lacks", lambda: None)
    monkeypatch.setattr(gpu_directions, "Options", partial(Options, **SMALL))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about machines without a GPU")
def test_other_machines_leave_it_to_xla() -> None:
    assert not fused(*call()[:3])


@pytest.mark.usefixtures("hopper")
def test_what_the_kernels_cannot_serve_is_left_to_xla() -> None:
    w, taps, tokens, _ = call()
    assert all(fused(*call(dim=dim)[:3]) for dim in (8, 16, 24, 40, 48, 256))
    assert not any(fused(*call(dim=dim)[:3]) for dim in (4, 20, 44, 264))
    assert not fused(w, None, tokens)
    with x64():
        assert not fused(w.astype(jnp.float64), taps, tokens)
        assert not fused(w, taps.astype(jnp.float64), tokens)
    with use(make_mesh(MeshConfig(context=2))):
        assert not fused(w, taps, tokens)
    asked = {name: fused(w, taps, tokens.replace(implementation=name)) for name in ("mosaic_gpu", "xla", "reference")}
    assert asked == {"mosaic_gpu": True, "xla": False, "reference": False}


@pytest.mark.usefixtures("hopper")
def test_a_model_that_is_asked_for_xla_has_no_kernel_of_its_own() -> None:
    def served(implementation: str) -> bool:
        size = ("position=path", "model.layers=1", "model.heads=2", "model.dim=32", "model.mlp_dim=16")
        lm = build_model(get("tiny", *size, f"model.attention_impl={implementation}"))
        ids = jnp.ones((1, 8), jnp.int32)
        return "path_directions" in str(jax.make_jaxpr(lambda: lm.init_with_output(jax.random.key(0), ids)[0])())

    assert not served("xla")
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:  # "xla" as if it were not known: then the kernel would serve
        patch.setattr(model, "_fused", lambda *arguments: True)
        assert served("xla")


@pytest.mark.usefixtures("hopper")
def test_devices_of_a_mesh_have_their_own_rows_and_heads() -> None:
    """Values and gradients over two parts of the batch and two of the heads equal XLA's on one device."""
    w, taps, tokens, d = call(batch=4)
    xla = lambda w, taps, tokens: model._units((True, EPS), w, taps, tokens.segment_ids, tokens.positions)
    want = jax.jit(with_gradients(xla))(w, taps, tokens, d)
    with use(make_mesh(MeshConfig(data=2, tensor=2))):
        got = jax.jit(with_gradients(directions))(w, taps, tokens, d)
    np.testing.assert_allclose(got[0], want[0], atol=1e-6)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert relative_rms(a, b) < 6e-3  # XLA rounds the gradient of what it mixed


@HOPPER
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dim", [48, 64])
def test_it_lowers_for_hopper(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    """One kernel per pass."""
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    monkeypatch.setattr(model, "machine_lacks", lambda: None)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    allowed = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    run = jax.jit(with_gradients(directions))
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)):
        exported = jax.export.export(run, platforms=["cuda"], disabled_checks=allowed)(*call(dim=dim))
    text = exported.mlir_module()
    assert text.count("xla.gpu.triton") == 2
    assert all(f'"{name}"' in text for name in ("path_directions", "path_directions_backward"))
