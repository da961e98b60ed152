"""State-tracking tasks: every row against a slow reading of the rules, and scores of an oracle and of a guesser."""

import argparse
import json
import math
from collections import defaultdict
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bampath.data import ByteTokenizer, DataConfig
from bampath.evaluation.session import Session
from bampath.evaluation.state import __main__ as command
from bampath.evaluation.state.flipflop import FlipFlop
from bampath.evaluation.state.recall import Mqar, Mqrar
from bampath.evaluation.state.score import BLOCK, score
from bampath.evaluation.state.tasks import parse_task, spec_of
from bampath.evaluation.state.words import Words, elements, multiplication, three_cycles

TASKS = {
    "fflm(pairs=20)": FlipFlop(pairs=20),
    "words(a5,letters=6)": Words("a5", 6),
    "words(s5,letters=4)": Words("s5", 4),
    "words(letters=5,question=identity)": Words(letters=5, question="identity"),
    "words(letters=5,over=cycles)": Words(letters=5, over="cycles"),
    "words(s5,letters=5,over=swaps)": Words("s5", 5, over="swaps"),
    "mqrar(back=2,keys=4,values=6,pairs=30)": Mqrar(back=2, keys=4, values=6, pairs=30),
    "mqar(pairs=4,length=30,vocabulary=20)": Mqar(pairs=4, length=30, vocabulary=20),
}


def draw(task, rows=40, seed=0):
    return task.draw(np.random.default_rng(seed), rows)


def flipflop_answers(tokens):
    last = None
    for at in range(0, len(tokens), 2):
        if tokens[at] == 2:
            last = tokens[at + 1]
        if tokens[at] == 3:
            yield at, last


def words_answers(tokens, task):
    found = elements(task.group)
    product_of, letters = list(range(5)), list(range(len(found)))
    if task.over == "swaps":
        letters = [i for i in letters if sum(x != y for x, y in enumerate(found[i])) < 3]
    elif task.over == "cycles" or task.question == "identity":
        letters = three_cycles(task.group)
    for at, token in enumerate(tokens[1:], 1):
        g = found[letters[token]]
        product_of = [product_of[x] for x in g]  # (a·b)(x) = a(b(x))
        if task.question == "product":
            yield at, found.tolist().index(product_of)
        elif at == task.letters:
            yield at, int(product_of == list(range(5)))


def mqrar_answers(tokens, task):
    history = defaultdict(list)
    for at in range(0, len(tokens), 2):
        key, value = tokens[at], tokens[at + 1]
        if value == task.vocab_size - 1:
            yield at + 1, history[key][-task.back]
        else:
            history[key].append(value)


def mqar_answers(tokens, weights, task):
    values = dict(zip(tokens[0 : 2 * task.pairs : 2], tokens[1 : 2 * task.pairs : 2], strict=True))
    for at in np.flatnonzero(weights):
        yield at, values[tokens[at]]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_answers_follow_from_the_rules(task):
    rows = draw(task)
    assert rows.tokens.shape == rows.targets.shape == rows.weights.shape == rows.depth.shape == (40, task.length)
    assert rows.tokens.min() >= 0
    assert rows.tokens.max() < task.vocab_size
    for tokens, targets, weights in zip(rows.tokens.tolist(), rows.targets, rows.weights, strict=True):
        if isinstance(task, FlipFlop):
            want = dict(flipflop_answers(tokens))
        elif isinstance(task, Words):
            want = dict(words_answers(tokens, task))
        elif isinstance(task, Mqrar):
            want = dict(mqrar_answers(tokens, task))
        else:
            want = dict(mqar_answers(tokens, weights, task))
        assert sorted(want) == np.flatnonzero(weights).tolist()
        assert [want[at] for at in sorted(want)] == targets[weights > 0].tolist()
        assert all(value in task.answers for value in want.values())
        assert 1 <= (weights > 0).sum() <= task.asked


@pytest.mark.parametrize("spec", TASKS)
def test_golden_rows(spec):
    golden = json.loads((Path(__file__).parent / "golden" / "state.json").read_text(encoding="utf-8"))
    rows = draw(TASKS[spec], 2, seed=7)
    assert {name: getattr(rows, name).astype(int).tolist() for name in golden[spec]} == golden[spec]


def test_depth_points_at_the_evidence():
    for task in (task for task in TASKS.values() if not isinstance(task, Words)):
        rows = draw(task)
        row, place = np.nonzero(rows.weights)
        evidence = rows.tokens[row, place - rows.depth[row, place]]
        assert (evidence == rows.targets[row, place]).all()


