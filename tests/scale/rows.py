"""One of two processes that make batches together and check them:

python -m tests.scale.rows COORDINATOR PROCESS SOURCE CACHE MESH …

For every MESH ("mesh.data=2,mesh.tensor=2") it asserts that the global array is the whole batch that one process makes
alone, in three steps and in the held-out text, and prints the rows that it made itself as a line of JSON.
"""

import json
import sys

import numpy as np
from jax.experimental import multihost_utils

from bampath import distributed, sharding
from bampath.data import make_loader, validation_batches
from bampath.step import device_batch
from tests.train.small import small


def gathered(array):
    return multihost_utils.process_allgather(array, tiled=True)


def main(coordinator, process, source, cache, *meshes):
    distributed.join(coordinator, 2, int(process))
    for mesh in meshes:
        config = small(f"data.source={source}", f"data.cache_dir={cache}", "data.batch_size=8", *mesh.split(","))
        rows = sharding.local_rows(sharding.mesh_of(config), 8)
        with make_loader(config.data, rows=rows) as mine, make_loader(config.data) as alone:
            pairs = [(next(mine), next(alone)) for _ in range(3)]
        pairs += zip(validation_batches(config.data, rows=rows), validation_batches(config.data), strict=True)
        for part, whole in pairs:
            for name, array in device_batch(config, part).items():
                np.testing.assert_array_equal(gathered(array), whole[name])
        print("ROWS", json.dumps(rows.tolist()), flush=True)
    distributed.part()


if __name__ == "__main__":
    main(*sys.argv[1:])
