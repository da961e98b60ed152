"""Retrieval documents: the protocol's words, lengths, depths and weights, as pure functions of (seed, index)."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bampath.data import WORDINGS, ByteTokenizer, RetrievalOptions, corpus_of
from bampath.data.mixing import RetrievalRows
from bampath.data.packing import make_batch
from bampath.data.retrieval import KINDS, document, draw_length

PAD = ByteTokenizer.pad_id
TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
CORPUS = corpus_of([[256, *b"abcdefgh" * 40, 257], [256, *b"ijklmnop" * 60, 257]])


def rows_of(options: RetrievalOptions, length: int = 600, seed: int = 0) -> RetrievalRows:
    return RetrievalRows(options, CORPUS, ByteTokenizer(), length, seed)


def text_of(ids: np.ndarray) -> str:
    return ByteTokenizer().decode(ids.tolist())


def test_the_default_is_the_protocol_word_for_word():
    for index in range(20):
        made = document(RetrievalOptions(), 1, index, 700, len)
        text = "".join(piece.text for piece in made.pieces)
        pattern = (
            re.escape(TASK)
            + f"(?P<before>({re.escape(NOISE)})*)"
            + r"The pass key is (?P<key>[1-9]\d{4})\. Remember it\. (?P=key) is the pass key\."
            + f"(?P<after>({re.escape(NOISE)})*)"
            + r"What is the pass key\? The pass key is (?P=key)"
        )
        found = re.fullmatch(pattern, text)
        assert found, text
        assert found["key"] == made.key
        before, after = (len(found[name]) // len(NOISE) for name in ("before", "after"))
        fixed = len(text) - len(NOISE) * (before + after)
        assert before + after == (700 - fixed) // len(NOISE)
        assert made.depth == before / (before + after)
        assert [piece.text for piece in made.pieces if piece.answer] == [f" {made.key}"]


@given(
    kind=st.sampled_from([*KINDS, "mixed"]),
    filler=st.sampled_from(["noise", "text", "mixed"]),
    depth=st.sampled_from(["uniform", "start", "end"]),
    digits=st.integers(1, 9),
    needles=st.integers(1, 4),
    low=st.integers(1, 300),
    law=st.sampled_from(["uniform", "log"]),
    index=st.integers(0, 10**9),
)
@settings(max_examples=100, deadline=None)
def test_documents_fit_and_can_be_answered(kind, filler, depth, digits, needles, low, law, index):
    options = RetrievalOptions(
        kind=kind,
        filler=filler,
        depth=depth,
        digits=digits,
        needles=needles,
        min_length=low,
        length_law=law,
        answer_weight=2.0,
        text_weight=0.5,
    )
    rows = rows_of(options)
    ids, weights = rows.document(index)
    assert len(ids) == len(weights) <= 601
    answer = text_of(ids[weights == 2.0])
    assert text_of(ids).endswith(answer)
    assert set(weights.tolist()) == {0.5, 2.0}
    assert text_of(ids[weights == 0.5]).count(answer.strip()) >= 1
    again = rows_of(options).document(index)
    np.testing.assert_array_equal(ids, again[0])


def test_text_filler_makes_exact_lengths_out_of_the_corpus():
    rows = rows_of(RetrievalOptions(kind="brief", filler="text", min_length=400, max_length=400))
    for index in range(10):
        ids, _ = rows.document(index)
        assert len(ids) == 400
        assert not np.isin(ids, [256, 257]).any()
        rest = re.sub(r"The pass key is \d{5}\.|The pass key is \d{5}$", "", text_of(ids))
        assert set(rest) <= set("abcdefghijklmnop")


def test_lengths_cover_their_range_by_their_law():
    options = RetrievalOptions(min_length=64, max_length=1024)
    uniform = [draw_length(options, 2048, 0, i) for i in range(3000)]
    log = [draw_length(dataclasses.replace(options, length_law="log"), 2048, 0, i) for i in range(3000)]
    for lengths in (uniform, log):
        assert min(lengths) < 70
        assert 1000 < max(lengths) <= 1024
    assert abs(np.median(uniform) - 544) < 30
    assert abs(np.median(log) - 256) < 20
    assert draw_length(options, 32, 0, 0) == 32
    assert len({draw_length(RetrievalOptions(), 128, 0, i) for i in range(2000)}) == 65


def test_depths():
    for rule, expected in (("start", {0.0}), ("end", {1.0})):
        made = {document(RetrievalOptions(depth=rule), 0, i, 2000, len).depth for i in range(20)}
        assert made == expected
    uniform = [document(RetrievalOptions(), 0, i, 4000, len).depth for i in range(600)]
    assert abs(np.mean(uniform) - 0.5) < 0.05
    assert min(uniform) == 0.0
    assert max(uniform) == 1.0


def test_labelled_documents_ask_for_one_of_several_keys():
    asked = set()
    for index in range(40):
        made = document(RetrievalOptions(kind="labelled", needles=4), 3, index, 900, len)
        text = "".join(piece.text for piece in made.pieces)
        keys = dict(re.findall(r"The pass key of the (\w+) is (\d{5})\.", text))
        assert len(keys) == 4
        name, answer = re.search(r"The pass key of the (\w+) is (\d{5})$", text).groups()
        assert keys[name] == answer == made.key
        asked.add(list(keys).index(name))
    assert asked == {0, 1, 2, 3}


def test_copy_documents_repeat_random_digits():
    made = document(RetrievalOptions(kind="copy"), 0, 5, 200, len)
    text = "".join(piece.text for piece in made.pieces)
    head, tail = re.fullmatch(r"Repeat:((?: \d)+) Again:((?: \d)+)", text).groups()
    assert head == tail
    assert 196 <= len(text) <= 200


def test_seeds_and_indices_give_other_documents():
    keys = {document(RetrievalOptions(), seed, index, 400, len).key for seed in range(10) for index in range(10)}
    assert len(keys) > 95


@pytest.mark.parametrize("isolated", [True, False])
def test_rows_end_in_a_document_behind_real_text(isolated: bool):
    options = RetrievalOptions(kind="brief", max_length=300, answer_weight=5.0, text_weight=0.25, isolated=isolated)
    rows = rows_of(options, length=400)
    tokens, borders, counts, loss = rows.rows(np.arange(6))
    batch = make_batch(tokens, borders, counts, loss, PAD, True)
    for row in range(6):
        ids, weights = rows.document(row)
        n = len(ids)
        assert (batch["targets"][row, -n + 1 :] == ids[1:]).all()
        assert (batch["weights"][row, -n + 1 :] == weights[1:]).all()
        assert text_of(batch["targets"][row][batch["weights"][row] == 5.0]) == text_of(ids[weights == 5.0])
        begin = 400 - n + 1
        assert batch["positions"][row, begin] == (0 if isolated else batch["positions"][row, begin - 1] + 1)
        assert (batch["segment_ids"][row, begin] == batch["segment_ids"][row, begin - 1]) is np.bool_(not isolated)
        assert batch["weights"][row, begin - 1] == (0.0 if isolated else 0.25)
        assert set(text_of(batch["tokens"][row, :begin])) <= set("abcdefghijklmnop")


def test_rows_with_padding_instead_of_text():
    rows = rows_of(RetrievalOptions(kind="brief", max_length=200, front="pad"), length=400)
    tokens, borders, counts, loss = rows.rows(np.arange(4))
    batch = make_batch(tokens, borders, counts, loss, PAD, True)
    for row in range(4):
        ids, _ = rows.document(row)
        n = len(ids) - 1
        assert (batch["tokens"][row, :n] == ids[:-1]).all()
        assert (batch["weights"][row] > 0).sum() == n
        assert (batch["segment_ids"][row] == [0] * n + [-1] * (400 - n)).all()


def test_a_row_must_hold_the_shortest_document():
    with pytest.raises(ValueError, match=r"retrieval\.kind='passkey' needs 249 tokens with the tokenizer bytes .* 129"):
        rows_of(RetrievalOptions(), length=128)
    assert len(rows_of(RetrievalOptions(), length=248).document(0)[0]) == 249
    with pytest.raises(ValueError, match="the corpus holds only BOS and EOS"):
        RetrievalRows(RetrievalOptions(filler="text"), corpus_of([[256, 257]]), ByteTokenizer(), 600, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.5}, r"retrieval\.share=1\.5 must be between 0 and 1"),
        ({"share": 1e-5}, "read to three digits"),
        ({"kind": "haystack"}, r"retrieval\.kind='haystack' is not one of passkey, brief, labelled, copy, mixed"),
        ({"min_length": 0}, "min_length=0"),
        ({"min_length": 100, "max_length": 50}, r"max_length=50 is below min_length=100"),
        ({"digits": 0}, r"digits=0 must be between 1 and 18"),
        ({"needles": 99}, "needles=99 must be between 1 and"),
        ({"answer_weight": -1.0}, "must not be negative"),
        ({"filler": "essay"}, r"retrieval\.filler='essay' is not one of noise, text, mixed"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        RetrievalOptions(**options)  # type: ignore[arg-type]


def test_wordings_have_the_places_that_they_need():
    for wording in WORDINGS.values():
        assert "{key}" in wording.needle
        assert "{key}" in wording.answer
        assert wording.question
