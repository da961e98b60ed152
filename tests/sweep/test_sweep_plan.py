"""Axes as they are written, what cannot be one, names of members and groups, folders that are damaged or in use."""

import json
import re
from pathlib import Path

import pytest

from bampath.data import load_corpus
from bampath.lock import InUseError, RunLock
from experiments.sweep.__main__ import check, check_text, claim, main
from experiments.sweep.plan import Axis, Spec, axis_of, plan, spec_json
from tests.train.small import SMALL, text_file


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("seed=0..3", Axis("seed", ("0", "1", "2", "3"))),
        ("optim.lr=1e-3, 3e-3", Axis("optim.lr", ("1e-3", "3e-3"))),
        (
            "position=3*rope+window(8),nope; rope",
            Axis("model.position", ("3*rope+window(8),nope", "rope")),
        ),
        ("position=3*rope+window(8),nope;", Axis("model.position", ("3*rope+window(8),nope",))),
        (
            "position=rope,bam(mu=trainable,init=laplace)+ssmax",
            Axis("model.position", ("rope", "bam(mu=trainable,init=laplace)+ssmax")),
        ),
    ],
)
def test_axes_as_they_are_written(text: str, axis: Axis):
    assert axis_of(text) == axis
    assert axis_of(str(axis)) == axis


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--vary", "train.steps=10,20"],
            "train.steps cannot be an axis: the runs of a sweep take their steps tog",
        ),
        (["--vary", "mesh.data=1,2"], "mesh.data cannot be an axis"),
        (["--structure", "seed=0,1"], "would compile one program again and again; use --vary"),
        (["--vary", "seed=0,1", "--vary", "data.seed=0,1"], "the axis seed is given twice"),
        (["--vary", "seed=1,1"], "has a value twice"),
        (["--vary", "data.tokenizer=bytes,a.json"], "share one tokenizer; use --structure"),
        (["--vary", "seed"], "is no axis"),
        (["--vary", "optim.lrate=1,2"], "unknown key 'optim.lrate'"),
        (["mesh.data=2"], r"mesh.\* spreads one run over 2 devices"),
        (["--resume"], "--resume needs --out"),
        (["--devices", "-1"], "--devices -1 must be"),
        (["--structure", "data.source=nowhere,elsewhere"], "source='nowhere' is no file, folder or glob"),
        (
            ["--structure", "position=3*rope+window(8),nope"],
            r"may be one value .* or 2: write 'position=.*nope;' for one",
        ),
        (["--structure", "data.source=0.5*a,0.5*b"], r"'data\.source=0\.5\*a;0\.5\*b' for 2"),
        (["--vary", "seed=0..999999999"], "1,000,000,000 values; a sweep may have 4,096 runs"),
        (
            ["--vary", "train.seed=0..99", "--vary", "data.seed=0..99"],
            r"10,000 runs \(train.seed 100 x data.seed 100\)",
        ),
        (["--vary", "optim.lr=1e-3,0.001"], "optim.lr=1e-3 and optim.lr=0.001 are one value"),
        (["--vary", "init.theta_beta=1,x", "position=bam"], "init.theta_beta='x' is not a number"),
        (["--vary", "init.theta=1", "position=bam"], "has no positional parameter 'theta'"),
        (
            ["--structure", "model.dim=32,64"],
            r"model.dim is given for all runs and also as an axis, --structure model.dim=…",
        ),
        (["--vary", "seed=0,1", "data.seed=3"], "data.seed is given for all runs and also as an axis, --vary seed=…"),
    ],
)
def test_what_cannot_be_an_axis_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given = [] if arguments == ["--resume"] else ["--out", str(tmp_path / "new")]
    if "--devices" not in arguments:
        monkeypatch.setattr("experiments.sweep.__main__.prepare_devices", lambda *_: None)  # they are there already
    assert main(["--config", "tiny", *SMALL, *given, *arguments, "--dry-run"]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


def test_a_structural_axis_cannot_be_vmapped(spec: Spec):
    wrong = Spec(spec.config, SMALL, (Axis("seed", ("0", "1")), Axis("model.kv_heads", ("2", "1"))), ())
    message = "--vary model.kv_heads: 1 makes another program than 2 .*use --structure model.kv_heads=2,1"
    with pytest.raises(ValueError, match=message):
        check(plan(wrong)[0], wrong)


def test_structures_are_groups_of_their_own(spec: Spec):
    structure = (Axis("model.position", ("rope", "alibi")), Axis("model.kv_heads", ("1", "2")))
    groups = plan(Spec(spec.config, SMALL, spec.vary, structure))
    assert [len(group.members) for group in groups] == [4] * 4
    assert [group.slug for group in groups][:2] == ["position-rope_kv_heads-1", "position-rope_kv_heads-2"]
    assert groups[1].members[0].slug == "position-rope_kv_heads-2_seed-0_lr-3e-3"
    assert (groups[3].members[3].config.model.position, groups[3].members[3].config.model.kv_heads) == ("alibi", 2)
    assert [group.slug for group in plan(Spec(spec.config, SMALL, (), ()))] == ["all"]


def test_no_two_members_or_groups_share_a_name(tmp_path: Path):
    sources = ("/c/a_b.txt", "/c/a/b.txt", "/c/other.txt", "/c/OTHER.txt", "/" + "long" * 90)
    groups = plan(Spec("tiny", SMALL, (Axis("seed", ("0", "1")),), (Axis("data.source", sources),)))
    names = [group.slug for group in groups]
    members = [member.slug for group in groups for member in group.members]
    assert len({name.lower() for name in names}) == 5
    assert len({name.lower() for name in members}) == 10
    for name in (*names, *members):
        (tmp_path / f"{name}.partial").touch()
    assert names[0].startswith("source-_c_a_b.txt-")
    assert plan(Spec("tiny", SMALL, (), (Axis("data.source", sources[1:3]),)))[0].slug == "source-_c_a_b.txt"


def test_one_process_trains_in_a_folder(
    spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"

    def second(trained: Spec, *_: object) -> int:
        """What a second command hears while the first one trains."""
        (out / "sweep.json").write_text(json.dumps(spec_json(trained)))
        assert main(["--resume", "--out", str(out)]) == 2
        assert re.search(r"out is being written by process \d+ .* choose another --out", capsys.readouterr().err)
        with RunLock(out, "--out") as lock, pytest.raises(InUseError):
            claim(out, lock, resume=True)
        return 7

    monkeypatch.setattr("experiments.sweep.__main__.train", second)
    monkeypatch.setattr("experiments.sweep.__main__.prepare_devices", lambda *_: None)
    assert main(["--config", "tiny", *spec.overrides, "--vary", "seed=0,1", "--out", str(out)]) == 7
    with RunLock(out, "--out") as lock, pytest.raises(FileExistsError, match="is not empty; continue that sweep"):
        claim(out, lock, resume=False)
    (out / "sweep.json").unlink()
    with RunLock(out, "--out") as lock:
        claim(out, lock, resume=False)  # of a command that was stopped before it began, only the lock is left


def test_a_damaged_cache_stops_no_sweep(tmp_path: Path):
    """As it is built anew; what cannot be read at all does."""
    keys = (*SMALL, f"data.source={text_file(tmp_path)}", f"data.cache_dir={tmp_path / 'cache'}")
    groups = plan(Spec("tiny", keys, (Axis("seed", ("0", "1")),), ()))
    load_corpus(groups[0].members[0].config.data)
    check_text(groups)
    (meta,) = (tmp_path / "cache").glob("*/meta.json")
    meta.write_text("{")
    check_text(groups)
    meta.unlink()
    meta.parent.joinpath("train.tokens").unlink()
    check_text(groups)
    for path in (tmp_path / "text").iterdir():
        path.write_bytes(b"a\xff")
    with pytest.raises(ValueError, match="is not UTF-8"):
        check_text(groups)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"config": "tiny"}', '{"config": 3, "overrides": [], "vary": [], "structure": []}']
)
def test_a_damaged_sweep_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "sweep.json").write_text(text)
    assert main(["--resume", "--out", str(tmp_path)]) == 2
    assert f"{tmp_path / 'sweep.json'} is damaged (" in capsys.readouterr().err
