"""Questions on disk and cut to a budget; answers of models in batches; materials from files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bampath import config as configs
from bampath.data import ByteTokenizer
from bampath.evaluation import materials
from bampath.evaluation.answers import ModelAnswerer, ask, contains_any, row, speed
from bampath.evaluation.questions import Question, depth_of, kept, largest, within
from bampath.evaluation.session import Session
from bampath.model import LM
from bampath.params import unbox
from tests.evaluation.oracles import WORDS, TextAnswerer, write_words

BYTES = ByteTokenizer()


def test_questions_are_made_once_and_read_afterwards(tmp_path):
    made = []

    def make(text):
        made.append(text)
        return [Question(text, ("a", "b"), 0.25, (("n", 1), ("s", "x"))), Question(text, ("c",))]

    first = kept(tmp_path, {"task": "t", "seed": 1}, lambda: make("one"))
    assert kept(tmp_path, {"task": "t", "seed": 1}, lambda: make("two")) == first
    assert made == ["one"]
    assert kept(tmp_path, {"task": "t", "seed": 2}, lambda: make("three"))[0].prompt == "three"
    for path in tmp_path.iterdir():
        path.write_text("{broken", encoding="utf-8")
    assert kept(tmp_path, {"task": "t", "seed": 1}, lambda: make("four"))[0].prompt == "four"


def test_the_key_of_kept_questions_is_all_that_they_depend_on(tmp_path):
    session = Session(None, None, BYTES, samples=2, cache=tmp_path)
    build = lambda seed, reserve: [Question(f"{seed} {reserve}", ("x",))]
    ask_for = lambda s=session, length=8, material=("m",): s.questions("t", length, material, build)
    ask_for()
    for change in ({"samples": 3}, {"seed": 1}, {"bos": True}):
        ask_for(Session(None, None, BYTES, **{"samples": 2, "cache": tmp_path, **change}))
    ask_for(length=9)
    ask_for(material=("n",))
    assert len(list(tmp_path.iterdir())) == 6
    ask_for()
    assert len(list(tmp_path.iterdir())) == 6


@given(st.integers(1, 500), st.integers(1, 20))
def test_the_largest_size_that_fits(limit, least):
    if least > limit:
        with pytest.raises(ValueError, match="what"):
            largest(lambda n: n <= limit, least, "what")
    else:
        assert largest(lambda n: n <= limit, least, "what") == limit


@given(st.integers(30, 3000), st.integers(2, 9), st.integers(0, 500))
def test_a_sample_is_taken_back_until_it_fits(budget, each, extra):
    make = lambda size: Question("x" * (each * size + 7), ("",))
    size = (budget - 7) // each
    question = within(make, len, budget, size + extra, 1, "what")
    assert len(question.prompt) <= budget
    assert len(question.prompt) > budget / 2 - 2 * each  # not much more than needed
    with pytest.raises(ValueError, match="longer than the budget"):
        within(make, len, 6, size, 1, "what")


def test_evidence_that_is_lost_is_an_error():
    assert depth_of("abcd", "c") == 0.5
    with pytest.raises(ValueError, match="substring"):
        depth_of("abcd", "x")


def test_rows_have_scores_intervals_and_speed():
    questions = [Question(f"q{i}", ("yes",), i / 3) for i in range(4)]
    answered, seconds = ask(
        TextAnswerer(BYTES, lambda text: "YES, sir\nno" if text != "q0" else "no"),
        BYTES,
        questions,
        9,
        contains_any,
        until="\n",
    )
    made = row(answered, task="t")
    assert (made["correct"], made["accuracy"], made["samples"], made["tokens"]) == (3, 0.75, 4, 2)
    assert 0.3 < made["lower"] < 0.75 < made["upper"] < 1
    assert [d["depth"] for d in made["depths"]] == [0, 1 / 3, 2 / 3, 1]
    assert made["depths"][1]["answer"] == "YES, sir"
    assert speed(answered, 2.0) == {"seconds": 2.0, "samples_per_second": 2.0, "prompt_tokens_per_second": 4.0}
    assert seconds >= 0


@pytest.fixture(scope="module")
def small():
    config = configs.get(
        "tiny", "model.dim=16", "model.heads=2", "model.mlp_dim=16", "model.layers=1", "position=alibi"
    )
    model = LM(config.model)
    return model, unbox(model.init(jax.random.key(3), jnp.zeros((1, 2), jnp.int32))["params"])


def test_answers_do_not_depend_on_company_or_chunks(small):
    model, params = small
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 256, n).tolist() for n in (3, 300, 17)]
    forward = jax.jit(lambda tokens: model.apply({"params": params}, tokens))

    def greedy(prompt):  # the definition: the whole row again for every token
        row = list(prompt)
        for _ in range(4):
            padded = np.zeros((1, 320), np.int32)
            padded[0, : len(row)] = row
            row.append(int(np.asarray(forward(padded))[0, len(row) - 1].argmax()))
        return row[len(prompt) :]

    want = [greedy(prompt) for prompt in prompts]
    assert ModelAnswerer(model, params, chunk=64, batch_tokens=10**5).answer(prompts, 4, None) == want
    assert ModelAnswerer(model, params, chunk=512, batch_tokens=1).answer(prompts[::-1], 4, None) == want[::-1]
    stop = lambda tokens: tokens[-1] == want[0][1]
    (stopped,) = ModelAnswerer(model, params, batch_tokens=1).answer(prompts[:1], 4, stop)
    assert stopped == want[0][: want[0].index(want[0][1]) + 1]
    with pytest.raises(ValueError, match="chunk"):
        ModelAnswerer(model, params, chunk=0)


def test_materials_come_from_files(tmp_path):
    assert materials.word_lists(str(write_words(tmp_path / "words"))).all() == WORDS.all()
    (tmp_path / "one.txt").write_text("Some prose. More of it.", encoding="utf-8")
    found = materials.prose(str(tmp_path / "one.txt"))
    assert (found.label, found.words()) == ("one.txt", ["Some", "prose.", "More", "of", "it."])
    (tmp_path / "words" / "verblist.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no words"):
        materials.word_lists(str(tmp_path / "words"))
    with pytest.raises(FileNotFoundError):
        materials.names(str(tmp_path / "none"))


def test_sentences():
    text = 'He came. "Who?" she asked. It was 3.5 miles. No! Yes.'
    assert materials.sentences(text) == ("He came.", '"Who?" she asked.', "It was 3.5 miles.", "No!", "Yes.")
    assert materials.sentences('He said "No." Then (or so.) he left.') == ('He said "No."', "Then (or so.) he left.")
    assert materials.sentences("") == ()
    assert json.dumps(materials.sentences("one\n\ntwo.  Three")) == '["one two.", "Three"]'
