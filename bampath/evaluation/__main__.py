"""A suite of benchmarks on a checkpoint: `python -m bampath.evaluation CHECKPOINT --suite long|short|state`.

Every benchmark has a command of its own as well, with the same options: python -m bampath.evaluation.ruler, and so on.
Benchmarks whose local files are not named, and lengths that one's smallest prompt does not fit, are listed as not run.
--out RESULTS.json writes JSON after every task and length, with a Markdown page and figures beside it.
"""

import argparse
import sys
from collections.abc import Sequence

from bampath.command import fail_gracefully
from bampath.evaluation.session import add_session_options, open_session, run_benchmarks
from bampath.evaluation.suites import suite


def main(argv: Sequence[str] | None = None) -> None:
    first = argparse.ArgumentParser(prog="python -m bampath.evaluation", add_help=False)
    first.add_argument("--suite", choices=("long", "short", "state"))
    chosen = first.parse_known_args(argv)[0].suite
    benchmarks = suite(chosen) if chosen else []
    parser = argparse.ArgumentParser(
        prog="python -m bampath.evaluation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_session_options(parser, "default: each benchmark's own")
    parser.add_argument("--suite", choices=("long", "short", "state"), required=True, help="with -h: its options too")
    for benchmark in benchmarks:
        benchmark.add_options(parser.add_argument_group(benchmark.NAME))  # type: ignore[arg-type]
    args = parser.parse_args(argv)
    run_benchmarks(open_session(args), benchmarks, args)


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
