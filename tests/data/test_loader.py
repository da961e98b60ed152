"""The loader: one order for any number of workers and processes, resume in O(1), refusal of another stream."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from bampath.data import ByteTokenizer, DataConfig, RetrievalOptions, corpus_of, make_loader, validation_batches
from bampath.data.corpus import TokenCorpus
from bampath.data.loader import BatchSource
from bampath.data.packing import Batch

RETRIEVAL = RetrievalOptions(share=0.25, kind="brief", min_length=40, answer_weight=3.0)
CONFIG = DataConfig(sequence_length=96, batch_size=8, seed=11, retrieval=RETRIEVAL, workers=0)


@pytest.fixture(scope="module")
def corpus() -> TokenCorpus:
    rng = np.random.default_rng(0)
    return corpus_of([[256, *rng.integers(97, 123, n).tolist(), 257] for n in rng.integers(5, 300, 60)])


def assert_equal(a: Batch, b: Batch) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def first(config: DataConfig, corpus: TokenCorpus, steps: int, **kwargs: np.ndarray) -> list[Batch]:
    with make_loader(config, corpus=corpus, **kwargs) as loader:
        return [next(loader) for _ in range(steps)]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_order(corpus: TokenCorpus, workers: int):
    expected = first(CONFIG, corpus, 12)
    for a, b in zip(expected, first(dataclasses.replace(CONFIG, workers=workers), corpus, 12), strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("shares", [[range(4), range(4, 8)], [range(0, 8, 2), [1, 3, 7], [5]], [range(8)] * 2])
def test_processes_make_their_rows_of_one_global_batch(corpus: TokenCorpus, shares: list):
    whole = first(CONFIG, corpus, 5)
    for share in shares:
        mine = first(CONFIG, corpus, 5, rows=np.asarray(share))
        for expected, got in zip(whole, mine, strict=True):
            assert_equal({name: array[list(share)] for name, array in expected.items()}, got)


def test_the_batch_is_a_function_of_seed_and_step(corpus: TokenCorpus):
    with make_loader(CONFIG, corpus=corpus) as loader:
        batches = [next(loader) for _ in range(4)]
        assert loader.step == 4
        assert_equal(loader.batch_at(2), batches[2])
        assert loader.step == 4
    other = first(dataclasses.replace(CONFIG, seed=12), corpus, 1)[0]
    assert (other["tokens"] != batches[0]["tokens"]).any()


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_continues_exactly(corpus: TokenCorpus, workers: int):
    config = dataclasses.replace(CONFIG, workers=workers)
    uninterrupted = first(config, corpus, 9)
    with make_loader(config, corpus=corpus) as loader:
        for _ in range(5):
            next(loader)
        state = json.loads(json.dumps(loader.state()))
    with make_loader(config, corpus=corpus) as loader:
        next(loader)  # restoring also works in the middle of another iteration
        loader.restore(state)
        for expected in uninterrupted[5:]:
            assert_equal(next(loader), expected)


def test_resume_at_step_one_million_makes_no_batch_before_it(corpus: TokenCorpus, monkeypatch: pytest.MonkeyPatch):
    """But for the few that a worker may have begun with; how long it takes is for `bampath.data.benchmark` to say."""
    made, make = list[int](), BatchSource.__getitem__
    monkeypatch.setattr(BatchSource, "__getitem__", lambda self, step: made.append(step) or make(self, step))
    config = dataclasses.replace(CONFIG, workers=1)
    with make_loader(config, corpus=corpus) as loader:
        loader.restore({**loader.state(), "step": 10**6})
        batch = next(loader)
        assert sum(step < 10**6 for step in made) <= 2 * config.prefetch
        assert loader.step == 10**6 + 1
        assert_equal(batch, loader.batch_at(10**6))


def test_resume_with_another_number_of_processes(corpus: TokenCorpus):
    expected = first(CONFIG, corpus, 4)[3]
    with make_loader(CONFIG, corpus=corpus, rows=np.arange(2, 4)) as loader:
        for _ in range(3):
            next(loader)
        state = loader.state()
    with make_loader(CONFIG, corpus=corpus, rows=np.arange(4, 8)) as loader:
        loader.restore(state)
        assert_equal(next(loader), {name: array[4:] for name, array in expected.items()})


def test_a_state_of_another_stream_is_refused_with_every_difference(corpus: TokenCorpus):
    with make_loader(CONFIG, corpus=corpus) as loader:
        state = loader.state()
    other = corpus_of([[1, 2, 3]])
    changed = dataclasses.replace(
        CONFIG, seed=5, batch_size=4, retrieval=dataclasses.replace(RETRIEVAL, digits=4), packing="whole"
    )
    with make_loader(changed, corpus=other) as loader:
        with pytest.raises(ValueError, match="cannot resume the data stream") as error:
            loader.restore(state)
        text = str(error.value)
        assert f"corpus: saved {corpus.fingerprint!r}, now {other.fingerprint!r}" in text
        for line in ("seed: saved 11, now 5", "batch_size: saved 8, now 4", "retrieval.digits: saved 5, now 4"):
            assert line in text
        assert "packing: saved 'split', now 'whole'" in text
        assert "tokenizer" not in text
        assert loader.step == 0
        with pytest.raises(ValueError, match="version 99; this code reads version 1"):
            loader.restore({**state, "version": 99})
        with pytest.raises(ValueError, match="step=-1"):
            loader.restore({**loader.state(), "step": -1})


def test_another_tokenizer_is_refused(corpus: TokenCorpus):
    class Other(ByteTokenizer):
        fingerprint = "other"

    with make_loader(CONFIG, corpus=corpus) as loader:
        state = loader.state()
    loader = make_loader(CONFIG, corpus=corpus, tokenizer=Other())
    with loader, pytest.raises(ValueError, match="tokenizer: saved 'bytes-259-v1', now 'other'"):
        loader.restore(state)


def test_workers_and_prefetch_may_change_between_save_and_resume(corpus: TokenCorpus):
    with make_loader(CONFIG, corpus=corpus) as loader:
        next(loader)
        state = loader.state()
    with make_loader(dataclasses.replace(CONFIG, workers=2, prefetch=1), corpus=corpus) as loader:
        loader.restore(state)
        assert_equal(next(loader), first(CONFIG, corpus, 2)[1])


@pytest.mark.parametrize("rows", [[], [0, 0], [3, 1], [-1, 2], [7, 8], [[0, 1]]])
def test_rows_that_a_batch_does_not_have_are_refused(corpus: TokenCorpus, rows: list):
    with pytest.raises(ValueError, match=r"must ascend within \[0, batch_size=8\)"):
        make_loader(CONFIG, corpus=corpus, rows=np.asarray(rows))


@pytest.mark.parametrize("batch_size", [1, 4, 64])
@pytest.mark.parametrize("count", [1, 4])
def test_validation_scores_every_token_once(corpus: TokenCorpus, batch_size: int, count: int):
    config = dataclasses.replace(CONFIG, batch_size=batch_size * count, sequence_length=64)
    per_process = [
        list(validation_batches(config, corpus=corpus, rows=np.arange(i, batch_size * count, count)))
        for i in range(count)
    ]
    assert len({len(batches) for batches in per_process}) == 1
    everything = [batch for batches in per_process for batch in batches]
    assert {batch["tokens"].shape for batch in everything} == {(batch_size, 64)}
    assert sum(batch["weights"].sum() for batch in everything) == len(corpus.tokens) - corpus.documents
    assert sum((batch["segment_ids"] >= 0).sum() for batch in everything) == len(corpus.tokens)
    scored = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in everything])
    wanted = np.concatenate([corpus.document(i)[1:] for i in range(corpus.documents)])
    assert sorted(scored.tolist()) == sorted(wanted.tolist())


def test_validation_can_be_shortened(corpus: TokenCorpus):
    assert len(list(validation_batches(CONFIG, batches=2, corpus=corpus))) == 2


def test_retrieval_rows_have_their_share_and_leave_the_corpus_whole(corpus: TokenCorpus):
    steps = 40
    batches = first(CONFIG, corpus, steps)
    heavy = np.concatenate([(batch["weights"] == 3).any(axis=1) for batch in batches])
    assert heavy.sum() == steps * 8 / 4
    assert [int(b.sum()) for b in heavy.reshape(steps, 8)] == [2] * steps
    plain = first(dataclasses.replace(CONFIG, retrieval=RetrievalOptions()), corpus, 30)
    rows = np.concatenate([batch["tokens"] for batch in batches])[~heavy]
    np.testing.assert_array_equal(rows[: 30 * 8], np.concatenate([batch["tokens"] for batch in plain]))


def test_the_default_corpus_end_to_end():
    with make_loader(DataConfig(sequence_length=256, batch_size=4, workers=1)) as loader:
        batch = next(loader)
        assert batch["tokens"].shape == (4, 256)
        assert loader.source.corpus.documents == 244
        text = loader.source.tokenizer.decode(batch["tokens"].ravel().tolist())
        assert sum(word in text for word in (" the ", " of ", " and ")) == 3


def test_no_jax_backend_is_started_by_loading():
    """The package needs no JAX at all; grain imports it, but neither loader nor workers may start a backend."""
    code = """
import sys
from bampath.data import DataConfig, corpus_of, make_loader
assert "jax" not in sys.modules and "grain" not in sys.modules
with make_loader(DataConfig(sequence_length=8, batch_size=2, workers=2), corpus=corpus_of([list(range(99))])) as loader:
    next(loader)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
print("clean")
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "clean\n", done.stderr
