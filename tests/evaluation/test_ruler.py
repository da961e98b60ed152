"""RULER: prompts against golden files, budgets, a reader that finds everything and a guesser that finds nothing."""

import json
import random
import re
from pathlib import Path

import pytest

from bampath.data import ByteTokenizer
from bampath.evaluation.answers import ask, contains_all, contains_any
from bampath.evaluation.questions import Question, count
from bampath.evaluation.ruler import counting, documents
from bampath.evaluation.ruler.tasks import NEW_TOKENS, NIAH, TASKS, Material, make, score_of
from tests.evaluation.fakes import WordTokenizer
from tests.evaluation.oracles import LIBRARY, MATERIAL, PROSE, WORDS, TextAnswerer, guesser, read_ruler

GOLDEN = Path(__file__).parent / "golden"
BYTES = ByteTokenizer()
LENGTH = {"cwe": 8192, "vt": 3072}  # in bytes; the others have 2,048


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_those_of_the_golden_files(task):
    (question,) = make(task, LENGTH.get(task, 2048), 1, BYTES, MATERIAL)
    golden = (GOLDEN / f"ruler-{task}.txt").read_text(encoding="utf-8")
    assert f"{question.prompt}\n=== {' | '.join(question.references)}\n" == golden


@pytest.mark.parametrize("task", TASKS)
def test_a_reader_scores_everything_within_the_budget_and_a_guesser_nothing(task):
    length = LENGTH.get(task, 2048) + 1000
    questions = make(task, length, 6, BYTES, MATERIAL, reserve=1)
    sizes = [count(BYTES, question.prompt) for question in questions]
    assert max(sizes) + NEW_TOKENS[task] + 1 <= length
    assert min(sizes) + NEW_TOKENS[task] + 1 > 0.9 * length - 200  # and the length is used
    read, _ = ask(
        TextAnswerer(BYTES, read_ruler), BYTES, questions, NEW_TOKENS[task], score_of(task), budget=length - 1
    )
    assert [a.score for a in read] == [1.0] * 6
    wrong = guesser(["0000000", "nothing", "zz-zz"])
    guessed, _ = ask(TextAnswerer(BYTES, wrong), BYTES, questions, NEW_TOKENS[task], score_of(task))
    assert [a.score for a in guessed] == [0.0] * 6


@pytest.mark.parametrize("task", sorted(NIAH))
def test_needles_stand_everywhere_and_are_never_lost(task):
    questions = make(task, 3000, 40, BYTES, MATERIAL)
    for question in questions:
        assert all(f"is: {value}." in question.prompt for value in question.references)
    depths = [question.depth for question in questions]
    several = len(questions[0].references) > 1  # then it is a mean
    assert min(depths) < (0.45 if several else 0.25)
    assert max(depths) > (0.55 if several else 0.75)


def test_needles_and_queries_have_the_published_numbers():
    (several,) = make("niah_multivalue", 3000, 1, BYTES, MATERIAL)
    (keys,) = make("niah_multikey_1", 3000, 1, BYTES, MATERIAL)
    (queries,) = make("niah_multiquery", 3000, 1, BYTES, MATERIAL)
    found = [
        re.findall(r"One of the special magic numbers for (\S+) is: (\d{7})\.", q.prompt)
        for q in (several, keys, queries)
    ]
    assert [len(f) for f in found] == [4, 4, 4]
    assert len({key for key, _ in found[0]}) == 1
    assert {value for _, value in found[0]} == set(several.references)
    assert len(keys.references) == 1
    assert {value for _, value in found[2]} == set(queries.references)
    assert "for all" not in keys.prompt
    assert keys.prompt.startswith("A special magic number is hidden within")
    assert queries.prompt.startswith("Some special magic numbers are hidden within")
    assert ", and " in queries.prompt[-200:]


def test_common_words_are_counted_right():
    (question,) = make("cwe", 8192, 1, BYTES, MATERIAL)
    main = question.prompt[question.prompt.rindex("Below is") :]
    counts = {word: len(re.findall(rf"\. {word}(?= |$)", main, re.MULTILINE)) for word in question.references}
    assert set(counts.values()) == {30}
    assert len(question.references) == 10
    (short,) = make("cwe", 2200, 1, BYTES, MATERIAL)
    main = short.prompt[short.prompt.rindex("Below is") :]
    assert {len(re.findall(rf"\. {word}(?= |$)", main, re.MULTILINE)) for word in short.references} == {6}


