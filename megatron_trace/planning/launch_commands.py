"""Launch commands, scripts and manifests of a run, as text: one pure function of a ``LaunchSpec`` (no torch).

Trainers are started by torchrun, one agent a node; engines that Ray places get nodes of their own, started beside it. What is
rendered first asks the planner and the preflight, so that a run that cannot work ends before it holds a device.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from megatron_trace.config.schema import RunConfig
from megatron_trace.planning import layout, ports, rates
from megatron_trace.planning.ports import Ports

Kind = Literal["torchrun", "torchrun-static", "torchrun-c10d", "slurm", "ray", "kuberay"]
KINDS: tuple[Kind, ...] = ("torchrun", "torchrun-static", "torchrun-c10d", "slurm", "ray", "kuberay")
ENTRY = "launch/pretrain_rl.py"
NODE_WAIT_S = 300
"""How long a node waits for the others before the launch fails with the names of those missing."""


@dataclass(frozen=True)
class LaunchSpec:
    """Everything a launch needs. ``hosts`` has one name for each trainer node; the first is where ranks meet."""

    name: str
    config_path: str
    overrides: tuple[str, ...]
    nodes: int
    devices_per_node: int
    rollout_nodes: int
    ports: Ports
    environment: Mapping[str, str]
    hosts: tuple[str, ...]
    gpu: bool = True
    image: str = "megatron-trace:latest"
    time_limit: str = "24:00:00"
    extra_sbatch: tuple[str, ...] = field(default=())
    """More ``#SBATCH`` options, such as a partition or an account."""

    @classmethod
    def build(
        cls,
        config: RunConfig,
        *,
        config_path: str,
        overrides: Sequence[str] = (),
        hosts: Sequence[str] = (),
        gpu: bool = True,
        **more: Any,
    ) -> LaunchSpec:
        """The spec of ``config``; hosts default to ``node0``, ``node1``, ... Raises ValueError where their number is wrong."""
        where = layout.resolve(config)
        nodes = config.cluster.nodes
        names = tuple(hosts) or tuple(f"node{index}" for index in range(nodes))
        if len(names) != nodes:
            raise ValueError(f"hosts={list(names)}: {len(names)} names for cluster.nodes={nodes}; give one for each node")
        engine_nodes = config.cluster.rollout_nodes or nodes
        reserved = ports.reserve(config.cluster.base_port, engines_per_node=-(-rates.engines(config, where) // engine_nodes))
        return cls(
            name=config.run.name,
            config_path=config_path,
            overrides=tuple(overrides),
            nodes=nodes,
            devices_per_node=where.world_size // nodes,
            rollout_nodes=config.cluster.rollout_nodes,
            ports=reserved,
            environment=environment(config),
            hosts=names,
            gpu=gpu,
            **more,
        )

    @property
    def world_size(self) -> int:
        """Trainer ranks."""
        return self.nodes * self.devices_per_node


def environment(config: RunConfig) -> dict[str, str]:
    """Variables of every process: the precision contract's, and those that must be equal on all nodes."""
    values = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | config.contract.environment()
    if config.rollout.placement == "ray":
        # Ray 2.60 turns token authentication on; a rank with another mode than the head's cannot join.
        values |= {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    return dict(sorted(values.items()))


def render(spec: LaunchSpec, kind: Kind) -> dict[str, str]:
    """File name -> text of everything that ``kind`` needs, in the order it is used.

    Raises ValueError where the cluster is not one that ``kind`` is for.
    """
    if kind == "torchrun" and spec.nodes != 1:
        raise ValueError(
            f"cluster.nodes={spec.nodes}: torchrun alone starts one node; use torchrun-c10d, torchrun-static or slurm"
        )
    if kind in ("ray", "kuberay") and not spec.rollout_nodes:
        raise ValueError(f"cluster.rollout_nodes=0: {kind} starts engines on nodes of their own; give at least one")
    if kind == "torchrun":
        return {"run.sh": _script(spec, [_plan(spec), _guarded(spec, [*_torchrun(spec), "--standalone"])])}
    if kind == "torchrun-static":
        return {
            f"run-{host}.sh": _script(spec, [_plan(spec), _guarded(spec, [*_torchrun(spec), *_static(spec, index)])])
            for index, host in enumerate(spec.hosts)
        }
    if kind == "torchrun-c10d":
        return {"run.sh": _script(spec, [_plan(spec), _guarded(spec, [*_torchrun(spec), *_c10d(spec.hosts[0], spec)])])}
    if kind == "slurm":
        return {"job.sbatch": _slurm(spec)}
    if kind == "ray":
        return {"ray-head.sh": _ray(spec, head=True), "ray-worker.sh": _ray(spec, head=False), "trainer.sh": _ray_trainer(spec)}
    return {"raycluster.yaml": _kuberay(spec), "trainer-job.yaml": _trainer_job(spec)}


# ---- torchrun -------------------------------------------------------------------------------------------------------------


def _torchrun(spec: LaunchSpec) -> list[str]:
    return ["torchrun", "--nnodes", str(spec.nodes), "--nproc-per-node", str(spec.devices_per_node), "--max-restarts", "0"]


def _static(spec: LaunchSpec, index: int) -> list[str]:
    return ["--node-rank", str(index), "--master-addr", spec.hosts[0], "--master-port", str(spec.ports.rendezvous)]


def _c10d(endpoint: str, spec: LaunchSpec, *, run_id: str | None = None) -> list[str]:
    return [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{endpoint}:{spec.ports.rendezvous}",
        "--rdzv-id",
        run_id or spec.name,
        "--rdzv-conf",
        f"join_timeout={NODE_WAIT_S}",
    ]


def _arguments(spec: LaunchSpec) -> list[str]:
    return ["--config", spec.config_path, *spec.overrides]


def _plan(spec: LaunchSpec) -> str:
    return _line(
        ["python", "tools/plan.py", *_arguments(spec), "--for-run", "--world-size", str(spec.world_size), "--json"]
    ) + (" >/dev/null")


class _Shell(str):
    """A word that the shell shall expand; every other word is quoted."""


def _line(words: Sequence[str]) -> str:
    """``words`` as one shell line."""
    return " ".join(word if isinstance(word, _Shell) else shlex.quote(word) for word in words)


def _guarded(spec: LaunchSpec, words: Sequence[str], *, prefix: str = "") -> str:
    """The command, and a line that says which node ended and how to go on."""
    command = _line([*words, ENTRY, *_arguments(spec)])
    message = (
        'echo "error: the trainer on $(hostname) ended with code $code; the first error above names the cause. '
        'Resume with checkpoint.resume=true." >&2'
    )
    return f"{prefix}{command} || {{ code=$?; {message}; exit $code; }}"


def _script(spec: LaunchSpec, lines: Sequence[str], *, head: Sequence[str] = ()) -> str:
    exports = [f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items()]
    return "\n".join(["#!/usr/bin/env bash", *head, "set -euo pipefail", *exports, *lines]) + "\n"


# ---- Slurm ----------------------------------------------------------------------------------------------------------------


def _slurm(spec: LaunchSpec) -> str:
    options = [
        f"--job-name={spec.name}",
        f"--nodes={spec.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={spec.devices_per_node}"] if spec.gpu else []),
        f"--time={spec.time_limit}",
        "--output=%x-%j.log",
        # The trainer writes a checkpoint on SIGTERM.
        "--signal=TERM@120",
        *spec.extra_sbatch,
    ]
    endpoint = ["--rdzv-backend", "c10d", "--rdzv-endpoint", _Shell(f'"$head:{spec.ports.rendezvous}"')]
    endpoint += ["--rdzv-id", _Shell('"$SLURM_JOB_ID"')]
    wait = ["--rdzv-conf", f"join_timeout={NODE_WAIT_S}"]
    preflight = [
        "srun",
        "--kill-on-bad-exit=1",
        "python",
        "launch/preflight.py",
        *_arguments(spec),
        "--nodes",
        str(spec.nodes),
        "--meet",
        # Trainer nodes run no Ray, so its port is free for the nodes to meet on.
        _Shell(f'"$head:{spec.ports.ray}"'),
    ]
    return _script(
        spec,
        [
            # sed reads to the end: head would close the pipe on scontrol, and pipefail ends the script without a word.
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
            _plan(spec),
            _line(preflight),
            _guarded(spec, ["srun", "--kill-on-bad-exit=1", *_torchrun(spec), *endpoint, *wait]),
        ],
        head=[f"#SBATCH {option}" for option in options],
    )


# ---- Ray beside torchrun --------------------------------------------------------------------------------------------------


def _ray_ports(spec: LaunchSpec) -> list[str]:
    first, workers = spec.ports.ray, spec.ports.ray_workers
    return [
        f"--node-manager-port={first + 1}",
        f"--object-manager-port={first + 2}",
        f"--runtime-env-agent-port={first + 3}",
        f"--dashboard-agent-grpc-port={first + 4}",
        f"--dashboard-agent-listen-port={first + 5}",
        f"--metrics-export-port={first + 6}",
        f"--min-worker-port={workers}",
        f"--max-worker-port={workers + ports.RAY_WORKER_PORTS - 1}",
    ]


def _ray(spec: LaunchSpec, *, head: bool) -> str:
    """Ray on a rollout node. Trainer nodes never run it, so that Ray cannot give their devices away."""
    devices = [f"--num-gpus={spec.devices_per_node}"] if spec.gpu else ["--num-gpus=0"]
    if head:
        role = ["--head", f"--port={spec.ports.ray}", "--include-dashboard=false"]
    else:
        role = [_Shell(f'--address="$RAY_HEAD:{spec.ports.ray}"')]
    lines = [] if head else [': "${RAY_HEAD:?set RAY_HEAD to the host that runs ray-head.sh}"']
    if head:
        # Makes the cluster's token if this home directory has none; nodes with another home need a copy of it.
        lines.append("ray get-auth-token --generate >/dev/null")
    lines.append(_line(["python", "launch/preflight.py", *_arguments(spec), "--local"]))
    lines.append(_line(["ray", "start", *role, *devices, *_ray_ports(spec), "--disable-usage-stats", "--block"]))
    return _script(spec, lines)


def _ray_trainer(spec: LaunchSpec) -> str:
    lines = [
        ': "${RAY_HEAD:?set RAY_HEAD to the host that runs ray-head.sh}"',
        f'export RAY_ADDRESS="$RAY_HEAD:{spec.ports.ray}"',
        _plan(spec),
        _line(
            [
                "python",
                "launch/preflight.py",
                *_arguments(spec),
                "--ray-nodes",
                str(spec.rollout_nodes),
                "--ray-wait",
                str(NODE_WAIT_S),
            ]
        ),
        _guarded(spec, [*_torchrun(spec), *_c10d(spec.hosts[0], spec)]),
    ]
    return _script(spec, lines)


# ---- KubeRay --------------------------------------------------------------------------------------------------------------


def _env_list(spec: LaunchSpec, **more: str) -> list[dict[str, Any]]:
    """Variables of a container; Ray's token comes from the secret ``<name>-ray-token``, key ``token``."""
    plain: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in {**spec.environment, **more}.items()]
    secret = {"name": f"{_dns(spec.name)}-ray-token", "key": "token"}
    return [*plain, {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": secret}}]


def _pod(spec: LaunchSpec, container: Mapping[str, Any]) -> dict[str, Any]:
    resources = {"limits": {"nvidia.com/gpu": spec.devices_per_node}} if spec.gpu else {}
    body = {
        "image": spec.image,
        "resources": resources,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        **container,
    }
    return {"containers": [body], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}


def _kuberay(spec: LaunchSpec) -> str:
    """RayCluster of the rollout nodes: one of them is the head. API: ray-project/kuberay, ray.io/v1."""
    container = {"name": "engine", "env": _env_list(spec)}
    start = {"num-gpus": str(spec.devices_per_node if spec.gpu else 0)}
    manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": _dns(spec.name)},
        "spec": {
            "headGroupSpec": {
                "rayStartParams": {**start, "port": str(spec.ports.ray), "include-dashboard": "false"},
                "template": {"spec": _pod(spec, container)},
            },
            "workerGroupSpecs": [
                {
                    "groupName": "engines",
                    "replicas": max(0, spec.rollout_nodes - 1),
                    "minReplicas": max(0, spec.rollout_nodes - 1),
                    "maxReplicas": max(0, spec.rollout_nodes - 1),
                    "rayStartParams": start,
                    "template": {"spec": _pod(spec, container)},
                }
            ],
        },
    }
    return _yaml(manifest)


def _trainer_job(spec: LaunchSpec) -> str:
    """Headless service and indexed Job of the trainer nodes; pod 0 is where ranks meet."""
    name = f"{_dns(spec.name)}-trainer"
    command = _guarded(spec, [*_torchrun(spec), *_c10d(f"{name}-0.{name}", spec)])
    container = {
        "name": "trainer",
        # Ray needs its address in every rank; the service is the one KubeRay makes for the head.
        "env": _env_list(spec, RAY_ADDRESS=f"{_dns(spec.name)}-head-svc:{spec.ports.ray}"),
        "command": ["bash", "-c", f"set -euo pipefail; {_plan(spec)}; {command}"],
    }
    pod = {**_pod(spec, container), "subdomain": name, "restartPolicy": "Never"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": spec.nodes,
            "parallelism": spec.nodes,
            "backoffLimit": 0,
            "template": {"spec": pod},
        },
    }
    return _yaml(service, job)


class _Plain(yaml.SafeDumper):
    """Writes equal parts out instead of referring to the first."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(*documents: Mapping[str, Any]) -> str:
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=1000)


def _dns(name: str) -> str:
    """``name`` as Kubernetes wants it: lower case, dashes."""
    return name.lower().replace("_", "-").replace(".", "-")
