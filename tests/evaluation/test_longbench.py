"""LongBench v2 and LongBench-E on files that the tests write: prompts, cuts, groups, scorers as published."""

import difflib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bampath.data import ByteTokenizer
from bampath.evaluation import longbench2, longbench_e
from bampath.evaluation import longbench_scores as scores
from bampath.evaluation.answers import ask
from bampath.evaluation.questions import count
from bampath.evaluation.session import Session
from tests.evaluation.oracles import TextAnswerer, guesser

BYTES = ByteTokenizer()
GOLDEN = Path(__file__).parent / "golden"


def record(index: int, answer: str = "", words: int = 300) -> dict[str, str]:
    context = " ".join(f"Line {i} says {i * index}." for i in range(words))
    return {
        "_id": str(index),
        "question": f" Which letter belongs to {index}? ",
        **{f"choice_{letter}": f"letter {letter}" for letter in "ABCD"},
        "answer": answer or "ABCD"[index % 4],
        "context": f"\n{context}\n",
        "difficulty": ("easy", "hard")[index % 2],
        "length": ("short", "medium", "long")[index % 3],
    }


def test_v2_golden_prompts():
    golden = (GOLDEN / "longbench2.txt").read_text(encoding="utf-8")
    made = [longbench2.make([record(3, words=3)], mode, BYTES, 4096)[0].prompt for mode in ("generate", "likelihood")]
    assert "\n===\n".join(made) + "\n" == golden


@pytest.mark.parametrize("mode", ["generate", "likelihood"])
def test_v2_cuts_the_middle_and_keeps_both_ends(mode):
    new = longbench2.NEW_TOKENS if mode == "generate" else 1
    (whole,) = longbench2.make([record(3)], mode, BYTES, 10**6)
    (cut,) = longbench2.make([record(3)], mode, BYTES, 1500, reserve=1)
    assert dict(whole.facts)["cut"] is False
    assert dict(cut.facts)["cut"] is True
    half = (1500 - new - 1) // 2
    assert cut.prompt == whole.prompt[:half] + whole.prompt[-half:]
    assert count(BYTES, cut.prompt) + new + 1 in (1499, 1500)


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("The correct answer is (B).", "B"),
        ("The correct answer is C", "C"),
        ("**The correct answer is (D)**", "D"),
        ("The correct answer is *(A)*", "A"),
        ("First the correct answer is (A). The correct answer is B and The correct answer is (C)", "C"),
        ("the correct answer is (A)", None),
        ("The correct answer is (E)", None),
        ("A", None),
        ("", None),
    ],
)
def test_v2_finds_the_letter_as_published(answer, letter):
    assert longbench2.extract(answer) == letter


class Letters:
    """A reader whose logits depend on the text that it was given: the letter that it wants gets the most."""

    def __init__(self, want):
        self.want = want

    def logits_at(self, tokens, places):
        logits = np.zeros((*places.shape, BYTES.vocab_size), np.float32)
        for row in range(len(tokens)):
            text = BYTES.decode(tokens[row, : places[row, 0] + 1])
            for column, at in enumerate(places[row]):
                wanted = " " if tokens[row, at] != ord(" ") or column == 0 else self.want(text)
                logits[row, column, ord(wanted)] = 9.0
        return logits


@pytest.mark.parametrize("length", [900, 8000])
def test_v2_likelihood_of_an_oracle_and_of_a_guesser(length):
    records = [record(i) for i in range(24)]
    answers = {r["question"].strip(): r["answer"] for r in records}
    know = lambda text: next(a for q, a in answers.items() if q in text)
    questions = longbench2.make(records, "likelihood", BYTES, length)
    session = Session(TextAnswerer(BYTES, know), Letters(know), BYTES)
    answered = longbench2.by_likelihood(session, questions)
    assert all(a.score == 1 for a in answered)
    groups = longbench2.groups(answered)
    assert {name: len(part) for name, part in groups.items()} == {
        "Overall": 24, "Easy": 12, "Hard": 12, "Short": 8, "Medium": 8, "Long": 8,
    }  # fmt: skip
    always = longbench2.by_likelihood(replace(session, reader=Letters(lambda text: "B")), questions)
    assert sum(a.score for a in always) == 6  # a quarter
    assert "Hard" not in longbench2.groups([answered[0]])


def test_v2_generation_of_an_oracle_and_of_a_guesser():
    records = [record(i) for i in range(100)]
    questions = longbench2.make(records, "generate", BYTES, 2000)
    answers = {r["question"].strip(): r["answer"] for r in records}
    know = lambda text: f"The correct answer is ({next(a for q, a in answers.items() if q in text)})."
    read, _ = ask(TextAnswerer(BYTES, know), BYTES, questions, 128, longbench2.score, budget=2000)
    assert sum(a.score for a in read) == 100
    replies = [f"The correct answer is ({letter})" for letter in "ABCD"]
    guessed, _ = ask(TextAnswerer(BYTES, guesser(replies)), BYTES, questions, 128, longbench2.score, budget=2000)
    assert 8 < sum(a.score for a in guessed) < 42  # 25 ± 4 standard deviations


