"""Whole suites on a checkpoint, as a person runs them: commands in, JSON, Markdown and figures out."""

import argparse
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from bampath import config as configs
from bampath.checkpoint import Saver
from bampath.data import ByteTokenizer
from bampath.evaluation import __main__ as suites
from bampath.evaluation import babilong, longbench_e, passkey, perplexity, phonebook, short
from bampath.evaluation.report import page
from bampath.evaluation.results import write_json
from bampath.evaluation.ruler import __main__ as ruler
from bampath.evaluation.session import add_session_options
from bampath.evaluation.suites import suite
from bampath.model import LM
from bampath.overrides import to_dict
from bampath.params import unbox
from tests.evaluation.oracles import PROSE, write_babi, write_names, write_words
from tests.evaluation.test_longbench import record

SMALL = ("model.dim=8", "model.heads=2", "model.mlp_dim=8", "model.layers=1", "model.attention_impl=reference")
RULER = ("niah_single_2", "vt", "fwe")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with an untrained checkpoint and everything that the long suite reads."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "text.txt").write_text(PROSE.documents[0] * 6, encoding="utf-8")
    config = configs.get(
        "tiny", *SMALL, "position=nope", f"data.source={folder}/text.txt", "data.validation_fraction=0.5"
    )
    params = unbox(LM(config.model).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"])
    facts = {"config": to_dict(config), "data": {}, "tokenizer": ByteTokenizer.fingerprint, "elapsed": 0.0}
    with Saver(folder / "run") as saver:
        saver.save(1, params, {"none": jnp.zeros(())}, facts)
    write_words(folder / "words")
    write_babi(folder / "babi")
    write_names(folder / "names")
    (folder / "v2.json").write_text(json.dumps([record(i, words=20) for i in range(3)]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def results(home):
    return long_suite(home, "long.json")


def long_suite(home, out, **changes):
    """What the long suite's command writes."""
    options = {
        "--suite": ["long"], "--lengths": ["2048"], "--samples": ["2"], "--cache": [home / "cache"],
        "--words": [home / "words"], "--essay": [home / "text.txt"], "--ruler-tasks": RULER,
        "--babi": [home / "babi"], "--babilong-tasks": ["qa1"], "--background": [home / "text.txt"],
        "--names": [home / "names"], "--longbench2": [home / "v2.json"], "--text": [home / "text.txt"],
        "--out": [home / out],
    }  # fmt: skip
    options |= {f"--{name}": [value] for name, value in changes.items()}
    suites.main([str(home / "run"), *(str(word) for name, values in options.items() for word in (name, *values))])
    return json.loads((home / out).read_text(encoding="utf-8"))


def test_the_long_suite_runs_and_reports(results, home):
    rows = results["rows"]
    names = [(row["benchmark"], row.get("task")) for row in rows if row["benchmark"] != "perplexity"]
    v2 = [("longbench2", name) for name in ("Overall", "Easy", "Hard", "Short", "Medium")]  # of two samples
    ruler = [("ruler", task) for task in RULER]
    assert names == [("passkey", None), *ruler, ("babilong", "qa1"), ("phonebook", "phonebook"), *v2]
    assert all(row["case"] == "nope" and row["step"] == 1 for row in rows)
    assert [row["samples"] for row in rows if row["benchmark"] in ("passkey", "ruler", "phonebook")] == [2] * 5
    assert [row["end"] for row in rows if row["benchmark"] == "perplexity"] == list(range(128, 2049, 128))
    (essay,) = [row for row in rows if row.get("task") == "niah_single_2"]
    assert (essay["essay"], essay["words"]) == ("text.txt", "words")
    assert essay["tokens"] + 128 <= 2048
    assert all({"depth", "correct", "answer", "references"} <= set(sample) for sample in essay["depths"])
    assert results["skipped"] == {"longbench_e": "needs --longbench-e FOLDER, a local copy of LongBench's files"}
    assert {"date", "jax", "device"} <= set(results["env"])


def test_the_page_has_tables_figures_and_what_was_not_run(results, home):
    text = (home / "long.md").read_text(encoding="utf-8")
    shown = sorted(path.name for path in home.glob("long-*.png"))
    assert {"long-passkey.png", "long-ruler.png", "long-ruler-depth.png", "long-perplexity.png"} <= set(shown)
    assert all(f"({name})" in text for name in shown)
    assert "mean of these 3 tasks" in text
    assert "essay=text.txt" in text
    assert "- longbench_e: needs" in text
    assert text == page(results["env"], results["rows"], results["skipped"], [home / n for n in _in_order(text, shown)])


def _in_order(text, names):
    return sorted(names, key=lambda name: text.index(f"({name})"))


def test_prompts_are_kept(results, home):
    kept = sorted(path.name.rsplit("-", 1)[0] for path in (home / "cache").iterdir())
    assert kept == ["babilong-qa1", "phonebook", *(f"ruler-{task}" for task in sorted(RULER))]


TOO_SHORT = [*(f"ruler {task}" for task in RULER), "babilong qa1", "phonebook"]


def test_a_length_that_is_too_short_ends_neither_the_suite_nor_other_lengths(results, home, capsys):
    both = long_suite(home, "both.json", lengths="64,2048")
    answers = lambda found: [
        (row["benchmark"], row.get("task"), row.get("depths") or row["loss"])
        for row in found["rows"]
        if row.get("length") != 64
    ]
    assert answers(both) == answers(results)
    assert [row["benchmark"] for row in both["rows"] if row.get("length") == 64] == ["passkey", *["longbench2"] * 5]
    unfit = {name: reason for name, reason in both["skipped"].items() if name not in results["skipped"]}
    assert list(unfit) == [f"{name} at 64 tokens" for name in TOO_SHORT]
    assert unfit["ruler vt at 64 tokens"].startswith("even the smallest prompt is longer than the budget")
    shown = capsys.readouterr().out
    assert all(f"{name}: not run, {reason}\n" in shown for name, reason in unfit.items())


def test_what_is_not_run_after_the_last_row_is_in_the_results_too(home):
    (home / "short.txt").write_text("Fellow citizens of the Senate.\n", encoding="utf-8")
    found = long_suite(home, "short.json", lengths="60", text=home / "short.txt")
    assert {row["benchmark"] for row in found["rows"]} == {"passkey", "longbench2"}
    assert list(found["skipped"])[-1] == "perplexity at 60 tokens"
    assert "- perplexity at 60 tokens: no row of 61 tokens" in (home / "short.md").read_text(encoding="utf-8")


def test_nothing_that_fits_is_an_error(home):
    words = [str(home / "run"), "--words", str(home / "words"), "--essay", str(home / "text.txt"), "--samples", "2"]
    words += ["--cache", str(home / "cache"), "--out", str(home / "none.json")]
    for tasks in (["niah_single_2"], ["niah_single_2", "vt"]):
        with pytest.raises(ValueError, match="niah_single_2 at 400 tokens: even the smallest"):
            ruler.main([*words, "--lengths", "400", "--ruler-tasks", *tasks])
    assert not (home / "none.json").exists()
    ruler.main([*words, "--lengths", "400,2048", "--ruler-tasks", "niah_single_2"])
    found = json.loads((home / "none.json").read_text(encoding="utf-8"))
    assert [row["length"] for row in found["rows"]] == [2048]
    assert list(found["skipped"]) == ["ruler niah_single_2 at 400 tokens"]


def test_a_model_of_text_takes_the_state_suite(home, capsys):
    suites.main([str(home / "run"), "--suite", "state", "--samples", "64", "--state-task", "fflm(pairs=40)"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "error" in line]
    assert [line.split()[1] for line in lines] == ["in-distribution", "sparse", "dense"]
    assert all(line.endswith("(never trained on it)") for line in lines)


def test_what_a_command_misses_is_said(home, monkeypatch):
    run = str(home / "run")
    with pytest.raises(ValueError, match="--babi"):
        babilong.main([run])
    with pytest.raises(ValueError, match="--longbench-e"):
        longbench_e.main([run])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install names"):
        phonebook.main([run])
    with pytest.raises(ValueError, match="pip install 'lm_eval"):
        short.main([run])


def test_wrong_options_are_refused(home):
    run = str(home / "run")
    with pytest.raises(ValueError, match="--samples 0"):
        phonebook.main([run, "--names", str(home / "names"), "--samples", "0"])
    with pytest.raises(ValueError, match="longer length"):
        phonebook.main([run, "--names", str(home / "names"), "--lengths", "80", "--cache", str(home / "cache")])
    with pytest.raises(ValueError, match="not one of"):
        suite("medium")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "."], "is not an ordinary file"),
        (["--out", "/dev/null/a.json"], "is not a folder"),
        (["--chunk", "0"], "--chunk 0 must be at least 1"),
        (["--batch-tokens", "-1"], "--batch-tokens -1 must be at least 1"),
        (["--lengths", "4k"], "length '4k' is neither"),
        (["--seed", "-1"], "--seed -1 must be at least 0"),
        (["--out", "page.md"], "results are JSON"),
    ],
)
def test_options_are_looked_at_before_the_checkpoint(words, message):
    """There is none, which would be said otherwise."""
    for main in (passkey.main, lambda argv: suites.main([*argv, "--suite", "long"])):
        with pytest.raises(ValueError, match=message):
            main(["nowhere", *words])
    if words[0] not in ("--lengths", "--seed"):
        with pytest.raises(ValueError, match=message):
            perplexity.main(["nowhere", *words])


