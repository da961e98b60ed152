"""Import and export against what transformers itself wrote and computed (see cases.py), and every refusal."""

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath.convert import export_model, import_model
from bampath.convert.families import ConversionError, hf_config, model_config, rope_of, windows_of
from bampath.model import LM, check_length
from bampath.params import unbox
from tests.convert.cases import BASE, CASES, FIXTURES, tokens


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    """A fixture's folder to damage."""
    return lambda name: shutil.copytree(FIXTURES / name, tmp_path / name)


def read(name: str) -> Any:
    return import_model(FIXTURES / name, **CASES[name][2], dtype="float32")


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str) -> None:
    found = read(name)
    assert found.config.position == CASES[name][3]
    assert found.dtype == "bfloat16"
    want = np.load(FIXTURES / name / "expected.npz")["logits"]
    got = jax.jit(LM(found.config).apply)({"params": found.params}, jnp.asarray(tokens()))
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert want.std() > 0.3
    check_length(found.config, tokens().shape[1])


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_gives_back_every_bit(name: str, tmp_path: Path) -> None:
    from bampath.convert.files import SafetensorsFolder

    found = read(name)
    export_model(tmp_path / "out", found.config, found.params, dtype=found.dtype, shard_bytes=6000)
    before, after = SafetensorsFolder(FIXTURES / name), SafetensorsFolder(tmp_path / "out")
    assert dict(before.shapes) == dict(after.shapes)
    for tensor in before.shapes:
        one, two = before.read(tensor), after.read(tensor)
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one.view(np.uint16), two.view(np.uint16), err_msg=tensor)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    again = import_model(tmp_path / "out", **CASES[name][2], dtype="float32")
    assert again.config == found.config


def test_the_exported_configuration_says_what_the_original_said() -> None:
    for name in CASES:
        original = json.loads((FIXTURES / name / "config.json").read_text())
        written = hf_config(read(name).config, shared_qk_norm=True)
        for key in set(written) & set(original) - {"use_cache", "rope_parameters"}:
            assert written[key] == original[key], (name, key)
        ours, theirs = written["rope_parameters"], original["rope_parameters"]
        lists = ("short_factor", "long_factor")  # one of them is left, see test_longrope_keeps_one_of_its_lists
        assert all(
            ours.get(key, value) == value for key, value in theirs.items() if value is not None and key not in lists
        )
        assert ours["rope_type"] == theirs["rope_type"]


def test_longrope_keeps_one_of_its_lists() -> None:
    for name, kept in (("llama-longrope", "long_factor"), ("qwen2-longrope-short", "short_factor")):
        original = json.loads((FIXTURES / name / "config.json").read_text())["rope_parameters"]
        written = hf_config(read(name).config, shared_qk_norm=True)["rope_parameters"]
        assert written["short_factor"] == written["long_factor"] == original[kept]
        assert original["short_factor"] != original["long_factor"]
    phi = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    older = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2, 64]}
    assert rope_of({**phi, "rope_scaling": older}).spec == (
        "rope(10000,scaling=longrope,factor=32,original=4096,factors=2:64)"
    )
    assert rope_of({**phi, "rope_scaling": older}, length=4096).factors == (1.0, 1.5)
    one = "rope(scaling=longrope,factors=2)"
    keys = hf_config(dataclasses.replace(read("llama").config, position=one), shared_qk_norm=True)["rope_parameters"]
    assert keys["long_factor"] == [2.0, 2.0]  # one per pair of a head of 4


def test_older_spellings_of_a_rotation() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 99}
    assert rope_of(old).spec == "rope(scaling=linear,factor=2)"
    assert rope_of({"rope_theta": 10000.0, "rope_scaling": None}).spec == "rope(10000)"
    assert rope_of({"rope_scaling": {"rope_type": "default"}}).spec == "rope(10000)"
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 33, "mscale": 0.7}
    assert rope_of({"max_position_embeddings": 99, "rope_scaling": yarn}).spec == (
        "rope(10000,scaling=yarn,factor=3,original=33)"
    )


def test_windows_by_layer() -> None:
    qwen = {"model_type": "qwen2", "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5}
    assert windows_of({**qwen, "max_window_layers": 2}) == [None, None, 5]
    assert windows_of({**qwen, "use_sliding_window": False}) == [None] * 3
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows_of({**qwen, "layer_types": kinds}) == [5, None, 5]
    with pytest.raises(ConversionError, match="layer_types"):
        windows_of({**qwen, "layer_types": ["chunked_attention"] * 3})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma3"}, "model_type='gemma3' is not one of llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' has no counterpart; it must be 'silu'"),
        ({"attention_bias": True}, "attention_bias=True has no counterpart"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 has no counterpart"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "rope_type='su' has no counterpart"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "rotary_factor=0.5",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type='linear' without factor: it needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type='llama3' without low_freq_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type='longrope' without short_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object with rope_type"),
        ({"num_attention_heads": 3}, "is not a multiple of num_attention_heads=3"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1], "long_factor": [1]}},
            "short_factor has 1 numbers, must have one per pair of a head",
        ),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be a positive whole number"),
        ({"hidden_size": None}, "hidden_size=None must be a positive whole number"),
    ],
)
def test_a_configuration_that_means_something_else_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConversionError, match=words):
        model_config({"model_type": "llama", **BASE, **changes})


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"tensor model.layers.1.mlp.up_proj.weight \[24, 16\] is missing",
        ),
        (lambda t: t.update({"model.extra": t["model.norm.weight"].copy()}), "tensor model.extra has no place"),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:5].copy()}),
            r"tensor model.norm.weight has shape \[5\], must be \[16\]",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}),
            "tensor lm_head.weight differs from the embedding",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(change: Any, words: str, copy: Callable[[str], Path]) -> None:
    folder = copy("qwen3")
    rewrite(folder / "model.safetensors", change)
    with pytest.raises(ConversionError, match=words):
        import_model(folder)


