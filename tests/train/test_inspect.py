"""Inspection tells everything from metadata and the few positional parameters."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath import checkpoint, inspect
from bampath.checkpoint import Saver
from bampath.overrides import to_dict
from bampath.step import build_model, declare
from tests.train.small import small


def save(run, cfg, step=5, **values):
    """A checkpoint of `cfg` whose parameters are zeros, but for those whose name ends in a key of `values`."""
    shapes = declare(build_model(cfg)).shapes

    def fill(path, leaf):
        chosen = [value for name, value in values.items() if path[-1].key == name]
        return jnp.asarray(np.broadcast_to(chosen[0] if chosen else 0.0, leaf.shape), jnp.float32)

    params = jax.tree_util.tree_map_with_path(fill, shapes)
    facts = {"config": to_dict(cfg), "data": {"step": step}, "tokenizer": "bytes-259-v1", "elapsed": 3600.0}
    with Saver(run) as saver:
        saver.save(step, params, {"count": jnp.int32(step)}, facts)
    return run


@pytest.fixture(scope="module")
def bam(tmp_path_factory):
    cfg = small("position=bam+ssmax", "model.layers=3", "model.heads=4")
    return save(tmp_path_factory.mktemp("bam"), cfg, theta_beta=np.array([1.0, 0.0, -0.5, -1.5]), scale=0.5)


def test_heads_and_their_regimes(bam):
    rows = inspect.heads(checkpoint.describe(bam))
    assert [(row["layer"], row["head"]) for row in rows] == [(i, h) for i in range(3) for h in range(4)]
    assert [row["regime"] for row in rows[:4]] == ["local", "uniform", "retrieval", "anti-local"]
    assert rows[0]["keys"] == 24
    assert rows[2]["parameters"] == {"bam/theta_alpha": 0.0, "bam/theta_beta": -0.5, "ssmax/scale": 0.5}
    assert rows[0]["mean_distance"] < rows[1]["mean_distance"] < rows[3]["mean_distance"]
    assert inspect.heads(checkpoint.describe(bam), keys=100)[0]["keys"] == 100


def test_only_positional_parameters_are_read(bam, monkeypatch):
    read = []
    original = checkpoint.read_params

    def spy(path, like=None, only=None):
        found = original(path, like, only)
        read.extend(checkpoint.index(found))
        return found

    monkeypatch.setattr(checkpoint, "read_params", spy)
    inspect.heads(checkpoint.describe(bam))
    assert len(read) == 9
    assert all("/position/" in array.name and array.shape == (4,) for array in read)


def test_text_folds_layers_that_are_alike(bam, capsys):
    assert inspect.main([str(bam)]) == 0
    text = capsys.readouterr().out
    assert "layer_0 … layer_2 (3 alike)" in text
    assert "float32[16, 4, 4]" in text
    assert "step         5, after 1.00 h of training" in text
    assert "model.position           bam+ssmax" in text
    assert "head  3  anti-local" in text
    assert inspect.main([str(bam), "--full"]) == 0
    full = capsys.readouterr().out
    assert "layer_2\n" in full
    assert "count  " in full


def test_json_holds_all_facts(bam, capsys):
    assert inspect.main([str(bam), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == found["data"]["step"] == 5
    query = next(a for a in found["params"] if a["name"] == "layer_1/attention/query")
    assert (query["shape"], query["dtype"], query["bytes"]) == ([16, 4, 4], "float32", 1024)
    assert len(found["heads"]) == 12
    assert found["config"]["model"]["layers"] == 3


def test_difference_of_two_checkpoints(bam, tmp_path, capsys):
    other = save(tmp_path / "rope", small("position=rope", "model.layers=3", "model.heads=4", "optim.lr=1e-4"), step=7)
    assert inspect.main(["--diff", str(bam), str(other)]) == 0
    text = capsys.readouterr().out
    for line in (
        "  model.position: 'bam+ssmax' → 'rope'",
        "  optim.lr: 0.003 → 0.0001",
        "  layer_0/attention/position/bam/theta_alpha float32[4] is only in the first",
        "  step: 5 → 7",
        "  data.step: 5 → 7",
        "state: no difference",
    ):
        assert line in text.splitlines()
    assert inspect.main(["--diff", str(bam), str(bam), "--json"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert (same["configuration"], same["parameters"], same["facts"]) == ([], [], [])


@pytest.mark.parametrize("spec", ["alibi", "nope", "2*bam(scope=global),rope", "t5+ssmax"])
def test_every_kind_of_scheme_can_be_inspected(spec, tmp_path, capsys):
    save(tmp_path, small(f"position={spec}", "model.layers=3"))
    assert inspect.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert ("no head has a prior over distance" in text) == (spec == "nope")
    assert text.count("head  1") == {"alibi": 3, "nope": 0, "2*bam(scope=global),rope": 2, "t5+ssmax": 3}[spec]


def test_what_is_no_checkpoint_is_refused_in_a_line(bam, tmp_path, capsys):
    assert inspect.main([str(tmp_path)]) == 2
    assert "neither a run nor a complete checkpoint" in capsys.readouterr().err
    shutil.copytree(bam, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/checkpoints/00000005/params")
    assert inspect.main([str(tmp_path / "copy")]) == 2
    for arguments, message in (
        (["--diff", "a"], "--diff compares two checkpoints, as in --diff A B; got 1: a"),
        (["a", "b"], "one checkpoint is inspected at a time (--diff A B compares two); got 2: a b"),
    ):
        with pytest.raises(SystemExit):
            inspect.main(arguments)
        assert message in capsys.readouterr().err


def test_the_flag_may_stand_between_the_checkpoints(bam, capsys):
    assert inspect.main([str(bam), "--diff", str(bam)]) == 0
    assert "configuration: no difference" in capsys.readouterr().out


def test_a_folder_of_runs_names_them(tmp_path, capsys):
    save(tmp_path / "members" / "seed-0", small("position=nope"))
    assert inspect.main([str(tmp_path)]) == 2
    assert "it holds runs, so name one of them, such as members/seed-0" in capsys.readouterr().err
