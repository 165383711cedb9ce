"""How fast records are read, verified, sliced and gathered into packed micro-batches.

    python benchmarks/guidance.py [--json] [--processes 2] [--gigabytes 1]

Writes compact records (1 bit, latter half, row-scaled expert input) of the Qwen3.5-35B-A3B shape to mapped files, and gathers
them into micro-batches as a trainer does. Each process is one rank. Rates are GB of record bytes gathered per second, all
processes together, files in the page cache. ``cpu`` divides by processor time, not time on the clock: what idle cores would do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_trace.guidance.checksum import checksum
from megatron_trace.guidance.frames import Rounding
from megatron_trace.guidance.segments import GuidanceSegment
from megatron_trace.guidance.sharding import sub_layout
from megatron_trace.guidance.spec import GuidanceSpec, GuidedShape, RecordLayout, latter_half
from megatron_trace.guidance.store import GuidanceStore, RowRequest
from megatron_trace.guidance.wire import map_record, write_record

CONTRACT = "benchmark"
QWEN_35B = GuidedShape(40, 2048, 2, 256, 8, 512, kv_layers=tuple(range(3, 40, 4)))
LAYOUT = RecordLayout.build(GuidanceSpec(bits=1, layers=latter_half(40)), QWEN_35B)
TOKENS = 4096


@dataclass(frozen=True)
class Job:
    """One rank's part: its samples, the layers of its stage (None: all), how many samples make a micro-batch."""

    directory: Path
    samples: tuple[int, ...]
    layers: tuple[int, ...] | None
    batch: int = 1


def write_samples(directory: Path, count: int) -> None:
    """``count`` samples of random bytes: checksums and copies do not care what they are."""
    rng = np.random.default_rng(0)
    amax = {(c.layer, c.site): 4.0 for c in LAYOUT if not c.amax_bytes}
    for sample_id in range(count):
        segment = GuidanceSegment(
            sample_id=sample_id,
            layout=LAYOUT,
            rows=rng.integers(0, 256, (TOKENS, LAYOUT.row_bytes), dtype=np.uint8),
            valid=np.ones(TOKENS, dtype=bool),
            versions=np.zeros(TOKENS, dtype=np.int32),
            contract_fingerprint=CONTRACT,
            static_amax={0: amax},
        )
        write_record(directory / str(sample_id), segment)


def ingest(job: Job) -> tuple[float, float, int]:
    """Clock seconds, processor seconds and record bytes of one pass over the job's samples, nothing kept from another."""
    clock, processor, total = time.perf_counter(), time.process_time(), 0
    for start in range(0, len(job.samples), job.batch):
        ids = job.samples[start : start + job.batch]
        store = GuidanceStore(contract_fingerprint=CONTRACT)
        for sample_id in ids:
            store.put_record(map_record(job.directory / str(sample_id), contract_fingerprint=CONTRACT))
        requests = [RowRequest(sample_id=i, length=TOKENS, versions=np.zeros(TOKENS, dtype=np.int64)) for i in ids]
        frame = store.frame(requests, seq_len=TOKENS, rounding=Rounding.GUIDED, layers=job.layers)
        assert frame.rows is not None and frame.valid is not None and bool(frame.valid.all())
        total += frame.rows.numel()
    return time.perf_counter() - clock, time.process_time() - processor, total


def measure(jobs: list[Job], *, repeats: int = 3) -> dict[str, float]:
    """Best of ``repeats``: all jobs at once, one process each."""
    best: dict[str, float] = {"gb_per_s": 0.0, "cpu_gb_per_s": 0.0}
    with multiprocessing.get_context("fork").Pool(len(jobs)) as pool:
        for _ in range(repeats + 1):  # the first maps the files
            clock = time.perf_counter()
            parts = pool.map(ingest, jobs, chunksize=1)
            elapsed = time.perf_counter() - clock
            total = sum(n for _, _, n in parts)
            best["gb_per_s"] = max(best["gb_per_s"], total / elapsed / 1e9)
            best["cpu_gb_per_s"] = max(best["cpu_gb_per_s"], len(jobs) * total / sum(cpu for _, cpu, _ in parts) / 1e9)
    best["ns_per_token_and_layer"] = 1e9 * elapsed_per_token_layer(jobs, best["cpu_gb_per_s"])
    return best


def elapsed_per_token_layer(jobs: list[Job], cpu_gb_per_s: float) -> float:
    """Processor seconds of one process per token and guided layer, from its rate."""
    layout = LAYOUT if jobs[0].layers is None else sub_layout(LAYOUT, jobs[0].layers)
    rate = cpu_gb_per_s * 1e9 / len(jobs)
    return layout.row_bytes / rate / len(layout.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--processes", type=int, default=2, help="ranks that read at once")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="record bytes on disk")
    args = parser.parse_args()
    count = max(2 * args.processes, round(args.gigabytes * 1e9 / TOKENS / LAYOUT.row_bytes))
    guided = LAYOUT.layers
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_samples(directory, count)

        def ranks(size: int, used: int, layers: tuple[int, ...] | None, batch: int = 1) -> list[Job]:
            """The first ``used`` of ``size`` data-parallel ranks."""
            return [Job(directory, tuple(range(r, count, size)), layers, batch) for r in range(used)]

        p = args.processes
        cases = {
            f"all 20 layers, {p} ranks": ranks(p, p, None),
            f"all 20 layers, {p} ranks, 4 samples a micro-batch": ranks(p, p, None, 4),
            f"all 20 layers, {p} of {2 * p} data-parallel ranks": ranks(2 * p, p, None),
            f"stage of 5 layers, {p} ranks": ranks(p, p, guided[5:10]),
            f"stage of 1 layer, {p} ranks": ranks(p, p, guided[-1:]),
        }
        results = {name: measure(jobs) for name, jobs in cases.items()}
    data = np.zeros(64 << 20, dtype=np.uint8)
    start = time.process_time()
    checksum(data)
    results["checksum alone, one core"] = {"cpu_gb_per_s": data.nbytes / (time.process_time() - start) / 1e9}
    if args.json:
        print(json.dumps({"row_bytes": LAYOUT.row_bytes, "samples": count, "tokens": TOKENS, "results": results}))
        return
    print(f"{count} samples of {TOKENS} tokens, {LAYOUT.row_bytes} bytes a token")
    for name, row in results.items():
        print(f"{name:52s} " + "  ".join(f"{key} {value:.2f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
