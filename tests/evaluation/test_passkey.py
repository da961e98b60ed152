"""Prompts token by token, and scores of readers whose answers are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bampath.data import ByteTokenizer
from bampath.evaluation.command import parse_lengths
from bampath.evaluation.passkey import PAPER_LENGTHS, PasskeyTask, Prompts, answer, evaluate, line
from tests.evaluation.fakes import Guesser, Oracle, WordTokenizer

WORDS = WordTokenizer()
# Counted by hand: words and marks, and for each mention of the key one space and five digits.
TASK, NOISE, INFO, QUERY, KEY = 29, 24, 25, 10, 6


def test_golden_prompt():
    task = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    )
    task += "about the important information there."
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    prompt = Prompts(PasskeyTask(samples=3), WORDS).make(TASK + 2 * NOISE + INFO + QUERY)[1]
    key = prompt.key
    info = f"The pass key is {key}. Remember it. {key} is the pass key."
    pieces = [task, noise, info, noise, "What is the pass key? The pass key is", f" {key}"]
    assert prompt.tokens.tolist() == [i for piece in pieces for i in WORDS.encode(piece)]
    assert prompt.tokens.dtype == np.int32
    assert (prompt.slot, prompt.slots, prompt.depth, prompt.scored) == (1, 2, 0.5, 5)
    assert prompt.prompt_tokens == TASK + 2 * NOISE + INFO + QUERY
    assert len(prompt.tokens) == prompt.prompt_tokens + KEY


@given(st.integers(0, 3000), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_length_is_the_largest_that_fits(length, seed):
    fixed = TASK + INFO + QUERY
    for prompt in Prompts(PasskeyTask(seed=seed), WORDS).make(length):
        assert prompt.prompt_tokens == fixed + NOISE * max(0, (length - fixed) // NOISE)
        assert prompt.prompt_tokens <= max(length, fixed)
        assert 10_000 <= int(prompt.key) <= 99_999


def test_needle_stands_at_every_equidistant_depth():
    prompts = Prompts(PasskeyTask(), WORDS).make(4096)
    slots = prompts[0].slots
    assert [p.slot for p in prompts] == [int(x) for x in np.floor(np.linspace(0, slots, 20) + 1e-9)]
    needle = WORDS.encode("The pass key is ")
    for prompt in prompts:
        at = TASK + NOISE * prompt.slot
        assert prompt.tokens[at : at + len(needle)].tolist() == needle
        assert prompt.tokens[at : at + INFO].tolist() == WORDS.encode(
            f"The pass key is {prompt.key}. Remember it. {prompt.key} is the pass key."
        )


def test_other_depths():
    slots = lambda depth: {p.slot for p in Prompts(PasskeyTask(depth=depth, samples=300), WORDS).make(400)}
    assert slots("beginning") == {0}
    assert slots("end") == {(400 - TASK - INFO - QUERY) // NOISE}
    assert slots("random") == set(range((400 - TASK - INFO - QUERY) // NOISE + 1))


def test_samples_are_a_function_of_seed_and_length():
    same = lambda **options: [p.tokens.tolist() for p in Prompts(PasskeyTask(**options), WORDS).make(500)]
    assert same() == same()
    assert same() != same(seed=1)
    assert same()[:5] == [p.tokens.tolist() for p in Prompts(PasskeyTask(), WORDS).make(500)][:5]
    keys = [p.key for p in Prompts(PasskeyTask(), WORDS).make(500)]
    assert len(set(keys)) == len(keys)
    assert keys != [p.key for p in Prompts(PasskeyTask(), WORDS).make(501)]


def test_given_digits_are_not_scored():
    prompt = Prompts(PasskeyTask(digits=5, prefix_digits=1), WORDS).make(200)[0]
    assert len(prompt.key) == 6
    assert prompt.scored == 5
    assert WORDS.decode(prompt.tokens[-5:]).replace(" ", "") == prompt.key[1:]


def test_digits_that_share_tokens():
    pairs = WordTokenizer(group=2)
    assert Prompts(PasskeyTask(digits=5), pairs).make(200)[0].scored == 3
    with pytest.raises(ValueError, match="prefix_digits"):
        Prompts(PasskeyTask(digits=5, prefix_digits=1), pairs).make(200)
    assert Prompts(PasskeyTask(digits=4, prefix_digits=2), pairs).make(200)[0].scored == 2


def test_bos_and_bytes():
    prompt = Prompts(PasskeyTask(bos=True), ByteTokenizer()).make(600)[0]
    assert prompt.tokens[0] == ByteTokenizer.bos_id
    assert bytes(prompt.tokens[-6:].tolist()).decode() == f" {prompt.key}"
    assert prompt.scored == 5
    with pytest.raises(ValueError, match="BOS"):
        Prompts(PasskeyTask(bos=True), WORDS).make(600)


def test_an_oracle_scores_everything_and_a_guesser_about_nothing():
    lengths = [0, 128, 300]
    results = evaluate(Oracle(WORDS.vocab_size), WORDS, lengths)
    assert [r.length for r in results] == lengths
    assert all(r.accuracy == 1 and r.token_accuracy == 1 and r.interval.upper == 1 for r in results)
    digits = [WORDS.encode(str(n))[0] for n in range(10)]
    (guessed,) = evaluate(Guesser(WORDS.vocab_size, digits), WORDS, [128], PasskeyTask(samples=400))
    assert guessed.accuracy == 0  # chance 1e-5 per sample
    assert 0.07 < guessed.token_accuracy < 0.13  # 0.1 ± 4 standard deviations of 2,000 guesses


def test_scores_need_every_digit():
    class AlmostOracle(Oracle):
        def logits_at(self, tokens, places):
            logits = super().logits_at(tokens, places)
            logits[0, -1] = 0  # one digit of one sample
            return logits

    (result,) = evaluate(AlmostOracle(WORDS.vocab_size), WORDS, [128], batch_tokens=10**6)
    assert result.correct == 19
    assert result.token_accuracy == pytest.approx(99 / 100)
    row = result.row(case="x")
    assert [depth["correct"] for depth in row["depths"]] == [False] + [True] * 19
    assert row["depths"][0]["right"] == 4
    assert row["case"] == "x"
    assert "19/20" in line(result, 128)
    assert "no prompt is that short" not in line(result, 128)
    (short,) = evaluate(Oracle(WORDS.vocab_size), WORDS, [0])
    longest = max(sample.prompt.prompt_tokens for sample in short.samples)
    assert line(short, 128).split()[:2] == [str(longest), f"{longest / 128:.3g}x"]
    assert line(short, 128).endswith("(asked for 0: no prompt is that short)")


@pytest.mark.parametrize("batch_tokens", [1, 300, 10**6])
def test_batches_of_any_size_say_the_same_and_have_one_shape(batch_tokens):
    oracle = Oracle(WORDS.vocab_size)
    samples = answer(oracle, Prompts(PasskeyTask(samples=7), WORDS).make(200), batch_tokens)
    assert [s.correct for s in samples] == [True] * 7
    assert len(oracle.shapes) == 1


def test_patience_stops_after_lengths_without_a_hit():
    digits = [WORDS.encode(str(n))[0] for n in range(10)]
    seen = []
    results = evaluate(
        Guesser(WORDS.vocab_size, digits), WORDS, range(0, 1000, 100), patience=2, on_result=lambda r: seen.append(r)
    )
    assert len(results) == 2
    assert seen == results


def test_lengths_of_the_command_line():
    assert parse_lengths("512, 2x,0.5x", 128) == [512, 256, 64]
    assert PAPER_LENGTHS[-1] == 32768
    for wrong in ("two", "-1", "", "nanx"):
        with pytest.raises(ValueError, match="length"):
            parse_lengths(wrong, 128)


@pytest.mark.parametrize(
    "options", [{"samples": 0}, {"digits": 0}, {"depth": "middle"}, {"digits": 18, "prefix_digits": 1}]
)
def test_wrong_tasks_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        PasskeyTask(**options)
