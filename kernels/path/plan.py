"""How a row is cut: superblocks of S tokens, each of 2ⁿ blocks."""

from typing import NamedTuple

import jax

from kernels.path.transport import BASE

SUPERBLOCK = {"cpu": 256}  # tokens that a tile of scores spans at most: what stays in a CPU's cache, else:
DEFAULT_SUPERBLOCK = 512


class Plan(NamedTuple):
    """So many superblocks of `size` tokens, a size that is `block` times a power of two."""

    superblocks: int
    size: int
    block: int

    @property
    def length(self) -> int:
        """Tokens of the row, padding at its end included."""
        return self.superblocks * self.size


def check_plan(plan: Plan, length: int) -> None:
    """Raise ValueError unless `plan` covers a row of `length` tokens and its blocks can be halved down to BASE."""
    blocks, block = plan.size // plan.block, plan.block
    while block > BASE and block % 2 == 0:
        block //= 2
    if plan.size % plan.block or blocks & (blocks - 1) or block > BASE:
        raise ValueError(f"{plan}: size must be block · 2ⁿ, and block at most {BASE} after halvings")
    if plan.length < length:
        raise ValueError(f"{plan} covers {plan.length} tokens, the row has {length}")


def choose_plan(length: int, dim: int) -> Plan:
    """The least padding with superblocks of about SUPERBLOCK tokens at most and blocks of about head_dim.

    Per token, a block of L tokens costs O(L D) for its triangle and O(D³ / L) for its product, so L near D is best;
    below 32 the number of small matrices dominates.
    """
    target = min(128, max(32, dim))
    superblock = max(target, SUPERBLOCK.get(jax.default_backend(), DEFAULT_SUPERBLOCK))
    count = -(-length // superblock)
    size = -(-length // count)
    blocks = 1
    while -(-size // blocks) > target:
        blocks *= 2
    block = -(-size // blocks)
    step = 1  # the block's halves, quarters, … must be whole numbers down to BASE
    while -(-block // step) > BASE:
        step *= 2
    block = -(-block // step) * step
    return Plan(count, blocks * block, block)
