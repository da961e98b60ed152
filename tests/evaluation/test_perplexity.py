"""Rows of a corpus, and sums by position against sums by hand."""

import numpy as np
import pytest

from bampath.data import corpus_of
from bampath.evaluation.perplexity import loss_by_position, rows_of
from tests.evaluation.fakes import Oracle

CORPUS = corpus_of([list(range(10, 22)), [7, 8], list(range(30, 35)), [9, *range(40, 50)]])


def test_rows_within_documents_cross_no_border():
    rows = rows_of(CORPUS, 3)
    assert rows.tolist() == [
        [10, 11, 12, 13], [14, 15, 16, 17], [18, 19, 20, 21], [30, 31, 32, 33], [9, 40, 41, 42], [43, 44, 45, 46],
    ]  # fmt: skip
    assert rows.dtype == np.int32
    assert rows_of(CORPUS, 3, limit=2).tolist() == rows[:2].tolist()


def test_rows_of_long_documents_only_and_rows_across():
    assert rows_of(CORPUS, 7, "documents").tolist() == [list(range(10, 18)), [9, *range(40, 47)]]
    joined = [*range(10, 22), *range(30, 35), *range(40, 50)]
    across = rows_of(CORPUS, 8, "across", drop=(7, 8, 9, None))
    assert across.tolist() == [joined[:9], joined[9:18], joined[18:27]]


def test_too_long_rows_are_refused_with_the_longest():
    with pytest.raises(ValueError, match="longest text has 12"):
        rows_of(CORPUS, 12)
    with pytest.raises(ValueError, match="cut"):
        rows_of(CORPUS, 3, "apart")


@pytest.mark.parametrize("batch_tokens", [1, 40, 10**6])
@pytest.mark.parametrize("window", [1, 4, 10])
def test_sums_are_exact_for_any_batch(window, batch_tokens):
    rows = np.random.default_rng(0).integers(0, 50, (7, 11))
    result = loss_by_position(Oracle(50), rows, window, batch_tokens=batch_tokens)
    losses = rows[:, 1:] + np.arange(10)[None, :] / 1024
    pieces = [losses[:, start : start + window] for start in range(0, 10, window)]
    np.testing.assert_allclose(result.loss, [piece.mean() for piece in pieces], rtol=1e-6)
    np.testing.assert_allclose(
        result.standard_error, [piece.mean(axis=1).std(ddof=1) / 7**0.5 for piece in pieces], rtol=1e-5
    )
    assert result.counts.tolist() == [piece.shape[1] for piece in pieces]
    assert result.tokens == 70
    assert result.mean_loss == pytest.approx(losses.mean(), rel=1e-6)
    records = result.rows(case="x")
    assert records[0]["perplexity"] == pytest.approx(np.exp(pieces[0].mean()), rel=1e-5)
    assert [r["end"] for r in records] == np.cumsum(result.counts).tolist()


def test_one_row_has_no_interval_and_a_window_must_fit():
    assert np.isnan(loss_by_position(Oracle(50), np.ones((1, 5), int), 2).standard_error).all()
    with pytest.raises(ValueError, match="window"):
        loss_by_position(Oracle(50), np.ones((1, 5), int), 5)
