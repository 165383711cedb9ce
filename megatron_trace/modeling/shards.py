"""From this rank's parameters to whole ones and back: tensor, expert, expert-tensor and pipeline parallelism undone by name.

A *global* name has the decoder layer's global index (0-based) and the expert's global id where Megatron-core has local ones.
Splits are Megatron-core's: column-parallel weights along dim 0, row-parallel ones along dim 1, gated fc1 along each half of
dim 0, vocabulary along dim 0 with rows of padding behind the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_trace.config.model import ModelConfig
from megatron_trace.modeling.parallel import local_expert_ids

SPLIT_DIM = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc2.weight": 1,
}
"""Parameters that tensor parallelism cuts, by the end of their name; all others are replicated."""
GATED = "linear_fc1.weight"
VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_LAYER = re.compile(r"(.*decoder\.layers\.)(\d+)(\..*)")


class ShardError(RuntimeError):
    """Shards of a parameter that do not make one whole."""


def split_dim(name: str) -> int | None:
    """The dimension along which tensor parallelism cuts parameter ``name``, None where it is replicated."""
    return next((dim for suffix, dim in SPLIT_DIM.items() if name.endswith(suffix)), None)


def is_expert(name: str) -> bool:
    return _EXPERT.search(name) is not None


def global_named_parameters(chunks: Iterable[torch.nn.Module], model: ModelConfig) -> dict[str, torch.nn.Parameter]:
    """Every parameter of this rank's model chunks by global name."""
    out: dict[str, torch.nn.Parameter] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            found = _LAYER.fullmatch(name)
            if found:
                layer = chunk.get_submodule(f"{found[1]}{found[2]}")
                assert isinstance(layer, TransformerLayer)
                name = f"{found[1]}{layer.layer_number - 1}{found[3]}"
            name = renumbered(name, local_expert_ids(model).start)
            if name in out:
                raise ShardError(f"{name} is in two model chunks of this rank")
            out[name] = parameter
    return out


def renumbered(name: str, first_expert: int) -> str:
    """``name`` with its local expert index counted from ``first_expert``."""
    return _EXPERT.sub(lambda found: f".local_experts.{int(found[1]) + first_expert}.", name)


def own_shard(name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of the parameter with global ``name``; vocabulary is padded to a multiple of the parallel size."""
    group = _tensor_group(name)
    size, rank, dim = group.size(), group.rank(), split_dim(name)
    if size == 1 or dim is None:
        return whole
    if name.endswith(VOCABULARY) and whole.shape[0] % size:
        whole = torch.cat((whole, whole.new_zeros(-whole.shape[0] % size, *whole.shape[1:])))
    if whole.shape[dim] % (2 * size if name.endswith(GATED) else size):
        raise ShardError(f"{name} {list(whole.shape)} cannot be cut into {size} parts along dim {dim}")
    if name.endswith(GATED):
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim=dim)[rank]


def joined(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole parameter from the parts of all tensor-parallel ranks, in rank order; replicated ones are the first part."""
    dim = split_dim(name)
    if len(parts) == 1 or dim is None:
        return parts[0]
    if name.endswith(GATED):
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[i] for i in (0, 1) for half in halves])
    return torch.cat(list(parts), dim=dim)


def whole_state(local: Mapping[str, torch.Tensor], model: ModelConfig) -> dict[str, torch.Tensor]:
    """All parameters (or their gradients) of the model from ``local`` by global name, on every rank. Collective.

    Padding rows of the vocabulary are cut off.
    """
    dense = {name: t for name, t in local.items() if not is_expert(name)}
    experts = {name: t for name, t in local.items() if is_expert(name)}
    dense = _joined_all(gather_named(dense, parallel_state.get_tensor_model_parallel_group()))
    experts = _joined_all(gather_named(experts, parallel_state.get_expert_tensor_parallel_group()))
    experts = union(gather_named(experts, parallel_state.get_expert_model_parallel_group()))
    stages = gather_named(dense | experts, parallel_state.get_pipeline_model_parallel_group())
    whole = union(stages, repeated=VOCABULARY)  # tied embeddings are on the first and the last stage
    return {name: t[: model.vocab_size] if name.endswith(VOCABULARY) else t for name, t in whole.items()}


def union(parts: Iterable[Mapping[str, torch.Tensor]], *, repeated: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """One dict of disjoint ones; ShardError for a name that two hold, but for names that end with one of ``repeated``."""
    out: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            if name in out and not name.endswith(repeated or ("\0",)):
                raise ShardError(f"{name} was gathered twice")
            out.setdefault(name, tensor)
    return out


def gather_named(local: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> list[dict[str, torch.Tensor]]:
    """``local`` of every rank of ``group``, in rank order: one all-gather of descriptions, one of bytes. Collective."""
    if group.size() == 1:
        return [dict(local)]
    tensors = {name: t.detach().contiguous() for name, t in local.items()}
    described: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]] * group.size()
    dist.all_gather_object(described, [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()], group=group)
    sizes = [sum(_bytes(dtype, shape) for _, dtype, shape in entries) for entries in described]
    buffer = torch.zeros(max(sizes), dtype=torch.uint8)
    if tensors:
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors.values()])
        buffer[: len(flat)] = flat
    gathered = [torch.empty_like(buffer) for _ in sizes]
    dist.all_gather(gathered, buffer, group=group)
    return [_unpacked(entries, data) for entries, data in zip(described, gathered, strict=True)]


def _unpacked(entries: list[tuple[str, torch.dtype, tuple[int, ...]]], data: torch.Tensor) -> dict[str, torch.Tensor]:
    out, offset = {}, 0
    for name, dtype, shape in entries:
        count = _bytes(dtype, shape)
        out[name] = data[offset : offset + count].clone().view(dtype).view(shape)
        offset += count
    return out


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * torch.Size(shape).numel()


def _tensor_group(name: str) -> dist.ProcessGroup:
    if is_expert(name):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _joined_all(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: joined(name, [part[name] for part in parts]) for name in parts[0]}