@given(st.integers(2, 80), st.floats(0, 0.99), st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_flipflops_have_the_published_form(pairs, ignore, seed):
    rows = draw(FlipFlop(pairs=pairs, ignore=ignore), 3, seed)
    assert (rows.tokens[:, 0] == 2).all()
    assert (rows.tokens[:, -2] == 3).all()
    assert set(np.unique(rows.tokens[:, 1::2])) <= {0, 1}
    answered = np.where(rows.weights > 0, rows.targets, -1)[:, 0::2]
    bits = rows.tokens[:, 1::2]
    assert (bits[answered >= 0] == answered[answered >= 0]).all()  # the answer follows its question in the row


def test_shares_of_instructions():
    for name, task in FlipFlop(pairs=2000).tests().items():
        rows = draw(task, 20)
        share = [(rows.tokens[:, 2:-2:2] == i).mean() for i in (2, 3, 4)]
        p = {"in-distribution": 0.8, "sparse": 0.98, "dense": 0.1}[name]
        assert share == pytest.approx([(1 - p) / 2, (1 - p) / 2, p], abs=0.015)


def test_groups_are_groups():
    for group, order in (("a5", 60), ("s5", 120)):
        table = multiplication(group)
        assert table.shape == (order, order)
        assert all(sorted(row) == list(range(order)) for row in table.tolist())  # a Latin square with identity 0
        assert table[0].tolist() == list(range(order))
        assert elements(group)[0].tolist() == [0, 1, 2, 3, 4]
        a, b, c = np.random.default_rng(0).integers(0, order, (3, 200))
        assert (table[table[a, b], c] == table[a, table[b, c]]).all()
    own = {tuple(p) for p in elements("a5").tolist()}
    assert own < set(permutations(range(5)))
    cycles = [elements("a5")[i].tolist() for i in three_cycles("a5")]
    assert cycles[:3] == [[1, 2, 0, 3, 4], [1, 3, 2, 0, 4], [1, 4, 2, 3, 0]]  # x -> its image, counted from 0
    assert all(
        multiplication("a5")[i, j] == 0 for i, j in zip(three_cycles("a5")[:3], three_cycles("a5")[3:], strict=True)
    )


def test_words_are_made_of_the_letters_that_are_named():
    sizes = {"words(a5)": 60, "words(s5)": 120, "words(s5,over=swaps)": 11, "words(s5,over=cycles)": 6}
    assert {spec: parse_task(spec).alphabet for spec in sizes} == sizes
    rows = draw(parse_task("words(s5,over=swaps)"), 200)
    assert sorted(set(rows.tokens[:, 1:].ravel().tolist())) == list(range(11))
    assert (rows.tokens[:, 0] == 11).all()
    assert len(set(rows.targets[:, -1].tolist())) > 60  # even and odd ones: the whole group is reached
    swaps = elements("s5")[parse_task("words(s5,over=swaps)").elements]
    assert sorted((p != np.arange(5)).sum() for p in swaps) == [0] + [2] * 10


def test_half_of_the_words_are_the_identity_and_all_such_words_are_alike():
    task = Words(letters=4, question="identity")
    rows = draw(task, 6000)
    right = rows.targets[:, -1] == 1
    assert 0.46 < right.mean() < 0.54
    table, letters = multiplication("a5"), three_cycles("a5")
    identities = []
    for word in product(range(6), repeat=4):
        value = 0
        for letter in word:
            value = table[value, letters[letter]]
        identities += [word] * int(value == 0)
    found = [tuple(word) for word in rows.tokens[right, 1:].tolist()]
    assert set(found) == set(identities)
    expected = len(found) / len(identities)
    counts = [found.count(word) for word in identities]
    assert sum((n - expected) ** 2 / expected for n in counts) < 1.6 * len(counts)  # chi-square


def test_every_key_can_be_asked_and_assigned():
    task = Mqrar(back=3, pairs=384)
    rows = draw(task, 4)
    asked = (rows.weights > 0).sum() / 4
    assert 130 < asked < 192  # half of the pairs whose key has three earlier assignments
    assert set(rows.targets[rows.weights > 0].tolist()) <= set(range(64))
    assert len(np.unique(rows.tokens[:, 0::2])) == 32


def test_mqar_queries_come_early_and_once():
    task = Mqar(pairs=8, length=256, vocabulary=64)
    rows = draw(task, 200)
    assert (rows.weights.sum(axis=1) == 8).all()
    places = np.nonzero(rows.weights)[1]
    assert (places % 2 == 0).all()
    assert places.min() == 16
    assert np.median(places) < (16 + 256) / 2 - 40


class Knows:
    """Logits that point at the target of the row that they are asked about (found by its tokens)."""

    def __init__(self, task, wrong=lambda place: False):
        self.task, self.wrong, self.answers = task, wrong, {}
        for block in range(40):
            rows = task.draw(np.random.default_rng([0, block]), BLOCK)
            for tokens, targets in zip(rows.tokens, rows.targets, strict=True):
                self.answers[tokens.tobytes()] = targets

    def logits_at(self, tokens, places):
        logits = np.zeros((*places.shape, self.task.vocab_size), np.float32)
        for row, ats in enumerate(places):
            for column, at in enumerate(ats):
                target = self.answers[tokens[row].tobytes()][at]
                logits[row, column, (target + self.wrong(at)) % self.task.vocab_size] = 1
        return logits


class Guesses:
    """One of the answers at random."""

    def __init__(self, task):
        self.task, self.draws = task, np.random.default_rng(5)

    def logits_at(self, tokens, places):
        logits = np.full((*places.shape, self.task.vocab_size), -9.0, np.float32)
        answers = list(self.task.answers)
        logits[:, :, answers] = self.draws.random((*places.shape, len(answers)))
        return logits


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_an_oracle_makes_no_mistake_and_a_guesser_chance(task):
    read = score(Knows(task), task, "t", 130)
    assert (read.error, read.sequence_right) == (0, 130)
    guessed = score(Guesses(task), task, "t", 700)
    chance = 1 - 1 / len(task.answers)
    spread = 4 * math.sqrt(chance * (1 - chance) / len(guessed.right))
    assert abs(guessed.error - chance) < spread + 1e-9
    row = guessed.row(case="x")
    assert sum(entry["wrong"] for entry in row["by_depth"]) == row["wrong"]
    assert sum(entry["answers"] for entry in row["by_depth"]) == row["answers"]
    assert row["lower"] <= row["error"] <= row["upper"]


@pytest.mark.parametrize("batch_tokens", [1, 3000, 10**6])
def test_scores_do_not_depend_on_the_batch(batch_tokens):
    task = TASKS["fflm(pairs=20)"]
    wrong = score(Knows(task, lambda place: place == 38), task, "t", 150, batch_tokens=batch_tokens)
    want = score(Knows(task, lambda place: place == 38), task, "t", 150)
    assert (wrong.right == want.right).all()
    assert (wrong.row_of == want.row_of).all()
    assert wrong.sequence_right == 0  # every row ends in a read
    assert int((~wrong.right).sum()) == 150


def test_word_problems_by_length():
    task = Words("a5", 6)
    row = score(Knows(task, lambda place: place == 4), task, "t", 64).row()
    assert row["by_length"] == [{"length": n, "right": 64 * (n < 4)} for n in range(1, 7)]
    assert score(Knows(TASKS["fflm(pairs=20)"]), TASKS["fflm(pairs=20)"], "t", 64).row()["by_length"] == []


@pytest.mark.parametrize("spec", TASKS)
def test_specs_are_read_back(spec):
    task = parse_task(spec)
    assert task == TASKS[spec]
    assert parse_task(spec_of(task)) == task


WRONG = (
    *("flip", "fflm+mqar", "fflm(pair=3)", "fflm(3)", "fflm(pairs=1)", "fflm(ignore=1)", "fflm(pairs=x)", "words(a6)"),
    *("words(a5,over=swaps)", "words(over=threes)"),
    *("words(letters=1)", "mqrar(back=0)", "mqar(pairs=99)", "mqar(vocabulary=9)", "mqar(power=0)"),
)


@pytest.mark.parametrize("spec", WRONG)
def test_wrong_tasks_are_refused(spec):
    with pytest.raises(ValueError, match=spec[:3]):
        parse_task(spec)


def test_a_model_of_text_reads_flipflops_as_text():
    tokenizer = ByteTokenizer()
    ids = command.text_ids(FlipFlop(), tokenizer)
    assert bytes(ids.tolist()) == b"01wri"

    class Reads:
        """Answers from the text, and would rather say something else."""

        def logits_at(self, tokens, places):
            logits = np.zeros((*places.shape, 259), np.float32)
            logits[:, :, ord("!")] = 99
            for row, ats in enumerate(places):
                for column, at in enumerate(ats):
                    text = bytes(tokens[row, : at + 1].tolist()).decode()
                    if text.endswith("r"):
                        logits[row, column, ord(text[text.rindex("w") + 1])] = 1
            return logits

    task = FlipFlop(pairs=12)
    assert score(Reads(), task, "t", 70, ids=ids).error == 0
    with pytest.raises(ValueError, match="not text"):
        command.text_ids(Words(), tokenizer)
    with pytest.raises(ValueError, match="one token"):
        command.text_ids(FlipFlop(), Doubling())
    with pytest.raises(ValueError, match="sequences"):
        score(Reads(), task, "t", 0, ids=ids)


class Doubling(ByteTokenizer):
    name = "doubling"

    def encode(self, text):
        return [i for i in super().encode(text) for _ in range(2)]


def test_the_task_of_a_checkpoint_is_the_default():
    task = FlipFlop(pairs=20)
    session = Session(None, Knows(task), ByteTokenizer(), seed=0, samples=64, say=lambda text: None)
    session.data = replace(DataConfig(), source="state:fflm(pairs=20)")
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    with pytest.raises(ValueError, match="other symbols"):
        command.run(session, parser.parse_args(["--state-task", "words(a5)"]))
    session.reader = Guesses(task)
    command.run(session, parser.parse_args([]))
    assert [row["test"] for row in session.rows] == ["in-distribution", "sparse", "dense"]
    assert all(row["trained"] for row in session.rows)
