"""What the studies share: cells that are kept, and what is refused before the first of them."""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from bampath.config import get, to_json
from bampath.lock import InUseError
from experiments.bam_h200 import run as bam
from experiments.extrapolation import run as extrapolation
from experiments.multi_gpu import run as multi_gpu
from experiments.positional_lsh import run as lsh
from experiments.positional_lsh import train as lsh_train
from experiments.state_tracking import run as state
from experiments.studies import alone, refuse_alike, refuse_counts, rows_of_cell


def test_a_cell_is_read_only_if_it_is_the_one_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "cell" / "rows.json"
    assert rows_of_cell(path, {"a": 1}) is None
    path.parent.mkdir()
    path.write_text(json.dumps({"identity": {"a": 1}, "rows": [{"loss": 2.0}]}))
    assert rows_of_cell(path, {"a": 1}) == [{"loss": 2.0}]
    with pytest.raises(ValueError, match="other options; choose another --out"):
        rows_of_cell(path, {"a": 2})
    config = json.loads(to_json(get("tiny")))
    older = {**config, "optim": {name: value for name, value in config["optim"].items() if name != "muon_dtype"}}
    path.write_text(json.dumps({"identity": {"config": older}, "rows": []}))  # before there was the option
    assert rows_of_cell(path, {"config": config}) == []
    for change in ("optim.lr=0.5", "optim.weight_decay=0.2"):
        with pytest.raises(ValueError, match="other options"):
            rows_of_cell(path, {"config": json.loads(to_json(get("tiny", change)))})
    path.write_text(json.dumps({"identity": {"config": {**older, "gone": 1}}, "rows": []}))
    with pytest.raises(ValueError, match="other options"):
        rows_of_cell(path, {"config": config})
    for text in ("", '{"identity"', "[]", '{"identity": {"a": 1}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"rows\.json is damaged \(.*delete it"):
            rows_of_cell(path, {"a": 1})


def test_cells_that_would_share_a_folder_are_refused() -> None:
    refuse_alike([("a", "a"), ("b", "b")])
    with pytest.raises(ValueError, match=r"fox\(bias=-5\) and fox\(bias=5\) would share the folder fox-bias-5"):
        refuse_alike([("fox(bias=5)", "fox-bias-5"), ("fox(bias=-5)", "fox-bias-5")])
    with pytest.raises(ValueError, match="rope is given twice"):
        refuse_alike([("rope", "rope"), ("rope", "rope")])


def test_a_second_process_in_the_folder_of_a_study_is_refused(tmp_path: Path) -> None:
    with alone(tmp_path / "study"):
        arguments = ["--out", str(tmp_path / "study"), "--schemes", "rope"]
        for main in (extrapolation.main, state.main):
            with pytest.raises(InUseError, match=r"study is being written by process .*choose another --out"):
                main(arguments)
    with alone(tmp_path / "study"):
        pass


def test_numbers_that_are_none() -> None:
    refuse_counts(Namespace(together=1, processes=None, minutes=float("inf")), "together", "processes")
    with pytest.raises(ValueError, match="--text-tokens 0 must be at least 1"):
        refuse_counts(Namespace(text_tokens=0), "text_tokens")
    for minutes in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"--minutes .* must be at least 0"):
            refuse_counts(Namespace(minutes=minutes))


BAM = ["--text", "nowhere.u16", "--held-out", "nowhere.u16", "--gpt2", "nowhere.json", "--size", "tiny"]
PAIR = ["fox(bias=5)", "fox(bias=-5)"]


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (bam.main, [*BAM, "--together", "0"], "--together 0 must be at least 1"),
        (bam.main, [*BAM, "--processes", "-1"], "--processes -1 must be at least 1"),
        (bam.main, [*BAM, "--seeds", "0", "0", "--cases", "rope"], "rope, retrieval, seed 0 is given twice"),
        (bam.main, [*BAM, "--cases", *PAIR], "would share the folder"),
        (bam.main, BAM, "--text nowhere.u16: there is no such file"),
        (extrapolation.main, ["--schemes", *PAIR], "would share the folder"),
        (state.main, ["--schemes", *PAIR], "would share the folder"),
        (state.main, ["--seeds", "1", "1"], "--seeds 1 is given twice"),
        (state.main, ["--minutes", "nan"], "--minutes nan must be at least 0"),
        (lsh.main, ["--seeds", "0"], "--seeds 0 must be at least 1"),
        (lsh.main, ["--out", "/dev/null"], "/dev/null is not a folder"),
        (lsh.main, ["--checkpoint", "nowhere"], "nowhere does not exist"),
        (lsh_train.main, ["--text", "nowhere", "--held-out", "x"], "--text nowhere: there is no such file"),
        (multi_gpu.main, ["--platform", "cpu", "--out", "/dev/null"], "--out /dev/null is not an ordinary file"),
        (multi_gpu.main, ["--platform", "cpu", "--seconds", "nan"], "--seconds nan must be positive"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    main, arguments, message, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lsh, "HERE", tmp_path)
    with pytest.raises((ValueError, OSError), match=message):
        main(arguments)
    assert not list(tmp_path.iterdir())


WAITS = """
import os, sys, time
open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
time.sleep(300)
"""


def test_an_interrupted_study_of_several_gpus_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pids").mkdir()
    monkeypatch.setattr(multi_gpu, "WORKER", (sys.executable, "-c", WAITS, str(tmp_path / "pids")))
    monkeypatch.setattr(multi_gpu.Study, "_look", lambda self: None)

    def collect(self: multi_gpu.Study) -> None:
        if len(list((tmp_path / "pids").iterdir())) >= 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(multi_gpu.Study, "_collect", collect)
    with pytest.raises(KeyboardInterrupt):
        multi_gpu.main(["--platform", "cpu", "--out", str(tmp_path / "results.json"), "--seconds", "120"])
    for pid in (int(path.name) for path in (tmp_path / "pids").iterdir()):
        last = time.monotonic() + 60
        while subprocess.run(["kill", "-0", str(pid)], capture_output=True, check=False).returncode == 0:
            assert time.monotonic() < last, f"process {pid} is left"
            time.sleep(0.05)
    assert os.listdir(tmp_path) == ["pids"]
