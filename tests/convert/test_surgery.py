"""Another scheme for the same weights, and the command."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath.checkpoint import describe
from bampath.convert import transplant
from bampath.convert.__main__ import main
from bampath.load import load
from bampath.model import LM
from tests.convert.cases import CASES, FIXTURES, tokens
from tests.convert.test_import_export import read


@pytest.mark.parametrize(
    ("spec", "new", "dropped"),
    [
        ("nope", (), ()),
        ("rope+ssmax", ("ssmax/scale",), ()),
        ("bam+ssmax", ("bam/theta_alpha", "bam/theta_beta", "ssmax/scale"), ()),
        ("path", ("path/w_down", "path/w_up", "path/conv", "path/beta_kernel", "path/beta_bias"), ()),
        ("path+fox", ("path/w_down", "fox/kernel", "fox/bias"), ()),
    ],
)
def test_what_means_the_same_is_copied(spec: str, new: tuple[str, ...], dropped: tuple[str, ...]) -> None:
    found = read("llama")
    config, params, report = transplant(found.config, found.params, spec)
    assert config.position == spec
    for name in new:
        assert f"layer_2/attention/position/{name}" in report.new
    assert report.dropped == dropped
    assert all("position" in name for name in report.new)
    for name in ("query", "out"):
        np.testing.assert_array_equal(params["layer_1"]["attention"][name], found.params["layer_1"]["attention"][name])
    assert jnp.isfinite(LM(config).apply({"params": params}, jnp.asarray(tokens()))).all()


def test_parameters_that_both_schemes_have_go_along() -> None:
    found = read("llama")
    bam, params, _ = transplant(found.config, found.params, "bam+ssmax")
    moved = jax.tree.map(lambda x: x + 0.5, params)
    _, after, report = transplant(bam, moved, "bam")
    theta = lambda p: p["layer_0"]["attention"]["position"]["bam"]["theta_beta"]
    np.testing.assert_array_equal(theta(after), theta(moved))
    assert {name.rsplit("/", 2)[1] for name in report.dropped} == {"ssmax"}
    assert "dropped  3 arrays:" in str(report)


def test_a_scheme_near_the_identity_starts_near_the_old_function() -> None:
    """path whose beta is tiny carries keys unmoved: NoPE's function, so the conversion begins where NoPE ends."""
    found = read("llama")
    outputs = {}
    for spec in ("nope", "path(bias=-20)"):
        config, params, _ = transplant(found.config, found.params, spec)
        outputs[spec] = LM(config).apply({"params": params}, jnp.asarray(tokens()))
    np.testing.assert_allclose(outputs["path(bias=-20)"], outputs["nope"], atol=1e-4)


def test_parameters_of_another_model_are_refused() -> None:
    found = read("llama")
    broken = {name: value for name, value in found.params.items() if name != "layer_1"}
    with pytest.raises(ValueError, match="not those of"):
        transplant(found.config, broken, "nope")
    with pytest.raises(ValueError, match="unknown part 'ropee'"):
        transplant(found.config, found.params, "ropee")


@pytest.fixture(scope="module")
def imported(tmp_path_factory: Any) -> Path:
    out = tmp_path_factory.mktemp("runs") / "qwen3"
    assert main(["import", str(FIXTURES / "qwen3"), str(out), "--tokenizer", "bytes", "--dtype", "float32"]) == 2
    tokenizer = tiny_tokenizer(out.parent / "tokenizer.json")
    assert main(["import", str(FIXTURES / "qwen3"), str(out), "--tokenizer", str(tokenizer), "--dtype", "float32"]) == 0
    return out


def tiny_tokenizer(path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)} | {"</s>": 60}, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(path))
    return path


def test_the_command_makes_runs_that_other_commands_read(imported: Path, tmp_path: Path, capsys: Any) -> None:
    loaded = load(imported)
    want = np.load(FIXTURES / "qwen3" / "expected.npz")["logits"]
    np.testing.assert_allclose(loaded.model.apply({"params": loaded.params}, jnp.asarray(tokens())), want, atol=1e-4)
    assert describe(imported).step == 0
    assert main(["position", str(imported), "path+fox", str(tmp_path / "path")]) == 0
    assert "rope(10000) → path+fox" in capsys.readouterr().out
    assert load(tmp_path / "path").config.model.position == "path+fox"
    assert main(["export", str(imported), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert len({path.stat().st_mode for path in (tmp_path / "hf").iterdir()}) == 1  # whoever reads one reads all
    assert main(["export", str(tmp_path / "path"), str(tmp_path / "no")]) == 2
    assert "path+fox" in capsys.readouterr().err


def test_mistakes_are_one_line(imported: Path, tmp_path: Path, capsys: Any) -> None:
    for command, words in (
        (["import", str(tmp_path / "none"), str(tmp_path / "out")], "only local folders"),
        (["import", str(FIXTURES / "llama"), str(tmp_path / "out")], "--tokenizer"),
        (["position", str(imported), "ropee", str(tmp_path / "out")], "unknown part"),
        (["position", str(imported), "nope", str(imported)], "not empty"),
    ):
        assert main(command) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/00000000"])
def test_our_own_runs_need_no_import(where: str, imported: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["import", str(imported / where), str(tmp_path / "out")]) == 2
    assert "is one of bampath's own runs, which needs no import" in capsys.readouterr().err


def test_what_is_known_beforehand_is_said_before_the_work(
    imported: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """The work would be an error of its own here."""

    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("arrays were read")

    assert main(["position", str(imported), "path", str(tmp_path / "path")]) == 0
    monkeypatch.setattr("bampath.load.load", work)
    monkeypatch.setattr("bampath.convert.importer.read_params", work)
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    run, llama, small = str(imported), str(FIXTURES / "llama"), str(tiny_tokenizer(tmp_path / "tokenizer.json"))
    for place, words in (
        (run, f"{run} is not empty; choose another folder"),
        (str(tmp_path / "file"), "file is not a folder; choose another"),
        (str(tmp_path / "file" / "out"), "file is not a folder; choose another"),
    ):
        for command in (["import", llama], ["position", run, "nope"], ["export", run]):
            more = ["--tokenizer", small] if command[0] == "import" else []
            assert main([*command, place, *more]) == 2
            assert words in capsys.readouterr().err
    for command, words in (
        (["import", llama], "name one with --tokenizer"),
        (["import", llama, "--tokenizer", str(tmp_path / "none.json")], "none.json"),
        (["import", llama, "--tokenizer", "bytes"], "tokens, the model only"),
        (["position", run, "ropee"], "unknown part"),
        (["export", str(tmp_path / "path")], "layer 0 has path"),
    ):
        assert main([*command, str(tmp_path / "out")]) == 2
        assert words in capsys.readouterr().err


def test_every_case_names_its_family() -> None:
    assert {kind for kind, *_ in CASES.values()} == {"Llama", "Mistral", "Qwen2", "Qwen3"}
