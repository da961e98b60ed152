"""Packing: every token once, no target across a border, positions that restart. Token ids are their own addresses."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bampath.data.config import DataConfig
from bampath.data.corpus import TokenCorpus, corpus_of
from bampath.data.loader import BatchSource
from bampath.data.packing import gather, make_batch, plan_rows
from bampath.data.tokenizer import ByteTokenizer

PAD = ByteTokenizer.pad_id


def numbered(lengths: list[int]) -> TokenCorpus:
    """A corpus whose token at stream position p is 1000 + p, so that a batch shows where each token came from."""
    starts = np.cumsum([0, *lengths])
    return corpus_of([range(1000 + a, 1000 + b) for a, b in pairwise(starts.tolist())])


def document_of(corpus: TokenCorpus, token: int) -> int:
    return int(np.searchsorted(corpus.offsets, token - 1000, side="right")) - 1


def check_rows(corpus: TokenCorpus, batch: dict[str, np.ndarray]) -> tuple[list[int], list[int]]:
    """Check each row by walking over it; returns all inputs and all scored targets."""
    inputs, scored = [], []
    for row in range(len(batch["tokens"])):
        tokens, targets, weights, segments, positions = (
            batch[name][row].tolist() for name in ("tokens", "targets", "weights", "segment_ids", "positions")
        )
        previous, segment, position = None, -1, 0
        for token, target, weight, seg, pos in zip(tokens, targets, weights, segments, positions, strict=True):
            if seg < 0:
                assert (token, target, weight, seg, pos) == (PAD, PAD, 0.0, -1, 0)
                previous = "padding"
                continue
            assert previous != "padding", "padding stands at the end only"
            document = document_of(corpus, token)
            if previous is None or token == 1000 + corpus.offsets[document] or token != previous + 1:
                segment, position = segment + 1, 0
            previous = token
            assert (seg, pos) == (segment, position)
            position += 1
            inputs.append(token)
            last = token - 1000 == corpus.offsets[document + 1] - 1
            assert weight == (0.0 if last else 1.0)
            assert target == (PAD if last else token + 1)
            if weight:
                scored.append(target)
    return inputs, scored


lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(
    lengths=lengths_of_documents,
    length=st.integers(1, 20),
    batch_size=st.integers(1, 5),
    packing=st.sampled_from(["split", "whole"]),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 1000),
    shuffle=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_an_epoch_holds_every_token_exactly_once(lengths, length, batch_size, packing, epoch, seed, shuffle):
    corpus = numbered(lengths)
    config = DataConfig(
        sequence_length=length, batch_size=batch_size, packing=packing, seed=seed, shuffle=shuffle, workers=0
    )
    source = BatchSource(config, corpus, ByteTokenizer())
    places = epoch * source.plan.rows + np.arange(source.plan.rows)
    tokens, borders, counts = source.corpus_rows(places)
    inputs, scored = check_rows(corpus, make_batch(tokens, borders, counts, None, PAD, True))
    everything = 1000 + np.arange(len(corpus.tokens))
    firsts = set((1000 + corpus.offsets[:-1]).tolist())
    assert sorted(inputs) == everything.tolist()
    assert sorted(scored) == [t for t in everything.tolist() if t not in firsts]


@given(lengths=lengths_of_documents, length=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_whole_documents_are_cut_only_if_longer_than_a_row(lengths, length):
    corpus = numbered(lengths)
    plan = plan_rows(corpus.offsets, length, "whole")
    starts, counts = plan.spans(np.arange(plan.rows), np.zeros(plan.rows, np.int64))
    assert counts.min() >= 1
    assert counts.max() <= length
    assert starts[0] == 0
    assert (starts[1:] == (starts + counts)[:-1]).all()
    inner = set(starts.tolist()) - set(corpus.offsets.tolist())
    for start in inner:
        begin = max(o for o in corpus.offsets.tolist() if o < start)
        assert (start - begin) % length == 0
        assert lengths[corpus.offsets.tolist().index(begin)] > length


def test_the_picture_in_the_docstring():
    corpus = numbered([5, 3, 7])
    plan = plan_rows(corpus.offsets, 4, "split")
    tokens, borders = gather(corpus, *plan.spans(np.arange(plan.rows), np.zeros(plan.rows, np.int64)), 5, PAD)
    batch = make_batch(tokens, borders, np.array([4, 4, 4, 3]), None, PAD, True)
    assert (batch["tokens"] - 1000)[:3].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert batch["targets"][0].tolist() == [1001, 1002, 1003, 1004]
    assert batch["weights"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["segment_ids"].tolist() == [[0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, -1]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 0]]
    assert {name: array.dtype.name for name, array in batch.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "weights": "float32",
        "segment_ids": "int32",
        "positions": "int32",
    }


def test_without_document_mask_a_row_is_one_segment_and_the_loss_still_stops_at_borders():
    corpus = numbered([5, 3, 7])
    masked, open_rows = (
        BatchSource(
            DataConfig(sequence_length=6, batch_size=3, shuffle=False, document_mask=mask), corpus, ByteTokenizer()
        )[0]
        for mask in (True, False)
    )
    np.testing.assert_array_equal(masked["weights"], open_rows["weights"])
    np.testing.assert_array_equal(masked["targets"], open_rows["targets"])
    assert open_rows["segment_ids"].tolist() == [[0] * 6, [0] * 6, [0] * 3 + [-1] * 3]
    assert open_rows["positions"].tolist() == [[0, 1, 2, 3, 4, 5]] * 2 + [[0, 1, 2, 0, 0, 0]]


def test_epochs_of_split_rows_cut_documents_at_different_places():
    corpus = numbered([400])
    source = BatchSource(DataConfig(sequence_length=16, batch_size=5, seed=1), corpus, ByteTokenizer())
    cuts = []
    for epoch in range(3):
        tokens, _, _ = source.corpus_rows(epoch * source.plan.rows + np.arange(source.plan.rows))
        cuts.append({int(t) % 16 for t in tokens[:, 0]})
    assert cuts[0] != cuts[1]
    assert cuts[1] != cuts[2]


def test_a_corpus_needs_documents():
    with pytest.raises(ValueError, match="at least one document"):
        corpus_of([])
    with pytest.raises(ValueError, match=r"lengths \[2, 0\]"):
        corpus_of([[1, 2], []])