def test_what_older_files_keep_beside_the_weights_does_no_harm(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen3")

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    rewrite(folder / "model.safetensors", change)
    np.testing.assert_array_equal(import_model(folder).params["embedding"], read("qwen3").params["embedding"])


@pytest.mark.parametrize("keep", [0.7, 0.05, 0.0])
def test_a_file_that_was_cut_short_names_a_tensor(keep: float, copy: Callable[[str], Path]) -> None:
    path = copy("llama3") / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])
    with pytest.raises(ConversionError, match=r"cut short: tensor \S+ ends at" if keep == 0.7 else "cut short"):
        import_model(path.parent)


def test_missing_and_wrong_files(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("llama")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConversionError, match=r"no model-00002-of-00003\.safetensors"):
        import_model(folder)
    lonely = copy("qwen2")
    (lonely / "model.safetensors").rename(lonely / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=r"pytorch_model.bin is a pickle"):
        import_model(lonely)
    (lonely / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"oops")
    with pytest.raises(ConversionError, match="not a safetensors file"):
        import_model(lonely)
    (lonely / "config.json").unlink()
    with pytest.raises(ConversionError, match=r"no config.json"):
        import_model(lonely)
    for place in (tmp_path / "meta-llama" / "Llama-3.2-1B", lonely / "model.safetensors"):
        with pytest.raises(ConversionError, match=f"{place.name} .*: only local folders and .gguf files are read"):
            import_model(place)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position": "bam+ssmax"}, "layer 0 has bam"),
        ({"position": "rope+ssmax"}, "cannot be exported"),
        ({"position": "rope(layout=interleaved)"}, "pairs dimensions in halves"),
        ({"position": "rope(scaling=yarn,factor=2,fraction=0.5)"}, "leaves pairs out only without rescaling"),
        ({"position": "rope,rope(10000)"}, "different rotations"),
        ({"position": "rope+window(4),rope"}, "Mistral has it in all or none"),
        ({"qk_norm": True, "qkv_bias": True}, "Qwen3 has no biases"),
    ],
)
def test_what_transformers_cannot_express_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    config = dataclasses.replace(read("llama").config, **changes)
    with pytest.raises(ConversionError, match=words):
        hf_config(config, shared_qk_norm=True)


def test_norms_that_differ_between_heads_are_refused(tmp_path: Path) -> None:
    found = read("qwen3")
    scale = found.params["layer_1"]["attention"]["key_norm"]["scale"]
    found.params["layer_1"]["attention"]["key_norm"]["scale"] = scale.at[0, 0].add(1.0)
    with pytest.raises(ConversionError, match="the heads' norm weights differ"):
        export_model(tmp_path / "out", found.config, found.params)
    assert not (tmp_path / "out").exists()


def test_memory_is_the_parameters_and_one_tensor(tmp_path: Path) -> None:
    """What numpy holds at its most, beyond what is there afterwards: a few copies of the largest tensor, not the model.
    JAX may keep arrays in numpy's memory, so that parameters count among what is there."""
    import tracemalloc

    config = dataclasses.replace(read("llama").config, vocab_size=256, dim=64, mlp_dim=256, layers=20, head_dim=16)
    shapes = jax.eval_shape(LM(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), unbox(shapes))
    largest = max(x.nbytes for x in jax.tree.leaves(params))
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    assert whole > 60 * largest

    def beyond(run: Callable[[], Any]) -> int:
        run()  # imports
        tracemalloc.start()
        try:
            kept = run()
            now, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        del kept
        return peak - now

    number = iter(range(9))
    write = lambda: export_model(tmp_path / str(next(number)), config, params, shard_bytes=2 * largest)
    assert beyond(write) < 8 * largest
    assert beyond(lambda: import_model(tmp_path / "0")) < 8 * largest


DAMAGE = [None, "abc", -1, 1.5, [], [1], {}, True, ""]


@pytest.mark.parametrize("name", ["llama-longrope", "llama-yarn-mscale", "llama3", "qwen2"])
def test_no_value_of_a_configuration_is_answered_by_a_traceback(name: str, copy: Callable[[str], Path]) -> None:
    folder = copy(name)
    raw = json.loads((folder / "config.json").read_text())
    inner = next((key for key in ("rope_parameters", "rope_scaling") if raw.get(key)), "rope_parameters")
    changed = [raw | {key: value} for key in raw for value in DAMAGE]
    changed += [raw | {inner: raw[inner] | {key: value}} for key in raw.get(inner, {}) for value in DAMAGE]
    refused = 0
    for config in changed:
        (folder / "config.json").write_text(json.dumps(config))
        try:
            import_model(folder)
        except ValueError:
            refused += 1
    assert refused > len(changed) // 3


@pytest.mark.parametrize("value", [None, 1, "F8_E4M3", [1], {}, [0, 10**12]])
@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_a_header_that_means_nothing_is_refused(key: str, value: Any, copy: Callable[[str], Path]) -> None:
    path = copy("llama-tied-linear") / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"][key] = value
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(ConversionError, match=r"model\.safetensors|model\.norm\.weight"):
        import_model(path.parent)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(text: str, copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConversionError, match=r"index\.json has no weight_map"):
        import_model(folder)
