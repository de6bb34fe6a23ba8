"""Turn the recording of a call into a function that launches the same at other addresses."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from .. import compat_triton
from . import direct
from .launches import Described, Launch, Place, Recording
from .tiles import ceil_div

# Where a buffer may begin, as in what torch allocates.
BUFFER_BYTES: Final = 512

Addresses = tuple[int, ...]


@dataclass(frozen=True)
class _Device:
    """Hold what tells and makes things on the device of a call."""

    device: torch.device
    current: Callable[[], int]
    stream: Callable[[int], int]
    make: Callable[..., Tensor]


@dataclass(frozen=True)
class _Memory:
    """Say how far into which memory each buffer lies, that of garbage or that of zeros."""

    offsets: dict[int, int]
    size: int
    zeroed_offsets: dict[int, int]
    zeroed_size: int

    def offset_of(self, place: Place) -> int:
        """Return where a place in a buffer is in the memory of its kind."""
        known = self.zeroed_offsets if place.index in self.zeroed_offsets else self.offsets
        return known[place.index] + place.offset


class _Base:
    """Stand for the tensor of a descriptor, of which launchers ask the address alone."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def repeat_of(recording: Recording, result: Tensor) -> Callable[[Addresses], Tensor] | None:
    """Return a function of the addresses of a call's tensors that repeats it; None if none can.

    It launches on the current stream of the tensors' device and allocates the result and, for as
    long as it runs, one piece of memory for all other buffers.
    """
    device, output = _device_of(result.device), _output_of(recording, result)
    if recording.refusal or device is None or output is None:
        return None
    launchers = []
    for launch in recording.launches:
        launcher = compat_triton.launcher_of(launch.kernel, launch.compiled)
        if launcher is None:
            return None
        launchers.append(launcher)
    if any(p.index == output and p.offset for each in recording.launches for p in places_of(each)):
        return None  # of the result only its beginning is passed on
    memory = arrange(recording, output)
    slots = _slots(recording, output, memory)
    described = [
        each for launch in recording.launches for each in launch.arguments if _is_described(each)
    ]
    if not slots.zeroed:
        known = (recording.launches, len(recording.tensors), output)
        plan = direct.plan_of(*known, memory.offset_of)
        launch_all = None if plan is None else direct.launch_all()
        if plan is not None and launch_all is not None:
            repeat = _repeat(device, result, memory.size, functools.partial(launch_all, plan))
            # They must outlive their launches.
            repeat.kernels = [each.compiled for each in recording.launches]  # type: ignore[attr-defined]
            return repeat
    again, constants = _again(recording, launchers, slots, described)
    rare = _rare(memory, slots, described, device.device)
    offsets = [memory.offset_of(place) for place in slots.buffers]
    one_by_one = _one_by_one(offsets, again, constants, rare)
    repeat = _repeat(device, result, memory.size, one_by_one)
    repeat.held = [launcher.kernel for launcher in launchers]  # type: ignore[attr-defined]
    return repeat


def _is_described(value: Any) -> bool:
    return isinstance(value, Described)


def _device_of(device: torch.device) -> _Device | None:
    make = compat_triton.buffer_maker(device.type)
    if make is None:
        return None
    current = compat_triton.current_device(device.type)
    return _Device(device, current, compat_triton.current_stream(device.type), make)


def _output_of(recording: Recording, result: Tensor) -> int | None:
    """Return which buffer the result is; None if it is none, or not a whole one."""
    place = recording.place_of(result)
    if place is None or place.kind != "buffer" or place.index in recording.zeroed:
        return None
    is_whole = place.offset == 0 and result.nbytes == recording.buffers[place.index].nbytes
    return place.index if is_whole and result.is_contiguous() else None


def places_of(launch: Launch) -> list[Place]:
    """Return where the tensors and descriptors of a launch point."""
    bases = (each.base if isinstance(each, Described) else each for each in launch.arguments)
    return [base for base in bases if isinstance(base, Place)]


def arrange(recording: Recording, output: int) -> _Memory:
    """Lay out all buffers but the output; those of launches apart may share memory.

    A kernel that starts early writes nothing before all earlier ones have ended, see
    dependent_launch.py, so that it may write where they have read: nothing but the progress of
    tiles, which lives from the routing on.
    """
    lives: dict[int, tuple[int, int]] = {}
    for turn, launch in enumerate(recording.launches):
        for place in places_of(launch):
            if place.kind == "buffer" and place.index != output:
                first, _ = lives.get(place.index, (turn, turn))
                lives[place.index] = (first, turn)
    sizes = {
        index: ceil_div(recording.buffers[index].nbytes, BUFFER_BYTES) * BUFFER_BYTES
        for index in lives
    }
    zeroed_offsets, zeroed_size = {}, 0
    offsets: dict[int, int] = {}
    for index in sorted(lives, key=lambda index: -sizes[index]):
        if index in recording.zeroed:
            zeroed_offsets[index], zeroed_size = zeroed_size, zeroed_size + sizes[index]
            continue
        first, last = lives[index]
        taken = sorted(
            (offset, offset + sizes[other])
            for other, offset in offsets.items()
            if lives[other][0] <= last and first <= lives[other][1]
        )
        begin = 0
        for left, right in taken:
            if begin + sizes[index] <= left:
                break
            begin = max(begin, right)
        offsets[index] = begin
    size = max((offset + sizes[index] for index, offset in offsets.items()), default=0)
    return _Memory(offsets, size, zeroed_offsets, zeroed_size)


