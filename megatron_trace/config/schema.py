"""Every setting of a run, its type, its default and what it means (no torch).

``docs/config.md`` is generated from this file; rules that involve more than one setting stand in ``validation.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

from megatron_trace.config.base import (
    Fraction,
    LayerChoice,
    LayerList,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
    reject_bool,
)
from megatron_trace.config.contract import PrecisionContract
from megatron_trace.config.model import ModelConfig

TrainerForward = Literal["guided", "qat", "w4a16", "bf16"]


class RunSection(Section):
    """Name, place and seed of the run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its files are written to ``<output_dir>/<name>/``. Letters, digits, dot, dash and underscore.

    A run started anew under the same name replaces ``metrics.jsonl`` and ``summary.json`` and moves earlier checkpoints aside.
    """
    output_dir: PathText = "runs"
    """Directory that holds the runs, relative to where the launcher is started."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of weights, problems and sampling."""


class PrecisionSection(Section):
    """Number formats of rollout and trainer; together with the parallel sizes they make the ``PrecisionContract``."""

    rollout: Literal["nvfp4", "bf16"] = "nvfp4"
    """Format of routed experts (weights and activations) and of the KV cache in the rollout engine."""
    trainer_forward: Literal["auto", "guided", "qat", "w4a16", "bf16"] = "auto"
    """How the trainer's forward rounds: ``guided`` (TRACE), ``qat`` (nearest, own scales), ``w4a16`` (weights only), ``bf16``.

    ``auto`` is ``guided`` for an NVFP4 rollout and ``bf16`` for a BF16 rollout.
    """
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Values of activations and working weights, in engine and trainer alike; ``float32`` is for comparing with a reference."""
    bf16_layers: LayerList = ()
    """Global layers (0-based) left in BF16 on both sides."""
    kv_amax_headroom: Annotated[float, Field(ge=1)] = 2.0
    """Factor between the largest K or V seen in calibration and the static amax the KV codes are scaled with."""
    fc2_row_scale: Literal["max_reduced", "per_shard"] = "max_reduced"
    """Row scale of the fc2 input under expert tensor parallelism: over the whole row, or one for each shard."""


class GuidanceSection(Section):
    """What the rollout engine records for the trainer. Used when the trainer's forward is ``guided``."""

    bits: Annotated[Literal[1, 4], BeforeValidator(reject_bool)] = 1
    """1 records the mantissa bit of each code (TRACE-compact), 4 the whole code (TRACE-full)."""
    layers: LayerChoice = "latter_half"
    """Guided global layers: ``latter_half`` (l >= L - L // 2), ``all``, or a list of 0-based layer numbers."""
    sites: Annotated[tuple[Literal["fc1_in", "k", "v"], ...], Strict(False), Field(min_length=1)] = ("fc1_in", "k", "v")
    """Guided tensors: routed-expert input, K after RoPE, V."""
    prompt_tokens: bool = True
    """Whether prompt tokens are recorded too; without it they are rounded to nearest and counted."""


class ParallelSection(Section):
    """Parallel sizes of the trainer. The data-parallel size is what is left of the world size."""

    tensor: PositiveInt = 1
    """Tensor parallel size."""
    pipeline: PositiveInt = 1
    """Pipeline parallel size."""
    expert: PositiveInt = 2
    """Expert parallel size; divides the number of experts and the world size."""
    expert_tensor: PositiveInt = 1
    """Tensor parallel size inside an expert. Never derived from ``tensor``."""
    context: PositiveInt = 1
    """Context parallel size."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks on each pipeline stage (interleaved schedule); 1 is the plain schedule."""


class ClusterSection(Section):
    """Machines a run is planned for. Nothing here changes what a run computes."""

    nodes: PositiveInt = 1
    """Nodes of the trainer."""
    devices_per_node: PositiveInt | None = None
    """Devices (or CPU processes) on each node; null takes the fewest that the parallel sizes need."""
    rollout_nodes: NonNegativeInt = 0
    """Nodes that only generate; 0 places the engines on the trainer's devices."""
    device_memory_gib: PositiveFloat | None = None
    """Memory of one device; null does not judge memory."""
    device_tflops: PositiveFloat | None = None
    """Dense BF16 TFLOP/s that one device sustains in training; null estimates no time of the forward and backward."""
    device_bandwidth_gb_s: PositiveFloat | None = None
    """Memory bandwidth of one device in 10^9 byte/s; null estimates no time of decoding."""
    network_gb_s: PositiveFloat | None = None
    """Network bandwidth of one node in 10^9 byte/s, for refit and guidance between nodes; null estimates no time."""
    storage_gb_s: PositiveFloat = 5.0
    """Bandwidth of the shared storage in 10^9 byte/s, should guidance or checkpoints go through it."""
    disk_gib: PositiveFloat | None = None
    """Free disk for checkpoints and guidance; null does not judge it."""
    base_port: Annotated[int, Field(ge=1024, le=60000)] = 29500
    """First of the ports that a run reserves: rendezvous, Ray, then a block for each engine."""


