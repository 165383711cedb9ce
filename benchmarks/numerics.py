"""Speed of the NVFP4 codec, after a proof that it is right on this device.

    python benchmarks/numerics.py                              CPU time against ModelOpt, torchao and compressed-tensors
    python benchmarks/numerics.py --device cuda [--tune]       bandwidth of each Triton kernel against the device's own copy

CUDA: first every kernel must equal the CPU reference bit for bit on hard inputs; a difference is printed and the exit code is
1. Then, on BF16 of --shape, all bytes read and written over the median time, and that over the bandwidth of ``out.copy_(x)``
in the same run, device time only. CPU: process CPU time on one thread, minimum over repetitions; peers that are not installed
are named as absent.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_trace.kernels import nvfp4 as kernels  # noqa: E402
from megatron_trace.numerics import dispatch, guided, nvfp4  # noqa: E402
from megatron_trace.numerics.guided import GuidanceRecord  # noqa: E402
from megatron_trace.numerics.nvfp4 import NVFP4Tensor  # noqa: E402

TARGETS = {"guided compact, static": 0.92, "nearest, static": 0.97, "quantise + record, row": 0.75}
"""Least share of copy bandwidth asked of a kernel."""


def hard_input(rows: int, width: int, seed: int) -> torch.Tensor:
    """float32 [rows, width] with ties, both zeros, dead, tiny and huge blocks among normal values."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -5.0, 0.0, -0.0, 1e-42, -1e-38, 1e-7])
    chosen = torch.rand(rows, width, generator=g) < 0.3
    x = torch.where(chosen, ties[torch.randint(0, 16, (rows, width), generator=g)], x)
    blocks = x.view(-1, 16)
    factor = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1e-7, 1e-41, 400.0])
    return (blocks * factor[torch.randint(0, 8, (len(blocks), 1), generator=g)]).view(rows, width)


# --- correctness on the device ----------------------------------------------------------------------------------------------


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def to_device(record: GuidanceRecord, device: str) -> GuidanceRecord:
    return GuidanceRecord(
        bits=record.bits,
        payload=record.payload.to(device),
        block_scale=record.block_scale.to(device),
        global_amax=record.global_amax.to(device),
    )


SHAPES: dict[torch.dtype, tuple[tuple[int, int], ...]] = {
    torch.bfloat16: ((64, 4096), (33, 2080), (257, 48), (1, 1040)),
    torch.float32: ((33, 2080), (257, 48)),
    torch.float16: ((8, 1024),),
}
"""Even and ragged rows, rows narrow enough to gather their amax, an odd tensor; few, since each compiles kernels of its own."""