def test_long_lists_go_on_with_pairs_of_words():
    question = counting.common_words(80, random.Random(0), WORDS, WORDS.all(), counting.SHORT)
    main = question.prompt[question.prompt.rindex("Below is") :]
    assert len(set(re.findall(r"\d+\. (\S+)", main))) == 80
    with pytest.raises(ValueError, match="shorter length"):
        counting.common_words(5000, random.Random(0), WORDS, WORDS.all(), counting.SHORT)


def test_coded_words_fall_off_with_the_square_of_the_rank():
    (question,) = make("fwe", 6000, 1, BYTES, MATERIAL)
    text = question.prompt[question.prompt.index("coded words. ") + 13 : question.prompt.index("\nQuestion:")].split()
    counts = [text.count(word) for word in ("...", *question.references)]
    size = counts[0] * counting.ZETA_2
    assert counts == pytest.approx([size / rank**2 / counting.ZETA_2 for rank in (1, 2, 3, 4)], abs=1)


def test_every_sample_is_a_function_of_its_index():
    for task in ("niah_single_2", "vt", "fwe", "qa_1"):
        length = LENGTH.get(task, 2048)
        three = make(task, length, 3, BYTES, MATERIAL)
        assert make(task, length, 2, BYTES, MATERIAL) == three[:2]
        assert make(task, length, 3, BYTES, MATERIAL, seed=1) != three
        assert len({question.prompt for question in three}) == 3


def test_any_tokenizer():
    words = WordTokenizer()
    for task in ("niah_single_1", "niah_multikey_3", "vt"):
        questions = make(task, 1024, 2, words, MATERIAL)
        assert all(count(words, q.prompt) + NEW_TOKENS[task] <= 1024 for q in questions)


def test_documents_of_both_kinds_of_files(tmp_path):
    squad = {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": "B is two.",
                        "qas": [{"question": "B?", "answers": [{"text": "two"}], "is_impossible": False}],
                    },
                    {"context": "A is one.", "qas": [{"question": "C?", "answers": [], "is_impossible": True}]},
                ]
            }
        ]
    }
    hotpot = [{"question": "Who?", "answer": "me", "context": [["T", ["One. ", "Two."]], ["S", ["Three."]]]}]
    for name, data in (("squad", squad), ("hotpot", hotpot), ("bad", {"data": [{}]}), ("none", {"data": []})):
        (tmp_path / name).write_text(json.dumps(data), encoding="utf-8")
    library = documents.read(tmp_path / "squad")
    assert library.documents == ("A is one.", "B is two.")
    assert [(q.query, q.answers, q.own, q.related) for q in library.questions] == [("B?", ("two",), (1,), (0,))]
    library = documents.read(tmp_path / "hotpot")
    assert library.documents == ("S\nThree.", "T\nOne. Two.")
    assert library.questions[0].own == (1, 0)
    for name in ("bad", "none"):
        with pytest.raises(ValueError, match=name):
            documents.read(tmp_path / name)


def test_documents_repeat_when_there_are_too_few():
    question = documents.make(LIBRARY, 3, 90, random.Random(1))
    assert question.prompt.count("Document ") == 90
    assert question.prompt.count("Mayor03x") in (2, 3)


def test_scorers_edge_cases():
    question = Question("", ("Alpha", "beta"))
    assert contains_all("ALPHA and nothing", question) == 0.5
    assert contains_any("ALPHA and nothing", question) == 1.0
    assert contains_all("", question) == contains_any("", question) == 0.0
    assert contains_all("alphabet", question) == 0.5  # a substring counts, as published


def test_what_cannot_be_done_is_refused():
    with pytest.raises(ValueError, match="longer length"):
        make("niah_single_1", 300, 1, BYTES, MATERIAL)
    with pytest.raises(ValueError, match="not one of"):
        make("niah", 3000, 1, BYTES, MATERIAL)
    with pytest.raises(ValueError, match="HotpotQA"):
        make("qa_2", 3000, 1, BYTES, Material(WORDS, PROSE))
    (question,) = make("niah_single_1", 2048, 1, BYTES, MATERIAL)
    with pytest.raises(ValueError, match="budget"):
        ask(TextAnswerer(BYTES, read_ruler), BYTES, [question], 128, contains_all, budget=1000)
