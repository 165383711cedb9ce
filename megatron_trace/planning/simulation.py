"""Event simulation of asynchronous reinforcement-learning steps: computed figures, calibrated by constants, never measured.

Trajectories with long-tailed lengths fill the decoding slots of all engines in order; a step's guidance is uploaded while
decoding and must be there before training; a policy version reaches the engines by refit; an engine may start a step's
trajectories as long as its weights are at most ``max_version_lag`` versions behind.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_trace.config.errors import ConfigError
from megatron_trace.config.schema import RunConfig
from megatron_trace.planning import layout as layouts
from megatron_trace.planning import rates

PAPER_SHARES = {"forward": 0.86, "activation guidance": 0.04, "KV guidance": 0.02, "KV dequantisation": 0.08}
"""Parts of the rollout's time with TRACE (arXiv 2610.07767, figure 9)."""
PAPER_STEP = (664.0, 713.0)
"""Published step time of plain FP4 and of TRACE, in the paper's unit (figure 9)."""
LOGNORMAL_SIGMA = 0.9
"""Spread of the logarithm of response lengths: an assumption; the longest responses are then several times the median."""


@dataclass(frozen=True)
class Constants:
    """What a simulation rests on; times in one unit."""

    slots: int
    """Trajectories that all engines decode at once."""
    trajectories: int
    """Of one step."""
    median_tokens: float
    longest_tokens: int
    token_time: float
    """Between two tokens of one trajectory, without guidance."""
    guidance_share: float
    """Part of the guided rollout's time that recording takes."""
    upload_time: float
    """Moving one step's guidance to the trainer; overlaps with decoding."""
    train_time: float
    refit_time: float
    max_version_lag: int


@dataclass(frozen=True)
class Simulated:
    """Steady state of a simulated run."""

    step_time: float
    rollout_time: float
    """From a step's first token to its last."""
    idle_slots: float
    """Share of slot time that a step's long tail leaves empty while nothing else may start."""
    waits_for: str
    """What the trainer mostly waits for: ``rollout``, ``guidance upload`` or ``nothing`` (it is the slowest part)."""


def simulate(constants: Constants, *, steps: int = 12, seed: int = 0) -> Simulated:
    """Run ``steps`` steps and report the later half. Deterministic in ``seed``; lengths are lognormal, cut at the longest."""
    draw = random.Random(seed)
    free = [0.0] * min(constants.slots, constants.trajectories * (constants.max_version_lag + 1))
    heapq.heapify(free)
    token_time = constants.token_time / (1 - constants.guidance_share)
    refitted, trained, uploaded, busy = [0.0], 0.0, 0.0, 0.0
    ends, waits, spans = [], [], []
    for step in range(steps):
        # Version v exists once step v - 1 is trained and sent; this step may use any within the allowed lag.
        allowed = refitted[max(0, step - constants.max_version_lag)]
        first, last = math.inf, 0.0
        for _ in range(constants.trajectories):
            start = max(heapq.heappop(free), allowed)
            length = min(constants.longest_tokens, constants.median_tokens * math.exp(draw.gauss(0, LOGNORMAL_SIGMA)))
            end = start + length * token_time
            busy += end - start
            first, last = min(first, start), max(last, end)
            heapq.heappush(free, end)
        # One storage: a step's upload begins when its rollout does and the one before it is done.
        uploaded = max(last, max(first, uploaded) + constants.upload_time)
        ready = max(uploaded, trained)
        waits.append("guidance upload" if uploaded > max(last, trained) else "rollout" if last > trained else "nothing")
        trained = ready + constants.train_time
        refitted.append(trained + constants.refit_time)
        ends.append(trained)
        spans.append(last - first)
    half = steps // 2
    later = waits[half:]
    return Simulated(
        step_time=(ends[-1] - ends[half - 1]) / (steps - half),
        rollout_time=sum(spans[half:]) / (steps - half),
        idle_slots=max(0.0, 1 - busy / (len(free) * max(free))),
        waits_for=max(set(later), key=later.count),
    )


@dataclass(frozen=True)
class PaperRatio:
    """The paper's step times against those computed from its shares."""

    plain: float
    computed_guided: float
    published_guided: float

    @property
    def computed_overhead(self) -> float:
        return self.computed_guided / self.plain - 1

    @property
    def published_overhead(self) -> float:
        return self.published_guided / self.plain - 1


def paper_ratio() -> PaperRatio:
    """Scale a rollout-bound run to the published plain step, then switch recording on at its published share of the rollout."""
    plain, published = PAPER_STEP
    share = PAPER_SHARES["activation guidance"] + PAPER_SHARES["KV guidance"]
    rollout_bound = Constants(
        slots=1024,
        trajectories=4096,
        median_tokens=8192,
        longest_tokens=2**18,
        token_time=1.0,
        guidance_share=0.0,
        upload_time=0.0,
        train_time=0.0,
        refit_time=0.0,
        max_version_lag=3,
    )
    unit = simulate(rollout_bound).step_time
    scaled = replace(rollout_bound, token_time=plain / unit)
    guided = simulate(replace(scaled, guidance_share=share)).step_time
    return PaperRatio(plain=simulate(scaled).step_time, computed_guided=guided, published_guided=published)