def check(device: str, shapes: dict[torch.dtype, tuple[tuple[int, int], ...]] = SHAPES) -> list[str]:
    """Names of the kernels that differ from the CPU reference; empty when all is well."""
    bad: list[str] = []

    def expect(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if not same_bits(got, want):
            bad.append(f"{name}: {list(want.shape)} {want.dtype}")

    for dtype, sizes in shapes.items():
        for rows, width in sizes:
            x = hard_input(rows, width, seed=rows).to(dtype).nan_to_num(posinf=6e4, neginf=-6e4)
            per_row = torch.linspace(0.5, 9, rows).view(rows, 1)
            scopes: list[tuple[str, dict[str, Any]]] = [
                ("row", {"scale_scope": "row"}),
                ("tensor", {"scale_scope": "tensor"}),
                ("static", {"scale_scope": "static", "global_amax": torch.tensor(3.0)}),
                ("static rows", {"scale_scope": "static", "global_amax": per_row}),
            ]
            for name, options in scopes:
                where = f"{name} {rows}x{width}"
                moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
                want, xd = nvfp4.quantize(x, **options), x.to(device)
                got, record = kernels.quantize_and_record(xd, **moved)
                plain = kernels.quantize(xd, **moved)
                expect(f"codes {where}", got.codes, want.codes)
                expect(f"plain codes {where}", plain.codes, want.codes)
                expect(f"scales {where}", got.block_scale, want.block_scale)
                expect(f"amax {where}", got.global_amax, want.global_amax)
                expect(f"record {where}", record.payload, guided.make_record(want).payload)
                expect(f"nearest {where}", kernels.quantize_dequantize(xd, **moved), want.dequantize(dtype))
                expect(f"dequantise {where}", kernels.dequantize(got, dtype), want.dequantize(dtype))
                both = kernels.quantize_with_dequantized(xd, **moved)[1]
                expect(f"quantise with values {where}", both, want.dequantize(dtype))
                for noise in (0.0, 0.02, 0.5):
                    y = (x.float() * (1 + noise * hard_input(rows, width, seed=5).clamp(-3, 3))).to(dtype)
                    y = y.nan_to_num(posinf=6e4, neginf=-6e4)
                    for bits in (1, 4):
                        r = guided.make_record(want, bits=bits)
                        out = kernels.fake_quantize_guided(y.to(device), to_device(r, device))
                        expect(f"guided {bits} bit {where} noise {noise}", out, guided.fake_quantize(y, record=r))
    rows_u8 = torch.randint(0, 256, (100, 300), dtype=torch.uint8)
    index = torch.randint(0, 100, (64,))
    want_r = guided.gather_record(rows_u8, index, start=7, width=128, bits=4)
    got_r = kernels.gather_record(rows_u8.to(device), index.to(device), start=7, width=128, bits=4)
    for field in ("payload", "block_scale", "global_amax"):
        expect(f"gather {field}", getattr(got_r, field), getattr(want_r, field))
    return bad


# --- bandwidth ---------------------------------------------------------------------------------------------------------------


class Cuda:
    """Cases of the bandwidth table on one BF16 tensor."""

    def __init__(self, rows: int, width: int) -> None:
        self.x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.x)
        self.amax = self.x.abs().amax().float()
        self.static = kernels.quantize(self.x, scale_scope="static", global_amax=self.amax)
        self.row, self.row_record = kernels.quantize_and_record(self.x)
        self.static_record = kernels.quantize_and_record(self.x, scale_scope="static", global_amax=self.amax)[1]
        self.full_record = guided.make_record(self.row, bits=4)
        self.index = torch.randperm(rows, device="cuda")
        amax_bytes = self.row.global_amax.view(torch.uint8)
        scale_bytes = self.row_record.block_scale.view(torch.uint8)
        self.rows = torch.cat((self.row_record.payload, scale_bytes, amax_bytes), dim=1).contiguous()

    def cases(self) -> dict[str, tuple[str, float, Callable[[], Any]]]:
        """name: (key of kernels.LAUNCH, bytes moved per value, call)."""
        x, k, width = self.x, kernels, self.x.shape[-1]
        static: dict[str, Any] = {"scale_scope": "static", "global_amax": self.amax}
        row = 4 / width  # the FP32 amax
        scale = 1 / 16
        return {
            "nearest, static": ("nearest", 4, lambda: k.quantize_dequantize(x, **static)),
            "nearest, row": ("own", 4 + row, lambda: k.quantize_dequantize(x, scale_scope="row")),
            "guided compact, static": ("guided", 4 + 1 / 8 + scale, lambda: k.fake_quantize_guided(x, self.static_record)),
            "guided compact, row": ("guided", 4 + 1 / 8 + scale + row, lambda: k.fake_quantize_guided(x, self.row_record)),
            "guided full, row": ("guided", 4 + 1 / 2 + scale + row, lambda: k.fake_quantize_guided(x, self.full_record)),
            "quantise, row": ("own", 2 + 1 / 2 + scale + row, lambda: k.quantize(x, scale_scope="row")),
            "quantise, static": ("quantize", 2 + 1 / 2 + scale, lambda: k.quantize(x, **static)),
            "quantise + record, row": ("own", 2 + 5 / 8 + scale + row, lambda: k.quantize_and_record(x)),
            "dequantise, static": ("dequantize", 2 + 1 / 2 + scale, lambda: k.dequantize(self.static)),
            "gather + unpack, row": (
                "gather",
                2 * (1 / 8 + scale + row) + 8 / width,
                lambda: k.gather_record(self.rows, self.index, start=0, width=width, bits=1),
            ),
        }

    def copy_bandwidth(self) -> float:
        """TB/s of out.copy_(x), median of three; not from a graph, whose copy node is a slower copy than the driver's own."""
        times = (bench(lambda: self.out.copy_(self.x)) for _ in range(3))
        return statistics.median(self.x.numel() * 4 / t / 1e9 for t in times)


