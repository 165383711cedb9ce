"""What a rollout engine is to the rest of the project: requests in, trajectories out, weights in, an acknowledgement out.

Arrays that cross this border are numpy (zero-copy through shared memory and object stores); tensors stay inside an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from megatron_trace.guidance.segments import GuidanceSegment, RouteSegment

if TYPE_CHECKING:
    import torch

    from megatron_trace.guidance.spec import GuidanceSpec

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. ``temperature`` 0 means greedy; log-probabilities are then of the untempered softmax."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    """Every sample draws from its own stream keyed by (seed, sample_id): results do not depend on batching or engine count."""
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One sample to generate. ``sample_id`` is unique within a rollout: guidance and routes are found by it later."""

    sample_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    forced_tokens: tuple[int, ...] | None = None
    """Teacher forcing: these tokens are emitted instead of sampled ones, decoded one by one, their log-probabilities
    reported."""


@dataclass(frozen=True)
class Trajectory:
    """One finished sample.

    ``tokens`` int64 [n] is prompt + response; ``logprobs`` float32 [n - prompt_length], entry i being the log-probability of
    ``tokens[prompt_length + i]`` under the distribution it was sampled from (temperature and top-p applied);
    ``token_versions`` int32 [n - prompt_length], the weight version that sampled each of them. Guidance and routes have one row
    per *input* position: n - 1 rows, since the last sampled token was never fed back.
    """

    sample_id: int
    tokens: np.ndarray
    prompt_length: int
    logprobs: np.ndarray
    token_versions: np.ndarray
    finish_reason: FinishReason
    guidance: GuidanceSegment | None = None
    routes: RouteSegment | None = None


@dataclass(frozen=True)
class QuantizedWeight:
    """One NVFP4 weight matrix as the trainer quantised it; the engine stores these very bytes.

    ``codes`` uint8 [out, in/2], ``block_scale`` float8_e4m3fn [out, in/16], ``global_amax`` float32 [].
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    global_amax: torch.Tensor


@dataclass(frozen=True)
class RefitBundle:
    """A complete set of weights of one version, by Hugging Face parameter name; each parameter exactly once.

    ``plain`` holds BF16 (or FP32) tensors, ``quantized`` NVFP4 ones. ``kv_amax`` gives the static FP32 amax of K and V,
    keyed (layer, "k" | "v"); empty when KV is not quantised.
    """

    version: int
    contract_fingerprint: str
    plain: Mapping[str, torch.Tensor]
    quantized: Mapping[str, QuantizedWeight] = field(default_factory=dict)
    kv_amax: Mapping[tuple[int, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class RefitAck:
    """What the engine holds after a refit. ``digest`` is computed over the engine's own stored bytes."""

    success: bool
    version: int
    digest: str
    message: str = ""


@dataclass(frozen=True)
class EngineHealth:
    """A snapshot of an engine: weight version, tokens generated so far, pages free and in use."""

    ok: bool
    weight_version: int
    generated_tokens: int
    pages_in_use: int
    pages_total: int
    detail: str = ""


class RolloutEngine(Protocol):
    """The five verbs every engine offers (DESIGN.md section 4)."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, capture: GuidanceSpec | None = None, capture_routes: bool = False
    ) -> list[Trajectory]:
        """Generate all ``requests`` and return their trajectories in request order."""
        ...

    def update_weights(self, bundle: RefitBundle) -> RefitAck:
        """Load a complete bundle; incomplete, unknown, or older-versioned bundles raise and leave the old weights serving."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def health(self) -> EngineHealth: ...

    def shutdown(self) -> None: ...
