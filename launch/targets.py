"""Plans for TPU VMs, xpk on GKE, SLURM and one machine. Options are those of `launch.run`, already checked there.

gcloud's queued resources and `tpu-vm ssh`: cloud.google.com/sdk/gcloud/reference/compute/tpus; xpk: its `workload
create --help`, by which a workload restarts on exit statuses 42 and 127 to 255 and on those that are added.
"""

import re
import shlex
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from launch.needs import find_python, look
from launch.plan import Command, File, Plan
from launch.supervise import FINAL, LOG_NAME, PID_NAME, STATUS_NAME

RUNTIMES = {"v5litepod": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
LOST = 4  # experiments.train: another process of the run is gone
_SAVING = 120  # seconds that a run gets to save when it is preempted


def chips_of(kind: str) -> int:
    """Chips of an accelerator type: v5litepod-256 and v6e-256 count chips, v5p-512 counts cores, two per chip.

    ValueError for a type that is none of these.
    """
    match = re.fullmatch(r"(v5litepod|v5p|v6e)-(\d+)", kind)
    if not match:
        raise ValueError(f"--type {kind!r} is not known; write v5litepod-256, v5p-512 or v6e-256, say")
    return int(match[2]) // (2 if match[1] == "v5p" else 1)


def train_command(options: Namespace, python: str, *, distributed: bool) -> list[str]:
    """The command that starts the run, and continues it whenever it is given again."""
    keys = ["--config", options.config, *options.overrides, "--run-dir", f"{options.runs}/{options.name}", "--resume"]
    return [
        *("env", f"JAX_COMPILATION_CACHE_DIR={options.runs}/programs", python, "-m", "experiments.train"),
        *(["--distributed"] if distributed else []),
        *keys,
    ]


def tpu_vm(options: Namespace) -> Plan:
    """A TPU VM (pod slice): made through a queued resource with --create, else one that is there."""
    pod = _Pod(options)
    made = (pod.create(), pod.wait()) if options.create else ()
    ready = (*pod.setup(), pod.look(), *pod.install())
    kept = f"{options.logs}/{options.name}"
    packed = (
        Command("a folder for the code and one for the logs", ("mkdir", "-p", str(Path(pod.archive).parent), kept)),
        Command("pack the last commit", ("git", "archive", "--format=tar.gz", f"--output={pod.archive}", "HEAD")),
    )
    gone = f"{pod.tpu} is gone and was not made here: give --create to have it made again"
    lost = Command("nothing can be rebuilt", ("bash", "-c", f"echo {shlex.quote(gone)} >&2; exit 1"))
    return Plan(
        options.name,
        before=(*packed, *made, *ready),
        run=(pod.start(), pod.follow()),
        after=tuple(pod.collect(worker, kept) for worker in range(options.hosts)),
        restarts=options.max_restarts,
        final=FINAL,
        healthy=pod.healthy(),
        rebuild=(pod.delete(), *made, *ready) if options.create else (lost,),
    )


class _Pod:
    """gcloud's commands for one TPU VM."""

    def __init__(self, options: Namespace) -> None:
        self.options, self.tpu = options, options.tpu or options.name
        self.home = f"bampath-{options.name}"
        self.archive = f"build/launch/{options.name}/code.tar.gz"
        self._where = (f"--zone={options.zone}", *([f"--project={options.project}"] if options.project else []))

    def _queued(self, verb: str, *more: str) -> tuple[str, ...]:
        return ("gcloud", "compute", "tpus", "queued-resources", verb, self.tpu, *more)

    def _vm(self, *words: str) -> tuple[str, ...]:
        return ("gcloud", "compute", "tpus", "tpu-vm", *words)

    def _on(self, worker: str, what: str, text: str) -> Command:
        return Command(what, (*self._vm("ssh", self.tpu), *self._where, f"--worker={worker}", f"--command={text}"))

    def create(self) -> Command:
        options = self.options
        runtime = options.runtime_version or RUNTIMES[options.type.split("-")[0]]
        machine = (f"--accelerator-type={options.type}", f"--runtime-version={runtime}")
        spot = ("--spot",) if options.spot else ()
        argv = self._queued("create", f"--node-id={self.tpu}", *self._where, *machine, *spot)
        return Command("ask for the machines", argv)

    def wait(self) -> Command:
        state = shlex.join(self._queued("describe", *self._where, "--format=value(state.state)"))
        failed = "case $s in FAILED|SUSPEND*) exit 1 ;; esac"
        until = f'until s=$({state}); [ "$s" = ACTIVE ]; do {failed}; sleep 30; done'
        return Command("wait until they are there", ("bash", "-c", until))

    def healthy(self) -> Command:
        state = shlex.join((*self._vm("describe", self.tpu), *self._where, "--format=value(state)"))
        return Command("are the machines there?", ("bash", "-c", f'[ "$({state})" = READY ]'))

    def delete(self) -> Command:
        argv = self._queued("delete", *self._where, "--force", "--quiet")
        return Command("give back what is left of them", argv)

    def setup(self) -> tuple[Command, ...]:
        """The user's own command, which mounts the folder of runs, say, or installs a Python."""
        return (self._on("all", "prepare every worker", self.options.setup),) if self.options.setup else ()

    def look(self) -> Command:
        options = self.options
        text = look(options.needed, options.runs, shared=options.hosts > 1)
        return self._on("all", "has every worker what the run needs?", text)

    def install(self) -> tuple[Command, Command]:
        copy = self._vm("scp", self.archive, f"{self.tpu}:{self.home}.tar.gz")
        unpack = f"mkdir -p {self.home} && tar -xzf {self.home}.tar.gz -C {self.home} && cd {self.home}"
        packages = "\"$p\" -m venv .venv && .venv/bin/pip install -q -r requirements.txt 'jax[tpu]'"
        return (
            Command("copy the code", (*copy, *self._where, "--worker=all")),
            self._on("all", "install it", f"{find_python()}; {unpack} && {packages}"),
        )

    def start(self) -> Command:
        """Detached, so that a lost connection does not end it."""
        options, python = self.options, ".venv/bin/python"
        supervise = (python, "-m", "launch.supervise", "--logs", f"logs/{options.name}")
        train = train_command(options, python, distributed=True)
        command = shlex.join([*supervise, "--max-restarts", str(options.max_restarts), "--", *train])
        alive = f"kill -0 $(cat logs/{options.name}/{PID_NAME}) 2>/dev/null"
        begin = f"rm -f logs/{options.name}/{STATUS_NAME}; "
        begin += f"setsid nohup {command} > /dev/null 2>&1 < /dev/null & sleep 2"
        text = f"cd {self.home} && mkdir -p logs && {{ {alive} || {{ {begin}; }}; }}"
        return self._on("all", "start the run on every worker, if it is not running", text)

    def follow(self) -> Command:
        """Until the supervisor of worker 0 ends; its status."""
        show = f"tail -n +1 -F --pid=$(cat {PID_NAME}) {LOG_NAME}"
        text = f"cd {self.home}/logs/{self.options.name} && {show}; exit $(cat {STATUS_NAME} || echo 255)"
        return self._on("0", "follow it on the first", text)

    def collect(self, worker: int, kept: str) -> Command:
        """A copy per worker: their files have the same names."""
        there = f"{self.tpu}:{self.home}/logs/{self.options.name}"
        argv = self._vm("scp", "--recurse", there, f"{kept}/worker-{worker}")
        return Command(f"collect the logs of worker {worker}", (*argv, *self._where, f"--worker={worker}"))


def xpk(options: Namespace) -> Plan:
    """A workload of a GKE cluster made with xpk; GKE restarts it."""
    where = ["--cluster", options.cluster, "--zone", options.zone]
    where += ["--project", options.project] if options.project else []
    image = ["--docker-image", options.image] if options.image else ["--base-docker-image", options.base_image]
    train = shlex.join(train_command(options, "python3", distributed=True))
    install = "pip install -q -r requirements.txt 'jax[tpu]' && "
    create = [
        *("xpk", "workload", "create", "--workload", options.name, *where, "--tpu-type", options.type),
        *("--num-slices", "1", *image, *([] if options.image else ["--script-dir", "."])),
        *("--max-restarts", str(options.max_restarts), "--restart-on-exit-codes", str(LOST)),
        *("--termination-grace-period-seconds", str(_SAVING)),
        *("--command", train if options.image else f"{install}{train}"),
    ]
    wait = ("xpk", "workload", "list", *where, f"--wait-for-job-completion={options.name}")
    chosen = (
        f'resource.type="k8s_container" AND resource.labels.cluster_name="{options.cluster}" AND '
        f'labels."k8s-pod/jobset_sigs_k8s_io/jobset-name"="{options.name}"'
    )
    worker = 'labels."k8s-pod/batch_kubernetes_io/job-completion-index"'
    logs = [
        *("gcloud", "logging", "read", chosen, "--freshness=30d", "--order=asc"),
        f"--format=value(timestamp,{worker},textPayload)",
        *([f"--project={options.project}"] if options.project else []),
    ]
    return Plan(
        options.name,
        before=(Command("submit the workload; GKE restarts it", tuple(create)),),
        run=(Command("wait until it is done", wait),),
        after=(Command("collect the logs", tuple(logs), to=f"{options.logs}/{options.name}/workers.log"),),
    )


def slurm(options: Namespace) -> Plan:
    """A batch job with one process per GPU, which puts itself back into the queue until the run is done."""
    path = f"build/launch/{options.name}/job.sbatch"
    logs = f"{Path(options.logs).absolute()}/{options.name}"
    lines = {
        "job-name": options.name,
        "nodes": str(options.nodes),
        "ntasks-per-node": str(options.gpus_per_node),
        "gpus-per-node": str(options.gpus_per_node),
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": f"{logs}/job.log",
        "open-mode": "append",
        "signal": f"TERM@{_SAVING}",
    }
    directives = [f"#SBATCH --{name}={value}" for name, value in lines.items() if value]
    several = options.nodes * options.gpus_per_node > 1
    train = shlex.join(train_command(options, ".venv/bin/python", distributed=several))
    again = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {options.max_restarts} ]'
    text = "\n".join(
        [
            "#!/bin/bash",
            *directives,
            "#SBATCH --requeue",
            f"cd {shlex.quote(str(Path.cwd()))} || exit 2",
            f"srun --kill-on-bad-exit=0 --open-mode=append --output={shlex.quote(logs)}/process-%t.log {train}",
            "status=$?",
            f"case $status in 0|{'|'.join(map(str, FINAL))}) exit $status ;; esac",
            f'if {again}; then scontrol requeue "$SLURM_JOB_ID"; fi',
            "exit $status",
        ]
    )
    return Plan(
        options.name,
        files=(File("the job", path, text + "\n"),),
        before=(Command("SLURM writes the logs here", ("mkdir", "-p", logs)),),
        run=(Command("submit it; it puts itself back into the queue", ("sbatch", path)),),
    )


def local(options: Namespace) -> Plan:
    """This machine, watched by `launch.supervise`."""
    python = options.python
    watch = (python, "-m", "launch.supervise", "--logs", f"{options.logs}/{options.name}")
    several = ("--processes", str(options.processes)) if options.processes > 1 else ()
    train = train_command(options, python, distributed=False)
    command = (*watch, "--max-restarts", str(options.max_restarts), *several, "--", *train)
    return Plan(options.name, run=(Command("train, and start again what was killed", command),))


TARGETS: dict[str, Callable[[Namespace], Plan]] = {"tpu-vm": tpu_vm, "xpk": xpk, "slurm": slurm, "local": local}
