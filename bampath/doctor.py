"""Is this machine fit? `python -m bampath.doctor` checks versions, devices, precision, and a tiny forward and backward
pass of every kernel that can run here against the dense reference; then the gradient of every parameter of small whole
models. On a CPU that would be minutes of compiling for kernels that nobody runs there, so only those that a CPU chooses
are checked, in float32, and no models; --all checks everything.

Exit status: 0 all is well, 1 a check failed, 2 a wrong command line.
"""

import argparse
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from bampath.command import end_with_status
from bampath.flops import peak_flops
from bampath.positions.registry import parse
from bampath.positions.slots import Geometry
from kernels.attention import api as attention_api
from kernels.path import api as path_api

# Versions that the suite runs on: at least, and below.
TESTED: dict[str, tuple[str, str]] = {
    "python": ("3.11", "3.14"),
    "jax": ("0.10.2", "0.13"),
    "flax": ("0.12.8", "0.13"),
    "optax": ("0.2.8", "0.3"),
    "orbax-checkpoint": ("0.12.8", "0.13"),
    "grain": ("0.2.18", "0.3"),
    "numpy": ("1.26", "3"),
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2}  # relative RMS of any output or gradient; a broken one is far off
MODELS = ("rope", "bam+ssmax", "fox", "path", "path+fox", "path+bam+ssmax")
# What a whole model's gradient may be off by: NOISE times what the dense reference is in bfloat16, and TOLERANCE, or
# FEW_OFF for a parameter of fewer than FEW numbers: its gradient is a sum over all pairs of tokens that nearly cancels.
NOISE, FEW, FEW_OFF = 2.0, 16, 0.2
LENGTHS = (256, 640, 384, 512)  # 2, 5, 3 and 4 tiles: some JAX versions reuse the first grid (jax-ml/jax#40847)

_REFUSAL = "cannot serve this call:"  # how both ops begin the reason of a backend

Status = Literal["ok", "skipped", "warning", "FAILED"]


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    detail: str

    def __str__(self) -> str:
        return f"{self.status:<8} {self.name:<34} {self.detail}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every check as it finishes; 1 if one failed, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bampath.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--no-kernels", action="store_true", help="versions, devices and precision only")
    what.add_argument(
        "--all", action="store_true", help="on a CPU: other machines' kernels too, interpreted, and bfloat16"
    )
    options = parser.parse_args(arguments)
    failed = 0
    for check in checks(kernels=not options.no_kernels, everything=options.all):
        print(check, flush=True)
        failed += check.status == "FAILED"
    print(f"{failed} check(s) failed" if failed else "all is well")
    return 1 if failed else 0


def checks(kernels: bool = True, everything: bool = False) -> Iterator[Check]:
    """All checks, in order. everything: on a CPU, too."""
    yield from (version_check(name, _version(name)) for name in TESTED)
    yield from (device_check(), precision_check())
    if kernels and (everything or jax.default_backend() != "cpu"):
        for op in (attention_cases, path_cases):
            for case in op():
                yield from (kernel_check(case, name) for name in case.backends if name != "reference")
        yield from grid_checks()
        yield from map(model_check, MODELS)
    elif kernels:
        for case, chosen in ((next(attention_cases()), attention_api), (next(path_cases()), path_api)):
            yield from (kernel_check(case, name, ("float32",)) for name in chosen.PREFERENCE["cpu"])


def version_check(name: str, found: str | None) -> Check:
    """A warning for a version outside the tested ones, a failure for a package that is missing."""
    low, high = TESTED[name]
    if found is None:
        return Check(name, "FAILED", f"not installed; needs >= {low}, < {high}")
    inside = _numbers(low) <= _numbers(found) < _numbers(high)
    return Check(name, "ok" if inside else "warning", found if inside else f"{found}; tested are >= {low}, < {high}")


def device_check() -> Check:
    """Which devices JAX sees."""
    devices = jax.devices()
    peak = peak_flops(devices[0].device_kind)
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    detail = f"{len(devices)} × {devices[0].device_kind}, backend {jax.default_backend()}"
    detail += f", {memory / 1e9:.0f} GB each" if memory else ""
    return Check("devices", "ok", detail + (f", peak {peak:.3g} FLOP/s in bfloat16" if peak else ", peak unknown"))


