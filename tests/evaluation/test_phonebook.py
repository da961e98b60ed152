"""PhoneBook: the form of the book, its length, a reader and a guesser."""

import re
from pathlib import Path

import pytest

from bampath.data import ByteTokenizer
from bampath.evaluation.answers import ask, equals_any
from bampath.evaluation.materials import names
from bampath.evaluation.phonebook import NEW_TOKENS, make
from bampath.evaluation.questions import Question, count
from tests.evaluation.oracles import PEOPLE, TextAnswerer, guesser, read_phonebook, write_names

BYTES = ByteTokenizer()


def test_golden_prompt():
    (question,) = make(0, 1, BYTES, PEOPLE, entries=6)
    golden = Path(__file__).parent / "golden" / "phonebook.txt"
    assert f"{question.prompt}\n=== {question.references[0]}\n" == golden.read_text(encoding="utf-8")


def test_a_book_fills_its_length_and_repeats_two_lines():
    for question in make(1500, 10, BYTES, PEOPLE, reserve=1):
        book, shots, asked = question.prompt.split("\n\n")
        lines = book.split("\n")
        assert len(lines) == dict(question.facts)["entries"]
        assert all(re.fullmatch(r"First\w Last\w\w: [6-9]\d{9}", line) for line in lines)
        assert len(shots.split("\n")) == 2
        assert set(shots.split("\n")) <= set(lines)
        assert f"{asked} {question.references[0]}" in lines
        assert f"{asked} {question.references[0]}" not in shots.split("\n")
        assert 1500 - 60 < count(BYTES, question.prompt) + NEW_TOKENS + 1 <= 1500


def test_a_reader_scores_everything_and_a_guesser_nothing():
    name = lambda question: question.prompt[question.prompt.rindex("\n") + 1 :]
    questions = [q for q in make(1200, 40, BYTES, PEOPLE) if q.prompt.count(name(q)) == 2]
    assert len(questions) > 15  # names may occur twice, then nobody can know
    read, _ = ask(TextAnswerer(BYTES, read_phonebook), BYTES, questions, NEW_TOKENS, equals_any, until="\n")
    assert all(a.score == 1 for a in read)
    assert all("Somebody" not in a.answer for a in read)
    guess = TextAnswerer(BYTES, guesser([f" {n}" for n in range(6_000_000_000, 6_000_000_050)]))
    guessed, _ = ask(guess, BYTES, questions, NEW_TOKENS, equals_any, until="\n")
    assert all(a.score == 0 for a in guessed)


def test_the_whole_number_must_be_right():
    question = Question("", ("6123456789",))
    assert equals_any(" 6123456789 ", question) == 1
    assert equals_any("6123456789.", question) == equals_any("612345678", question) == equals_any("", question) == 0


def test_names_come_from_census_files(tmp_path):
    people = names(str(write_names(tmp_path / "names")))
    assert people.first == ("Mary", "Linda", "James", "John")
    assert people.first_share.tolist() == pytest.approx([2.5 / 8, 1.5 / 8, 3 / 8, 1 / 8])
    assert people.last_share.tolist() == pytest.approx([0.5, 0.3, 0.2])


def test_what_cannot_be_done_is_refused(tmp_path):
    with pytest.raises(ValueError, match="entries"):
        make(1000, 1, BYTES, PEOPLE, entries=2)
    with pytest.raises(ValueError, match="longer length"):
        make(100, 1, BYTES, PEOPLE)
    (tmp_path / "dist.female.first").write_text("MARY\n", encoding="utf-8")
    with pytest.raises(ValueError, match="NAME SHARE"):
        names(str(tmp_path))
