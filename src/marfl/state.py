"""Model ↔ flat vector: what travels, in which order, and hashes that are equal if and only if the bits are.

What travels is what training changes: the trainable parameters and the floating-point buffers of a checkpoint
(BatchNorm's running statistics), cast to fp32, parameters first, each in the order the module registered them.
What deliberately does not travel:

- frozen parameters (`requires_grad=False`): every peer loaded the same ones, so sending them would only cost bytes
  (peers compare hashes of them when they join: see `frozen_layers`);
- integer and boolean buffers (BatchNorm's `num_batches_tracked`): a mean of counters means nothing, they stay local;
- buffers that a checkpoint leaves out (`persistent=False`): caches and masks that each peer computes for itself;
- personal layers (`keep_at_home`): every peer trains its own.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import zip_longest
from mmap import mmap
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from marfl.errors import InputError

_AT_HOME = "_marfl_at_home"  # the attribute of a module that names its personal layers
LONG = 8 * 2**20  # bytes; the pages of a shorter vector cost more time than they are worth

class LayerSlot(NamedTuple):
    """One layer's place in the flat vector."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as in the module; in the vector everything is fp32
    offset: int

    @property
    def length(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Layout:
    """Names, shapes, dtypes and offsets of what travels. Peers average only with peers of the same layout."""

    slots: tuple[LayerSlot, ...]

    @property
    def length(self) -> int:
        """Number of fp32 values in the flat vector."""
        return self.slots[-1].offset + self.slots[-1].length if self.slots else 0

    @cached_property
    def hash(self) -> bytes:
        """sha256 over every slot, the fields length-prefixed so that no two layouts read alike."""
        fields = [str(field) for slot in self.slots for field in slot]
        return hashlib.sha256("".join(f"{len(field.encode())}:{field}" for field in fields).encode()).digest()

    def difference(self, other: Layout) -> str | None:
        """One line naming the first layer that differs, or None when the layouts are the same."""
        for mine, theirs in zip_longest(self.slots, other.slots):
            if mine != theirs:
                return f"layouts differ: {mine or 'nothing'} here, {theirs or 'nothing'} there"
        return None


def travelling(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that travel, by name, in the order of the flat vector; tied parameters once."""
    saved = module.state_dict(keep_vars=True).keys()
    parameters = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    buffers = {
        name: tensor
        for name, tensor in module.named_buffers()
        if name in saved and (tensor.is_floating_point() or tensor.is_complex())
    }
    at_home = personal_names(module)
    found = {name: tensor for name, tensor in (parameters | buffers).items() if name not in at_home}
    for name, tensor in found.items():
        _check_supported(name, tensor)
    return found


def keep_at_home(module: nn.Module, patterns: Iterable[str]) -> None:
    """From now on the layers whose names match (`head.*`) are the peer's own: nothing of them travels.

    `InputError` for a pattern that matches nothing, and for patterns that leave nothing trainable to travel.
    """
    object.__setattr__(module, _AT_HOME, frozenset())
    layers, found = travelling(module), set[str]()
    for pattern in patterns:
        names = {name for name in layers if fnmatchcase(name, pattern)}
        if not names:
            shown = ", ".join(list(layers)[:8]) + (", …" if len(layers) > 8 else "")
            raise InputError(f"local = {pattern!r}: matches no layer; there are {shown}")
        found |= names
    if not any(isinstance(tensor, nn.Parameter) and name not in found for name, tensor in layers.items()):
        raise InputError(f"local = {', '.join(patterns)}: matches everything that is trained: nothing would travel")
    object.__setattr__(module, _AT_HOME, frozenset(found))


def personal_names(module: nn.Module) -> frozenset[str]:
    """The layers that `keep_at_home` named."""
    names: frozenset[str] = getattr(module, _AT_HOME, frozenset())
    return names


def trainable_values(module: nn.Module) -> int:
    """How many values of the flat vector are trained: those before the buffers."""
    return sum(tensor.numel() for tensor in travelling(module).values() if isinstance(tensor, nn.Parameter))


def _check_supported(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise InputError(f"layer {name} has no shape yet: run one batch through the model first")
    if tensor.is_complex():
        raise InputError(f"layer {name} is {tensor.dtype}: only real floating-point layers can be averaged")
    if tensor.layout != torch.strided:
        raise InputError(f"layer {name} is {tensor.layout}: only dense layers can be averaged")


def check_trainable(module: nn.Module) -> None:
    """`InputError` for a model in which nothing is trained: peers would average nothing, for ever."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError("model: nothing in it is trainable (requires_grad is False everywhere): nothing would travel")


class FrozenLayer(NamedTuple):
    """A parameter that is not trained, known by its hash."""

    name: str
    dtype: str
    digest: bytes  # of every bit

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}, {self.digest.hex()[:8]})"


