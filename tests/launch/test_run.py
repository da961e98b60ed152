"""Launch plans as text, what is refused, and a local run that is killed and goes on."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bampath import config as configs
from bampath.metrics import read
from launch import needs, plan, run
from launch.plan import Command, File, Plan, call, execute, run_name
from launch.targets import TARGETS, chips_of, slurm
from tests.train.small import SMALL, text_file

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
BIG = ("--config", "bam-1.1b", "mesh.fsdp=16", "train.accumulate=1", "--name", "demo", "--dry-run")
BATCH = ("--on", "slurm", "--nodes", "2", "--gpus-per-node", "8", "--time", "1:00:00")
PODS = ("--on", "xpk", "--cluster", "pods", "--zone", "z", "--type", "v6e-16")
CASES = {
    "tpu-vm": (
        *("--on", "tpu-vm", "--create", "--spot", "--type", "v5litepod-16", "--zone", "us-west4-a"),
        *("--project", "mine", "--runs", "/mnt/runs", "position=path+fox", *BIG),
    ),
    "xpk": (
        "--on",
        "xpk",
        "--cluster",
        "pods",
        "--zone",
        "us-west4-a",
        "--type",
        "v6e-16",
        "--runs",
        "/mnt/runs",
        *BIG,
    ),
    "slurm": (
        *("--on", "slurm", "--nodes", "2", "--gpus-per-node", "8", "--time", "24:00:00", "--partition", "gpu"),
        *("--logs", "/home/me/logs", "--max-restarts", "7", *BIG),
    ),
    "local": (
        "--on",
        "local",
        "--python",
        "python3",
        "--config",
        "tiny",
        "--name",
        "demo",
        "--processes",
        "2",
        "--dry-run",
    ),
}


def git_says(monkeypatch: pytest.MonkeyPatch, **answers: str) -> None:
    """Let `git VERB` print this, and no other program be run by launch."""
    real = subprocess.run

    def answer(argv: list[str], **how: object) -> object:
        if argv[0] != "git":
            return real(argv, **how)
        return subprocess.CompletedProcess(argv, 0, stdout=answers[argv[1].replace("-", "_")])

    monkeypatch.setattr(subprocess, "run", answer)


@pytest.fixture(autouse=True)
def _committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be in the middle of a change."""
    git_says(monkeypatch, status="", ls_tree="")


