"""CPU stand-ins, the lone process group, stop requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from processes import environment

from megatron_trace.platform import cpu, device
from megatron_trace.platform.cpu import MegatronOnCpu
from megatron_trace.platform.stop import StopRequest


def test_stand_ins_refuse_a_machine_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.cuda.current_device, torch.Tensor.cuda, torch.Tensor.type
    monkeypatch.setattr(cpu, "_installed", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="CPU stand-ins asked for on a machine with CUDA"):
        cpu.install()
    assert (torch.cuda.current_device, torch.Tensor.cuda, torch.Tensor.type) == before and not cpu._installed


def test_with_cuda_nothing_is_replaced_and_nothing_is_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "_megatron_ready", False)
    monkeypatch.setattr(cpu, "install", lambda: pytest.fail("stand-ins installed on a machine with CUDA"))
    monkeypatch.setenv("LOCAL_RANK", "3")
    device.prepare_megatron()
    assert not device.on_cpu() and device.device() == torch.device("cuda", 3)
    assert not isinstance(device.megatron_context(), MegatronOnCpu)


def test_without_cuda_the_context_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.on_cpu() and device.device() == torch.device("cpu")
    assert isinstance(device.megatron_context(), MegatronOnCpu)


def test_stand_ins_once_installed_answer_for_the_cpu(lone_process: None) -> None:
    if not device.on_cpu():
        pytest.skip("this machine has CUDA")
    cpu.install()
    assert torch.cuda.current_device() == torch.device("cpu")
    assert not torch.cuda.is_available(), "the stand-ins must not pretend that there is a GPU"
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    x = torch.ones(2)
    assert x.cuda() is x and x.type() == "torch.cuda.FloatTensor" and x.type(torch.float64).dtype is torch.float64
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.cuda.current_stream().query() and torch.cuda.Event().elapsed_time(None) == 0.0


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment() | variables, capture_output=True, text=True, timeout=60
    )


def test_a_lone_process_is_a_group_of_one_without_a_port() -> None:
    code = """
import torch, torch.distributed as dist
from megatron_trace.platform.device import init_process_group, leave_process_group
leave_process_group()
assert init_process_group() == (0, 1) == init_process_group()
assert dist.get_backend() == "gloo"
x = torch.ones(2); dist.all_reduce(x); assert x.tolist() == [1, 1]
dist.new_group([0]); dist.barrier()
leave_process_group()
assert not dist.is_initialized()
print(init_process_group())
"""
    done = run(code)
    assert (done.returncode, done.stdout) == (0, "(0, 1)\n"), done.stderr


def test_importing_the_package_does_not_replace_anything() -> None:
    code = """
import torch
before = torch.cuda.current_device, torch.Tensor.cuda, torch.Tensor.type
import megatron_trace, megatron_trace.platform.device, megatron_trace.platform.compute, megatron_trace.platform.cpu
assert before == (torch.cuda.current_device, torch.Tensor.cuda, torch.Tensor.type)
import sys; assert not any(name.startswith("megatron.core") for name in sys.modules)
"""
    assert run(code).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_answered_later(lone_process: None, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stop = StopRequest()
    try:
        assert stop.agreed() == 0
        os.kill(os.getpid(), number)
        assert stop.signal == number and stop.agreed() == number == stop.agreed()
        with pytest.raises(KeyboardInterrupt):  # asked twice
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 0.2)
    finally:
        stop.restore()
    assert signal.getsignal(number) == before
