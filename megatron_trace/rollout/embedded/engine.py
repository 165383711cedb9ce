"""The embedded rollout engine: continuous batching over paged NVFP4 KV, in one process, in plain torch.

``scheduler.py`` says what the next forward computes: chunks of prompts, or one token of every running sequence. A finished
sequence leaves at once and frees its pages. What was recorded when a token was sampled is saved before its pages are lost, to
preemption or to new weights, and nothing recorded later replaces it: a token's log-probability, route and codes come from one
forward.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from megatron_trace.config.model import ModelConfig
from megatron_trace.guidance import operations
from megatron_trace.guidance.segments import GuidanceSegment, RouteSegment, tokens_digest
from megatron_trace.guidance.spec import GuidanceSpec
from megatron_trace.rollout.embedded.block_manager import BlockManager
from megatron_trace.rollout.embedded.kv_cache import DensePages, PackedPages, Pages, copy_slots
from megatron_trace.rollout.embedded.model import Qwen3MoeModel
from megatron_trace.rollout.embedded.recorder import Recorder
from megatron_trace.rollout.embedded.sampler import sample
from megatron_trace.rollout.embedded.scheduler import Scheduler, Work
from megatron_trace.rollout.embedded.sequence import RunningSequence, forward_batch, sampling_batch
from megatron_trace.rollout.embedded.validation import check_capture, check_engine, check_request
from megatron_trace.rollout.embedded.weights import WeightLoader, Weights
from megatron_trace.rollout.protocol import EngineHealth, FinishReason, GenerationRequest, RefitAck, RefitBundle, Trajectory


class EmbeddedEngine:
    """``RolloutEngine`` for the Qwen3-MoE family. Weights arrive by ``update_weights`` only; until then ``generate`` raises.

    ``quantization`` "nvfp4": routed experts W4A4 and packed KV pages in every layer outside ``bf16_layers``; "none": everything
    in ``dtype``. ``tensor_parallel`` N computes the row-parallel products as N rounded partial sums, which is the arithmetic of
    N ranks with a BF16 all-reduce, in this one process. ``max_prefill_tokens`` bounds the new tokens of one prefill forward; a
    longer prompt is computed in chunks. Received NVFP4 bytes are kept as the truth; products run on an FP32 copy of them.
    ``on_refit`` says what a weight change means for sequences in flight and for cached prefixes: "recompute" drops all keys and
    values and computes them again with the new weights; "keep" goes on with them, each row read by its version's static amax.
    ``may_admit`` is back-pressure: while it says no (a guidance store above its high-water mark), samples start one at a time.
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
        on_refit: Literal["recompute", "keep"] = "recompute",
        may_admit: Callable[[], bool] = lambda: True,
        device: torch.device | str = "cpu",
    ) -> None:
        if on_refit not in ("recompute", "keep"):
            raise ValueError(f"on_refit={on_refit!r}: must be 'recompute' or 'keep'")
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
        self.on_refit = on_refit
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
        self._scheduler = Scheduler(
            self._blocks,
            max_batch_size=max_batch_size,
            max_prefill_tokens=max_prefill_tokens,
            on_preempt=self._keep_records,
            may_admit=may_admit,
        )
        self._aborting: set[int] = set()
        self._turn = threading.Condition()  # held for one step, or for one change from another thread
        self._visitors: set[object] = set()

    def generate(
        self, requests: Sequence[GenerationRequest], *, capture: GuidanceSpec | None = None, capture_routes: bool = False
    ) -> list[Trajectory]:
        """Generate all ``requests``; trajectories in request order.

        Raises RuntimeError while paused, before the first refit and after shutdown; ValueError for a request or a capture that
        cannot be served, before anything is generated. Recording another layout than the last call did empties the prefix
        cache, since cached pages then have no rows to give. Between two steps other threads may change weights, pause or abort.
        """
        self._check_serving()
        check_capture(capture, self.quantized_layers)
        for request in requests:
            check_request(request, model=self.model_config, max_slots=self._blocks.num_pages * self._blocks.page_size)
        ids = [r.sample_id for r in requests]
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ValueError(f"sample_id={twice} occurs twice in one call: guidance is found by sample_id")
        if self._recorder.configure(capture, routes=capture_routes):
            self._blocks.flush()
        finished: dict[int, Trajectory] = {}
        self._aborting.clear()
        self._scheduler.waiting.extend(RunningSequence(r) for r in requests)
        try:
            with torch.inference_mode():
                while self._scheduler.waiting or self._scheduler.running:
                    self._give_way()
                    with self._turn:
                        self._step(finished)
        except BaseException:
            self._scheduler.abandon()
            raise
        return [finished[i] for i in ids]

    def abort(self, sample_ids: Iterable[int]) -> None:
        """End samples of the running ``generate`` before its next step, waiting ones too.

        Their trajectories carry what was sampled so far, with its log-probabilities and records, and ``finish_reason`` "abort".
        """
        with self._visit():
            self._aborting.update(sample_ids)

    def update_weights(self, bundle: RefitBundle) -> RefitAck:
        """Serve ``bundle`` from now on, static K/V amax included; all or nothing. Another thread may be generating.

        Sequences in flight go on with the new weights as ``on_refit`` says; each token carries the version that sampled it,
        each record the version it was made under. Raises ValueError naming what is incomplete, unknown, misshapen, older, or of
        another contract; the old weights then keep serving. ``RefitAck.digest`` covers the engine's own copies
        (``rollout/refit_digest.py``).
        """
        if self._closed:
            raise RuntimeError("engine is shut down")
        keep = self.on_refit == "keep"
        with self._visit():
            current = None if self._weights is None else self._weights.version
            weights = self._loader.load(bundle, current_version=current)
            if not keep:
                self._scheduler.preempt_all()
                self._blocks.flush()
                self._blocks.salt = f"version {bundle.version}"
            self._recorder.serve(weights.version, weights.kv_amax, keep_rows=keep)
            self._weights = weights
        return RefitAck(success=True, version=bundle.version, digest=weights.digest)

    def pause(self) -> None:
        """Refuse ``generate`` until ``resume``; one that runs in another thread stands still before its next step."""
        with self._visit():
            self._paused = True

    def resume(self) -> None:
        """Serve again after ``pause``."""
        with self._visit():
            self._paused = False
            self._turn.notify_all()

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
        with self._visit():
            self._closed = True
            self._weights = None
            self._pages = []
            self._turn.notify_all()

    @property
    def preemptions(self) -> int:
        """Times a sequence lost its pages, to memory pressure or to new weights, since the engine was built."""
        return self._scheduler.preemptions

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes one token's K and V take over all layers, from the sizes of the page tensors."""
        return sum(p.rows.nbytes / len(p.rows) for p in self._pages)

    def _check_serving(self) -> None:
        if self._closed:
            raise RuntimeError("engine is shut down")
        if self._paused:
            raise RuntimeError("engine is paused: call resume() before generate()")
        if self._weights is None:
            raise RuntimeError("engine has no weights: call update_weights() before generate()")

    @contextmanager
    def _visit(self) -> Iterator[None]:
        """Between two steps of a running ``generate``, whatever thread it is in."""
        visitor = object()
        self._visitors.add(visitor)
        try:
            with self._turn:
                yield
        finally:
            self._visitors.discard(visitor)

    def _give_way(self) -> None:
        while self._visitors:  # a lock alone is not fair: the loop would take it again at once
            time.sleep(0.0005)
        with self._turn:
            while self._paused and not self._closed:
                self._turn.wait()

    def _step(self, finished: dict[int, Trajectory]) -> None:
        """One forward: chunks of prompts, or one token of every running sequence."""
        if self._closed or self._weights is None:
            raise RuntimeError("engine is shut down")
        self._finish_aborted(finished)
        if not self._scheduler.waiting and not self._scheduler.running:
            return
        self._compute(self._scheduler.next(), self._weights)
        for sequence in [s for s in self._scheduler.running if s.finish_reason is not None]:
            finished[sequence.request.sample_id] = self._retire(sequence, sequence.finish_reason)

    def _finish_aborted(self, finished: dict[int, Trajectory]) -> None:
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            if sequence.request.sample_id in self._aborting:
                finished[sequence.request.sample_id] = self._retire(sequence, "abort")
        self._aborting.clear()

    def _compute(self, work: Work, weights: Weights) -> None:
        """Run the forward of ``work`` and sample the next token of every sequence that has all its tokens computed."""
        batch = forward_batch(work.sequences, work.ends, page_size=self._blocks.page_size, device=self._device)
        logits_BV = self._forward.forward(batch, weights, self._pages, self._recorder)
        row = {id(s): i for i, s in enumerate(work.sequences)}
        for sequence, end in zip(work.sequences, work.ends, strict=True):
            sequence.computed = end
        if work.forks:
            self._copy_last_pages(work.forks)
        ready = [(s, s) for s in work.sequences if s.computed == len(s.tokens)] + work.forks
        ready.sort(key=lambda pair: self._scheduler.running.index(pair[0]))
        if ready:
            rows = torch.tensor([row[id(leader)] for _, leader in ready], device=self._device)
            self._advance([s for s, _ in ready], logits_BV[rows], weights)

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

    def _advance(self, sequences: Sequence[RunningSequence], logits_BV: torch.Tensor, weights: Weights) -> None:
        tokens_B, logprobs_B = sample(logits_BV, sampling_batch(sequences, device=self._device))
        for sequence, token, logprob in zip(sequences, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            sequence.append(token, logprob, weights.version)
        self._generated_tokens += len(sequences)

    def _records(self, sequence: RunningSequence) -> tuple[GuidanceSegment | None, RouteSegment | None]:
        """Records of the computed positions: those saved when their tokens were sampled, then what the pages hold."""
        request = sequence.request
        slots = sequence.slots(self._blocks.page_size, 0, sequence.computed)
        slots_N = torch.from_numpy(slots).to(self._device)
        guidance = self._recorder.guidance(
            slots_N,
            sample_id=request.sample_id,
            prompt_length=sequence.prompt_length,
            contract_fingerprint=self.contract_fingerprint,
        )
        routes = self._recorder.routes(slots_N, sample_id=request.sample_id)
        if guidance is not None and sequence.kept_guidance is not None:
            guidance = operations.restore(sequence.kept_guidance, guidance)
        if routes is not None and sequence.kept_routes is not None:
            routes = operations.restore(sequence.kept_routes, routes)
        return guidance, routes

    def _keep_records(self, sequence: RunningSequence) -> None:
        """Save what was recorded before the pages go. Nothing before the first token: the next prefill samples it."""
        if sequence.step and sequence.computed > sequence.kept:
            sequence.kept_guidance, sequence.kept_routes = self._records(sequence)
            sequence.kept = sequence.computed

    def _retire(self, sequence: RunningSequence, reason: FinishReason | None) -> Trajectory:
        """Gather what was recorded, free the pages (they stay findable as a prefix), and drop the sequence.

        Positions of an aborted sample that were not computed get rows marked invalid.
        """
        assert reason is not None
        n = len(sequence.tokens) - 1
        sequence.computed = min(sequence.computed, n)
        guidance, routes = self._records(sequence)
        self._scheduler.remove(sequence)
        if guidance is not None:
            digest = tokens_digest(sequence.tokens[:n])
            guidance = replace(operations.pad_invalid(guidance, n), tokens_digest=digest)
        return Trajectory(
            sample_id=sequence.request.sample_id,
            tokens=np.asarray(sequence.tokens, dtype=np.int64),
            prompt_length=sequence.prompt_length,
            logprobs=np.asarray(sequence.logprobs, dtype=np.float32),
            token_versions=np.asarray(sequence.versions, dtype=np.int32),
            finish_reason=reason,
            guidance=guidance,
            routes=None if routes is None else operations.pad_invalid(routes, n),
        )