def precision_check() -> Check:
    """How exact a float32 matrix product is here when nothing is asked for, measured against float64."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(128, 128)).astype(np.float32) for _ in range(2))
    default = relative_rms(jnp.asarray(a) @ jnp.asarray(b), a.astype(np.float64) @ b)
    with jax.default_matmul_precision("highest"):
        highest = relative_rms(jnp.asarray(a) @ jnp.asarray(b), a.astype(np.float64) @ b)
    word = "float32" if default < 1e-6 else "reduced (TF32 or bfloat16), which is normal on accelerators"
    status: Status = "ok" if highest < 1e-6 else "FAILED"
    return Check("float32 products", status, f"error {default:.1e} by default: {word}; {highest:.1e} at 'highest'")


@dataclass(frozen=True)
class Case:
    """One call of an op: run(inputs, implementation) -> output; inputs: a dict of arrays (and pytrees of them) that it
    is differentiated by."""

    op: str
    name: str
    backends: dict[str, str]
    inputs: dict[str, Any]
    run: Callable[[dict[str, Any], str], Any]
    wanted: dict[str, Any] = field(default_factory=dict, compare=False)  # what the reference says, by dtype

    def cast(self, dtype: Any) -> dict[str, Any]:
        """The inputs with q, k and v in another dtype."""
        return {name: x.astype(dtype) if name in ("q", "k", "v") else x for name, x in self.inputs.items()}


def attention_cases(length: int = 96) -> Iterator[Case]:
    """A trained BAM prior with SSMax on packed documents, and forget gates in a window."""
    rng = np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    base = {"q": normal(1, length, 4, 64), "k": normal(1, length, 2, 64), "v": normal(1, length, 2, 64)}
    sharp = jnp.abs(normal(1, length, 4)) + 0.5
    beliefs = {**base, "prior": _prior(rng), "sharpness": sharp}
    gates = {**base, "log_gates": -jnp.abs(normal(1, length, 4))}
    segments = jnp.asarray(np.arange(length) >= length // 3, jnp.int32)[None, :]
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "bam+ssmax, packed": (beliefs, {"segment_ids": segments}),
        "fox, window": (gates, {"window": length // 2}),
    }
    for name, (inputs, fixed) in cases.items():

        def run(x: dict[str, Any], backend: str, fixed: dict[str, Any] = fixed) -> Any:
            return attention_api.attention(**x, **fixed, implementation=backend)

        yield Case("attention", name, attention_api.BACKENDS, inputs, run)


def path_cases(length: int = 96) -> Iterator[Case]:
    """PaTH-FoX with a BAM prior and SSMax on packed documents."""
    rng = np.random.default_rng(2)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    w = normal(1, length, 2, 64)
    inputs = {"q": normal(1, length, 4, 64), "k": normal(1, length, 2, 64), "v": normal(1, length, 2, 64)}
    inputs |= {"w": w / jnp.linalg.norm(w, axis=-1, keepdims=True), "beta": 2 * jax.nn.sigmoid(normal(1, length, 2))}
    inputs |= {"log_gates": -jnp.abs(normal(1, length, 4)), "sharpness": jnp.abs(normal(1, length, 4)) + 0.5}
    inputs |= {"prior": _prior(rng)}
    segments = jnp.asarray(np.arange(length) >= length // 3, jnp.int32)[None, :]

    def run(x: dict[str, Any], backend: str) -> Any:
        return path_api.path_attention(**x, segment_ids=segments, implementation=backend)

    yield Case("path", "path+fox+bam+ssmax, packed", path_api.BACKENDS, inputs, run)


def kernel_check(case: Case, backend: str, dtypes: Sequence[str] = ("float32", "bfloat16")) -> Check:
    """Output and every gradient of a backend against the reference in float32; skipped where it says that it cannot."""
    name = f"{case.op} {backend}: {case.name}"
    reasons, errors = [], []
    for dtype in dtypes:
        inputs = case.cast(dtype)
        reason = _refusal(case, inputs, backend)
        if reason is not None:
            reasons.append(reason)
            continue
        try:
            worst, where = _worst_error(case, inputs, backend, dtype)
        except Exception as error:  # whatever a kernel raises on this machine is the finding
            return Check(name, "FAILED", f"{dtype}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        errors.append(f"{dtype} {worst:.1e}")
        if not worst < TOLERANCE[dtype]:
            return Check(name, "FAILED", f"{dtype}: relative error {worst:.2g} of {where}, allowed {TOLERANCE[dtype]}")
    if not errors:
        return Check(name, "skipped", reasons[0])
    return Check(name, "ok", f"largest relative error {', '.join(errors)}")


def grid_checks() -> Iterator[Check]:
    """Every accelerator kernel at lengths of 2, 5, 3 and 4 tiles, one after the other in this process."""
    if jax.default_backend() == "cpu":
        yield Check("grids of 2, 5, 3 and 4 tiles", "skipped", "no kernel is compiled by Pallas on a CPU")
        return
    for backend in attention_api.BACKENDS:
        if backend not in ("reference", "xla"):
            found = [kernel_check(next(attention_cases(length)), backend) for length in LENGTHS]
            worst = next((check for check in found if check.status != "ok"), found[0])
            yield Check(f"grids of 2, 5, 3 and 4 tiles: {backend}", worst.status, worst.detail)


def model_check(spec: str, dim: int = 128, length: int = 320) -> Check:
    """The loss and every parameter's gradient of a whole model in bfloat16, with the kernels that this machine chooses.

    They are compared with those of the dense reference in float32, and so are those of the reference in bfloat16: what
    rounding of everything but attention does.
    """
    name = f"model: {spec}"
    try:
        with jax.default_matmul_precision("highest"):
            exact = _model_gradients(spec, dim, length, "float32", "reference")
        dense = _model_gradients(spec, dim, length, "bfloat16", "reference")
        got = _model_gradients(spec, dim, length, "bfloat16", None)
    except Exception as error:  # whatever a kernel raises on this machine is the finding
        return Check(name, "FAILED", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    errors = {what: (relative_rms(got[what], exact[what]), relative_rms(dense[what], exact[what])) for what in exact}
    allowed = lambda what: NOISE * errors[what][1] + (FEW_OFF if exact[what].size < FEW else TOLERANCE["bfloat16"])
    off = [what for what, (kernels, _) in errors.items() if not kernels < allowed(what)]
    what = max(off or errors, key=lambda what: errors[what][0])
    kernels, rounding = errors[what]
    found = f"largest relative error {kernels:.1e} of {what}; the dense reference: {rounding:.1e}"
    return Check(name, "FAILED", f"{found}; {len(off)} of {len(errors)} are off") if off else Check(name, "ok", found)


def _model_gradients(spec: str, dim: int, length: int, dtype: Any, backend: str | None) -> dict[str, Any]:
    """Loss and gradients by name: two layers, heads of 64 that share keys in pairs, packed documents, padding."""
    from bampath.config import get
    from bampath.step import build_model, declare, gradients

    config = get("tiny", f"position={spec}", f"model.dim={dim}", "model.layers=2", f"model.heads={dim // 64}")
    model = replace(config.model, kv_heads=dim // 128, dtype=dtype, attention_impl=backend)
    config = replace(config, model=model, train=replace(config.train, accumulate=1))
    lm, rng = build_model(config), np.random.default_rng(3)
    leaves, tree = jax.tree.flatten(declare(lm).shapes)
    params = jax.tree.unflatten(tree, [jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype) for x in leaves])
    where = np.arange(length)
    ids = jnp.asarray([np.where(where < length - 30, where // 140, -1), where // 200], jnp.int32)
    tokens, targets = (jnp.asarray(rng.integers(0, model.vocab_size, (2, length)), jnp.int32) for _ in range(2))
    batch = {"tokens": tokens, "targets": targets, "segment_ids": ids, "weights": (ids >= 0).astype(jnp.float32)}
    loss, grads = jax.jit(lambda p: gradients(config, lm, p, batch, jax.random.key(0)))(params)
    named = {jax.tree_util.keystr(path): g for path, g in jax.tree_util.tree_leaves_with_path(grads)}
    return {"loss": loss.total, **{f"gradient of {name}": g for name, g in named.items()}}


def relative_rms(got: Any, want: Any) -> float:
    """RMS(got − want) / RMS(want) in float64; infinite if `got` is not finite."""
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.isfinite(a).all():
        return float("inf")
    return float(np.sqrt(np.mean((a - b) ** 2)) / max(np.sqrt(np.mean(b**2)), 1e-30))


def _refusal(case: Case, inputs: dict[str, Any], backend: str) -> str | None:
    """Why a backend does not serve a call here, in its own words; None if it does (or fails in another way)."""
    try:
        jax.eval_shape(lambda x: case.run(x, backend), inputs)
    except ImportError as error:
        return f"cannot be imported here: {error}"
    except ValueError as error:
        return str(error).partition(_REFUSAL)[2].strip() or None if _REFUSAL in str(error) else None
    except Exception:  # shown by the run that follows
        return None
    return None


def _worst_error(case: Case, inputs: dict[str, Any], backend: str, dtype: str) -> tuple[float, str]:
    """Largest relative RMS error over the output and the gradients, and what it belongs to."""
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest"):
        got = _output_and_gradients(case, inputs, backend)
        if dtype not in case.wanted:
            case.wanted[dtype] = _output_and_gradients(case, exact, "reference")
    want = case.wanted[dtype]
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    return max((relative_rms(a, b), "".join(map(str, path)).strip("[]'")) for (path, a), b in pairs)


def _output_and_gradients(case: Case, inputs: dict[str, Any], backend: str) -> dict[str, Any]:
    def weighted(x: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        out = case.run(x, backend).astype(jnp.float32)
        ramp = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * ramp), out

    lowered = jax.jit(jax.value_and_grad(weighted, has_aux=True)).lower(inputs)
    # The same arithmetic, compiled in half the time: LLVM's passes are most of what a CPU needs for this.
    on_cpu: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    (_, out), gradients = lowered.compile(on_cpu if jax.default_backend() == "cpu" else None)(inputs)
    return {"output": out, **{f"gradient of {name}": g for name, g in gradients.items()}}


def _prior(rng: np.random.Generator) -> Any:
    """GGD-BAM with parameters as after some training: local, flat and retrieval heads."""
    composition = parse("bam").single
    params = composition.init_params(jax.random.key(0), Geometry(dim=256, heads=4, kv_heads=2, head_dim=64))
    bam = {name: jnp.asarray(rng.normal(0, 0.3, 4), jnp.float32) for name in params["bam"]}
    return composition.distance_prior({"bam": bam | {"theta_beta": jnp.asarray([1.0, 0.3, -0.2, -0.5], jnp.float32)}})


def _version(name: str) -> str | None:
    if name == "python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    digits = ["".join(c for c in part if c.isdigit()) for part in version.split(".")]
    return tuple(int(d) for d in digits if d)


if __name__ == "__main__":
    end_with_status(main)
