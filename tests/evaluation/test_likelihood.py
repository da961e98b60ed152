"""Likelihoods by hand, and of real models whatever the batch, the padding, the order and the company."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath import config as configs
from bampath.evaluation.likelihood import Pair, likelihoods, losses_of
from bampath.evaluation.reader import ModelReader
from bampath.model import LM
from bampath.params import unbox
from tests.evaluation.fakes import Bigrams

SMALL = ("model.dim=16", "model.heads=2", "model.mlp_dim=32", "model.vocab_size=64", "model.layers=1")
# p(next | last) of three symbols, to multiply by hand.
TABLE = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]])


@pytest.mark.parametrize("batch_tokens", [1, 130, 10**6])
def test_by_hand(batch_tokens):
    reader = Bigrams(TABLE)
    pairs = [Pair((0,), (0,)), Pair((0,), (1, 1, 2)), Pair((2, 0, 1), (1,)), Pair((0, 1), (0,)), Pair((0,), (1, 1, 1))]
    want = [0.5, 0.25 * 0.8 * 0.1, 0.8, 0.1, 0.25 * 0.8 * 0.8]
    found = likelihoods(reader, pairs, batch_tokens)
    assert [f.log_probability for f in found] == pytest.approx([math.log(p) for p in want])
    assert [f.greedy for f in found] == [True, False, True, False, False]
    assert losses_of(reader, pairs, batch_tokens) == pytest.approx([-math.log(p) for p in want])


def test_choices_of_one_question_share_a_row():
    reader = Bigrams(TABLE)
    likelihoods(reader, [Pair((0, 1), (c,)) for c in range(3)], 64)
    assert reader.rows == 1
    found = likelihoods(reader, [Pair((0, 1), (c,)) for c in (1, 1, 0)], 64)
    assert [f.greedy for f in found] == [True, True, False]


@pytest.fixture(scope="module", params=["rope", "bam(init=slopes)+ssmax"])
def small(request):
    model = LM(configs.get("tiny", *SMALL, f"position={request.param}").model)
    return model, unbox(model.init(jax.random.key(1), jnp.zeros((1, 2), jnp.int32))["params"])


def test_the_company_does_not_matter(small):
    model, params = small
    draw = np.random.default_rng(0)
    some = lambda n: tuple(draw.integers(0, 64, n).tolist())
    pairs = [Pair(some(a), some(b)) for a, b in itertools.product((1, 5, 70), (1, 8))]
    forward = jax.jit(lambda tokens: model.apply({"params": params}, tokens))
    alone = []
    for pair in pairs:  # the definition, without any of the code under test
        tokens = np.array([[*pair.context, *pair.continuation, *[63] * 80]], np.int32)[:, :80]
        ids = list(pair.continuation)
        first = len(pair.context) - 1
        logits = np.asarray(forward(tokens), np.float64)[0, first : first + len(ids)]
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        alone.append((float(log_p[range(len(ids)), ids].sum()), logits.argmax(axis=-1).tolist() == ids))
    for order, batch_tokens, chunk in ((range(6), 1, 512), (draw.permutation(6), 600, 32)):
        reader = ModelReader(model, params, chunk)
        shuffled = [pairs[i] for i in order]
        found = likelihoods(reader, shuffled, batch_tokens)
        np.testing.assert_allclose([f.log_probability for f in found], [alone[i][0] for i in order], atol=1e-5)
        assert [f.greedy for f in found] == [alone[i][1] for i in order]
        losses = losses_of(reader, shuffled, batch_tokens)
        np.testing.assert_allclose(losses, [-alone[i][0] for i in order], atol=1e-5)


@pytest.mark.parametrize("pair", [Pair((), (1,)), Pair((1,), ())])
def test_empty_parts_are_refused(pair):
    with pytest.raises(ValueError, match="at least one token"):
        likelihoods(Bigrams(TABLE), [pair], 10)
