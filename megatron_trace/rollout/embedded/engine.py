"""The embedded rollout engine: continuous batching over paged NVFP4 KV, in one process, in plain torch.

Waiting requests are admitted while pages and batch places last; the admitted are prefilled in one flattened forward; otherwise
all running sequences decode one token. A finished sequence leaves at once and frees its pages. A sequence is admitted only when
all the pages it may need are free, so nothing is ever preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from megatron_trace.config.model import ModelConfig
from megatron_trace.guidance.spec import GuidanceSpec
from megatron_trace.rollout.embedded.block_manager import BlockManager
from megatron_trace.rollout.embedded.kv_cache import DensePages, PackedPages, Pages, copy_slots
from megatron_trace.rollout.embedded.model import Qwen3MoeModel
from megatron_trace.rollout.embedded.recorder import Recorder
from megatron_trace.rollout.embedded.sampler import sample
from megatron_trace.rollout.embedded.sequence import RunningSequence, forward_batch, sampling_batch
from megatron_trace.rollout.embedded.validation import check_capture, check_engine, check_request
from megatron_trace.rollout.embedded.weights import WeightLoader, Weights
from megatron_trace.rollout.protocol import EngineHealth, GenerationRequest, RefitAck, RefitBundle, Trajectory


class EmbeddedEngine:
    """``RolloutEngine`` for the Qwen3-MoE family. Weights arrive by ``update_weights`` only; until then ``generate`` raises.

    ``quantization`` "nvfp4": routed experts W4A4 and packed KV pages in every layer outside ``bf16_layers``; "none": everything
    in ``dtype``. ``tensor_parallel`` N computes the row-parallel products as N rounded partial sums, which is the arithmetic of
    N ranks with a BF16 all-reduce, in this one process. ``max_prefill_tokens`` bounds the new tokens of one prefill forward (a
    longer prompt goes alone). Received NVFP4 bytes are kept as the truth; products run on an FP32 copy of their values.
    Raises ValueError, naming field and remedy, for settings that do not fit the model.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        quantization: Literal["nvfp4", "none"],
        num_pages: int,
        contract_fingerprint: str,
        dtype: torch.dtype = torch.bfloat16,
        tensor_parallel: int = 1,
        page_size: int = 16,
        max_batch_size: int = 256,
        max_prefill_tokens: int = 8192,
        bf16_layers: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        check_engine(
            model,
            quantization=quantization,
            dtype=dtype,
            tensor_parallel=tensor_parallel,
            positive={
                "num_pages": num_pages,
                "page_size": page_size,
                "max_batch_size": max_batch_size,
                "max_prefill_tokens": max_prefill_tokens,
            },
            bf16_layers=bf16_layers,
        )
        self.model_config = model
        self.contract_fingerprint = contract_fingerprint
        self.max_batch_size = max_batch_size
        self.max_prefill_tokens = max_prefill_tokens
        self._device = torch.device(device)
        all_layers = frozenset(range(model.num_layers))
        self.quantized_layers = all_layers - set(bf16_layers) if quantization == "nvfp4" else frozenset()
        self._loader = WeightLoader(
            model=model,
            quantized_layers=self.quantized_layers,
            dtype=dtype,
            tensor_parallel=tensor_parallel,
            contract_fingerprint=contract_fingerprint,
            device=self._device,
        )
        self._forward = Qwen3MoeModel(model, dtype=dtype, device=self._device)
        self._blocks = BlockManager(num_pages=num_pages, page_size=page_size)
        slots = num_pages * page_size
        width = model.num_key_value_heads * model.head_dim
        self._pages: list[Pages] = [
            PackedPages(num_slots=slots, width=width, device=self._device)
            if layer in self.quantized_layers
            else DensePages(num_slots=slots, width=width, dtype=dtype, device=self._device)
            for layer in range(model.num_layers)
        ]
        self._recorder = Recorder(model=model, num_slots=slots, device=self._device)
        self._weights: Weights | None = None
        self._paused = False
        self._closed = False
        self._generated_tokens = 0
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []

    def generate(
        self, requests: Sequence[GenerationRequest], *, capture: GuidanceSpec | None = None, capture_routes: bool = False
    ) -> list[Trajectory]:
        """Generate all ``requests``; trajectories in request order.

        Raises RuntimeError while paused, before the first refit and after shutdown; ValueError for a request or a capture that
        cannot be served, before anything is generated. Recording another layout than the last call did empties the prefix
        cache, since cached pages then have no rows to give.
        """
        weights = self._serving()
        check_capture(capture, self.quantized_layers)
        for request in requests:
            check_request(request, model=self.model_config, max_slots=self._blocks.num_pages * self._blocks.page_size)
        ids = [r.sample_id for r in requests]
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ValueError(f"sample_id={twice} occurs twice in one call: guidance is found by sample_id")
        if self._recorder.configure(capture, routes=capture_routes):
            self._blocks.flush()
        sequences = [RunningSequence(r) for r in requests]
        finished: dict[int, Trajectory] = {}
        self._waiting.extend(sequences)
        try:
            with torch.inference_mode():
                while self._waiting or self._running:
                    self._step(weights, finished)
        except BaseException:
            self._abandon()
            raise
        return [finished[i] for i in ids]

    def update_weights(self, bundle: RefitBundle) -> RefitAck:
        """Serve ``bundle`` from now on, static K/V amax included, and empty the prefix cache; all or nothing.

        Raises ValueError naming what is incomplete, unknown, misshapen, older, or of another contract; the old weights then
        keep serving. ``RefitAck.digest`` covers the engine's own copies (``rollout/refit_digest.py``).
        """
        if self._closed:
            raise RuntimeError("engine is shut down")
        current = None if self._weights is None else self._weights.version
        self._weights = self._loader.load(bundle, current_version=current)
        self._blocks.flush()
        self._blocks.salt = f"version {bundle.version}"
        return RefitAck(success=True, version=bundle.version, digest=self._weights.digest)

    def pause(self) -> None:
        """Refuse ``generate`` until ``resume``."""
        self._paused = True

    def resume(self) -> None:
        """Serve again after ``pause``."""
        self._paused = False

    def health(self) -> EngineHealth:
        """Snapshot; ``weight_version`` is -1 before the first refit."""
        state = "shut down" if self._closed else "no weights" if self._weights is None else "paused" if self._paused else ""
        return EngineHealth(
            ok=not self._closed and self._weights is not None,
            weight_version=-1 if self._weights is None else self._weights.version,
            generated_tokens=self._generated_tokens,
            pages_in_use=self._blocks.pages_in_use,
            pages_total=self._blocks.num_pages,
            detail=state,
        )

    def shutdown(self) -> None:
        """Drop weights and pages; idempotent. Everything but ``health`` raises afterwards."""
        self._closed = True
        self._weights = None
        self._pages = []

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes one token's K and V take over all layers, from the sizes of the page tensors."""
        return sum(p.rows.nbytes / len(p.rows) for p in self._pages)

    def _serving(self) -> Weights:
        if self._closed:
            raise RuntimeError("engine is shut down")
        if self._paused:
            raise RuntimeError("engine is paused: call resume() before generate()")
        if self._weights is None:
            raise RuntimeError("engine has no weights: call update_weights() before generate()")
        return self._weights

    def _step(self, weights: Weights, finished: dict[int, Trajectory]) -> None:
        """One prefill of newly admitted sequences, or one decode of all running ones."""
        admitted = self._admit()
        if admitted:
            self._prefill(admitted, weights)
        else:
            self._advance(self._running, self._compute(self._running, weights), weights)
        for sequence in [s for s in self._running if s.finish_reason is not None]:
            finished[sequence.request.sample_id] = self._retire(sequence, weights)

    def _admit(self) -> list[tuple[RunningSequence, RunningSequence | None]]:
        """Take waiting sequences in order while batch places, pages and the prefill budget last: (sequence, its twin or None).

        A later sequence with the same prompt as one admitted here computes nothing: it copies from that twin after the prefill.
        """
        admitted: list[tuple[RunningSequence, RunningSequence | None]] = []
        leaders: dict[tuple[int, ...], RunningSequence] = {}
        new_tokens = 0
        while self._waiting and len(self._running) < self.max_batch_size:
            sequence = self._waiting[0]
            leader = leaders.get(sequence.request.prompt)
            if leader is not None:
                pages = self._blocks.fork(leader.pages, prompt_length=sequence.prompt_length, num_slots=sequence.num_slots)
                if pages is None:
                    break
                sequence.pages = pages
            else:
                if new_tokens and new_tokens + sequence.prompt_length > self.max_prefill_tokens:
                    break
                allocation = self._blocks.allocate(sequence.tokens, num_slots=sequence.num_slots)
                if allocation is None:
                    break
                sequence.pages, sequence.computed = allocation.pages, allocation.cached_tokens
                new_tokens += sequence.prompt_length - allocation.cached_tokens
                leaders[sequence.request.prompt] = sequence
            self._running.append(self._waiting.popleft())
            admitted.append((sequence, leader))
        return admitted

    def _prefill(self, admitted: list[tuple[RunningSequence, RunningSequence | None]], weights: Weights) -> None:
        leaders = [s for s, leader in admitted if leader is None]
        row = {id(s): i for i, s in enumerate(leaders)}
        logits_BV = self._compute(leaders, weights)
        forks = [(s, leader) for s, leader in admitted if leader is not None]
        if forks:
            self._copy_last_pages(forks)
        rows = [row[id(s if leader is None else leader)] for s, leader in admitted]
        self._advance([s for s, _ in admitted], logits_BV[torch.tensor(rows, device=self._device)], weights)

    def _copy_last_pages(self, forks: list[tuple[RunningSequence, RunningSequence]]) -> None:
        """Give each fork its own copy of the prompt's last, partly filled page: keys, values and records."""
        size = self._blocks.page_size
        spans = [(s.prompt_length // size * size, s.prompt_length) for s, _ in forks]
        source = np.concatenate([leader.slots(size, *span) for (_, leader), span in zip(forks, spans, strict=True)])
        target = np.concatenate([s.slots(size, *span) for (s, _), span in zip(forks, spans, strict=True)])
        source_N, target_N = (torch.from_numpy(x).to(self._device) for x in (source, target))
        for pages in self._pages:
            copy_slots(pages, source_N, target_N)
        self._recorder.copy(source_N, target_N)
        for sequence, _ in forks:
            sequence.computed = sequence.prompt_length

    def _compute(self, sequences: Sequence[RunningSequence], weights: Weights) -> torch.Tensor:
        """Logits [B, V] after the last token of each sequence, all its tokens computed."""
        batch = forward_batch(sequences, page_size=self._blocks.page_size, device=self._device)
        logits_BV = self._forward.forward(batch, weights, self._pages, self._recorder)
        for sequence in sequences:
            sequence.computed = len(sequence.tokens)
        return logits_BV

    def _advance(self, sequences: Sequence[RunningSequence], logits_BV: torch.Tensor, weights: Weights) -> None:
        tokens_B, logprobs_B = sample(logits_BV, sampling_batch(sequences, device=self._device))
        for sequence, token, logprob in zip(sequences, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            sequence.append(token, logprob, weights.version)
        self._generated_tokens += len(sequences)

    def _retire(self, sequence: RunningSequence, weights: Weights) -> Trajectory:
        """Gather what was recorded, free the pages (they stay findable as a prefix), and drop the sequence."""
        request, n = sequence.request, len(sequence.tokens) - 1
        slots_N = torch.from_numpy(sequence.slots(self._blocks.page_size, 0, n)).to(self._device)
        guidance = self._recorder.guidance(
            slots_N,
            sample_id=request.sample_id,
            prompt_length=sequence.prompt_length,
            contract_fingerprint=self.contract_fingerprint,
            version=weights.version,
            kv_amax=weights.kv_amax,
        )
        routes = self._recorder.routes(slots_N, sample_id=request.sample_id, version=weights.version)
        self._blocks.release(sequence.pages, tokens=sequence.tokens[:n])
        self._running.remove(sequence)
        reason = sequence.finish_reason
        assert reason is not None
        return Trajectory(
            sample_id=request.sample_id,
            tokens=np.asarray(sequence.tokens, dtype=np.int64),
            prompt_length=sequence.prompt_length,
            logprobs=np.asarray(sequence.logprobs, dtype=np.float32),
            token_versions=np.asarray(sequence.versions, dtype=np.int32),
            finish_reason=reason,
            guidance=guidance,
            routes=routes,
        )

    def _abandon(self) -> None:
        """After an error: give back all pages, whose contents may be half written, and forget every sequence."""
        for sequence in self._running:
            self._blocks.release(sequence.pages)
        self._running.clear()
        self._waiting.clear()
        self._blocks.flush()