def bench(call: Callable[[], Any]) -> float:
    """Median milliseconds between events around ``call``, caches cleared before each."""
    import triton

    return float(triton.testing.do_bench(call, warmup=25, rep=150, return_mode="median"))


def measure_cuda(call: Callable[[], Any]) -> float:
    """``bench`` of a graph of ``call``, so that a short kernel is not timed with the host's work."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return bench(graph.replay)


def tune(cuda: Cuda, copy: float) -> dict[str, str]:
    """Best launch per kernel, set for the table that follows."""
    representative = {
        "nearest": "nearest, static",
        "guided": "guided compact, static",
        "quantize": "quantise, static",
        "own": "quantise + record, row",
        "dequantize": "dequantise, static",
        "gather": "gather + unpack, row",
    }
    sizes = {"own": (64, 128, 256, 512), "gather": (256, 512, 1024, 2048)}
    best_of: dict[str, str] = {}
    for key, case in representative.items():
        results: list[tuple[float, kernels.Launch]] = []
        for rows in sizes.get(key, (64, 128, 256, 512, 1024)):
            for warps in (16,) if key == "own" else (1, 2, 4, 8, 16):
                if key != "own" and not 32 <= rows // warps <= 256:
                    continue
                kernels.LAUNCH[key] = kernels.Launch(rows, warps)
                _, per_value, call = cuda.cases()[case]
                results.append((cuda.x.numel() * per_value / measure_cuda(call) / 1e9 / copy, kernels.LAUNCH[key]))
        results.sort(key=lambda r: -r[0])
        kernels.LAUNCH[key] = results[0][1]
        best_of[key] = ", ".join(f"{launch.rows}x{launch.warps} {share:.3f}" for share, launch in results[:4])
    return best_of


def run_cuda(shape: tuple[int, int], tuning: bool) -> dict[str, Any]:
    bad = check("cuda")
    print(f"bit equality with the CPU reference: {'yes, every kernel' if not bad else 'NO'}")
    for name in bad[:40]:
        print(f"  differs: {name}")
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "shape": list(shape), "differs": bad, "rows": []}
    if bad:
        return result
    cuda = Cuda(*shape)
    copy = cuda.copy_bandwidth()
    if tuning:
        result["tuned"] = tune(cuda, copy)
        for key, line in result["tuned"].items():
            print(f"tuned {key:12s} rows x warps, share of copy: {line}")
    copy = cuda.copy_bandwidth()
    result["copy_tb_s"] = copy
    versions = f"torch {torch.__version__}, triton {importlib.import_module('triton').__version__}"
    print(f"{result['device']}, {versions}, BF16 {shape[0]}x{shape[1]}, device copy {copy:.3f} TB/s")
    print(f"{'kernel':26s} {'ms':>8s} {'TB/s':>7s} {'of copy':>8s}  target")
    for name, (_, per_value, call) in cuda.cases().items():
        milliseconds = measure_cuda(call)
        bandwidth = cuda.x.numel() * per_value / milliseconds / 1e9
        target = TARGETS.get(name)
        verdict = "" if target is None else f"{target:.2f} {'met' if bandwidth / copy >= target else 'MISSED'}"
        print(f"{name:26s} {milliseconds:8.3f} {bandwidth:7.3f} {bandwidth / copy:8.3f}  {verdict}")
        result["rows"].append({"kernel": name, "ms": milliseconds, "tb_s": bandwidth, "of_copy": bandwidth / copy})
    return result


# --- CPU ---------------------------------------------------------------------------------------------------------------------


def cpu_time(call: Callable[[], Any], repeat: int) -> float:
    """Least CPU milliseconds of the process over ``repeat`` calls, after two unmeasured ones."""
    call(), call()
    best = float("inf")
    for _ in range(repeat):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best * 1e3


@contextlib.contextmanager
def oracle_path() -> Any:
    root = os.environ.get("MEGATRON_TRACE_ORACLES")
    extra = [str(Path(root) / "peers")] if root else []
    sys.path.extend(extra)
    try:
        yield
    finally:
        for path in extra:
            sys.path.remove(path)


def modelopt_call(x: torch.Tensor) -> Callable[[], Any]:
    tensor = importlib.import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor

    def call() -> Any:
        q, scale, scale_2 = tensor.quantize(x, 16)
        return q.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})

    return call


def torchao_call(x: torch.Tensor) -> Callable[[], Any]:
    tensor = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor").NVFP4Tensor
    return lambda: tensor.to_nvfp4(x, per_tensor_scale=x.abs().max() / 2688).dequantize(torch.float32)


def compressed_tensors_call(x: torch.Tensor) -> Callable[[], Any]:
    quantization = importlib.import_module("compressed_tensors.quantization")
    helpers = importlib.import_module("compressed_tensors.quantization.utils.helpers")
    forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
    args = quantization.QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", symmetric=True, group_size=16, dynamic=False,
        scale_dtype=torch.float8_e4m3fn,
    )  # fmt: skip

    def call() -> Any:
        blocks, g = x.view(x.shape[0], -1, 16), helpers.generate_gparam(x.min(), x.max())
        scale, zero = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=g)
        return forward.fake_quantize(x, scale, zero, args, global_scale=g)

    return call


def run_cpu(shape: tuple[int, int], repeat: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    record = guided.make_record(nvfp4.quantize(x, scale_scope="row"))
    q: NVFP4Tensor = nvfp4.quantize(x)
    ours: dict[str, Callable[[], Any]] = {
        "fake-quantise, eager": lambda: nvfp4.quantize_dequantize(x),
        "guided compact, eager": lambda: guided.fake_quantize(x, record=record),
        "quantise, eager": lambda: nvfp4.quantize(x),
        "dequantise, eager": lambda: q.dequantize(torch.float32),
    }
    rows = {name: cpu_time(call, repeat) for name, call in ours.items()}
    missing = dispatch.unavailable("compiled")
    if missing is None:
        with dispatch.prefer("compiled"):
            rows["fake-quantise, compiled"] = cpu_time(ours["fake-quantise, eager"], repeat)
            rows["guided compact, compiled"] = cpu_time(ours["guided compact, eager"], repeat)
    else:
        print(f"compiled path: {missing}")
    peers: dict[str, Callable[[torch.Tensor], Callable[[], Any]]] = {
        "ModelOpt": modelopt_call,
        "torchao": torchao_call,
        "compressed-tensors": compressed_tensors_call,
    }
    for name, make in peers.items():
        try:
            with oracle_path():
                call = make(x)
                rows[f"{name} quantise + dequantise"] = cpu_time(call, max(3, repeat // 3))
        except ImportError as error:
            print(f"{name}: absent ({error})")
    best = rows.get("fake-quantise, compiled", rows["fake-quantise, eager"])
    print(f"{platform.processor() or platform.machine()}, one thread, float32 {shape[0]}x{shape[1]}, torch {torch.__version__}")
    print(f"{'':36s} {'CPU ms':>8s} {'x ours':>7s}")
    for name, value in rows.items():
        print(f"{name:36s} {value:8.2f} {value / best:7.1f}")
    return {"shape": list(shape), "cpu_ms": rows, "ratio": {n: v / best for n, v in rows.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", type=int, nargs=2, help="default 65536 4096 on cuda, 1024 2048 on cpu")
    parser.add_argument("--tune", action="store_true", help="cuda: search launch shapes first, and use the best")
    parser.add_argument("--repeat", type=int, default=20, help="cpu: repetitions")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    args = parser.parse_args()
    if args.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: this machine has no CUDA device; use --device cpu")
        shape = tuple(args.shape or (65536, 4096))
        result = run_cuda((shape[0], shape[1]), args.tune)
    else:
        shape = tuple(args.shape or (1024, 2048))
        result = run_cpu((shape[0], shape[1]), args.repeat)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result.get("differs") else 0


if __name__ == "__main__":
    raise SystemExit(main())