def test_v2_files(tmp_path):
    for name, text in (
        ("list.json", json.dumps([record(0), record(1)])),
        ("lines.jsonl", "\n".join(json.dumps(record(i)) for i in range(2))),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert longbench2.read(tmp_path / name) == [record(0), record(1)]
    for change, message in (({"answer": "E"}, "answer 'E'"), ({"context": None}, "context")):
        broken = {k: v for k, v in {**record(0), **change}.items() if v is not None}
        (tmp_path / "bad.json").write_text(json.dumps([record(0), broken]), encoding="utf-8")
        with pytest.raises(ValueError, match=rf"record 2 has .*{message}"):
            longbench2.read(tmp_path / "bad.json")


def entry(answers: list[str], length: int = 100, classes: list[str] | None = None) -> dict[str, object]:
    return {"input": "Q?", "context": "Some text. " * 50, "answers": answers, "length": length, "all_classes": classes}


def test_e_golden_prompts():
    golden = (GOLDEN / "longbench_e.txt").read_text(encoding="utf-8")
    short = {**entry(["x"]), "context": "CONTEXT"}
    made = [f"{task}\n{longbench_e.make(task, [short], BYTES, 4096)[0].prompt}\n===\n" for task in longbench_e.TASKS]
    assert "".join(made) == golden


REPLIES = {
    "passage_count": ("12", "There are 12", "13"),
    "passage_retrieval_en": ("Paragraph 7", "Paragraph 7.", "Paragraph 8"),
    "trec": ("Number of something", " Number of something\nNumber", "Date"),
    "lcc": ("return value", "# comment\nreturn value\nmore", "zzz"),
}


@pytest.mark.parametrize("task", longbench_e.TASKS)
def test_e_scores_an_oracle_and_a_wrong_answer(task):
    reference, right, wrong = REPLIES.get(task, ("the quick fox. it ran", "the quick fox. it ran", "nothing alike"))
    classes = ["Number of something", "Date"] if task == "trec" else None
    (question,) = longbench_e.make(task, [entry(["other 5 Paragraph 5", reference], classes=classes)], BYTES, 4096)
    assert longbench_e.score(right, question) == pytest.approx(1, abs=1e-6)
    assert longbench_e.score(wrong, question) < 0.4
    assert longbench_e.score("", question) == 0


def test_e_prompts_leave_room_for_the_answer():
    (question,) = longbench_e.make("qasper", [entry(["x"])], BYTES, 1000, reserve=1)
    assert dict(question.facts)["cut"]
    assert count(BYTES, question.prompt) + longbench_e.TASKS["qasper"].new_tokens + 1 in (999, 1000)
    assert question.prompt.endswith("Question: Q?\n\nAnswer:")


def test_e_runs_by_buckets_of_length(tmp_path):
    lines = [entry(["yes"], length) for length in (100, 3999, 4000, 7999, 8000, 20000)]
    (tmp_path / "qasper_e.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    records = longbench_e.read(tmp_path, "qasper")
    said: list[str] = []
    session = Session(TextAnswerer(BYTES, lambda text: " yes"), None, BYTES, say=said.append)
    longbench_e._add(session, "qasper", 4096, longbench_e.make("qasper", records, BYTES, 4096))
    assert [(row["task"], row["samples"], row["accuracy"]) for row in session.rows] == [
        ("qasper 0-4k", 2, 1.0), ("qasper 4-8k", 2, 1.0), ("qasper 8k+", 2, 1.0), ("qasper", 6, 1.0),
    ]  # fmt: skip
    with pytest.raises(FileNotFoundError, match="trec"):
        longbench_e.read(tmp_path, "trec")
    (tmp_path / "trec.jsonl").write_text('{"input": ""}', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1 has no field 'context'"):
        longbench_e.read(tmp_path, "trec")


def test_question_answering_is_f1_of_words():
    f1 = scores.question_answering
    assert f1("The  answer, is: forty-two!", "answer is fortytwo") == 1
    assert f1("a b", "the an") == 0  # "a", "the" and "an" are no words; "b" alone remains
    assert f1("red red blue", "red green") == pytest.approx(2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))
    assert f1("", "x") == f1("x", "") == 0


# Computed with the package rouge 1.0.1: Rouge().get_scores([answer], [reference])[0]["rouge-l"]["f"].
ROUGE = json.loads((GOLDEN / "rouge.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("index", range(len(ROUGE)))
def test_summaries_score_as_the_published_package_does(index):
    answer, reference, value = ROUGE[index]
    assert scores.summary(answer, reference) == pytest.approx(value, abs=1e-9)


def test_empty_summaries_score_nothing():
    assert scores.summary("", "x") == scores.summary("...", "x") == scores.summary("x", ".") == 0


def test_classification_as_published():
    classes = ["Date", "Other date", "Number", "Other number of things"]
    one = lambda answer, reference: scores.classification(answer, reference, classes)
    assert one("It is a Date", "Date") == 1
    assert one("Date or Number", "Date") == 0.5
    assert one("nothing", "Date") == 0
    assert one("Number", "Date") == 0
    # Names inside the right one's name do not count, but the name after one that is dropped is not looked at.
    nested = ["ab", "b", "c", "xabc"]
    assert scores.classification("xabc", "xabc", nested) == pytest.approx(1 / 2)
    assert scores.classification("c xabc", "xabc", ["c", "z", "xabc"]) == 1


def test_counting_as_published():
    assert scores.count("12 or 13 or 12", "12") == pytest.approx(2 / 3)
    assert scores.count("012", "12") == scores.count("no number", "12") == 0
    assert scores.retrieval("Paragraph 3 (not 4)", "Paragraph 3") == 0.5
    with pytest.raises(ValueError, match="names no paragraph"):
        scores.retrieval("3", "3")


def test_code_as_published():
    assert scores.code("\n\n# no\n// no\n`no`\nreturn x\nreturn y", "return x") == 1
    assert scores.code("# only\n", "return x") == 0
    near = difflib.SequenceMatcher(None, "return y", "return x").ratio()
    assert scores.code("return y", "return x") == round(100 * near) / 100