class RolloutSection(Section):
    """The rollout engine and how it samples."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """Engine that generates: ``embedded`` is the project's own paged engine, ``sglang`` is SGLang."""
    placement: Literal["local", "ray"] = "local"
    """Where engines live: ``local`` is inside the trainer's processes, ``ray`` is in Ray actors."""
    tensor_parallel: PositiveInt = 2
    """Tensor parallel size of the engine: partial sums of attention output and expert down-projection, each rounded to BF16."""
    page_size: PositiveInt = 16
    """Tokens in one page of the KV cache."""
    expert_parallel: PositiveInt = 1
    """Expert parallel size inside the engine; divides ``tensor_parallel``, whose rest shards each expert."""
    num_pages: PositiveInt = 1024
    """Pages in the KV cache of one engine."""
    max_batch_size: PositiveInt = 64
    """Largest number of sequences decoded at once by one engine."""
    temperature: Annotated[float, Field(ge=1e-4)] = 1.0
    """Sampling temperature; all three log-probabilities are of the tempered distribution."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass; below 1 the behaviour policy has no probability where the trainer has some."""
    max_new_tokens: PositiveInt
    """Longest response in tokens, end-of-sequence included."""


class ArithmeticSection(Section):
    """Generator of the ``arithmetic`` task: chains of additions and subtractions, as numbers or in words."""

    operands: Annotated[int, Field(ge=2, le=6)] = 3
    """Numbers in one problem."""
    max_operand: Annotated[int, Field(ge=9, le=9999)] = 99
    """Largest number; the smallest is 1. Partial sums stay within 0 and ``operands * max_operand``."""
    ops: Annotated[tuple[Literal["+", "-"], ...], Strict(False), Field(min_length=1)] = ("+",)
    """Operations drawn from."""
    word_problem_fraction: Fraction = 0.25
    """Share of problems told in words."""
    forgetful_fraction: Fraction = 0.0
    """Share of the solutions shown in the warm-up that leave out the last operand: demonstrations of mixed quality, which a
    policy imitates and a reward then sorts out. Needs at least 3 operands."""


class ReasoningGymSection(Section):
    """Source of the ``reasoning_gym`` task (package reasoning-gym, extra ``tasks``)."""

    dataset: str = "chain_sum"
    """Name of the reasoning-gym dataset."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that dataset's configuration, ``seed`` and ``size`` excepted."""


class TaskSection(Section):
    """Where problems come from."""

    name: Literal["arithmetic", "reasoning_gym"] = "arithmetic"
    """Which source is used."""
    train_problems: PositiveInt = 8192
    """Distinct problems of the training split, drawn from again and again."""
    heldout_problems: PositiveInt = 512
    """Problems of the held-out split; none of them is ever trained on."""
    max_prompt_tokens: PositiveInt = 48
    """Longest prompt in tokens that the source may give; a source that could give a longer one is refused."""
    arithmetic: ArithmeticSection = Field(default_factory=ArithmeticSection)
    """Settings of the ``arithmetic`` source."""
    reasoning_gym: ReasoningGymSection = Field(default_factory=ReasoningGymSection)
    """Settings of the ``reasoning_gym`` source."""


class WarmupSection(Section):
    """Supervised warm-up on written-out solutions before reinforcement learning."""

    steps: NonNegativeInt
    """Optimiser steps; 0 skips the warm-up."""
    batch_size: PositiveInt = 64
    """Sequences in one step over all ranks."""
    learning_rate: PositiveFloat = 1e-3
    """Learning rate."""


class AlgorithmSection(Section):
    """Advantages, objective and sizes of one reinforcement-learning step."""

    advantage: Literal["grpo"] = "grpo"
    """Advantage estimator: reward normalised within the samples of one prompt."""
    objective: Literal["tis", "acr", "decoupled", "naive_behavior", "naive_proximal"] = "tis"
    """Policy objective (``megatron_trace.rl.losses``); QuRL's section 3 names them."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip range of the probability ratio."""
    clip_high: PositiveFloat = 0.28
    """Upper clip range of the probability ratio."""
    truncation: Annotated[float, Field(ge=1)] = 5.0
    """Upper bound of the importance weight between proximal and behaviour policy."""
    prompts_per_step: PositiveInt
    """Prompts in one step over all ranks."""
    samples_per_prompt: Annotated[int, Field(ge=2)]
    """Responses sampled for each prompt: the group advantages are normalised in."""
    updates_per_rollout: PositiveInt = 1
    """Optimiser steps (mini-batches) on one rollout."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of a KL penalty towards the policy after warm-up."""


class OptimizerSection(Section):
    """Adam with decoupled weight decay, as Megatron-core's optimiser."""

    learning_rate: PositiveFloat = 1e-4
    """Learning rate of reinforcement learning."""
    min_learning_rate: PositiveFloat | None = None
    """Learning rate of the last step, reached linearly; null keeps it constant."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0, while Adam's second moments are still of few gradients."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 does not clip."""


