"""The conversion study: its words, its report, and all of it at a tiny size."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bampath.config import get
from bampath.convert.distill import stages_of
from experiments.conversion.cells import Bench
from experiments.conversion.config import SIZES, cases_of
from experiments.conversion.material import write_text
from experiments.conversion.merge import merge
from experiments.conversion.report import last_rows, report, write_report
from experiments.conversion.run import main
from tests.train.small import text_file


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["path+fox", "path", "bam+ssmax", "nope", "rope, continued"])
def test_every_case_sees_the_same_tokens(size: str, name: str) -> None:
    teacher = get("tiny", "position=rope(100000)", "model.train_length=8192")
    case = next(c for c in cases_of("rope(100000)", 8192) if c.name == name)
    stages = stages_of(teacher, Bench(SIZES[size], Path(), Path(), ()).words(case))
    assert [s.name for s in stages] == ["stage1", "stage2", "stage3"]
    like = stages_of(teacher, Bench(SIZES[size], Path(), Path(), ()).words(cases_of("rope", 8192)[-1]))
    for stage, other in zip(stages, like, strict=True):
        assert stage.config.data == other.config.data
        assert stage.config.train.steps == other.config.train.steps
    kinds = [s.kind for s in stages]
    assert kinds == (["text"] * 3 if name == "rope, continued" else ["attention", "logits", "text"])
    if name == "rope, continued":
        assert len({s.config.optim.lr for s in stages}) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--cases", "rope", "nosuch"], "--cases 'nosuch' is not one of 'rope', "),
        (["--words", "stage1.steps"], "--words 'stage1.steps' must be key=value"),
        (["--rows", "0"], "--rows 0 must be at least 1"),
        (["--samples", "-2"], "--samples -2 must be at least 1"),
    ],
)
def test_wrong_options_are_refused_before_a_teacher_is_trained(wrong: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        main(["--out", str(tmp_path / "study"), *wrong])
    assert not (tmp_path / "study").exists()


def test_a_teacher_without_plain_rope_is_refused() -> None:
    with pytest.raises(ValueError, match="converts plain rope"):
        cases_of("rope(10000,scaling=linear,factor=2)", 128)
    assert cases_of("rope(10000)", 128)[1].position == "rope(10000,scaling=yarn,factor=4,original=128)"


def test_files_of_tokens_become_texts(tmp_path: Path) -> None:
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<|endoftext|>": 256}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "gpt2.json"))
    texts = ["a b é\n", "second", "third"]
    letters = {byte: chr(byte) for byte in range(33, 127)} | {32: "Ġ", 10: "Ċ"}
    letters |= {0xC3: "Ã", 0xA9: "©"}
    ids = [[vocabulary[letters[byte]] for byte in text.encode()] + [256] for text in texts]
    np.concatenate(ids).astype("<u2").tofile(tmp_path / "x.u16")
    folder = write_text(tmp_path / "x.u16", tmp_path / "gpt2.json", tmp_path / "out", limit=len(ids[0]) + 1)
    assert [p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.txt"))] == texts[:2]


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for case, stages in (("rope", ("untrained",)), ("nope", ("start", "stage1"))):
        for stage in stages:
            facts = {"case": case, "position": case, "after": stage, "seed": 0}
            for n in (1, 2, 4):
                loss = 2.0 + len(stage) / n
                spread = {"lower": float(np.exp(loss - 0.1)), "upper": float(np.exp(loss + 0.1))}
                window = {
                    "start": 8 * (n - 1),
                    "end": 8 * n,
                    "tokens": 8,
                    "loss": loss,
                    "perplexity": float(np.exp(loss)),
                }
                found.append({**facts, "benchmark": "perplexity", **window, **spread})
                key = {"length": 8 * n, "samples": 4, "correct": n - 1, "token_accuracy": n / 5}
                found.append({**facts, "benchmark": "passkey", **key})
    curve = {"step": [1, 2], "loss": [0.5, 0.25]}
    training = {"after": "stage1", "tokens": 64, "seconds": 3.0, "tokens_per_second": None, "layers": [0.5, 0.1]}
    return [
        *found,
        {"benchmark": "training", "case": "nope", "position": "nope", "seed": 0, "curve": curve, **training},
    ]


def test_results_of_several_calls_become_one() -> None:
    """A case that was run again replaces all stages of the earlier run; who wrote what is kept through two merges."""
    teacher = {"shape": "2 layers", "parameters": 10, "position": "rope"}
    study = {"name": "cpu", "teacher": teacher, "train_length": 8, "words": ["a=b"], "text": ["t"], "complete": False}
    row = lambda case, after, number: {"case": case, "after": after, "benchmark": "passkey", "correct": number}
    file = lambda date, *found: {"env": {"date": date}, "study": study, "rows": list(found)}
    early = file("early", row("path", "stage1", 1), row("path", "stage2", 1), row("rope", "untrained", 1))
    late = file("late", row("nope", "stage3", 2), row("path", "stage1", 2))
    made = merge([early, late])
    assert made["rows"] == [row("rope", "untrained", 1), row("path", "stage1", 2), row("nope", "stage3", 2)]
    assert made["runs"] == [{"date": "early", "cases": ["rope"]}, {"date": "late", "cases": ["path", "nope"]}]
    assert not made["study"]["complete"]
    again = merge([made, file("last", row("nope", "stage3", 3))])
    assert again["runs"] == [
        {"date": "early", "cases": ["rope"]},
        {"date": "late", "cases": ["path"]},
        {"date": "last", "cases": ["nope"]},
    ]
    ends = [row(case.name, "stage3" if case.trained else "untrained", 1) for case in cases_of("rope", 8)]
    assert merge([file("all", *ends)])["study"]["complete"]
    with pytest.raises(ValueError, match="different studies: words is not the same"):
        merge([early, {**late, "study": {**study, "words": ["a=c"]}}])


def test_the_report_holds_every_number(tmp_path: Path) -> None:
    env = dict.fromkeys(("date", "device", "platform", "python", "jax", "commit"), "x")
    teacher = {"shape": "2 layers", "parameters": 10, "position": "rope"}
    study = {"name": "cpu", "teacher": teacher, "train_length": 8, "words": ["a=b"], "text": ["t"], "complete": False}
    text = write_report(tmp_path, {"env": env, "study": study, "rows": rows()}).read_text(encoding="utf-8")
    assert f"| `nope` | stage 1 | {np.exp(8.0):.2f} [{np.exp(7.9):.2f}, {np.exp(8.1):.2f}] |" in text
    assert "| `rope` | not trained | 0.00 [0.00, 0.49] | 0.25 [0.05, 0.70] | 0.75 [0.30, 0.95] |" in text
    assert "| `nope` | stage 1 | 0.20 | 0.40 | 0.80 |" in text
    assert "| `nope` | stage 1 | 64 | 0.5 | 0.25 | not measured | 3 s |" in text
    assert "--resume" in text
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {
        "perplexity.png",
        "passkey.png",
        "losses.png",
        "layers.png",
    }
    assert {(row["case"], row["after"]) for row in last_rows(rows()[:-1])} == {
        ("rope", "untrained"),
        ("nope", "stage1"),
    }


def test_the_report_of_merged_calls_says_who_wrote_what() -> None:
    """Under one date and commit for all of it, rows of an earlier call would pass for those of the last."""
    env = dict.fromkeys(("date", "device", "platform", "python", "jax"), "x")
    teacher = {"shape": "2 layers", "parameters": 10, "position": "rope"}
    study = {"name": "cpu", "teacher": teacher, "train_length": 8, "words": ["a=b"], "text": ["t"], "complete": True}
    calls = [{**env, "commit": "early", "cases": ["rope"]}, {**env, "commit": "late", "cases": ["path", "nope"]}]
    text = report({"env": {**env, "commit": "late"}, "runs": calls, "study": study, "rows": rows()})
    (early,) = (line for line in text.splitlines() if "commit early" in line)
    (late,) = (line for line in text.splitlines() if "commit late" in line)
    assert early.startswith("`rope`: written by ")
    assert late.startswith("`path`, `nope`: written by ")
    assert "--resume" not in text


def test_a_case_that_is_behind_says_so_in_the_figures() -> None:
    found = rows()[:-1]
    further = [{**row, "case": "path", "after": "stage2"} for row in found if row["after"] == "stage1"]
    assert {row["case"] for row in last_rows([*found, *further])} == {"rope", "nope, stage 1", "path"}


@pytest.mark.slow
def test_the_whole_study_at_a_tiny_size(tmp_path: Path, capsys: Any) -> None:
    out, text = tmp_path / "out", str(text_file(tmp_path))
    few = [f"stage{n}.{key}" for n in (1, 2, 3) for key in ("steps=3", "length=64", "batch=2")]
    held_out = tmp_path / "held-out.txt"
    held_out.write_text("the old bridge was over the river. " * 40)
    arguments = [
        "--text",
        text,
        "--held-out",
        str(held_out),
        "--out",
        str(out),
        "--rows",
        "2",
        "--samples",
        "2",
        "--words",
        *few,
    ]
    before = jax.config.jax_compilation_cache_dir
    try:
        main([*arguments, "--cases", "rope", "nope"])
        first = json.loads((out / "results.json").read_text())
        (out / "cells" / "nope" / "measured-stage3.json").unlink()  # as if the process had been killed before it
        main([*arguments, "--resume", "--part", "train", "--cases", "rope", "nope", "rope, continued"])
        assert [path.name for path in (out / "cells").glob("*/run")] == ["run", "run"]
        main([*arguments, "--resume", "--part", "measure", "--cases", "rope", "nope", "rope, continued"])
        again = json.loads((out / "results.json").read_text())
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
    assert not again["study"]["complete"]
    numbers = lambda found: [row for row in found["rows"] if row["case"] == "nope" and row["benchmark"] == "perplexity"]
    without = lambda found: [{k: v for k, v in row.items() if k != "measured_in"} for row in numbers(found)]
    assert without(first) == without(again)
    assert [row["after"] for row in numbers(first)] == [
        s for s in ("start", "stage1", "stage2", "stage3") for _ in range(4)
    ]
    trained = [(r["case"], r["after"]) for r in again["rows"] if r["benchmark"] == "training"]
    assert trained == [(case, f"stage{n}") for case in ("rope, continued", "nope") for n in (1, 2, 3)]
    assert not list((out / "cells").glob("*/run"))
    with pytest.raises(ValueError, match="other options"):
        main([*arguments, "stage3.lr=1", "--resume", "--cases", "rope"])
