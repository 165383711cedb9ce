"""Preflight: every problem names its node, ports are fixed ranges, and a node that does not come is named."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_trace.config import load
from megatron_trace.planning import plan, ports, preflight
from megatron_trace.planning.preflight import Check, Report


def test_port_ranges_are_disjoint() -> None:
    reserved = ports.reserve(29500, engines_per_node=8)
    ranges = [
        range(reserved.rendezvous, reserved.rendezvous + 1),
        range(reserved.ray, reserved.ray_workers),
        range(reserved.ray_workers, reserved.engines),
        *(reserved.engine(index) for index in range(8)),
    ]
    every = [port for part in ranges for port in part]
    assert every == list(range(29500, reserved.end))
    with pytest.raises(ValueError, match=r"engine 8: this node has engines 0\.\.7"):
        reserved.engine(8)


def test_a_port_in_use_is_named(tiny_config_path: Path) -> None:
    with socket.socket() as other:
        port = next(port for port in range(20000, 28000) if other.connect_ex(("127.0.0.1", port)))
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        found = plan(load(tiny_config_path, [f"cluster.base_port={port}"]))
        check = preflight.local(found, output_dir=Path("runs"), ray=False)[0]
        assert (check.name, check.ok) == ("ports", False)
        assert check.detail == f"port {port} is in use; set cluster.base_port to the first of 305 free ports"
        assert f"port {port} is in use" not in preflight._ports(found, skip=port).detail


def test_too_little_disk_is_said(tiny_config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: preflight.shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
    check = preflight._disk(plan(load(tiny_config_path)), tmp_path / "runs", gib=2**30)
    assert not check.ok and "GiB needed for checkpoints" in check.detail


def test_a_long_temporary_directory_breaks_rays_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.tempfile, "gettempdir", lambda: "/" + "t" * 60)
    check = preflight._ray_sockets()
    assert not check.ok and "shorten TMPDIR" in check.detail


def test_a_left_over_cluster_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.tempfile, "gettempdir", lambda: "/t")
    assert preflight._ray_sockets().ok
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("x")
    monkeypatch.setattr(preflight.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(preflight, "SOCKET_PATH_LIMIT", 4096)
    assert "run ray stop" in preflight._ray_sockets().detail


@pytest.mark.parametrize(("mode", "ok"), [("token", True), ("disabled", True), (None, False), ("tokn", False)])
def test_ray_authentication_is_set_alike(tmp_path: Path, mode: str | None, ok: bool) -> None:
    environment = {"RAY_AUTH_TOKEN": "x"} | ({} if mode is None else {"RAY_AUTH_MODE": mode})
    assert preflight._ray_authentication(environment, home=tmp_path).ok is ok


def test_a_missing_token_is_said_before_ray_starts(tmp_path: Path) -> None:
    environment = {"RAY_AUTH_MODE": "token"}
    check = preflight._ray_authentication(environment, home=tmp_path)
    assert not check.ok and "run ray get-auth-token --generate on one node" in check.detail
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("x")
    assert preflight._ray_authentication(environment, home=tmp_path).ok


def _report(node: int, *, clock: float = 1000.0, torch: str = "2.13.0", check: Check | None = None) -> Report:
    return Report(
        node=node, host=f"host{node}", clock=clock, versions={"torch": torch}, checks=(check or Check("disk", True, ""),)
    )


def test_problems_name_the_node() -> None:
    reports = [_report(0), _report(1, torch="2.12.0", check=Check("disk", False, "1 GiB free")), _report(2, clock=1060.0)]
    assert preflight.judge(reports, asked={0: 1000.0, 1: 1000.0, 2: 1000.5}) == [
        "host1: disk: 1 GiB free",
        "host1: torch 2.12.0, but host0 has 2.13.0; install one version",
        "host2: clock is +60 s from host0's; synchronise them",
    ]
    assert Report.from_json(reports[1].to_json()) == reports[1]


def test_ray_nodes_are_waited_for_and_then_counted() -> None:
    counts = iter([1, 1, 4])
    assert preflight.wait_for_ray(lambda: next(counts), nodes=4, wait_s=60, sleep=lambda _: None) == []
    assert preflight.wait_for_ray(lambda: 1, nodes=4, wait_s=0) == [
        "Ray has 1 of 4 rollout nodes after 0 s; start ray-worker.sh on 3 more"
    ]


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.dist
def test_two_nodes_meet_and_a_third_that_does_not_come_is_named(repository: Path) -> None:
    def start(node: int, nodes: int, port: int) -> subprocess.Popen[str]:
        command = [sys.executable, "launch/preflight.py", "--config", "configs/tiny_moe_cpu.yaml", "--nodes", str(nodes)]
        command += ["--node", str(node), "--meet", f"127.0.0.1:{port}", "--wait", "20" if nodes == 2 else "3"]
        return subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    for nodes, code in ((2, 0), (3, 1)):
        port = _port()
        both = [start(node, nodes, port) for node in (0, 1)]
        outputs = [process.communicate(timeout=60) for process in both]
        assert [process.returncode for process in both] == [code, code], outputs
        if code:
            for _, errors in outputs:
                assert "error: node 2 of 3 did not answer within 3 s" in errors
        else:
            assert outputs[0][0] == "preflight: 2 nodes ready\n"
