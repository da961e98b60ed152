"""Training = prefill = chunked prefill = decode over 300 tokens, for every scheme and option of the registry's matrix.

Rows are ragged and padded on either side. The short, always-run relatives are in test_scheme_matrix.py.
"""

from collections.abc import Iterator
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath.generate import extend, pad_prompts
from bampath.model import LM, geometry_of, init_cache
from bampath.positions import parse
from tests.model.test_scheme_matrix import CONFIG, build, random_tokens
from tests.positions.matrix import SPECS

pytestmark = pytest.mark.slow
TOTAL, NEW, CHUNK = 300, 44, 64


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """A process that keeps the programs of every scheme runs out of memory maps."""
    yield
    case.cache_clear()
    jax.clear_caches()


@cache
def case(spec: str) -> tuple[LM, dict, list[np.ndarray], jax.Array]:
    """Model, parameters, three rows of tokens, and their hidden states [3, longest, dim] by the full forward.

    The longest row has 300 tokens (a learned table with fewer rows sets a lower limit), more than twice the training
    length wherever the scheme allows it.
    """
    model, params = build(spec, train_length=128)
    if limit(model) < TOTAL:
        model, params = build(spec, train_length=TOTAL)
    total = min(TOTAL, limit(model))
    rows = [np.asarray(random_tokens(n, seed=n)) for n in (total, (total + NEW) // 2, NEW + 1)]
    padded = jnp.asarray(np.stack([np.pad(row, (0, total - len(row))) for row in rows]))  # causal: the tail is unseen
    want = jax.jit(lambda p, t: model.apply({"params": p}, t, method="features"))(params, padded)
    return model, params, rows, want


def limit(model: LM) -> int:
    """Positions that the scheme is defined for."""
    config, found = model.config, []
    for layer in range(config.layers):
        found += [p.max_positions(geometry_of(config, layer)) for p in parse(config.position).at(layer).parts]
    return min([n for n in found if n is not None], default=1 << 30)


def worst_gap(spec: str, prompts: list[int], side: str, chunk: int) -> float:
    """Largest difference from the full forward when each row's first `prompts` tokens are read in chunks and the others
    one by one."""
    model, params, rows, want = case(spec)
    tokens, mask = pad_prompts([row[:n] for row, n in zip(rows, prompts, strict=True)], side, multiple=chunk)
    state = init_cache(model.config, len(rows), tokens.shape[1] + len(rows[0]))
    pieces = []
    for start in range(0, tokens.shape[1], chunk):
        here = slice(start, start + chunk)
        hidden, state = extend(model, params, jnp.asarray(tokens[:, here]), state, jnp.asarray(mask[:, here]))
        pieces.append(np.asarray(hidden))
    read = np.concatenate(pieces, axis=1)
    got = [[*read[i][mask[i]]] for i in range(len(rows))]
    for t in range(max(len(row) - n for row, n in zip(rows, prompts, strict=True))):
        alive = np.asarray([n + t < len(row) for row, n in zip(rows, prompts, strict=True)])
        new = np.asarray([row[min(n + t, len(row) - 1)] for row, n in zip(rows, prompts, strict=True)])
        hidden, state = extend(model, params, jnp.asarray(new[:, None]), state, jnp.asarray(alive[:, None]))
        for i in np.flatnonzero(alive):
            got[i].append(np.asarray(hidden)[i, 0])
    assert [len(row) for row in got] == [len(row) for row in rows]
    return max(float(np.abs(np.stack(row) - np.asarray(want)[i, : len(row)]).max()) for i, row in enumerate(got))


@pytest.mark.parametrize("spec", SPECS)
def test_every_way_of_reading_gives_the_same_states(spec: str) -> None:
    _, _, rows, _ = case(spec)
    prompts = [len(row) - NEW for row in rows]
    gaps = {
        "chunks, padded left": worst_gap(spec, prompts, "left", CHUNK),
        "chunks, padded right": worst_gap(spec, prompts, "right", CHUNK),
        "one prefill, padded left": worst_gap(spec, prompts, "left", max(prompts)),
        "token by token": worst_gap(spec, [1, 1, 1], "right", 1),
    }
    assert max(gaps.values()) < 1e-4, gaps


def test_the_rows_go_beyond_the_training_length() -> None:
    model, _, rows, _ = case("bam+ssmax")
    assert len(rows[0]) == TOTAL > 2 * model.config.train_length > CONFIG.train_length