@torch.no_grad()
def frozen_layers(module: nn.Module) -> tuple[FrozenLayer, ...]:
    """The parameters that do not travel because all peers have the same: these must be the same, to the bit."""
    found = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad and not is_lazy(parameter):
            raw = parameter.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
            digest = blake3(f"{list(parameter.shape)}".encode()).update(raw.data).digest(length=16)
            found.append(FrozenLayer(name, str(parameter.dtype).removeprefix("torch."), digest))
    return tuple(found)


def frozen_hash(layers: Iterable[FrozenLayer]) -> str:
    """One hash for all of them, in hex; empty where nothing is frozen."""
    digest, some = hashlib.sha256(), False
    for layer in layers:
        some = True
        digest.update(f"{len(layer.name.encode())}:{layer.name}:{layer.dtype}:".encode() + layer.digest)
    return digest.hexdigest() if some else ""


def layout_of(module: nn.Module) -> Layout:
    """The layout of a module's flat vector."""
    slots, offset = [], 0
    for name, tensor in travelling(module).items():
        slots.append(LayerSlot(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset))
        offset += tensor.numel()
    return Layout(tuple(slots))


@torch.no_grad()
def flatten(module: nn.Module) -> Tensor:
    """What travels as one fresh 1-D fp32 vector on the CPU. Exact for fp16 and bf16; fp64 is rounded to fp32."""
    tensors = travelling(module).values()
    vector = new_vector(sum(tensor.numel() for tensor in tensors))
    for tensor, part in _parts(tensors, vector):
        part.copy_(tensor)
    return vector


def new_vector(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Room for a flat vector, not initialised. A long one goes back to the system as soon as it is freed.

    malloc keeps what was freed between other things, and a peer makes and frees whole models in every iteration: it
    would come to twice the memory that it ever holds at once (benchmarks/memory.py).
    """
    size = length * dtype.itemsize
    return torch.frombuffer(mmap(-1, size), dtype=dtype) if size >= LONG else torch.empty(length, dtype=dtype)


@torch.no_grad()
def unflatten(vector: Tensor, module: nn.Module) -> None:
    """Copy a flat vector into the module, in place, cast to each layer's own dtype; the inverse of `flatten`."""
    tensors = travelling(module).values()
    length = sum(tensor.numel() for tensor in tensors)
    if vector.dtype != torch.float32 or vector.shape != (length,):
        found = f"{vector.dtype} of shape {list(vector.shape)}"
        raise InputError(f"the flat vector is {found}, but this model needs torch.float32 of shape [{length}]")
    for tensor, part in _parts(tensors, vector):
        tensor.copy_(part)


def _parts(tensors: Iterable[Tensor], vector: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor with its slice of the vector, as a view of the tensor's shape."""
    offset = 0
    for tensor in tensors:
        yield tensor, vector[offset : offset + tensor.numel()].view(tensor.shape)
        offset += tensor.numel()


def vector_hash(*vectors: Tensor) -> bytes:
    """sha256 over dtype, length and raw bytes of each vector: equal if and only if the bits are (−0.0 is not 0.0)."""
    digest = hashlib.sha256()
    for vector in vectors:
        digest.update(f"{vector.dtype}:{vector.numel()}:".encode())
        raw = vector.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
        digest.update(raw.numpy().data)
    return digest.digest()


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The agreed state after an iteration: immutable by convention, and compared by `hash`."""

    version: int  # the iteration that produced it
    vectors: Mapping[str, Tensor]  # such as "theta" and "momentum"
    scalars: Mapping[str, float]  # such as "clip"

    @cached_property
    def hash(self) -> bytes:
        """sha256 over the version, every name and every bit (32 bytes); the order of the names does not matter."""
        digest = hashlib.sha256(f"{self.version}:{len(self.vectors)}:{len(self.scalars)}:".encode())
        for name, vector in sorted(self.vectors.items()):
            digest.update(f"{len(name.encode())}:{name}".encode() + vector_hash(vector))
        for name, scalar in sorted(self.scalars.items()):
            digest.update(f"{len(name.encode())}:{name}".encode() + struct.pack("<d", scalar))
        return digest.digest()


def all_finite(x: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    # One pass in the common case: a NaN or Inf always makes the sum non-finite; only an overflow needs the exact look.
    return math.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())
