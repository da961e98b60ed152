"""How a row is cut: superblocks of S tokens, each of 2ⁿ blocks."""

from typing import NamedTuple

import jax

from kernels.path.transport import BASE

CPU_SUPERBLOCK, SUPERBLOCK = 256, 512  # tokens that a tile of scores spans at most, on CPU and elsewhere
CPU_TILE = 2**20  # scores of the tiles of all rows and heads together, on CPU: more is slower by up to two times


class Plan(NamedTuple):
    """So many superblocks of `size` tokens, a size that is `block` times a power of two."""

    superblocks: int
    size: int
    block: int
    group: int | None = None  # batch rows worked on at a time, a divisor of their number; None: all

    @property
    def length(self) -> int:
        """Tokens of the row, padding at its end included."""
        return self.superblocks * self.size


def check_plan(plan: Plan, length: int, batch: int = 1) -> None:
    """Raise ValueError unless `plan` covers rows of `length` tokens and its blocks can be halved down to BASE."""
    blocks, block = plan.size // plan.block, plan.block
    while block > BASE and block % 2 == 0:
        block //= 2
    if plan.size % plan.block or blocks & (blocks - 1) or block > BASE:
        raise ValueError(f"{plan}: size must be block · 2ⁿ, and block at most {BASE} after halvings")
    if batch % (plan.group or batch):
        raise ValueError(f"{plan}: group must divide the batch of {batch} rows")
    if plan.length < length:
        raise ValueError(f"{plan} covers {plan.length} tokens, the row has {length}")


def choose_plan(length: int, dim: int, batch: int = 1, heads: int = 1) -> Plan:
    """The least padding with superblocks of about SUPERBLOCK tokens at most and blocks of about head_dim.

    Per token, a block of L tokens costs O(L D) for its triangle and O(D³ / L) for its product, so L near D is best;
    below 32 the number of small matrices dominates. On CPU, tiles that leave the cache cost more than a loop over
    groups of batch rows.
    """
    on_cpu = jax.default_backend() == "cpu"
    target = min(128, max(32, dim))
    superblock = max(target, CPU_SUPERBLOCK if on_cpu else SUPERBLOCK)
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
    size = blocks * block
    most = max(1, CPU_TILE // (heads * size * size)) if on_cpu else batch
    group = max(n for n in range(1, batch + 1) if batch % n == 0 and n <= most)
    return Plan(count, size, block, None if group == batch else group)
