"""Checks on every node before a run starts, each with its node's name: ports, disk, paths, versions, clocks, a collective.

``local`` needs no torch. ``meet`` brings one process of each node together over a TCPStore, so that a node that never comes is
named by number instead of hanging the others.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_trace.planning.plan import GIB, Plan

CLOCK_SKEW_S = 5.0
"""Clocks further apart than this make logs unreadable and tokens of Ray and Kubernetes expire early."""
SOCKET_PATH_LIMIT = 107
"""Bytes of a Unix socket's path (sun_path, unix(7))."""
RAY_SESSION_BYTES = len("/ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
SHARED_MEMORY_GIB = 1.0
PACKAGES = ("torch", "megatron-core", "numpy", "pydantic", "transformer-engine", "sglang", "ray", "nvidia-modelopt")


@dataclass(frozen=True)
class Check:
    """One finding on one node."""

    name: str
    ok: bool
    detail: str


def local(found: Plan, *, output_dir: Path, ray: bool, meeting_port: int | None = None, gib: float = GIB) -> list[Check]:
    """What one node can tell alone. ``meeting_port`` is not asked for: the nodes may be meeting on it already."""
    checks = [_ports(found, skip=meeting_port), _disk(found, output_dir, gib=gib), _shared_memory(gib=gib)]
    if ray:
        checks += [_ray_sockets(), _ray_authentication(os.environ, home=Path.home())]
    return checks


def _ports(found: Plan, *, skip: int | None) -> Check:
    """Every reserved port that this node may have to open can be bound now."""
    wanted = [found.ports.rendezvous, *range(found.ports.ray, found.ports.ray_workers), found.ports.engines]
    taken = [port for port in wanted if port != skip and not _free(port)]
    if taken:
        count = found.ports.end - found.ports.rendezvous
        detail = f"port {taken[0]} is in use; set cluster.base_port to the first of {count} free ports"
        return Check("ports", False, detail)
    return Check("ports", True, f"{found.ports.rendezvous}-{found.ports.end - 1} reserved")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _disk(found: Plan, output_dir: Path, *, gib: float) -> Check:
    place = next(parent for parent in (output_dir.resolve(), *output_dir.resolve().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    detail = f"{free / gib:.1f} GiB free under {output_dir}, {found.disk_bytes / gib:.1f} GiB needed for checkpoints"
    return Check("disk", free >= found.disk_bytes, detail)


def _shared_memory(*, gib: float) -> Check:
    place = Path("/dev/shm")
    if not place.exists():
        return Check("shared memory", True, "no /dev/shm on this system")
    size = shutil.disk_usage(place).total / gib
    return Check("shared memory", size >= SHARED_MEMORY_GIB, f"/dev/shm has {size:.2f} GiB, {SHARED_MEMORY_GIB:g} GiB needed")


def _ray_sockets() -> Check:
    root = tempfile.gettempdir()
    length = len(root.encode()) + RAY_SESSION_BYTES
    if length > SOCKET_PATH_LIMIT:
        return Check(
            "Ray sockets", False, f"{root} makes socket paths of {length} bytes, {SOCKET_PATH_LIMIT} at most; shorten TMPDIR"
        )
    left = Path(root) / "ray" / "ray_current_cluster"
    if left.exists():
        return Check("Ray sockets", False, f"{left} is left from another cluster; run ray stop on this node")
    return Check("Ray sockets", True, f"paths of {length} bytes")


def _ray_authentication(environment: Mapping[str, str], *, home: Path) -> Check:
    """One mode on every node and, with tokens, a token where Ray looks for it; its value is not read."""
    mode = environment.get("RAY_AUTH_MODE")
    if mode not in ("token", "disabled"):
        return Check("Ray authentication", False, f"RAY_AUTH_MODE={mode!r}: set token (or disabled) alike on every node")
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH", home / ".ray" / "auth_token"))
    if mode == "token" and not environment.get("RAY_AUTH_TOKEN") and not path.is_file():
        detail = f"no token in {path}; run ray get-auth-token --generate on one node and give every node that file"
        return Check("Ray authentication", False, detail)
    return Check("Ray authentication", True, mode)


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Installed version of each package, ``absent`` where there is none, and Python's."""
    found = {"python": sys.version.split()[0]}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


@dataclass(frozen=True)
class Report:
    """What one node brings to the meeting."""

    node: int
    host: str
    clock: float
    """Seconds since the epoch when the node answered the meeting's question."""
    versions: Mapping[str, str]
    checks: tuple[Check, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        values = json.loads(text)
        return cls(**{**values, "checks": tuple(Check(**check) for check in values["checks"])})


def judge(reports: Sequence[Report], *, asked: Mapping[int, float]) -> list[str]:
    """One line for each problem, with the node's host. ``asked`` is the asking node's clock when each answer arrived."""
    problems = [f"{report.host}: {check.name}: {check.detail}" for report in reports for check in report.checks if not check.ok]
    first = reports[0]
    for report in reports[1:]:
        for name, value in report.versions.items():
            if value != first.versions[name]:
                problems.append(
                    f"{report.host}: {name} {value}, but {first.host} has {first.versions[name]}; install one version"
                )
        skew = report.clock - asked[report.node]
        if abs(skew) > CLOCK_SKEW_S:
            problems.append(f"{report.host}: clock is {skew:+.0f} s from {first.host}'s; synchronise them")
    return problems


def meet(
    checks: Sequence[Check],
    *,
    node: int,
    nodes: int,
    endpoint: tuple[str, int],
    wait_s: float,
    clock: Callable[[], float] = time.time,
) -> list[str]:
    """Bring ``nodes`` nodes together, compare them, and run one collective; the problems, the same on every node that came.

    Node 0 holds the store at ``endpoint``. A node that does not come within ``wait_s`` seconds is a problem by number.
    """
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        endpoint[0],
        endpoint[1],
        is_master=node == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=wait_s),
    )
    if node:
        store.wait([f"ask/{node}"], timedelta(seconds=wait_s))
        report = Report(node=node, host=socket.gethostname(), clock=clock(), versions=versions(), checks=tuple(checks))
        store.set(f"report/{node}", report.to_json())
    else:
        own = Report(node=0, host=socket.gethostname(), clock=clock(), versions=versions(), checks=tuple(checks))
        store.set("problems", json.dumps(_gather(store, own, nodes=nodes, wait_s=wait_s, clock=clock)))
    store.wait(["problems"], timedelta(seconds=wait_s + 30))
    problems: list[str] = json.loads(store.get("problems"))
    if not problems:
        problems = _ping(store, node=node, nodes=nodes, wait_s=wait_s)
    _leave(store, node=node, nodes=nodes, wait_s=wait_s)
    return problems


def _gather(store: Any, own: Report, *, nodes: int, wait_s: float, clock: Callable[[], float]) -> list[str]:
    reports, asked, missing = [own], {0: own.clock}, []
    deadline = time.monotonic() + wait_s
    for other in range(1, nodes):
        store.set(f"ask/{other}", "now")
    waiting = set(range(1, nodes))
    while waiting and time.monotonic() < deadline:
        for other in sorted(waiting):
            if store.check([f"report/{other}"]):
                asked[other] = clock()
                reports.append(Report.from_json(store.get(f"report/{other}").decode()))
                waiting.discard(other)
        time.sleep(0.05)
    missing = [f"node {other} of {nodes} did not answer within {wait_s:g} s" for other in sorted(waiting)]
    return missing + judge(reports, asked=asked)


def _ping(store: Any, *, node: int, nodes: int, wait_s: float) -> list[str]:
    """One all-reduce over the nodes, by NCCL where there is a device."""
    import torch
    import torch.distributed as dist

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = "cuda" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(0)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("ping", store),  # type: ignore[attr-defined]
            rank=node,
            world_size=nodes,
            timeout=timedelta(seconds=wait_s),
        )
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        if int(total.item()) != nodes:
            return [f"{socket.gethostname()}: {backend} all-reduce over {nodes} nodes gave {total.item():g}"]
        return []
    except RuntimeError as error:
        return [f"{socket.gethostname()}: {backend} all-reduce failed: {str(error).splitlines()[0]}"]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _leave(store: Any, *, node: int, nodes: int, wait_s: float) -> None:
    """The node that holds the store goes last, or the others would lose it while reading; those that never came are not waited
    for."""
    store.add("left", 1)
    deadline = time.monotonic() + min(5.0, wait_s)
    while node == 0 and store.add("left", 0) < nodes and time.monotonic() < deadline:
        time.sleep(0.05)


def wait_for_ray(
    alive: Callable[[], int], *, nodes: int, wait_s: float, sleep: Callable[[float], None] = time.sleep
) -> list[str]:
    """Wait until ``alive()`` counts ``nodes`` Ray nodes; afterwards say how many are missing instead of waiting for ever."""
    deadline = time.monotonic() + wait_s
    while (count := alive()) < nodes:
        if time.monotonic() >= deadline:
            return [f"Ray has {count} of {nodes} rollout nodes after {wait_s:g} s; start ray-worker.sh on {nodes - count} more"]
        sleep(1.0)
    return []


def ray_nodes() -> int:
    """Living nodes of the cluster at ``RAY_ADDRESS``."""
    import ray  # type: ignore[import-not-found, unused-ignore]

    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False)
    return sum(1 for entry in ray.nodes() if entry["Alive"])
