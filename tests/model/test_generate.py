"""Sampling and generation: filters against hand-computed cases, batches against solo runs, errors by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath.generate import Sampling, filter_logits, generate, pad_prompts, pick, prefill
from bampath.model import init_cache
from tests.model.test_scheme_matrix import build, random_tokens

PROMPTS = [[5, 9, 11], [7], [3, 1, 4, 1, 5, 9, 2, 6]]


@pytest.mark.parametrize(
    ("spec", "side"), [pytest.param("rope", "right", marks=pytest.mark.slow), ("path+bam+ssmax", "left")]
)
def test_a_batch_gives_each_row_its_solo_continuation(spec: str, side: str) -> None:
    model, params = build(spec)
    together = generate(model, params, PROMPTS, 6, pad_side=side, chunk=3)
    assert together == [generate(model, params, [prompt], 6)[0] for prompt in PROMPTS]


def test_greedy_takes_the_likeliest_token_of_the_full_forward() -> None:
    model, params = build("bam+ssmax")
    prompt = PROMPTS[2]
    answer = generate(model, params, [prompt], 5)[0]
    logits = model.apply({"params": params}, jnp.asarray([prompt + answer[:-1]]))
    assert answer == logits[0, len(prompt) - 1 :].argmax(-1).tolist()


def test_generation_ends_at_the_stop_token_and_reports_each_step() -> None:
    model, params = build("nope")
    free = generate(model, params, PROMPTS, 8)
    stop = free[0][2]
    steps: list[np.ndarray] = []
    stopped = generate(model, params, PROMPTS, 8, stop_id=stop, on_tokens=steps.append)
    cut = [row[: row.index(stop)] if stop in row else row for row in free]
    assert stopped == cut
    for row, ids in enumerate(cut):
        assert [int(s[row]) for s in steps if s[row] >= 0] == ids


def test_sampling_is_reproducible_and_differs_by_seed() -> None:
    model, params = build("rope")
    run = lambda seed: generate(model, params, PROMPTS, 12, sampling=Sampling(temperature=2.0), seed=seed)
    assert run(1) == run(1)
    assert run(1) != run(2)


def test_only_ids_of_the_tokenizer_are_drawn() -> None:
    model, params = build("rope")
    hot = Sampling(temperature=50.0)  # nearly uniform over what may be drawn
    drawn = np.concatenate(generate(model, params, PROMPTS, 30, sampling=hot, vocab_size=7))
    assert set(drawn.tolist()) == set(range(7))
    assert max(map(max, generate(model, params, PROMPTS, 4, vocab_size=7))) < 7  # greedy


def test_filters_keep_what_they_promise() -> None:
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]]))
    kept = lambda **options: np.isfinite(filter_logits(logits, Sampling(temperature=1.0, **options)))[0].tolist()
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_p=0.5) == [True, False, False, False]
    assert kept(top_p=0.51) == [True, True, False, False]
    assert kept(top_p=0.81) == [True, True, True, False]
    assert kept(top_k=3, top_p=0.999) == [True, True, True, False]
    sharper = filter_logits(logits, Sampling(temperature=0.5))
    np.testing.assert_allclose(sharper, 2 * (logits - logits.max()), rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-46])
def test_a_cold_draw_is_greedy(temperature: float) -> None:
    logits = jnp.asarray([[1.0, 2.0, 3.5, 3.4], [-9.0, -8.0, -7.0, -2.0]])
    for options in ({}, {"top_k": 3}, {"top_p": 0.9}):
        drawn = pick(logits, jax.random.key(0), Sampling(temperature, **options))
        assert drawn.tolist() == [2, 3], options


def test_draws_follow_the_distribution() -> None:
    logits = jnp.broadcast_to(jnp.log(jnp.asarray([0.6, 0.3, 0.1])), (4000, 3))
    drawn = np.bincount(np.asarray(pick(logits, jax.random.key(0), Sampling(temperature=1.0))), minlength=3) / 4000
    np.testing.assert_allclose(drawn, [0.6, 0.3, 0.1], atol=0.03)


@pytest.mark.parametrize(
    ("spec", "side"),
    [
        pytest.param("alibi", "right", marks=pytest.mark.slow),
        pytest.param("bam+ssmax", "left", marks=pytest.mark.slow),
        ("fox+bam", "left"),
        ("rope+window(3)", "right"),
    ],
)
def test_prefill_gives_the_state_of_each_last_token(spec: str, side: str) -> None:
    """Also of a second part of each row, which begins behind the padding of the first."""
    model, params = build(spec)
    tokens, mask = pad_prompts(PROMPTS, side)
    hidden, cache = prefill(model, params, tokens, mask, init_cache(model.config, 3, 16), chunk=3)
    features = jax.jit(lambda row: model.apply({"params": params}, row, method="features")[0])
    # One program for every length: what follows a token does not reach it.
    last = lambda row: features(jnp.asarray([row + [0] * (11 - len(row))]))[len(row) - 1]
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(hidden[row], last(prompt), atol=1e-5)
    assert cache.next_position.tolist() == [3, 1, 8]
    more = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    hidden, _ = prefill(model, params, more, np.ones((3, 3), bool), cache, chunk=2)
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(hidden[row], last([*prompt, *more[row].tolist()]), atol=1e-5)


def test_a_prompt_with_a_gap_is_read_by_its_positions() -> None:
    model, params = build("bam+ssmax")
    tokens, mask = np.array([[3, 1, 0, 4, 1]]), np.array([[True, True, False, True, True]])
    hidden, _ = prefill(model, params, tokens, mask, init_cache(model.config, 1, 8), chunk=8)
    want = model.apply({"params": params}, jnp.asarray([[3, 1, 4, 1]]), method="features")[0, -1]
    np.testing.assert_allclose(hidden[0], want, atol=1e-5)


def test_mistakes_are_named() -> None:
    model, params = build("nope")
    with pytest.raises(ValueError, match="temperature=-1"):
        Sampling(temperature=-1)
    with pytest.raises(ValueError, match=r"top_p=0\.0 must be in \(0, 1\]"):
        Sampling(top_p=0.0)
    with pytest.raises(ValueError, match="top_k=-3"):
        Sampling(top_k=-3)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        generate(model, params, PROMPTS, 0)
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, params, [[1], []], 2)
    with pytest.raises(ValueError, match="pad_side='middle'"):
        generate(model, params, PROMPTS, 2, pad_side="middle")
    with pytest.raises(ValueError, match="temperature=nan"):
        Sampling(temperature=float("nan"))
    with pytest.raises(ValueError, match="vocab_size=98 must be between 1 and the model's 97"):
        generate(model, params, PROMPTS, 2, vocab_size=98)
    with pytest.raises(ValueError, match="chunk=0"):
        generate(model, params, PROMPTS, 2, chunk=0)
    table, learned = build("learned(9)")
    with pytest.raises(ValueError, match=r"10 tokens are asked for, but learned\(9\) is defined for 9 positions"):
        generate(table, learned, PROMPTS, 2)
    with pytest.raises(ValueError, match=r"tokens has shape \(3,\)"):
        model.apply({"params": params}, random_tokens(3))
    with pytest.raises(ValueError, match="segment_ids has shape"):
        model.apply({"params": params}, random_tokens(1, 4), jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(TypeError, match="positions has dtype float32; it must be int32"):
        model.apply({"params": params}, random_tokens(1, 4), None, jnp.zeros((1, 4)))
    for bad in (97, -1, 2**40):
        with pytest.raises(ValueError, match=f"prompt 1 holds {bad}, but token ids end at 96"):
            generate(model, params, [[1], [2, bad]], 2)
    with pytest.raises(ValueError, match="prompt 1 holds float64, but token ids are integers"):
        generate(model, params, [[1], [2, 2.5]], 2)
    tokens, mask = pad_prompts(PROMPTS, "left")
    _, cache = prefill(model, params, tokens, mask, init_cache(model.config, 3, 12), chunk=8)
    with pytest.raises(ValueError, match="8 tokens do not fit into a cache of 12 slots, 8 of which are taken"):
        prefill(model, params, tokens, mask, cache, chunk=8)
    with pytest.raises(ValueError, match="capacity=0"):
        init_cache(model.config, 1, 0)