@pytest.mark.parametrize("words", [("--length", "1x,2x"), ("--window", "2,3"), ("--rows", "-1")])
def test_perplexity_takes_one_length_and_one_window(words):
    with pytest.raises(ValueError, match=words[0]):
        perplexity.main(["nowhere", *words])


def test_results_that_several_write_at_once_are_those_of_one(tmp_path):
    """As evaluations of several checkpoints do with the prompts that they share."""
    path = tmp_path / "kept.json"

    def write(n):
        for _ in range(20):
            write_json(path, {"rows": [n] * 2000})
            assert len(set(json.loads(path.read_text())["rows"])) == 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert [one.name for one in tmp_path.iterdir()] == ["kept.json"]


def test_help_needs_no_checkpoint(capsys):
    before = "lm_eval" in sys.modules
    for argv in (["-h"], ["--suite", "long", "-h"]):
        with pytest.raises(SystemExit):
            suites.main(argv)
    assert "--ruler-tasks" in capsys.readouterr().out
    assert ("lm_eval" in sys.modules) == before  # help does not load the harness


def test_the_documentation_names_commands_and_options_that_exist():
    text = (Path(__file__).parent.parent.parent / "docs" / "evaluation.md").read_text(encoding="utf-8")
    known = {benchmark.NAME: benchmark for name in ("long", "short", "state") for benchmark in suite(name)}
    for name, rest in re.findall(r"python -m bampath\.evaluation\.(\w+) (?:CHECKPOINT )?([^`\n]*)", text):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        if name in known and name not in ("passkey", "perplexity"):
            add_session_options(parser, "")
            known[name].add_options(parser)
        else:
            parser = import_module(f"bampath.evaluation.{name}").parser()
        for option in re.findall(r"--[\w-]+", rest):
            assert option in parser._option_string_actions, f"{name} {option}"


def test_the_page_says_which_prompts_are_longer_than_their_length():
    row = {"benchmark": "passkey", "length": 32, "tokens": 243, "samples": 2}
    row |= {"accuracy": 0.0, "lower": 0.0, "upper": 0.66}
    env = {"date": "", "device": "", "platform": "", "jax": "", "commit": ""}
    text = page(env, [row, {**row, "length": 512, "tokens": 500}], {}, [])
    assert "No prompt is as short as 32: those have up to 243 tokens." in text
    assert "No prompt" not in page(env, [{**row, "length": 512}], {}, [])


def test_perplexity_reads_the_longest_rows_that_the_text_has(home):
    (home / "seventy.txt").write_text("Fellow citizens of the Senate " * 2 + "and ladies", encoding="utf-8")
    found = long_suite(home, "seventy.json", lengths="50,60,100", text=home / "seventy.txt")
    ends = [row["end"] for row in found["rows"] if row["benchmark"] == "perplexity"]
    assert (max(ends), len(set(ends))) == (60, len(ends))  # not those of 50 tokens as well
    assert found["skipped"]["perplexity at 100 tokens"].startswith("no row of 101 tokens")
    assert "perplexity at 60 tokens" not in found["skipped"]
