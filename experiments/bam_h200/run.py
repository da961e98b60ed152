"""The headline comparison on one GPU: every scheme under one budget, then far beyond its training length.

    python -m experiments.bam_h200.run --text books.u16.xz --held-out novels.u16.xz --gpt2 tokenizer.json
    python -m experiments.bam_h200.run --text fineweb:FOLDER --held-out FOLDER … --out runs/bam --minutes 20
    python -m experiments.bam_h200.run … --out runs/bam --resume        # goes on with the cells that are missing

A cell is a scheme, a seed, a mix of the text and a size; each is kept as soon as it is done, and results.json grows.
Programs are compiled side by side, one process each; `--together` of them train or are asked at a time.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully
from experiments.bam_h200.config import MIXES, SIZES, Cell
from experiments.studies import alone, folder_of, refuse_alike, refuse_counts

RUNS = Path("runs/bam_h200")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    refuse_counts(options, "together", "processes", "gpus")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the device
    cells = cells_of(options)
    if not options.resume:
        refuse_missing(options)
    from experiments.bam_h200.schedule import run_cells

    out = folder_of(options, RUNS)
    with alone(out):
        materials, jobs = prepare(options, cells, out)
        run_cells(cells, materials, jobs, options)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bam_h200.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the configuration of all cells")
    parser.add_argument("--text", required=True, help="training text: GPT-2 tokens (.u16, .u16.xz) or a data.source")
    parser.add_argument("--held-out", required=True, help="text for perplexity and haystacks, in the same forms")
    parser.add_argument("--gpt2", type=Path, required=True, help="GPT-2's tokenizer.json (or .json.xz)")
    parser.add_argument("--words", type=Path, help="RULER's word lists (default: those of the package wonderwords)")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--mixes", nargs="+", choices=tuple(MIXES), default=["retrieval"])
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="SPEC",
        help="schemes, or 'SPEC @ key=value …'; 'SPEC @ clamped' keeps theta_beta >= 0",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell after this time")
    parser.add_argument("--together", type=int, default=1, help="cells that use the device at a time (default 1)")
    parser.add_argument("--gpus", type=int, help="deal the cells to so many GPUs, --together on each (default: one)")
    parser.add_argument("--processes", type=int, help="programs that are open at a time (default: the CPU cores)")
    parser.add_argument("--far", action="store_true", help="ask the first seeds also at 128k and 512k tokens")
    parser.add_argument("--out", type=Path, help="folder of the study (default: a new one under runs/bam_h200)")
    parser.add_argument("--resume", action="store_true", help="continue the study in --out")
    return parser.parse_intermixed_args(argv)


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """All cells, first seeds first. ValueError for a wrong case or override."""
    cases = options.cases or SIZES[options.size].study.schemes
    cells = [Cell(case, seed, mix, options.size) for seed in options.seeds for mix in options.mixes for case in cases]
    for cell in cells:
        cell.config(Path("tokenizer.json"), "text", tuple(options.overrides))
    refuse_alike((f"{cell.case}, {cell.mix}, seed {cell.seed}", cell.slug) for cell in cells)
    return cells


def refuse_missing(options: argparse.Namespace) -> None:
    """FileNotFoundError for text, tokenizer or words that are not there, before programs are compiled for them."""
    from bampath.data.prepared import SHARDS, mixture_of
    from bampath.data.sources import open_source
    from bampath.evaluation.materials import word_lists
    from experiments.bam_h200.text import is_tokens

    for name in ("text", "held_out", "gpt2"):
        source = str(getattr(options, name))
        if (name == "gpt2" or is_tokens(source)) and not Path(source).is_file():
            raise FileNotFoundError(f"--{name.replace('_', '-')} {source}: there is no such file")
        if name != "gpt2" and not (is_tokens(source) or source.startswith(SHARDS) or mixture_of(source)):
            open_source(source)
    word_lists(None if options.words is None else str(options.words))


def prepare(options: argparse.Namespace, cells: Sequence[Cell], out: Path) -> tuple[Any, list[Future[None]]]:
    """The tokenizer and where the rest will be; text, batches, needles and held-out rows are made meanwhile."""
    from experiments.bam_h200 import text
    from experiments.bam_h200.cells import Materials

    materials = Materials(out, options.text, tuple(options.overrides))
    text.tokenizer_file(options.gpt2, materials.config(cells[0]).model.vocab_size, materials.tokenizer)
    begin, pool = time.monotonic(), ThreadPoolExecutor(2)
    say = lambda what: print(f"{what} after {time.monotonic() - begin:.0f} s", flush=True)
    jobs = [pool.submit(job, options, cells, materials, say) for job in (prepare_batches, prepare_questions)]
    pool.shutdown(wait=False)
    return materials, jobs


def prepare_batches(options: argparse.Namespace, cells: Sequence[Cell], materials: Any, say: Any) -> None:
    """The batches of every seed, mix and change of the data, once."""
    from experiments.bam_h200 import rows, text

    folder, first = materials.out / "text", materials.config(cells[0])
    if not (folder / "info.json").exists():
        rows.save_corpus(text.corpus(first.data, options.text, options.gpt2, first.model.vocab_size), folder)
        say("training text")
    configs = {materials.rows(cell): materials.config(cell) for cell in cells}
    wanted = [(config.data, config.train.steps, out) for out, config in configs.items()]
    rows.make_all(wanted, folder, done=lambda out: say(f"batches {out.name}"))


def prepare_questions(options: argparse.Namespace, cells: Sequence[Cell], materials: Any, say: Any) -> None:
    """Rows of held-out text, and needles in it, once."""
    import numpy as np

    from bampath.data import tokenizer_of
    from bampath.evaluation.perplexity import rows_of
    from experiments.bam_h200 import needles, text

    if materials.held_out.exists():
        return
    config, asked = materials.config(cells[0]), SIZES[options.size].asked
    tokenizer = tokenizer_of(config.data)
    held_out = text.corpus(config.data, options.held_out, options.gpt2, config.model.vocab_size)
    lengths = [length for group in asked.niah for length in group]
    material = needles.material_of(held_out, tokenizer, options.words)
    materials.out.mkdir(parents=True, exist_ok=True)
    needles.write(tokenizer, material, lengths, asked.niah_samples, materials.needles)
    np.save(materials.held_out, rows_of(held_out, asked.perplexity, "documents"))
    say("held-out text and needles")


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:], stopped="stopped; --resume continues with what is finished")