@dataclass(frozen=True)
class Row:
    """One size of the run: trainer and rollout devices multiplied together, and the step's trajectories with them."""

    devices: int
    plain: Simulated
    guided: Simulated


@dataclass(frozen=True)
class Report:
    """Scaling of one configuration, and the paper's ratio."""

    name: str
    rows: tuple[Row, ...]
    paper: PaperRatio

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "computed": True,
            "unit": "s",
            "rows": [asdict(row) for row in self.rows],
            "paper": {
                **asdict(self.paper),
                "computed_overhead": self.paper.computed_overhead,
                "published_overhead": self.paper.published_overhead,
            },
            "errors": [],
            "warnings": [],
        }

    def text(self) -> str:
        """The report for people."""
        lines = [f"{self.name}: computed by event simulation, not measured; seconds a step, trajectories grow with the devices"]
        lines.append(f"{'devices':>8} {'plain FP4':>10} {'guided':>10} {'overhead':>9} {'idle slots':>10}  trainer waits for")
        for row in self.rows:
            overhead = row.guided.step_time / row.plain.step_time - 1
            lines.append(
                f"{row.devices:8} {row.plain.step_time:10.0f} {row.guided.step_time:10.0f} {overhead:9.1%} "
                f"{row.guided.idle_slots:10.0%}  {row.guided.waits_for}"
            )
        paper = self.paper
        lines.append(
            f"paper's step from its shares of the rollout: {paper.plain:.0f} -> {paper.computed_guided:.0f} computed "
            f"(+{paper.computed_overhead:.1%}); published {PAPER_STEP[0]:.0f} -> {paper.published_guided:.0f} "
            f"(+{paper.published_overhead:.1%})"
        )
        return "\n".join(lines)


def simulate_config(config: RunConfig, *, world_size: int | None = None, max_version_lag: int = 3) -> Report:
    """Simulate ``config`` at its own size and at multiples up to 4,096 devices.

    Raises ConfigError where the cluster section lacks a bandwidth that the constants need.
    """
    names = ("device_bandwidth_gb_s", "device_tflops", "network_gb_s")
    missing = [f"cluster.{name}: needed to simulate; give cluster.{name}=VALUE" for name in names if not _given(config, name)]
    if missing:
        raise ConfigError(missing)
    where = layouts.resolve(config, world_size=world_size)
    per_node = config.cluster.devices_per_node or where.world_size // config.cluster.nodes
    devices = where.world_size + config.cluster.rollout_nodes * per_node
    multiples = [2**power for power in range(7) if devices * 2**power <= 4096] or [1]
    rows = []
    for multiple in multiples:
        plain, guided = (_constants(config, where, multiple=multiple, guided=on, lag=max_version_lag) for on in (False, True))
        rows.append(Row(devices=devices * multiple, plain=simulate(plain), guided=simulate(guided)))
    return Report(name=config.run.name, rows=tuple(rows), paper=paper_ratio())


def _given(config: RunConfig, name: str) -> bool:
    return getattr(config.cluster, name) is not None


def _constants(config: RunConfig, where: layouts.Layout, *, multiple: int, guided: bool, lag: int) -> Constants:
    """Constants of ``config`` with devices and trajectories multiplied.

    Every multiple of the devices works like the first on its share of the trajectories; what they share is the storage, which
    takes the guidance of all.
    """
    found = rates.rates(config, where)
    assert found.decode_tokens_per_second is not None and found.train_seconds is not None and found.refit_seconds is not None
    context = (config.task.max_prompt_tokens + config.rollout.max_new_tokens) / 2
    room = config.rollout.num_pages * config.rollout.page_size / context
    batch = max(1, int(min(config.rollout.max_batch_size, room)))
    engines = rates.engines(config, where)
    longest = config.rollout.max_new_tokens
    # The median of a lognormal whose two-sigma length is the longest allowed.
    median = longest / math.exp(2 * LOGNORMAL_SIGMA)
    mean = min(1.0, median * math.exp(LOGNORMAL_SIGMA**2 / 2) / longest)
    trajectories = config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
    share = PAPER_SHARES["activation guidance"] + PAPER_SHARES["KV guidance"]
    return Constants(
        slots=engines * batch,
        trajectories=trajectories,
        median_tokens=median,
        longest_tokens=longest,
        token_time=engines * batch / found.decode_tokens_per_second,
        guidance_share=share if guided else 0.0,
        upload_time=found.guidance_seconds_storage * mean * multiple if guided else 0.0,
        train_time=found.train_seconds * mean,
        refit_time=found.refit_seconds,
        max_version_lag=lag,
    )
