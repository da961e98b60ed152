"""What a step should cost on a chip, from formulas, the compiled program's collectives, and stated assumptions.

The estimate is a bound to compare measurements with, not a measurement.
"""

from dataclasses import dataclass

from bampath.config import Config
from bampath.flops import train_flops_per_token
from launch.chips import Chip
from launch.hlo import Collective

# Share of the matrix peak that fused attention reaches on v5e by the compiler's static schedules (docs/kernels_tpu.md:
# 46 % forward, 75 % backward without a prior at head_dim 64, 39 % and 57 % with one; about half over both passes).
ATTENTION_EFFICIENCY = 0.5
ASSUMPTIONS = (
    "projections, MLP and head run at the dense bfloat16 peak; attention at half of it",
    "causal attention, no work saved by document masks or windows; PaTH's transport is not counted",
    "rematerialised layers repeat their forward pass (all of it for remat=full, all but attention for remat=attention)",
    "the optimiser reads and writes parameters and moments once at the bandwidth of the memory",
    "a collective sends its bytes around a ring along one axis of the torus, in both directions, at nominal bandwidth",
    "fastest: collectives hide behind compute completely; slowest: not at all; launch and input cost nothing",
)


@dataclass(frozen=True)
class Roofline:
    """Seconds per step, and model FLOPs utilisation (causal, no recomputation counted), from best to worst overlap."""

    model_flops: float  # per step, all devices
    matmul_seconds: float
    attention_seconds: float
    optimizer_seconds: float
    collective_seconds: float
    peak: float  # FLOP/s of all devices

    @property
    def compute_seconds(self) -> float:
        return self.matmul_seconds + self.attention_seconds + self.optimizer_seconds

    @property
    def fastest(self) -> float:
        return max(self.compute_seconds, self.collective_seconds)

    @property
    def slowest(self) -> float:
        return self.compute_seconds + self.collective_seconds

    def mfu(self, seconds: float) -> float:
        """MFU of a step of so many seconds."""
        return self.model_flops / (seconds * self.peak)


def estimate(config: Config, chip: Chip, parameters: int, found: list[Collective]) -> Roofline:
    """The roofline of one optimiser step."""
    devices = config.mesh.size
    tokens = config.data.batch_size * config.data.sequence_length
    flops = train_flops_per_token(config.model, parameters, config.data.sequence_length)
    attention = flops.full - flops.causal  # the causal half of all pairs
    matmul = flops.causal - attention
    repeated = {"none": (0.0, 0.0), "attention": (1 / 3, 0.0), "full": (1 / 3, 1 / 3)}[config.model.remat]
    peak = chip.peak * devices
    moments = 1 if config.optim.name == "muon" else 2
    state = 4 * parameters / (config.mesh.fsdp * config.mesh.tensor)
    return Roofline(
        model_flops=flops.causal * tokens,
        matmul_seconds=matmul * (1 + repeated[0]) * tokens / peak,
        attention_seconds=attention * (1 + repeated[1]) * tokens / (peak * ATTENTION_EFFICIENCY),
        optimizer_seconds=state * (1 + 2 * (1 + moments)) / chip.hbm_bandwidth,
        collective_seconds=sum(one.moved_bytes for one in found) / chip.axis_bandwidth,
        peak=peak,
    )
