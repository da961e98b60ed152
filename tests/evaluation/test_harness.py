"""The adapter under the real lm-evaluation-harness, with a model whose likelihoods are multiplied by hand."""

import argparse
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from bampath.data import ByteTokenizer
from bampath.evaluation import short
from bampath.evaluation.session import Session
from tests.evaluation.fakes import Bigrams

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'lm_eval>=0.4.13,<0.5'")
pytestmark = pytest.mark.filterwarnings("ignore")  # its dependencies warn about each other

BYTES = ByteTokenizer()
# After x comes y (0.7) or z (0.2), after y a newline (0.6); everything else is uniform over the 259 ids.
TABLE = np.full((259, 259), 1 / 259)
TABLE[ord("x")] = 0.1 / 257
TABLE[ord("x"), [ord("y"), ord("z")]] = 0.7, 0.2
TABLE[ord("y")] = 0.4 / 258
TABLE[ord("y"), ord("\n")] = 0.6
EACH = math.log(259)


def model(**options):
    from bampath.evaluation.harness import HarnessModel  # it needs lm_eval

    reader = Bigrams(TABLE)
    options = {"bos": False, "window": 64, "batch_tokens": 512, "tokenizer": BYTES, **options}
    return HarnessModel(reader, reader, **options)


def ask(*args):
    return SimpleNamespace(args=args)


def test_loglikelihood_by_hand():
    asked = [ask("x", "y"), ask("x", "z"), ask("x", "yy"), ask("", "x"), ask("ax ", "b"), ask("x", "y\n")]
    found = model().loglikelihood(asked)
    want = [
        (math.log(0.7), True),
        (math.log(0.2), False),
        (math.log(0.7 * 0.4 / 258), False),
        (-EACH, False),  # after the BOS every id is equally likely, and id 0 comes first
        (math.log(0.1 / 257) - EACH, False),  # the space at the end of a context belongs to the continuation
        (math.log(0.7 * 0.6), True),
    ]
    assert [f[0] for f in found] == pytest.approx([w[0] for w in want], rel=1e-6)
    assert [f[1] for f in found] == [w[1] for w in want]
    assert model().loglikelihood(asked[::-1]) == found[::-1]
    assert model(batch_tokens=1).loglikelihood(asked) == found


@pytest.mark.parametrize("window", [1, 2, 3, 64])
def test_rolling_counts_every_token_once(window):
    one = model(window=window)
    found = one.loglikelihood_rolling([ask("xy\nx"), ask("")])
    # x after the BOS, y after x, a newline after y, x after it; a window begins with its last token before
    assert found == pytest.approx([-EACH + math.log(0.7) + math.log(0.6) - EACH, 0.0], rel=1e-6)
    assert one.counts == {"requests": 2, "merged": 0, "cut": 0}


def test_generation_stops_before_the_first_stop_string():
    options = {"until": ["\n", "q"], "max_gen_toks": 5, "do_sample": False}
    assert model().generate_until([ask("x", options), ask("ay", options)]) == ["y", ""]
    assert model().generate_until([ask("x", {"until": "nothing", "max_gen_toks": 2})]) == ["y\n"]
    assert len(model().generate_until([ask("", {"max_gen_toks": 3})])[0]) == 3  # three ids 0
    with pytest.raises(ValueError, match="sampling"):
        model().generate_until([ask("x", {"until": [], "do_sample": True})])


def test_bos_cuts_and_merges_are_counted():
    class Pairs(ByteTokenizer):
        """'xy' is one token, id 1."""

        def encode(self, text):
            return [1 if c == "\0" else ord(c) for c in text.replace("xy", "\0")]

    merging = model(bos=True, tokenizer=Pairs())
    pair = merging._pair("ax", "yb")
    assert pair == ((256, ord("a"), 1), (ord("b"),))
    assert merging.counts == {"requests": 1, "merged": 1, "cut": 0}
    with pytest.raises(ValueError, match="no token of its own"):
        merging._pair("ax", "y")
    short_model = model(max_length=4, bos=True)
    assert short_model._pair("abcdef", "gh") == (tuple(b"def"), tuple(b"gh"))
    assert short_model._pair("a", "gh") == ((256, ord("a")), tuple(b"gh"))
    assert short_model.counts == {"requests": 2, "merged": 0, "cut": 1}
    with pytest.raises(ValueError, match="too short"):
        short_model._pair("a", "bcdefg")


