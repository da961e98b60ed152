"""Heads against the formula of their prior, and figures against the rows that they show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from bampath import analysis
from bampath import config as configs
from bampath.analysis.figures import short_names, short_number
from bampath.model import LM
from bampath.params import unbox

KEYS = 50


def heads(position, **replaced):
    config = configs.get("tiny", "model.layers=2", "model.heads=2", f"position={position}").model
    params = jax.eval_shape(lambda: unbox(LM(config).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]))
    filled = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), params)
    for layer in ("layer_0", "layer_1"):
        for name, value in replaced.items():
            part, parameter = name.split("__")
            filled[layer]["attention"]["position"][part][parameter] = np.asarray(value, np.float32)
    return analysis.read_heads(config, filled, KEYS)


def test_heads_are_the_normalised_prior_with_its_sharpness():
    alpha, beta, scale = [0.3, -1.0], [1.0, -0.4], [0.5, 0.2]
    found = heads("bam+ssmax", bam__theta_alpha=alpha, bam__theta_beta=beta, ssmax__scale=scale)
    assert [(h.layer, h.head) for h in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for head in found:
        a, b, s = alpha[head.head], beta[head.head], scale[head.head]
        cost = np.exp(a) * (np.arange(KEYS) + 1e-5) ** b * s * np.log(KEYS)
        p = np.exp(-(cost - cost.min()))
        p /= p.sum()
        np.testing.assert_allclose(head.p, p, atol=1e-5)
        assert head.mean_distance == pytest.approx(p @ np.arange(KEYS), rel=1e-3)
        assert head.parameters == pytest.approx({"bam/theta_alpha": a, "bam/theta_beta": b, "ssmax/scale": s})
    assert [h.regime for h in found[:2]] == ["local", "retrieval"]


def test_sharpness_outside_leaves_the_prior_alone():
    weak = heads("alibi+ssmax(inside=false)", ssmax__scale=[1.0, 1.0])
    strong = heads("alibi+ssmax(inside=false)", ssmax__scale=[9.0, 9.0])
    np.testing.assert_array_equal(weak[0].p, strong[0].p)


def test_schemes_without_a_distance_prior_have_no_heads():
    assert heads("rope") == []


def test_a_head_as_a_row():
    row = heads("bam", bam__theta_alpha=[0, 0], bam__theta_beta=[1, 0])[1].row(points=10, case="bam")
    assert row["case"] == "bam"
    assert row["regime"] == "uniform"
    assert row["curve"]["distance"][-1] == KEYS - 1
    np.testing.assert_allclose(row["curve"]["p"], 1 / KEYS, rtol=1e-4)


def test_shared_priors_and_windows():
    config = configs.get("tiny", "model.layers=1", "position=bam(scope=global)").model
    params = {
        "shared_position_bam": {"theta_alpha": np.zeros(4), "theta_beta": np.ones(4)},
        "layer_0": {"attention": {}},
    }
    assert analysis.read_heads(config, params, KEYS)[3].parameters == {"bam/theta_alpha": 0, "bam/theta_beta": 1}
    windowed = configs.get("tiny", "model.layers=1", "position=alibi+window(8)").model
    (head, *_) = analysis.read_heads(windowed, {"layer_0": {"attention": {}}}, KEYS)
    assert head.p.shape == (8,)
    assert head.row()["curve"]["distance"][-1] == 7


def passkey_rows():
    sample = lambda depth, correct: {"depth": depth, "correct": correct}
    rows = []
    for case, reach in (("rope", 128), ("bam(init=slopes)+ssmax", 512)):
        for length in (128, 256, 512):
            depths = [sample(i / 3, length <= reach) for i in range(4)]
            hits = sum(d["correct"] for d in depths)
            rows.append({"case": case, "length": length, "samples": 4, "correct": hits, "depths": depths})
    return rows


def test_passkey_figures_show_the_shares(tmp_path):
    figure = analysis.passkey_figure(passkey_rows(), 128)
    lines = {text.get_text(): None for text in figure.axes[0].get_legend().get_texts()}
    assert list(lines) == ["rope", "bam+ssmax"]
    data = [container[0].get_ydata().tolist() for container in figure.axes[0].containers]
    assert data == [[1, 0, 0], [1, 1, 1]]
    heat = analysis.heatmap_figure(passkey_rows(), 128)
    images = [axes.images[0].get_array() for axes in heat.axes[:2]]
    assert images[0][:, 0].min() == 1
    assert images[0][:, 1:].max() == 0
    assert images[1].min() == 1
    assert analysis.save(heat, tmp_path / "figures" / "heat.png").stat().st_size > 5000


@pytest.mark.parametrize("end", [20, 60, 128])
def test_perplexity_of_rows_below_the_training_length_is_in_the_figure(end):
    row = {"case": "nope", "start": 0, "end": end, "loss": 6.0}
    axes = analysis.perplexity_figure([row], 128).axes[0]
    low, high = axes.get_xlim()
    assert low < end / 2 < high
    assert low < 128 < high


def test_perplexity_figure_averages_losses_over_seeds():
    rows = [
        {"case": "nope", "seed": seed, "start": start, "end": start + 64, "loss": 3.0 + seed}
        for seed in (0, 1)
        for start in (0, 64, 128)
    ]
    line = analysis.perplexity_figure(rows, 64).axes[0].lines[0]
    np.testing.assert_allclose(line.get_ydata(), np.exp(3.5))
    np.testing.assert_allclose(line.get_xdata(), [32, 96, 160])


def test_prior_figures():
    rows = [h.row(case="bam") for h in heads("bam", bam__theta_alpha=[0, 1], bam__theta_beta=[1, -0.5])]
    assert isinstance(analysis.prior_figure(rows, 16), Figure)
    points = analysis.exponent_figure(rows).axes[0].collections
    np.testing.assert_allclose(points[0].get_offsets(), [[1, 0], [-0.5, 1]])
    with pytest.raises(ValueError, match="theta_beta"):
        analysis.exponent_figure([{**row, "parameters": {}} for row in rows])
    with pytest.raises(ValueError, match="no rows"):
        analysis.prior_figure([], 16)


def test_names_for_people():
    assert [short_number(n) for n in (96, 128, 1024, 1536, 65536, 1 << 20)] == ["96", "128", "1k", "1,536", "64k", "1M"]
    assert list(short_names(["bam(init=slopes)+ssmax", "fox(bias=5)"]).values()) == ["bam+ssmax", "fox"]
    alike = ["bam+ssmax", "bam+ssmax(init=0.2)", "nope+ssmax(init=0.2)", "rope"]
    assert short_names(alike) == {case: case for case in alike}