class TrainerSection(Section):
    """The training loop."""

    steps: NonNegativeInt
    """Reinforcement-learning steps (rollouts)."""
    micro_batch_size: PositiveInt = 32
    """Sequences in one forward pass of one rank."""
    sequence_length: PositiveInt
    """Most tokens of a sequence: prompt and response. A micro-batch is padded to the longest of its own sequences."""
    log_every: PositiveInt = 1
    """Steps between two lines on the console; metrics.jsonl gets every step."""
    backend: Literal["megatron"] = "megatron"
    """Training backend."""
    recompute: Literal["none", "full"] = "none"
    """Activations kept for the backward: all of them, or only each layer's input (the layer's forward runs again)."""


class CheckpointSection(Section):
    """Checkpoints of weights, optimiser, random states and step."""

    directory: PathText | None = None
    """Where checkpoints go; null means ``<output_dir>/<name>/checkpoints``."""
    interval: NonNegativeInt = 0
    """Steps between two checkpoints; 0 writes one only when the run ends or is interrupted."""
    keep_last: PositiveInt = 2
    """Newest checkpoints that are kept."""
    resume: bool = False
    """Continue from the newest checkpoint; an error where there is none."""


class EvaluationSection(Section):
    """Greedy evaluation on the held-out split."""

    interval: NonNegativeInt = 0
    """Steps between two evaluations; 0 evaluates only after the warm-up and at the end."""
    batch_size: PositiveInt = 128
    """Problems given to the engine at once."""


class EvidenceSection(Section):
    """Measurements at the end of a run: mismatch of each method on the same trajectories."""

    enabled: bool = True
    """Whether they are made."""
    prompts: PositiveInt = 32
    """Held-out prompts they are made on."""
    samples_per_prompt: PositiveInt = 2
    """Responses sampled for each of them."""
    stale_updates: Annotated[tuple[NonNegativeInt, ...], Strict(False), Field(min_length=1)] = (0, 2)
    """How many updates newer the trainer's policy is than the one the data came from, each measured; 0 among them."""


class RunConfig(Section):
    """All settings of a run."""

    run: RunSection
    """Name, place and seed of the run."""
    model: ModelConfig
    """Architecture."""
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    """Number formats of rollout and trainer."""
    guidance: GuidanceSection = Field(default_factory=GuidanceSection)
    """What the rollout engine records."""
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    """Parallel sizes of the trainer."""
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    """Machines the run is planned for."""
    rollout: RolloutSection
    """The rollout engine and how it samples."""
    task: TaskSection = Field(default_factory=TaskSection)
    """Where problems come from."""
    warmup: WarmupSection
    """Supervised warm-up."""
    algorithm: AlgorithmSection
    """Advantages, objective and sizes of one step."""
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    """Optimiser."""
    trainer: TrainerSection
    """The training loop."""
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """Checkpoints."""
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    """Evaluation on the held-out split."""
    evidence: EvidenceSection = Field(default_factory=EvidenceSection)
    """Mismatch measurements."""

    @property
    def trainer_forward(self) -> TrainerForward:
        """``precision.trainer_forward`` with ``auto`` resolved."""
        choice = self.precision.trainer_forward
        if choice == "auto":
            return "guided" if self.precision.rollout == "nvfp4" else "bf16"
        return choice

    @property
    def guided_layers(self) -> tuple[int, ...]:
        """Global layers that are guided, ascending, without those left in BF16; empty unless the forward is guided."""
        if self.trainer_forward != "guided":
            return ()
        total = self.model.num_layers
        choice = self.guidance.layers
        if choice == "all":
            layers: tuple[int, ...] = tuple(range(total))
        elif choice == "latter_half":
            layers = tuple(range(total - total // 2, total))
        else:
            layers = tuple(sorted(choice))
        return tuple(layer for layer in layers if layer not in self.precision.bf16_layers)

    @property
    def contract(self) -> PrecisionContract:
        """What rollout engine and trainer agree on about numbers."""
        if self.precision.rollout == "bf16":
            return PrecisionContract.bf16(temperature=self.rollout.temperature, source_dtype=self.precision.compute_dtype)
        per_shard = self.precision.fc2_row_scale == "per_shard"
        return PrecisionContract.nvfp4(
            temperature=self.rollout.temperature,
            source_dtype=self.precision.compute_dtype,
            bf16_layers=tuple(sorted(set(self.precision.bf16_layers))),
            fc2_row_scale=self.precision.fc2_row_scale,
            expert_tensor_parallel=self.parallel.expert_tensor if per_shard else 1,
        )

    def resolved(self) -> dict[str, Any]:
        """Every setting with its value, as plain lists, dicts and scalars that YAML and JSON can hold."""
        return self.model_dump(mode="json")
