"""The reader of real models: one forward, streamed pieces and any batch give the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath import config as configs
from bampath.evaluation import passkey, perplexity
from bampath.evaluation.reader import ModelReader
from bampath.model import LM
from bampath.params import unbox
from tests.evaluation.fakes import WordTokenizer

SMALL = ("model.dim=16", "model.heads=2", "model.mlp_dim=32", "model.vocab_size=256", "model.layers=1")


@pytest.fixture(scope="module", params=["bam(init=slopes)+ssmax", "sinusoidal"])
def small(request):
    model = LM(configs.get("tiny", *SMALL, f"position={request.param}").model)
    params = unbox(model.init(jax.random.key(1), jnp.zeros((1, 2), jnp.int32))["params"])
    return model, params


def rows(count, length):
    return np.random.default_rng(5).integers(0, 256, (count, length)).astype(np.int32)


def test_logits_at_places_are_those_of_the_whole_forward(small):
    model, params = small
    tokens, places = rows(2, 40), np.array([[0, 39, 7], [16, 15, 31]])
    everything = model.apply({"params": params}, tokens)
    want = np.take_along_axis(np.asarray(everything), places[:, :, None], axis=1)
    for chunk in (100, 16):  # in one piece, and in pieces of which the last is not full
        got = ModelReader(model, params, chunk).logits_at(tokens, places)
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_losses_are_those_of_a_direct_computation(small):
    model, params = small
    tokens = rows(3, 41)
    logits = np.asarray(model.apply({"params": params}, tokens[:, :-1]), np.float64)
    log_z = np.log(np.exp(logits).sum(axis=-1))
    want = log_z - np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[:, :, 0]
    for chunk in (100, 16):
        reader = ModelReader(model, params, chunk)
        np.testing.assert_allclose(reader.losses(tokens[:, :-1], tokens[:, 1:]), want, atol=2e-5)
        result = perplexity.loss_by_position(reader, tokens, 10, batch_tokens=80)
        np.testing.assert_allclose(result.loss, want.reshape(3, 4, 10).mean(axis=(0, 2)), atol=2e-5)


def test_passkey_does_not_depend_on_batch_or_chunk(small):
    model, params = small
    tokenizer, task = WordTokenizer(), passkey.PasskeyTask(samples=4)
    scores = []
    for chunk, batch_tokens in ((1000, 10**6), (1000, 1), (48, 300)):
        (result,) = passkey.evaluate(
            ModelReader(model, params, chunk), tokenizer, [150], task, batch_tokens=batch_tokens
        )
        scores.append([sample.log_probability for sample in result.samples])
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-4)
    np.testing.assert_allclose(scores[2], scores[0], atol=1e-4)


def test_wrong_shapes_are_refused(small):
    reader = ModelReader(*small)
    with pytest.raises(ValueError, match="places"):
        reader.logits_at(rows(1, 8), np.array([[8]]))
    with pytest.raises(ValueError, match="targets"):
        reader.losses(rows(1, 8), rows(1, 7))
    with pytest.raises(ValueError, match="chunk"):
        ModelReader(*small, chunk=0)
