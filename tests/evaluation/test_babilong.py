"""BABILong: stories, prompts of exact length, the published comparison, a reader and a guesser."""

import re
from pathlib import Path

import pytest

from bampath.data import ByteTokenizer
from bampath.evaluation.answers import ask
from bampath.evaluation.babilong import NEW_TOKENS, Story, find_file, make, read_stories, score
from bampath.evaluation.babilong_prompts import LABELS, PROMPTS
from bampath.evaluation.questions import Question, count
from tests.evaluation.fakes import WordTokenizer
from tests.evaluation.oracles import PROSE, TextAnswerer, guesser, read_places, write_babi

BYTES = ByteTokenizer()
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def stories(tmp_path):
    return read_stories(find_file(write_babi(tmp_path / "babi"), "qa1"))


def test_every_question_is_a_story_without_the_questions_before(stories):
    assert [story.answer for story in stories] == ["bathroom", "hallway", "kitchen", "office"]
    assert stories[1] == Story(
        (
            "Mary moved to the bathroom.",
            "John went to the hallway.",
            "Daniel went back to the hallway.",
            "Sandra moved to the garden.",
        ),
        "Where is Daniel?",
        "hallway",
    )
    assert stories[2].facts[0] == "Sandra travelled to the office."


def test_golden_prompts(stories):
    text = ""
    for task in PROMPTS:
        (question,) = make(task, 2600, 1, BYTES, stories[:1], PROSE)
        text += f"{question.prompt}\n=== {task}: {question.references[0]}\n"
    assert text == (GOLDEN / "babilong.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("length", [0, 2200, 4000])
def test_a_reader_scores_everything_and_a_guesser_about_a_sixth(stories, length):
    questions = make("qa1", length, 120, BYTES, stories, PROSE, reserve=1)
    if length:
        assert all(length - 60 < count(BYTES, q.prompt) + NEW_TOKENS + 1 <= length for q in questions)
    read, _ = ask(TextAnswerer(BYTES, read_places), BYTES, questions, 99, score)
    assert all(a.score == 1 for a in read)
    guessed, _ = ask(TextAnswerer(BYTES, guesser(LABELS["qa1"])), BYTES, questions, NEW_TOKENS, score)
    assert 0.03 < sum(a.score for a in guessed) / 120 < 0.33  # 1/6 ± 4 standard deviations


def test_facts_stay_in_order_and_none_is_lost(stories):
    for question in make("qa1", 3000, 30, BYTES, stories, PROSE):
        context = question.prompt[question.prompt.index("<context>") :]
        (story,) = [s for s in stories if s.question == dict(question.facts)["question"]]
        places = [context.index(fact) for fact in story.facts]
        assert places == sorted(places)
        assert 0 <= question.depth <= 1


def test_background_fills_the_length_exactly(stories):
    words = WordTokenizer()
    (question,) = make("qa1", 1024, 1, words, stories[2:3], PROSE)
    context = re.search(r"<context>\n(.*)\n</context>", question.prompt, re.DOTALL)[1]
    assert count(words, context) == 1024 - 300  # the margin is the binding limit with whole words as tokens


def test_prompts_are_functions_of_their_index(stories):
    three = make("qa1", 2200, 3, BYTES, stories, PROSE)
    assert make("qa1", 2200, 2, BYTES, stories, PROSE) == three[:2]
    assert make("qa1", 2200, 3, BYTES, stories, PROSE, seed=7) != three


@pytest.mark.parametrize(
    ("task", "question", "target", "answer", "right"),
    [
        ("qa1", "Where is Mary?", "kitchen", "The most recent location of Mary is KITCHEN.", 1),
        ("qa1", "Where is Mary?", "kitchen", "the kitchen or the garden.", 0),
        ("qa1", "Where is Mary?", "kitchen", "nowhere. kitchen", 0),
        ("qa1", "Where is Mary?", "kitchen", "kitchen. garden", 1),
        ("qa1", "Where is Mary?", "kitchen", "kitchen<example>garden", 1),
        ("qa1", "Where is Mary?", "kitchen", "kitchen <context> garden", 1),
        ("qa1", "Where is Mary?", "kitchen", "kitchen Question: the garden", 0),  # that cut never fires
        ("qa1", "Where is Mary?", "kitchen", "", 0),
        ("qa3", "Where was the apple before the kitchen?", "garden", "Before the kitchen it was in the garden", 1),
        ("qa5", "What did Fred give to Bill?", "apple", "Fred gave Bill the apple", 1),
        ("qa5", "Who gave the milk?", "Fred", "fred", 1),
        ("qa5", "Who gave the milk?", "Fred", "Fred to Jeff", 0),
    ],
)
def test_published_comparison(task, question, target, answer, right):
    asked = Question("", (target,), None, (("task", task), ("question", question)))
    assert score(answer, asked) == right


def test_what_cannot_be_done_is_refused(stories, tmp_path):
    with pytest.raises(ValueError, match="longer length"):
        make("qa1", 900, 1, BYTES, stories, PROSE)
    with pytest.raises(FileNotFoundError, match="qa2"):
        find_file(tmp_path, "qa2")
    (tmp_path / "bad.txt").write_text("no number\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1"):
        read_stories(tmp_path / "bad.txt")
