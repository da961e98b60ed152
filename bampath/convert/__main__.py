"""Models of other libraries in and out, and another positional scheme for a model that is there:

    python -m bampath.convert import ~/models/SmolLM2-135M runs/smollm2
    python -m bampath.convert position runs/smollm2 path+fox runs/smollm2-path
    python -m bampath.convert distill runs/smollm2 position=path+fox data.source=~/text --out runs/smollm2-path-fox
    python -m bampath.convert export runs/smollm2 ~/models/out

import reads a folder as transformers saves it, or a .gguf file; export writes such a folder. What import and position
write is a run with one checkpoint, for generate, evaluation and inspect. distill trains a student with another scheme
on what its teacher does, in stages that are runs as well (docs/conversion.md).
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bampath.command import end_with_status, folder_to_make

# What brings JAX is imported inside the functions that need it, so that help and refusals come at once.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status: 0 done, 1 a loss that is not finite, 2 with a message that names what does not fit,
    128 + n stopped by signal n."""
    options = parse(argv)
    from bampath.checkpoint import CheckpointError

    commands: dict[str, Callable[[argparse.Namespace], int | None]]
    commands = {"import": import_, "position": position, "distill": distill, "export": export}
    try:
        status = commands[options.command](options)
    except (ValueError, OSError, ImportError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return status or 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bampath.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("import", help="a Llama, Mistral, Qwen2 or Qwen3 model as a run")
    one.add_argument("source", type=Path, help="folder with config.json and safetensors, or a .gguf file")
    one.add_argument("out", type=Path, help="new folder of the run")
    one.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype (default: the model's)")
    one.add_argument("--length", type=int, help="context that dynamic NTK scaling serves (default: the scaled one)")
    one.add_argument("--tokenizer", help="tokenizer.json or .model (default: the one in the folder or the file)")
    two = commands.add_parser("position", help="the same weights with another positional scheme")
    two.add_argument("checkpoint", type=Path, help="a run's folder, or one checkpoint's")
    two.add_argument("spec", help="the new scheme, as in position=SPEC")
    two.add_argument("out", type=Path, help="new folder of the run")
    two.add_argument("--seed", type=int, default=0, help="of the parameters that are made anew (default 0)")
    four = commands.add_parser("distill", help="teach a student with another positional scheme what a model does")
    four.add_argument("teacher", type=Path, help="a run's folder, or one checkpoint's")
    four.add_argument("words", nargs="*", metavar="key=value", help="position=SPEC, section.key=…, stageN.key=…")
    four.add_argument("--out", type=Path, help="folder of the distillation (default: TEACHER-SPEC)")
    four.add_argument("--student", type=Path, metavar="CHECKPOINT", help="begin with these weights, not by surgery")
    four.add_argument(
        "--teacher-dtype", choices=("float32", "bfloat16"), help="of the teacher's arithmetic (default: the student's)"
    )
    four.add_argument("--resume", action="store_true", help="continue the distillation in --out")
    three = commands.add_parser("export", help="a folder that transformers reads")
    three.add_argument("checkpoint", type=Path, help="a run's folder, or one checkpoint's")
    three.add_argument("out", type=Path, help="new folder")
    three.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the tensors")
    options, more = parser.parse_known_args(argv)
    if more and (options.command != "distill" or any(word.startswith("-") for word in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:  # words may stand behind options as well
        options.words += more
    return options


def import_(options: argparse.Namespace) -> None:
    from bampath.config import Config
    from bampath.convert.importer import open_model
    from bampath.data.config import DataConfig
    from bampath.data.tokenizer import load_tokenizer

    folder_to_make(options.out)
    opened = open_model(options.source, dtype=options.dtype, length=options.length)
    name = options.tokenizer or (str(opened.tokenizer) if opened.tokenizer else None)
    if name is None:
        raise ValueError(
            f"{options.source} came without a tokenizer.json or tokenizer.model: name one with --tokenizer (of bytes: "
            "--tokenizer bytes)"
        )
    tokenizer = load_tokenizer(name)
    if tokenizer.vocab_size > opened.config.vocab_size:
        raise ValueError(f"{name} has {tokenizer.vocab_size} tokens, the model only {opened.config.vocab_size}")
    found = opened.read(print)
    data = DataConfig(tokenizer=name, sequence_length=found.config.train_length)
    save(options.out, Config(model=found.config, data=data), found.params, tokenizer)
    print(f"{options.out}: {found.config.position}, {found.config.layers} layers, tensors were {found.dtype}")


def position(options: argparse.Namespace) -> None:
    from dataclasses import replace

    from bampath.convert.surgery import transplant
    from bampath.load import load
    from bampath.positions.registry import parse

    folder_to_make(options.out)
    parse(options.spec)
    loaded = load(options.checkpoint)
    model, params, report = transplant(loaded.config.model, loaded.params, options.spec, seed=options.seed)
    save(options.out, replace(loaded.config, model=model), params, loaded.tokenizer)
    print(f"{loaded.config.model.position} → {model.position}\n{report}\n{options.out}")


def distill(options: argparse.Namespace) -> int:
    """Run it; the first interrupt saves and ends with 128 + its number, the second one ends at once."""
    import re

    from bampath.command import Stop
    from bampath.convert.distill import distill as run
    from bampath.convert.distill import plan

    found = plan(options.teacher, options.words, options.student, options.teacher_dtype)
    slug = re.sub(r"[^\w.+-]+", "_", found.position).strip("_")
    out = options.out or options.teacher.with_name(f"{options.teacher.name}-{slug}")
    with Stop() as stop:
        last = run(found, out, resume=options.resume, should_stop=lambda: stop.by != 0)
    if last is None:
        print("stopped and saved; the same command with --resume goes on from there")
        return 128 + stop.by
    print(f"done: {last}; look at it with python -m bampath.inspect {last}")
    return 0


def export(options: argparse.Namespace) -> None:
    from bampath.checkpoint import describe
    from bampath.convert.exporter import export_model
    from bampath.convert.families import hf_config
    from bampath.inspect import config_of
    from bampath.load import load

    folder_to_make(options.out)
    hf_config(config_of(describe(options.checkpoint)).model, True)  # what cannot be said there is refused at once
    loaded = load(options.checkpoint)
    export_model(options.out, loaded.config.model, loaded.params, dtype=options.dtype, tokenizer=loaded.tokenizer.file)
    print(options.out)
    if loaded.tokenizer.file is None:
        print(f"without a tokenizer's file, as {loaded.tokenizer.name} has none: import it with --tokenizer bytes")


def save(out: Path, config: Any, params: Any, tokenizer: Any) -> None:
    """`write_start` in a folder that is not used yet, nor by now. FileExistsError if it is."""
    from bampath.convert.surgery import write_start

    folder_to_make(out)
    write_start(out, config, params, tokenizer)


if __name__ == "__main__":
    end_with_status(main)
