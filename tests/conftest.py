"""Settings for the whole suite: 8 forced CPU devices, exact matmuls, no silent broadcasting."""

import os
import tempfile
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["BAMPATH_CACHE"] = os.path.join(tempfile.gettempdir(), f"bampath-tests-{os.getuid()}")  # never the user's
# The suite's time is compile time: LLVM without its optimiser, and XLA without its emitters of fusions where it can do
# without them (an unknown flag ends the process), each take half of it and change nothing but rounding.
os.environ["XLA_FLAGS"] = " ".join(
    ["--xla_backend_optimization_level=0"]
    + ["--xla_cpu_use_fusion_emitters=false"] * (tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11))
    + [os.environ.get("XLA_FLAGS", "")]  # last, as the last of two counts
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from collections.abc import Iterator

import jax
import pytest
from hypothesis import settings

settings.register_profile("bampath", settings.default, deadline=None)  # a slow machine is no mistake
settings.load_profile("bampath")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs() -> Iterator[None]:
    """Thousands of compiled programs would otherwise pile up to several gigabytes."""
    yield
    jax.clear_caches()
