"""One flat buffer per device and step: everything that has to reach the host travels in it, at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from collapse_monitor.measure.host import Array

_Group = tuple[torch.device, torch.Size]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a packed tensor will be found again."""

    group: _Group
    index: int


@dataclass(slots=True)
class Pack:
    """Collects tensors; those of equal shape are stacked, so the number of operations does not grow with the number of tensors."""

    _groups: dict[_Group, list[Tensor]] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> Slot:
        """Take a tensor along; it travels as fp32."""
        group = (tensor.device, tensor.shape)
        members = self._groups.setdefault(group, [])
        members.append(tensor if tensor.dtype == torch.float32 else tensor.to(torch.float32))
        return Slot(group, len(members) - 1)

    def send(self) -> Parcel:
        """Form one buffer per device and start its copy to the host; nothing waits."""
        offsets: dict[_Group, int] = {}
        parts: dict[torch.device, list[Tensor]] = {}
        lengths: dict[torch.device, int] = {}
        for group, members in self._groups.items():
            device, shape = group
            offsets[group] = lengths.get(device, 0)
            lengths[device] = offsets[group] + len(members) * shape.numel()
            parts.setdefault(device, []).append((torch.stack(members) if len(members) > 1 else members[0]).reshape(-1))
        crates = {device: _Crate.of(torch.cat(flat)) for device, flat in parts.items()}
        self._groups = {}
        return Parcel(offsets, crates)


@dataclass(slots=True)
class _Crate:
    """The buffer of one device on its way: `landed` is host memory, complete once `event` has happened."""

    departed: Tensor | None
    landed: Tensor | None
    event: torch.cuda.Event | None
    bytes: int
    opened: Array | None = None

    @classmethod
    def of(cls, flat: Float[Tensor, " value"]) -> _Crate:
        size = flat.numel() * flat.element_size()
        if flat.device.type == "cpu":
            return cls(None, flat, None, size)
        if flat.device.type != "cuda":  # no pinned memory, no events: fetched when asked for
            return cls(flat, None, None, size)
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        host.copy_(flat, non_blocking=True)
        with torch.cuda.device(flat.device):
            event = torch.cuda.Event()
            event.record()
        return cls(flat, host, event, size)

    def ready(self) -> bool:
        return self.event is None or self.event.query()

    def open(self) -> Array:
        if self.opened is None:
            self.opened = self._unpacked()
        return self.opened

    def _unpacked(self) -> Array:
        if self.event is not None:
            self.event.synchronize()
        if self.landed is None:
            assert self.departed is not None
            self.landed = self.departed.cpu()
        self.departed = self.event = None
        return self.landed.numpy()


@dataclass(slots=True)
class Parcel:
    """What was sent, to be read on the host."""

    _offsets: dict[_Group, int]
    _crates: dict[torch.device, _Crate]

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        return sum(crate.bytes for crate in self._crates.values())

    @property
    def copies(self) -> int:
        """One per device that took part."""
        return len(self._crates)

    def ready(self) -> bool:
        """Whether reading would not wait for a device."""
        return all(crate.ready() for crate in self._crates.values())

    def read(self, slot: Slot) -> Array:
        """The values of one tensor, fp32; waits for the copy."""
        device, shape = slot.group
        start = self._offsets[slot.group] + slot.index * shape.numel()
        return self._crates[device].open()[start : start + shape.numel()].reshape(tuple(shape))

    def read_all(self, slots: Sequence[Slot]) -> list[Array]:
        """The values of several tensors."""
        return [self.read(slot) for slot in slots]
