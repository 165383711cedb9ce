"""CPU stand-ins for the ``torch.cuda`` entry points that Megatron-core calls without asking.

Megatron-core has no CPU mode. Its local (non Transformer Engine) modules compute with plain torch, so all that stands in the
way are device queries, streams, ``device="cuda"`` literals and a few type names. ``install`` replaces exactly those, refuses on
a machine that has CUDA, and ``MegatronOnCpu`` rewrites the literals and routes BF16 matrix products through ``compute``.
Checked with megatron-core 0.16.1; call sites: ``parallel_state``, ``tensor_parallel/random.py``, ``optimizer/clip_grads.py``,
``optimizer/distrib_optimizer.py``, ``transformer/moe/token_dispatcher.py``, ``pipeline_parallel/schedules.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_trace.platform.compute import MATRIX_PRODUCTS, fp32_accumulate

_installed = False


class _NoStream:
    """A stream on a device without streams: everything is already in order."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _NoEvent()

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _NoEvent:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


def install() -> None:
    """Put the stand-ins in place; idempotent. Must run before ``megatron.core`` is imported.

    Raises RuntimeError when CUDA is available: the stand-ins would hide a real device.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("CPU stand-ins asked for on a machine with CUDA: use the real device")
    cuda, cpu = torch.cuda, torch.device("cpu")
    stream = _NoStream()
    replacements: dict[str, Any] = {
        "current_device": lambda: cpu,
        "set_device": lambda _device: None,
        "device": lambda _device: contextlib.nullcontext(),
        "synchronize": lambda *_a, **_k: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "initial_seed": torch.initial_seed,
        "current_stream": lambda *_a, **_k: stream,
        "default_stream": lambda *_a, **_k: stream,
        "stream": lambda _stream: contextlib.nullcontext(),
        "Stream": _NoStream,
        "Event": _NoEvent,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *_a, **_k: (0, 0),
        "memory_allocated": lambda *_a, **_k: 0,
        "max_memory_allocated": lambda *_a, **_k: 0,
        "memory_reserved": lambda *_a, **_k: 0,
        "max_memory_reserved": lambda *_a, **_k: 0,
        "reset_peak_memory_stats": lambda *_a, **_k: None,
    }
    for name, value in replacements.items():
        setattr(cuda, name, value)
    # Used in isinstance() checks by megatron.core.transformer.module, so they must be types.
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "ByteTensor", "IntTensor"):
        setattr(cuda, name, getattr(torch, name))
    cuda.nvtx.range_push = lambda *_a, **_k: None
    cuda.nvtx.range_pop = lambda *_a, **_k: None
    torch.Tensor.cuda = lambda self, *_a, **_k: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_a, **_k: self  # type: ignore[method-assign]
    _answer_type_like_cuda()
    _installed = True


def _answer_type_like_cuda() -> None:
    """Megatron's optimizers compare ``tensor.type()`` with ``"torch.cuda.FloatTensor"``."""
    real = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return real(self, *args, **kwargs)
        name = real(self)
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # type: ignore[method-assign]


def patch_megatron() -> None:
    """The places inside megatron-core that no public name reaches. Call after importing ``megatron.core``."""
    import megatron.core.tensor_parallel.layers as mcore_layers
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as mcore_random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    # The stock setter queues a lazy CUDA call, which on a CPU is a silent no-op.
    mcore_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # 0.16.1 tests a name that is only bound when Transformer Engine imports.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # gloo takes split sizes as Python or numpy integers only; upstream converts only tensors that are on CUDA.
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes_on_cpu
    # gloo gathers and scatters equal parts only; the parts of expert-tensor-parallel ranks differ.
    mappings._gather_along_first_dim = _uneven_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _uneven_reduce_scatter(mappings._reduce_scatter_along_first_dim)
    # Autograd runs backward functions without the caller's modes: dgrad and wgrad of every linear layer would run natively.
    _route_backward(mcore_layers.LinearWithGradAccumulationAndAsyncCommunication)


def _route_backward(function: type[torch.autograd.Function]) -> None:
    """Make ``function.backward`` run inside ``MegatronOnCpu`` as its forward does."""
    original = function.backward

    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with MegatronOnCpu():
            return original(ctx, *grads)

    function.backward = staticmethod(backward)  # type: ignore[method-assign]


def _uneven_gather(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``original`` for equal parts; others are padded to the largest, gathered, and cut."""

    def gather(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        sizes = None if output_split_sizes is None else [int(n) for n in output_split_sizes]
        if sizes is None or len(set(sizes)) == 1 or group.size() == 1:
            return original(input_, group, sizes, *args, **kwargs)
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    return gather


def _uneven_reduce_scatter(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``original`` for equal parts; others are summed whole on every rank, which keeps its own."""

    def reduce_scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        sizes = None if input_split_sizes is None else [int(n) for n in input_split_sizes]
        if sizes is None or len(set(sizes)) == 1 or group.size() == 1:
            return original(input_, group, sizes, *args, **kwargs)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].contiguous()

    return reduce_scatter


def _split_sizes_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class MegatronOnCpu(TorchFunctionMode):
    """Active around every call into Megatron-core: ``device="cuda"`` means CPU, BF16 matrix products accumulate in FP32."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func in MATRIX_PRODUCTS:
            result = fp32_accumulate(func, args, kwargs)
            if result is not None:
                return result
        elif _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        elif func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)
