"""What guidance costs a training step: guided against plain quantisation-aware training, and the share of gather and replay.

    python benchmarks/training_step.py [--repeats 15] [--json]

The shipped tiny model in BF16 on one CPU thread, trajectories of its own engine. Both kinds alternate and medians are
compared, so that a busy machine disturbs both alike. Goals: guided <= 1.05 x plain; gather and route replay <= 3 % of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megatron_trace.platform.device import init_process_group, leave_process_group, prepare_megatron  # noqa: E402

OVERRIDES = ["parallel.expert=1", "rollout.tensor_parallel=1", "run.name=benchmark"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="steps of each kind")
    parser.add_argument("--samples", type=int, default=64, help="trajectories in a step")
    parser.add_argument("--micro-batch", type=int, default=32, help="sequences in a micro-batch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prepare_megatron()
    init_process_group()
    try:
        figures = measure(repeats=options.repeats, samples=options.samples, micro_batch=options.micro_batch)
    finally:
        leave_process_group()
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28s} {value:.4f}")
    return 0


def measure(*, repeats: int, samples: int, micro_batch: int) -> dict[str, float]:
    """Median seconds of both kinds of forward and backward, their ratio, and the share of gathering and of replaying."""
    from megatron_trace.config import load
    from megatron_trace.guidance.frames import Rounding
    from megatron_trace.modeling.route_replay import KeyedRouteReplay
    from megatron_trace.rollout.build import build_engine
    from megatron_trace.tasks.factory import build_task
    from megatron_trace.trainer.batch import Sample, micro_batches
    from megatron_trace.trainer.experience import generate
    from megatron_trace.trainer.megatron import MegatronTrainer
    from megatron_trace.trainer.refit import build_bundle, refit
    from megatron_trace.trainer.warmup import calibrate

    config = load(ROOT / "configs" / "tiny_moe_cpu.yaml", OVERRIDES)
    task, trainer, engine = build_task(config), MegatronTrainer(config), build_engine(config)
    calibrate(trainer, task)
    refit(engine, build_bundle(trainer, quantized=True, contract_fingerprint=config.contract.fingerprint))
    group = config.algorithm.samples_per_prompt
    problems = task.train_problems(start=0, count=-(-samples // group))
    trajectories = generate(engine, problems, config, stop_ids=(task.tokenizer.eos_id,), step=0)[:samples]
    store = _store(trajectories, config.contract.fingerprint)
    scored = [Sample(t, advantage=(-1.0) ** i) for i, t in enumerate(trajectories)]

    def batches(rounding: Rounding) -> list:
        return micro_batches(scored, size=micro_batch, store=store, rounding=rounding, pad_id=task.tokenizer.pad_id)

    def step(given: list) -> float:
        start = time.perf_counter()
        trainer.step(given, lambda lp, b: (-(lp * b.advantages * b.mask).sum(), 0.0), denominator=1e9, learning_rate=0.0)
        return time.perf_counter() - start

    replay = _Clock(KeyedRouteReplay.get_replay_topk)
    KeyedRouteReplay.get_replay_topk = lambda *args: replay(*args)
    seconds: dict[Rounding, list[float]] = {Rounding.GUIDED: [], Rounding.NEAREST: []}
    gathers, replays = [], []
    for repeat in range(repeats + 1):
        for rounding in seconds:
            start = time.perf_counter()
            given = batches(rounding)
            gather = time.perf_counter() - start
            replay.seconds = 0.0
            taken = step(given)
            if repeat:  # the first of each kind warms up
                seconds[rounding].append(taken)
                if rounding is Rounding.GUIDED:
                    gathers.append(gather)
                    replays.append(replay.seconds)
    guided, plain = (statistics.median(values) for values in seconds.values())
    return {
        "guided_seconds": guided,
        "plain_qat_seconds": plain,
        "guided_over_plain": guided / plain,
        "gather_share": statistics.median(gathers) / guided,
        "route_replay_share": statistics.median(replays) / guided,
        "gather_and_replay_share": (statistics.median(gathers) + statistics.median(replays)) / guided,
        "tokens": float(sum(len(t.tokens) - 1 for t in trajectories)),
    }


def _store(trajectories: list, fingerprint: str):  # noqa: ANN202
    from megatron_trace.guidance.store import GuidanceStore

    store = GuidanceStore(contract_fingerprint=fingerprint)
    for trajectory in trajectories:
        store.put(trajectory.guidance, trajectory.routes)
    return store


class _Clock:
    """A function that adds up the seconds spent in it."""

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.seconds = 0.0

    def __call__(self, *args: object) -> object:
        start = time.perf_counter()
        try:
            return self.function(*args)
        finally:
            self.seconds += time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
