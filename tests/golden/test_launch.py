"""Launch commands are what they were: compared with committed files, which UPDATE_GOLDEN=1 writes anew.

And they run: the Slurm script under a stand-in scheduler on PATH, with two torchrun agents that meet on loopback.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_trace.config import load
from megatron_trace.planning.launch_commands import KINDS, LaunchSpec, render

GOLDEN = Path(__file__).parent / "launch"
CASES = {
    ("tiny", "torchrun"): ("configs/tiny_moe_cpu.yaml", ["run.seed=3"], False),
    ("tiny", "torchrun-static"): ("configs/tiny_moe_cpu.yaml", ["cluster.nodes=2"], False),
    ("tiny", "torchrun-c10d"): ("configs/tiny_moe_cpu.yaml", ["cluster.nodes=2"], False),
    ("tiny", "slurm"): ("configs/tiny_moe_cpu.yaml", ["cluster.nodes=2"], False),
    ("qwen3_5_35b_a3b", "slurm"): ("configs/presets/qwen3_5_35b_a3b.yaml", [], True),
    ("qwen3_5_35b_a3b", "ray"): ("configs/presets/qwen3_5_35b_a3b.yaml", [], True),
    ("qwen3_5_35b_a3b", "kuberay"): ("configs/presets/qwen3_5_35b_a3b.yaml", [], True),
}


def _spec(repository: Path, path: str, overrides: list[str], gpu: bool) -> LaunchSpec:
    config = load(repository / path, overrides, planned_only=True)
    return LaunchSpec.build(config, config_path=path, overrides=overrides, gpu=gpu)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_rendered_commands_are_the_golden_ones(repository: Path, name: str, kind: str) -> None:
    files = render(_spec(repository, *CASES[(name, kind)]), kind)  # type: ignore[arg-type]
    folder = GOLDEN / f"{name}-{kind}"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
    assert {path.name: path.read_text() for path in folder.iterdir()} == files, "if meant: UPDATE_GOLDEN=1 pytest tests/golden"


def test_every_kind_has_a_golden_file() -> None:
    assert {kind for _, kind in CASES} == set(KINDS)


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[1] != "kuberay"])
def test_scripts_are_valid_shell(name: str, kind: str) -> None:
    for path in (GOLDEN / f"{name}-{kind}").iterdir():
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_manifests_are_valid_and_keep_the_ports() -> None:
    folder = GOLDEN / "qwen3_5_35b_a3b-kuberay"
    cluster = yaml.safe_load((folder / "raycluster.yaml").read_text())
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["port"] == "29501"
    assert cluster["spec"]["workerGroupSpecs"][0]["replicas"] == 7
    service, job = yaml.safe_load_all((folder / "trainer-job.yaml").read_text())
    assert job["spec"]["completions"] == 8 and service["spec"]["clusterIP"] == "None"


def test_words_of_the_user_are_quoted(repository: Path) -> None:
    script = render(_spec(repository, "configs/tiny_moe_cpu.yaml", ["run.output_dir=$(touch x) y"], False), "torchrun")[
        "run.sh"
    ]
    assert "'run.output_dir=$(touch x) y'" in script


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("torchrun", ["cluster.nodes=2"], "cluster.nodes=2: torchrun alone starts one node; use torchrun-c10d"),
        ("ray", [], "cluster.rollout_nodes=0: ray starts engines on nodes of their own; give at least one"),
    ],
)
def test_a_cluster_that_a_kind_is_not_for(repository: Path, kind: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(_spec(repository, "configs/tiny_moe_cpu.yaml", overrides, False), kind)  # type: ignore[arg-type]


# ---- executed -------------------------------------------------------------------------------------------------------------

SHORT = [
    "warmup.steps=2",
    "trainer.steps=2",
    "evidence.enabled=false",
    "task.heldout_problems=16",
    "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=4",
    "algorithm.updates_per_rollout=1",
    "trainer.micro_batch_size=8",
    "checkpoint.interval=1",
    "cluster.nodes=2",
]
SCONTROL = "#!/usr/bin/env bash\necho 127.0.0.1\nsleep 0.2\necho 127.0.0.1\n"
SBATCH = '#!/usr/bin/env bash\nSLURM_JOB_NODELIST=two SLURM_JOB_ID=42 exec bash "$1"\n'
SRUN = """#!/usr/bin/env bash
# One process a node, all ended by the first that fails, as srun --kill-on-bad-exit=1 does.
shift
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
code=0
for _ in 1 2; do wait -n || { code=$?; kill $first $second 2>/dev/null; break; }; done
exit $code
"""


def _free_port() -> int:
    """A port below the range the system hands out, so that nobody takes it before the run does."""
    for port in range(21000, 30000, 400):
        with socket.socket() as probe:
            if all(probe.connect_ex(("127.0.0.1", port + offset)) for offset in (0, 1)):
                return port
    raise RuntimeError("no free port")


def _environment(repository: Path, tools: Path | None = None) -> dict[str, str]:
    python = str(Path(sys.executable).parent)
    path = os.pathsep.join([*([str(tools)] if tools else []), python, os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.dist
def test_the_slurm_script_runs_two_nodes_on_a_stand_in_scheduler(repository: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("scontrol", SCONTROL), ("sbatch", SBATCH), ("srun", SRUN)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    overrides = [*SHORT, f"run.output_dir={tmp_path}", f"cluster.base_port={_free_port()}"]
    (tmp_path / "job.sbatch").write_text(
        render(_spec(repository, "configs/tiny_moe_cpu.yaml", overrides, False), "slurm")["job.sbatch"]
    )
    done = subprocess.run(
        ["sbatch", str(tmp_path / "job.sbatch")],
        cwd=repository,
        env=_environment(repository, tools),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "preflight: 2 nodes ready" in done.stdout
    lines = (tmp_path / "tiny_moe_cpu" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) >= 2


@pytest.mark.slow
@pytest.mark.dist
def test_a_killed_node_ends_the_other_and_the_run_resumes(repository: Path, tmp_path: Path) -> None:
    def start(*more: str, steps: int) -> list[subprocess.Popen[str]]:
        overrides = [item for item in SHORT if not item.startswith("trainer.steps")]
        overrides += [f"trainer.steps={steps}", f"run.output_dir={tmp_path}", f"cluster.base_port={_free_port()}", *more]
        config = load(repository / "configs/tiny_moe_cpu.yaml", overrides)
        hosts = ("127.0.0.1", "localhost")
        spec = LaunchSpec.build(config, config_path="configs/tiny_moe_cpu.yaml", overrides=overrides, hosts=hosts, gpu=False)
        files = render(spec, "torchrun-c10d")
        script = tmp_path / "run.sh"
        script.write_text(files["run.sh"])
        return [
            subprocess.Popen(
                ["bash", str(script)],
                cwd=repository,
                env=_environment(repository),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in hosts
        ]

    both = start(steps=500)
    checkpoints = tmp_path / "tiny_moe_cpu" / "checkpoints"
    try:
        _wait_until(lambda: len(list(checkpoints.glob("*"))) >= 2, 240, both)
        for process in [*psutil.Process(both[1].pid).children(recursive=True), psutil.Process(both[1].pid)]:
            process.kill()
        output, _ = both[0].communicate(timeout=60)
    finally:
        for agent in both:
            _kill_tree(agent)
    assert both[0].returncode != 0
    assert "ended with code" in output and "checkpoint.resume=true" in output

    step = max(int("".join(filter(str.isdigit, path.name)) or 0) for path in checkpoints.iterdir())
    resumed = start("checkpoint.resume=true", steps=step + 1)
    outputs = [agent.communicate(timeout=240)[0] for agent in resumed]
    assert [agent.returncode for agent in resumed] == [0, 0], outputs[0][-3000:]


def _wait_until(done, seconds: float, agents: list[subprocess.Popen[str]]) -> None:  # type: ignore[no-untyped-def]
    import time

    deadline = time.monotonic() + seconds
    while not done():
        assert all(agent.poll() is None for agent in agents), agents[0].communicate()[0][-3000:]
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.2)


def _kill_tree(agent: subprocess.Popen[str]) -> None:
    if agent.poll() is None:
        for process in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
            process.kill()
        agent.wait()
