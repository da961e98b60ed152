"""One of two processes whose evaluation hook fails in process 1 only, while a checkpoint is being saved:

python -m tests.scale.hook COORDINATOR PROCESS RUN_DIR key=value …
"""

import sys

import jax

from bampath import config, distributed
from bampath.train import fit
from bampath.watch import LOST


def evaluate(now):
    if jax.process_index() == 1:
        raise RuntimeError("the hook of process 1 failed")
    return {"step": float(now.step)}


def main(coordinator, process, run_dir, *overrides):
    distributed.join(coordinator, 2, int(process))
    try:
        fit(config.get("tiny", *overrides), run_dir, evaluate=evaluate)
    except RuntimeError as error:
        print(error, flush=True)
        distributed.leave(LOST if isinstance(error, distributed.LostError) else 9)
    distributed.part()


if __name__ == "__main__":
    main(*sys.argv[1:])