@pytest.mark.parametrize("target", CASES)
def test_a_dry_run_prints_exactly_what_would_run(target: str, capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.chdir("/tmp")
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is run
    assert run.main(CASES[target]) == 0
    assert capsys.readouterr().out == (GOLDEN / f"{target}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("target", CASES)
def test_the_plan_is_a_shell_script(target: str):
    text = (GOLDEN / f"{target}.txt").read_text(encoding="utf-8")
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.stderr == ""
    for inner in re.findall(r"^bash -c (.*)$", text, re.MULTILINE):  # what a shell inside gets is a script, too
        argument = subprocess.run(["bash", "-c", f"printf %s {inner}"], text=True, capture_output=True, check=True)
        subprocess.run(["bash", "-n", "-c", argument.stdout], check=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--on", "tpu-vm", "--create", "--type", "v5litepod-16", "--runs", "/r"), "needs --zone"),
        (("--on", "tpu-vm", "--zone", "z", "--type", "v5litepod-16", "--runs", "/r"), "needs --tpu NAME"),
        (("--on", "tpu-vm", "--zone", "z", "--type", "v5litepod-16", "--tpu", "t"), "needs --runs"),
        (
            ("--on", "tpu-vm", "--zone", "z", "--type", "v4-16", "--runs", "/r", "--create"),
            "--type 'v4-16' is not known",
        ),
        (("--on", "tpu-vm", "--zone", "z", "--type", "v5p-16", "--runs", "/r", "--create"), "has 8 devices, .* is 16"),
        (
            ("--on", "tpu-vm", "--zone", "z", "--type", "v6e-16", "--runs", "/r", "--tpu", "t", "--spot"),
            "--spot is for",
        ),
        (("--on", "slurm", "--nodes", "2", "--time", "1:00:00"), "needs --gpus-per-node"),
        (("--on", "slurm", "--nodes", "2", "--gpus-per-node", "4", "--time", "1:0:0"), "has 8 devices, .* is 16"),
        (("--on", "local", "--zone", "z"), "--on local has no use for --zone"),
        (("--on", "local", "--max-restarts", "-1"), "must not be negative"),
        (("--on", "local", "--processes", "0"), "--processes 0 must be at least 1"),
        (("--on", "local", "--processes", "-3"), "--processes -3 must be at least 1"),
        ((*PODS, "--runs", "/r", "--processes", "0"), "--on xpk has no use for --processes"),
        ((*BATCH, "--nodes", "0"), "--nodes 0 must be at least 1"),
        (("--on", "local", "--nodes", "0"), "--on local has no use for --nodes"),
        (("--on", "local", "--python", "/nonexistent"), "--python '/nonexistent' is not a program on this machine"),
        (("--on", "local", "--name", ""), "--name '' is empty"),
        (("--on", "local", "--runs", ""), "--runs '' is empty"),
        ((*BATCH, "--time", ""), "--time '' is empty"),
        (("--on", "local", "--runs", "gs://b/r"), "--runs gs://b/r is an address, must be a folder: mount it"),
        ((*BATCH, "--runs", "S3:/b/r"), "--runs S3:/b/r is an address"),
        ((*PODS, "--runs", "gs://b/r"), "--runs gs://b/r is an address"),
        ((*PODS, "--logs", "gs://b/r", "--runs", "/r"), "--logs gs://b/r is an address"),
        ((*PODS, "--runs", "~/r"), "--runs '~/r' must be a path from /, the same folder on all machines"),
        ((*PODS, "--runs", "runs"), "--runs 'runs' must be a path from /"),
        (("--on", "local", "--runs", "~nobody-called-so/r"), "--runs '~nobody-called-so/r': there is no such home"),
        ((*PODS, "--runs", "/r", "--zone", "z\nrm"), r"--zone 'z\\nrm' must be of letters, digits and"),
        ((*PODS, "--runs", "/r", "--cluster", 'a" OR "'), "--cluster .* must be of letters"),
        (("--on", "local", "--runs", "a\nb"), r"--runs 'a\\nb' must not have control characters"),
        ((*BATCH, "--partition", "gpu\nrm -r x"), r"--partition 'gpu\\nrm -r x' must be of letters, digits and"),
        ((*BATCH, "--account", "a b"), "--account 'a b' must be of letters"),
        ((*BATCH, "--time", "24"), "--time '24' must be HH:MM:SS or D-HH:MM:SS"),
        ((*BATCH, "--time", "1:00:00\nrm"), r"--time '1:00:00\\nrm' must not have control characters"),
        ((*BATCH, "--logs", "/my logs"), "--logs: SLURM cannot write into '/my logs'"),
        ((*BATCH, "--logs", "/logs/%j"), "--logs: SLURM cannot write into '/logs/%j'"),
        (("--on", "local", "--name", "Not_a_name"), "--name 'Not_a_name' must be"),
        (("--on", "local", "positon=rope"), "unknown key 'positon'; did you mean position"),
    ],
)
def test_what_cannot_work_is_refused_at_once(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture):
    keys = ("--config", "bam-1.1b", "mesh.fsdp=16", "train.accumulate=1", "--dry-run")
    assert run.main((*arguments, *keys)) == 2
    assert re.search(message, capsys.readouterr().err)


def examples(text: str) -> list[str]:
    """The command lines `python -m launch.run --on …` of a text."""
    joined = re.sub(r"\\\n\s*", "", text)
    return re.findall(r"^    python -m launch\.run (--on [a-z].*)$", joined, re.MULTILINE)


@pytest.mark.parametrize("source", ["help", "docs/scaling.md"])
def test_the_examples_can_be_launched(source: str, capsys: pytest.CaptureFixture):
    if source == "help":
        with pytest.raises(SystemExit):
            run.main(["--help"])
        text = capsys.readouterr().out
    else:
        text = (ROOT / source).read_text(encoding="utf-8")
    found = examples(text)
    assert [line.split()[1] for line in found] == ["local", "tpu-vm", "xpk", "slurm"]
    for line in found:
        words = shlex.split(line)
        assert run.main([*words, "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("target", ["local", "slurm"])
def test_folders_of_home_are_written_out(target: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    where = BATCH if target == "slurm" else ("--on", "local")
    assert run.main([*where, *BIG, "--runs", "~/runs/", "--logs", "~/logs"]) == 0
    out = capsys.readouterr().out
    assert "JAX_COMPILATION_CACHE_DIR=/home/me/runs/programs " in out
    assert "--run-dir /home/me/runs/demo " in out
    assert "/home/me/logs/demo" in out
    assert "~" not in out


def test_a_line_of_an_override_does_not_end_the_file_of_a_dry_run(tmp_path: Path, capsys, monkeypatch):
    """The printed script, run without sbatch, writes the file that would be written, and nothing of it is run."""
    monkeypatch.chdir(tmp_path)
    bad = "train.init_from=a\nEND_OF_FILE\ntouch escaped\nEND_OF_FILE_"
    words = [*BATCH, *BIG, bad, "--logs", str(tmp_path / "logs")]
    assert run.main(words) == 0
    subprocess.run(["bash", "-c", f"sbatch() {{ :; }}\n{capsys.readouterr().out}"], check=True)
    assert not (tmp_path / "escaped").exists()
    plan_of_it = slurm(run.parse(words))
    assert (tmp_path / plan_of_it.files[0].path).read_text() == plan_of_it.files[0].text


def test_an_interpreter_that_cannot_be_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    program = tmp_path / "python"
    program.write_bytes(b"\x7fELF no program")
    program.chmod(0o755)
    assert run.main(["--on", "local", "--config", "tiny", "--python", str(program)]) == 2
    assert f"error: {program} cannot be run" in capsys.readouterr().err


def test_names_have_configuration_scheme_and_date():
    now = time.struct_time((2026, 11, 29, 19, 52, 0, 6, 333, 0))
    assert run_name("bam-1.1b", "path+fox(bias=5)", now) == "bam-1-1b-path-fox-bias-5-20261129-1952"
    long = run_name("bam-432m", "rope(theta=500000)+window(512)+bam+ssmax", now)
    assert len(long) <= plan.NAME_LENGTH
    assert long.endswith("-20261129-1952")
    plan.check_name(long)


def test_chips_by_type():
    assert [chips_of(kind) for kind in ("v5litepod-256", "v5p-512", "v6e-8")] == [256, 256, 8]


class Script:
    """Answers commands with the statuses that it was given, in order; 0 for any other."""

    def __init__(self, **answers: list[int]) -> None:
        self.answers, self.called = answers, []

    def __call__(self, command: Command) -> int:
        self.called.append(command.what)
        answers = self.answers.get(command.what, [])
        return answers.pop(0) if answers else 0


def command(what: str) -> Command:
    return Command(what, (what,))


PLAN = Plan(
    "demo",
    before=(command("create"),),
    run=(command("start"), command("follow")),
    after=(command("collect"),),
    restarts=2,
    final=(1, 2),
    healthy=command("healthy"),
    rebuild=(command("delete"), command("create")),
)


@pytest.mark.parametrize(
    ("answers", "status", "called"),
    [
        ({}, 0, "create start follow collect"),
        ({"create": [9]}, 9, "create"),
        ({"follow": [2]}, 2, "create start follow collect"),
        ({"follow": [255]}, 0, "create start follow healthy start follow collect"),
        ({"follow": [255], "healthy": [1]}, 0, "create start follow healthy delete create start follow collect"),
        ({"start": [7]}, 0, "create start healthy start follow collect"),
        (
            {"follow": [255, 143, 137]},
            137,
            "create start follow healthy start follow healthy start follow collect",
        ),
        ({"follow": [255], "healthy": [1], "delete": [5]}, 255, "create start follow healthy delete collect"),
    ],
)
def test_a_plan_is_repeated_until_it_is_done(answers: dict[str, list[int]], status: int, called: str):
    calls = Script(**answers)
    assert execute(PLAN, calls, say=lambda text: None) == status
    assert " ".join(calls.called) == called


def test_commands_are_run_and_files_written(tmp_path: Path, capfd: pytest.CaptureFixture):
    script = File("a script", str(tmp_path / "deep" / "script.sh"), 'echo "$1" to stdout; exit 3\n')
    run_it = Command("run it", ("bash", script.path, "words"), to=str(tmp_path / "out" / "log"))
    collect = Command("collect", ("bash", "-c", "echo collected"))
    assert execute(Plan("demo", files=(script,), run=(run_it,), after=(collect,)), call) == 3
    assert (tmp_path / "out" / "log").read_text() == "words to stdout\n"
    assert "collected\n" in capfd.readouterr().out
    assert call(Command("miss", ("no-such-program-here",))) == 127


@pytest.mark.parametrize("dry", [True, False])
def test_machines_get_the_last_commit_so_changes_are_refused(dry: bool, monkeypatch: pytest.MonkeyPatch, capsys):
    git_says(monkeypatch, status=" M launch/run.py\n")
    words = [word for word in CASES["xpk"] if dry or word != "--dry-run"]
    assert run.main(words) == 2
    assert "files differ from the last commit" in capsys.readouterr().err
    if dry:
        assert run.main([*words, "--allow-dirty"]) == 0


def test_files_that_the_machines_will_not_have_are_refused(monkeypatch: pytest.MonkeyPatch, capsys):
    assert run.main([*CASES["xpk"], "data.source=my/text"]) == 2
    error = capsys.readouterr().err
    assert "data.source: 'my/text' is not in the last commit" in error
    assert "name a path from /" in error
    git_says(monkeypatch, status="", ls_tree="my/text\n")
    assert run.main([*CASES["xpk"], "data.source=my/text"]) == 0


def test_what_a_run_reads_is_known():
    keys = ["data.source=0.7*shards:/d/a,0.3*fineweb:/d/b/*.parquet", "data.validation_source=tfds:books@/d/t"]
    found = needs.paths(configs.get("tiny", *keys, "data.tokenizer=/d/mistral.model", "train.init_from=/d/run"))
    assert found == {
        "data.source[0]": "/d/a",
        "data.source[1]": "/d/b/*.parquet",
        "data.validation_source": "/d/t",
        "data.tokenizer": "/d/mistral.model",
        "train.init_from": "/d/run",
    }
    assert needs.paths(configs.get("tiny", "data.validation_source=tfds:books")) == {}


def test_workers_are_looked_at_before_anything_is_installed(tmp_path: Path):
    """The text that a worker runs, run here."""
    (tmp_path / "text").mkdir()
    (tmp_path / "file").touch()

    def look(folder: Path, *, shared: bool = False, **needed: str) -> str:
        text = needs.look(needed, str(folder), shared=shared)
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
        assert done.returncode == (2 if done.stderr else 0), done
        return done.stderr

    runs = tmp_path / "my runs"
    assert look(runs, text=f"{tmp_path}/te*", here="not/from/root") == ""
    assert runs.is_dir()
    assert f"text: there is no {tmp_path}/none" in look(runs, text=f"{tmp_path}/none")
    assert f"{tmp_path}/file/runs cannot be written: mount it" in look(tmp_path / "file/runs")
    assert f"{runs} is a disk of this machine alone, must be one that all share" in look(runs, shared=True)
    without = needs.find_python().replace("python3", "python2-not-there")
    done = subprocess.run(["bash", "-c", without], capture_output=True, text=True, check=False)
    assert (done.returncode, "no Python 3.11 to 3.13" in done.stderr) == (2, True)


def test_a_pod_is_prepared_looked_at_and_installed_again_when_it_was_made_again():
    words = [word for word in CASES["tpu-vm"] if word != "position=path+fox"]
    made = TARGETS["tpu-vm"](run.parse([*words, "--setup", "sudo mount 10.0.0.2:/runs /mnt/runs"]))
    steps = ["prepare every worker", "has every worker what the run needs?", "copy the code", "install it"]
    for commands in (made.before, made.rebuild):
        assert [command.what for command in commands][-4:] == steps
        assert commands[-4].argv[-1] == "--command=sudo mount 10.0.0.2:/runs /mnt/runs"


@pytest.mark.slow
def test_a_local_run_that_is_killed_goes_on(tmp_path: Path):
    """kill −9 of the training process: the supervisor starts it again, and no step is missing or twice."""
    text_file(tmp_path)
    keys = [*SMALL, "train.steps=200", "train.save_every=50", f"data.source={tmp_path / 'text'}"]
    keys.append(f"data.cache_dir={tmp_path / 'cache'}")
    where = ["--runs", str(tmp_path / "runs"), "--logs", str(tmp_path / "logs"), "--name", "demo"]
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.run", "--on", "local", "--config", "tiny", *where, *keys],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
    )
    try:
        run_dir, log = tmp_path / "runs/demo", tmp_path / "logs/demo/log"
        while not list(run_dir.glob("checkpoints/????????")):
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        child = re.search(r"attempt 0: process (\d+)", log.read_text())
        assert child is not None
        os.kill(int(child[1]), signal.SIGKILL)
        assert process.wait(timeout=120) == 0, log.read_text()
    finally:
        process.terminate()
    said = log.read_text()
    assert "attempt 0 ended with -9; starting again" in said
    assert re.search(r"continuing after step \d*0\n", said)
    assert "attempt 1 ended with 0; done" in said
    assert [record["step"] for record in read(run_dir / "metrics.jsonl")] == list(range(1, 201))
    assert (tmp_path / "logs/demo/status").read_text() == "0\n"
    assert {path.name for path in (tmp_path / "logs/demo").glob("attempt*")} == {
        "attempt-00-process-0.log",
        "attempt-01-process-0.log",
    }
