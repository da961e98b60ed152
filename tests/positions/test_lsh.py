"""The lsh part: what it draws, when it draws anew, what it may stand beside, and how far it looks back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath import startup
from bampath.config import get
from bampath.model import LM, init_cache
from bampath.params import unbox
from bampath.positions import parse
from bampath.positions.alibi import alibi_slopes
from bampath.positions.lsh import LSH
from bampath.positions.slots import Geometry
from bampath.step import declare

GEOMETRY = Geometry(dim=8, heads=4, kv_heads=2, head_dim=8, layer=1, layers=2, train_length=32)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 300, (2, 40)), jnp.int32)


def build(spec: str):
    model = LM(get("tiny", f"position={spec}", "model.dim=16", "model.layers=2").model)
    return model, {"params": unbox(model.init(jax.random.key(1), TOKENS))["params"]}


def test_bandwidths_are_the_reciprocals_of_alibis_slopes() -> None:
    np.testing.assert_allclose(LSH().sigmas(12), 1 / np.asarray(alibi_slopes(12)))
    assert LSH(sigma=5.0).sigmas(3) == [5.0] * 3
    at = np.arange(6)
    np.testing.assert_allclose(
        parse("lsh").log_prior({}, at, at, heads=8), parse("alibi").log_prior({}, at, at, heads=8), rtol=1e-6
    )


def test_the_frozen_draw_depends_on_seed_and_layer_only() -> None:
    widths = lambda part, layer: np.asarray(part.frozen(Geometry(8, 4, 2, 8, layer=layer))[0])
    np.testing.assert_array_equal(widths(LSH(40), 0), widths(LSH(40), 0))
    assert (widths(LSH(40), 0) != widths(LSH(40), 1)).any()
    assert (widths(LSH(40), 0) != widths(LSH(40, seed=1), 0)).any()


def test_heads_in_step_share_their_random_numbers() -> None:
    together = LSH(500, sigma=None, across="layer").frozen(GEOMETRY)[0].astype(jnp.float32)
    apart = LSH(500, across="head").frozen(GEOMETRY)[0].astype(jnp.float32)
    assert np.corrcoef(together)[2, 3] > 0.99
    assert abs(np.corrcoef(apart)[2, 3]) < 0.2


def test_training_draws_anew_and_evaluation_does_not() -> None:
    model, params = build("lsh(3)")
    run = jax.jit(lambda key: model.apply(params, TOKENS, rngs=None if key is None else {"sample": key}))
    step = [run(jax.random.key(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(step[0], step[1])
    assert float(jnp.abs(step[0] - step[2]).max()) > 1e-3
    still = model.apply(params, TOKENS)
    np.testing.assert_array_equal(still, model.apply(params, TOKENS))
    assert float(jnp.abs(step[0] - still).max()) > 1e-3


def test_never_redrawn_training_is_evaluation() -> None:
    model, params = build("lsh(3,redraw=never)")
    trained = model.apply(params, TOKENS, rngs={"sample": jax.random.key(5)})
    np.testing.assert_array_equal(trained, model.apply(params, TOKENS))


def test_exact_evaluation_is_alibi_and_training_is_not() -> None:
    model, params = build("lsh(evaluate=exact)")
    alibi = LM(get("tiny", "position=alibi", "model.dim=16", "model.layers=2").model)
    np.testing.assert_allclose(model.apply(params, TOKENS), alibi.apply(params, TOKENS), atol=1e-6)
    trained = model.apply(params, TOKENS, rngs={"sample": jax.random.key(0)})
    assert float(jnp.abs(trained - alibi.apply(params, TOKENS)).max()) > 1e-3


def test_many_samples_come_close_to_alibi() -> None:
    """The error of the logits falls with s, about as 1/√s."""
    alibi, params = build("alibi")
    want = alibi.apply(params, TOKENS)
    errors = [
        float(jnp.sqrt(jnp.mean((build(f"lsh({s})")[0].apply(params, TOKENS) - want) ** 2))) for s in (4, 64, 1024)
    ]
    assert errors[0] > 2.5 * errors[1] > 6 * errors[2]


def test_a_cache_holds_the_longest_block_and_no_more() -> None:
    part = LSH(4, sigma=3.0)
    reach = part.reach(GEOMETRY)
    assert reach == int(part.frozen(GEOMETRY)[0].max())
    config = get("tiny", f"position={part.spec}", "model.layers=2").model
    layers = init_cache(config, 3, 10_000).layers
    assert [layer.k.shape[1] for layer in layers] == [0, 0]
    assert all(layer.ring is not None and layer.ring.k.shape[1] < 100 for layer in layers)
    assert LSH(evaluate="exact").reach(GEOMETRY) is None


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lsh(0)", "samples is 0"),
        ("lsh(sigma=0)", "sigma is 0"),
        ("lsh(3,law=antithetic)", "samples is 3 but must be even"),
        ("lsh(combine=mean,evaluate=exact)", "does not tend to ALiBi"),
        ("lsh(law=fixed,evaluate=exact)", "no limit of law=fixed"),
        ("lsh(law=fixed,seed=2)", "no effect with law=fixed"),
        ("lsh+ssmax", "lsh cannot stand beside ssmax"),
        ("lsh+alibi", "lsh cannot stand beside alibi"),
        ("path+lsh", "lsh cannot stand beside path"),
        ("lsh+window(8)", r"lsh cannot stand beside window\(8\)"),
    ],
)
def test_what_makes_no_sense_is_refused(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(spec)


def test_explicit_positions_and_one_program_for_all_layers_are_refused() -> None:
    model, params = build("lsh")
    with pytest.raises(ValueError, match="no explicit positions"):
        model.apply(params, TOKENS, None, jnp.broadcast_to(jnp.arange(40), (2, 40)))
    config = get("tiny", "position=lsh", "model.scan=true", "model.dim=16")
    with pytest.raises(ValueError, match="lsh draws differently in each layer"):
        declare(LM(config.model))  # before anything is allocated


def test_the_banner_names_the_kernel_of_every_layer() -> None:
    assert startup.kernels(get("tiny", "position=lsh,rope")) == ["lsh xla", "attention xla"]