@dataclass(frozen=True)
class _Slots:
    """Say where in the pool of a call a place is: the tuple from which launches pick.

    The addresses of the call's tensors, of the result, of places in buffers, in zeroed ones,
    descriptors, constants.
    """

    of: dict[Place, int]
    buffers: list[Place]
    zeroed: list[Place]


def _slots(recording: Recording, output: int, memory: _Memory) -> _Slots:
    first = [Place("argument", index) for index in range(len(recording.tensors))]
    first.append(Place("buffer", output))
    places = dict.fromkeys(place for launch in recording.launches for place in places_of(launch))
    buffers = [place for place in places if place.kind == "buffer" and place not in first]
    plain = [place for place in buffers if place.index not in memory.zeroed_offsets]
    zeroed = [place for place in buffers if place.index in memory.zeroed_offsets]
    return _Slots({p: i for i, p in enumerate((*first, *plain, *zeroed))}, plain, zeroed)


# A launcher, what comes before the stream, what between that and the first argument that changes,
# what picks those up to the last that does, what comes behind them.
Again = tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], Any, tuple[Any, ...]]


def _again(
    recording: Recording,
    launchers: list[compat_triton.Launcher],
    slots: _Slots,
    described: list[Described],
) -> tuple[list[Again], tuple[Any, ...]]:
    """Return how to launch each again, and the constants to pick from.

    Picking one takes as long as copying ten, so that ends are copied as they are.
    """
    pool: list[Any] = [*slots.of, *described]
    launches: list[Again] = []
    for launch, launcher in zip(recording.launches, launchers, strict=True):
        values = launch.arguments
        moving = [i for i, value in enumerate(values) if isinstance(value, Place | Described)]
        # Of one alone a pick would be no tuple.
        first, last = min(moving[0], len(values) - 2), max(moving[-1], moving[0] + 1)
        picked = []
        for value in values[first : last + 1]:
            if isinstance(value, Place):
                picked.append(slots.of[value])
                continue
            if not any(each is value for each in pool):
                pool.append(value)
            picked.append(next(i for i, each in enumerate(pool) if each is value))
        before = (*launcher.before, *values[:first])
        pick = operator.itemgetter(*picked)
        front = (launch.programs, 1, 1)
        launches.append((launcher.function, front, before, pick, values[last + 1 :]))
    return launches, tuple(pool[len(slots.of) + len(described) :])


Rare = Callable[[tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]


def _rare(
    memory: _Memory, slots: _Slots, described: list[Described], device: torch.device
) -> Rare | None:
    """Return what makes zeros and descriptors, if there are any: what to keep, what to add."""
    if not slots.zeroed and not described:
        return None
    offsets = [memory.offset_of(place) for place in slots.zeroed]
    templates = []
    for each in described:
        template = copy.copy(each.descriptor)
        template.base = None  # or this would keep the weights
        templates.append((slots.of[each.base], template))

    def rare(pool: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        zeros = None
        if offsets:
            zeros = torch.zeros(memory.zeroed_size, dtype=torch.uint8, device=device)
            base = zeros.data_ptr()
            pool += tuple([base + offset for offset in offsets])
        made = []
        for slot, template in templates:
            descriptor = copy.copy(template)
            descriptor.base = _Base(pool[slot])
            made.append(descriptor)
        return zeros, (*pool, *made)

    return rare


# Launches with the addresses of a call's tensors, of its result and of scratch memory, on a
# device's stream.
Launching = Callable[[Addresses, int, int, int, int], None]


def _one_by_one(
    offsets: list[int], launches: list[Again], constants: tuple[Any, ...], rare: Rare | None
) -> Launching:
    """Return what calls Triton's launchers."""

    def launch_all(addresses: Addresses, output: int, base: int, now: int, device: int) -> None:
        places = [base + offset for offset in offsets]
        pool: tuple[Any, ...] = (*addresses, output, *places)
        kept = None
        if rare is not None:
            kept, pool = rare(pool)
        pool += constants
        for launch, front, before, pick, behind in launches:
            launch(*front, now, *before, *pick(pool), *behind)
        del kept

    return launch_all


def _repeat(
    device: _Device, result: Tensor, scratch_size: int, launch_all: Launching
) -> Callable[[Addresses], Tensor]:
    index = device.device.index or 0
    current, stream, make = device.current, device.stream, device.make
    sizes, strides, dtype, byte = tuple(result.shape), result.stride(), result.dtype, torch.uint8
    scratch_sizes, scratch_strides = (scratch_size,), (1,)

    def repeat(addresses: Addresses) -> Tensor:
        if current() != index:
            with torch.cuda.device(index):
                return repeat(addresses)
        output = make(sizes, strides, dtype)
        scratch = make(scratch_sizes, scratch_strides, byte)
        launch_all(addresses, output.data_ptr(), scratch.data_ptr(), stream(index), index)
        return output

    return repeat