@pytest.fixture(autouse=True)
def no_hub(tmp_path, monkeypatch):
    """The harness looks at local files only, keeps its copies in the test's folder, and the environment is restored."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))


@pytest.fixture
def tasks(tmp_path):
    """A folder of two task files on local data: four choices, and the perplexity of a text."""
    rows = [{"q": "x", "choices": ["z", "y"], "gold": 1}, {"q": "x", "choices": ["y", "z"], "gold": 1}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "text.jsonl").write_text(json.dumps({"page": "xy\nxy\n"}), encoding="utf-8")
    common = "dataset_path: json\ntest_split: test\n"
    (tmp_path / "choices.yaml").write_text(
        f"task: own_choices\n{common}dataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\n"
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: gold\n"
        "target_delimiter: ''\nmetric_list: [{metric: acc}]\n",
        encoding="utf-8",
    )
    (tmp_path / "text.yaml").write_text(
        f"task: own_text\n{common}dataset_kwargs: {{data_files: {{test: {tmp_path}/text.jsonl}}}}\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{page}}'\n"
        "metric_list: [{metric: byte_perplexity}]\n",
        encoding="utf-8",
    )
    return tmp_path


def test_the_real_harness_runs_local_tasks(tasks):
    reader, said = Bigrams(TABLE), []
    session = Session(reader, reader, BYTES, samples=0, train_length=64, say=said.append)
    parser = argparse.ArgumentParser()
    short.add_options(parser)
    options = ["--tasks", "own_choices", "own_text", "--include-path", str(tasks), "--offline"]
    short.run(session, parser.parse_args(options))
    values = {(row["task"], row["metric"]): row for row in session.rows}
    assert values["own_choices", "acc"]["value"] == 0.5  # y is likelier than z, which is right once in two
    assert values["own_choices", "acc"]["samples"] == 2
    loss = 2 * EACH - 2 * math.log(0.7) - 2 * math.log(0.6)
    assert values["own_text", "byte_perplexity"]["value"] == pytest.approx(math.exp(loss / 6), rel=1e-5)
    assert len(said) == len(session.rows)


def test_a_task_of_the_harness_on_a_local_file(tmp_path):
    rows = [{"goal": "g", "sol1": "ax", "sol2": "xy", "label": label} for label in (0, 1, 1)]
    (tmp_path / "piqa.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    reader = Bigrams(TABLE)
    session = Session(reader, reader, BYTES, samples=0, train_length=64, say=lambda text: None)
    parser = argparse.ArgumentParser()
    short.add_options(parser)
    short.run(session, parser.parse_args(["--data", f"piqa=validation:{tmp_path}/piqa.jsonl", "--offline"]))
    values = {row["metric"]: row["value"] for row in session.rows if row["task"] == "piqa"}
    assert values["acc"] == pytest.approx(2 / 3)  # " xy" is likelier than " ax" by the step from x to y


def test_data_options_are_checked(tmp_path):
    for wrong in ("piqa", "piqa=validation", "piqa=dev:x"):
        with pytest.raises(ValueError, match="--data"):
            short.local_task(wrong)
    assert short.metadata_of('{"max_seq_lengths": [64]}') == {"max_seq_lengths": [64]}
    for wrong in ("{", "[1]"):
        with pytest.raises(ValueError, match="--metadata"):
            short.metadata_of(wrong)
    with pytest.raises(FileNotFoundError, match="no file"):
        short.local_task(f"piqa=test:{tmp_path}/none.jsonl")
