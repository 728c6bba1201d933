"""The copy engine: bulk copies and tensor loads and stores, in pieces that land in any order."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from emulator import memory, tensormap
from emulator.compile import Node, active_lanes, address_getter, getter, node, predicated
from emulator.errors import (
    OutOfBoundsError,
    ProtocolError,
    UninitializedError,
    UnknownOpcodeError,
)
from emulator.ptx import Imm, Instr
from emulator.warp import Group, Warp


class AsyncOp:
    """Something in flight. `step` performs a part of it; `ready` says whether it may start."""

    name = ""
    done = False
    priority = 0.0

    def ready(self) -> bool:
        return True

    def step(self) -> None:
        raise NotImplementedError

    def touches(self, cta: Any) -> bool:
        """Whether it still reads or writes the CTA's shared memory."""
        return False


def swizzled(offset: np.ndarray, span: int) -> np.ndarray:
    """Shared addresses of 16-byte chunks: bits 4.. are XORed with bits 7.., absolute."""
    if not span:
        return offset
    return offset ^ (offset >> 3 & (span - 16))


class _Copy(AsyncOp):
    """A load: the source's bytes to one place in each destination CTA."""

    def __init__(self, w: Warp, text: str, targets: list, size: int, span: int, source: Any):
        self.name = f"{text} of {w.name}"
        self.w = w
        self.size = size
        self.span = span
        self.source = source
        self.data: np.ndarray | None = None
        self.clocks = w.clocks.copy()
        rng = w.rng
        cluster = w.cluster
        self.tasks = []
        for cta, offset, barrier in targets:
            slot = barrier.slot
            cluster.copy_clocks[slot] += 1
            clock = cluster.copy_clocks[slot]
            pieces = rng.choice(cluster.machine.options.pieces)
            step = max(128, -(-size // pieces) // 128 * 128)
            for low in range(0, size, step):
                self.tasks.append((cta, offset, barrier, clock, low, min(size, low + step)))
        rng.shuffle(self.tasks)

    def touches(self, cta: Any) -> bool:
        return any(task[0] is cta for task in self.tasks)

    def step(self) -> None:
        if self.data is None:
            self.data = self.source()
        cta, offset, barrier, clock, low, high = self.tasks.pop()
        cta.check_alive(self.name)
        cluster = self.w.cluster
        slot = barrier.slot
        words = slice((offset + low) // 4, (offset + high) // 4)
        cluster.detector.write(cta.memory, words, self.clocks, slot, clock, "async", self.name)
        chunks = np.arange((offset + low) // 16, (offset + high) // 16)
        at = swizzled(chunks * 16, self.span) // 16
        target = cta.memory.data.reshape(-1, 16)
        target[at] = self.data[low:high].reshape(-1, 16)
        barrier.copied(high - low, slot, clock)
        self.done = not self.tasks
        if cluster.trace:
            cluster.trace(f"{self.name}: bytes {low}..{high} land at {cta.name} {offset:#x}")


class _Store(AsyncOp):
    """Shared memory to global memory; first reads, then writes."""

    def __init__(
        self, w: Warp, text: str, offset: int, size: int, span: int, sink: Any, group: Any
    ):
        self.name = f"{text} of {w.name}"
        self.w = w
        self.offset, self.size, self.span = offset, size, span
        self.sink = sink
        self.group = group
        self.clocks = w.clocks.copy()
        self.data: np.ndarray | None = None

    def touches(self, cta: Any) -> bool:
        if not self.w.cluster.machine.options.strict_exit:
            return False
        return self.data is None and cta is self.w.cta

    def step(self) -> None:
        w = self.w
        if self.data is None:
            words = slice(self.offset // 4, (self.offset + self.size) // 4)
            w.cluster.detector.read(
                w.memory, words, self.clocks, self.group.slot, self.group.clock, "async", self.name
            )
            chunks = np.arange(self.offset // 16, (self.offset + self.size) // 16)
            at = swizzled(chunks * 16, self.span) // 16
            self.data = w.memory.data.reshape(-1, 16)[at].reshape(-1)
            self.group.unread -= 1
        else:
            self.sink(self.data)
            self.group.unwritten -= 1
            self.done = True
        w.cluster.changed()


class _BulkGroup:
    def __init__(self, slot: int, clock: int):
        self.slot, self.clock = slot, clock
        self.stores = 0
        self.unread = 0
        self.unwritten = 0


class BulkState:
    """A thread's bulk groups; the last one is still open."""

    def __init__(self, w: Warp):
        self.slot = w.cluster.slots.add(f"bulk stores of {w.name}")
        self.clock = 1
        self.groups = [_BulkGroup(self.slot, 1)]
        self.waited = 0  # clock up to which the sources are known to be read

    def commit(self) -> None:
        self.clock += 1
        self.groups.append(_BulkGroup(self.slot, self.clock))

    def pending(self, keep: int) -> list[_BulkGroup]:
        closed = self.groups[:-1]
        return closed[: len(closed) - keep] if keep else closed


def _bulk_state(w: Warp, lane: int) -> BulkState:
    if w.bulk is None:
        w.bulk = {}
    if lane not in w.bulk:
        w.bulk[lane] = BulkState(w)
    return w.bulk[lane]


@functools.lru_cache(maxsize=4096)
def _decoded(raw: bytes) -> tensormap.TensorMap:
    return tensormap.decode(raw)


def load_map(w: Warp, address: int) -> tensormap.TensorMap:
    machine = w.cluster.machine
    if address >= memory.SHARED_WINDOW:
        raise UnknownOpcodeError("tensor maps in shared memory are not modelled")
    if address >= memory.PARAM_WINDOW:
        offset = address - memory.PARAM_WINDOW - memory.PARAM_BASE
        raw = machine.parameters.data[offset : offset + tensormap.BYTES].tobytes()
    else:
        found = machine.memory.find(address, address + tensormap.BYTES)
        offset = address - found.base
        raw = found.data[offset : offset + tensormap.BYTES].tobytes()
    if offset % 64:
        raise OutOfBoundsError(f"tensor map at {address:#x} is not 64-byte aligned")
    return _decoded(raw)


def _window(w: Warp, tensor: tensormap.TensorMap, coords: list[int]):
    """The tensor's bytes, and the part of the box inside it: (view, in slices, out slices)."""
    if tensor.nibbles:
        if coords[0] % 2:
            raise ProtocolError(f"coordinate {coords[0]} inside a byte")
        coords = [coords[0] // 2, *coords[1:]]
    if len(coords) != len(tensor.dims):
        raise ProtocolError(f"{len(coords)} coordinates for a tensor of rank {len(tensor.dims)}")
    if tensor.swizzle and coords[0] * tensor.element_bytes % 16:
        # Seen with bytes and a swizzle of 128.
        raise ProtocolError(
            f"a box from coordinate {coords[0]} begins inside 16 bytes: an illegal instruction on "
            "an H200"
        )
    extent = tensor.dims[0] * tensor.element_bytes
    for dim, stride in zip(tensor.dims[1:], tensor.strides, strict=True):
        extent += (dim - 1) * stride
    found = w.cluster.machine.memory.find(tensor.address, tensor.address + extent)
    inside, outside = [], []
    for i, (c, dim, side) in enumerate(zip(coords, tensor.dims, tensor.box, strict=True)):
        unit = tensor.element_bytes if i == 0 else 1
        low, high = max(0, c), max(min(dim, c + side), max(0, c))
        inside.append(slice(low * unit, high * unit))
        outside.append(slice((low - c) * unit, (high - c) * unit))
    shape = (*tensor.dims[:0:-1], tensor.dims[0] * tensor.element_bytes)
    strides = (*tensor.strides[::-1], 1)
    start = tensor.address - found.base

    def view(array: np.ndarray) -> np.ndarray:
        scale = array.itemsize
        return as_strided(array[start:], shape, tuple(s * scale for s in strides))

    return found, view, tuple(inside[::-1]), tuple(outside[::-1])


def _box_shape(tensor: tensormap.TensorMap) -> tuple[int, ...]:
    return (*tensor.box[:0:-1], tensor.box[0] * tensor.element_bytes)


def _filled(shape: tuple[int, ...]) -> np.ndarray:
    """What a box holds outside the tensor."""
    return np.zeros(shape, np.uint8)


def _span(tensor: tensormap.TensorMap) -> int:
    inner = tensor.box[0] * tensor.element_bytes
    if tensor.swizzle and inner != tensor.swizzle:
        raise UnknownOpcodeError(f"swizzle of {tensor.swizzle} bytes on rows of {inner}")
    return tensor.swizzle


def _barrier_of(cta: Any, offset: int, w: Warp) -> Any:
    barrier = cta.mbarriers.get(offset)
    if barrier is None:
        raise ProtocolError(f"a copy signals {cta.name} {offset:#x}, where no mbarrier is")
    if not barrier.fenced and w.cluster.machine.options.strict_init:
        raise ProtocolError(f"a copy signals {barrier} before fence.mbarrier_init")
    return barrier


def _targets(w: Warp, dst: int, bar: int, mask: int | None, pair: bool, size: int, align: int):
    """(cta, offset, barrier) of every destination."""
    cluster = w.cluster
    cta, offset = cluster.resolve(w, dst, True, "copy destination")
    bar_cta, bar_offset = cluster.resolve(w, bar, True, "copy's mbarrier")
    if offset % align:
        raise OutOfBoundsError(f"copy to shared offset {offset:#x}: not {align}-byte aligned")
    if mask is None:
        if bar_cta is not cta and not pair:
            raise ProtocolError("a copy signals an mbarrier of another CTA than it writes to")
        ranks = [cta.rank]
    else:
        ranks = [r for r in range(16) if mask >> r & 1]
        if not ranks:
            raise ProtocolError("multicast to no CTA")
    out = []
    for rank in ranks:
        to = cluster.cta(w, rank, True, "copy destination")
        to.memory.check(offset, offset + size, "copy")
        signal = to
        if pair:
            # The mbarrier of the same CTA pair, in the member that its address names.
            signal = cluster.cta(w, (rank & ~1) | (bar_cta.rank & 1), True, "copy's mbarrier")
        elif mask is None:
            signal = bar_cta
        out.append((to, offset, _barrier_of(signal, bar_offset, w)))
    return out


@node("cp")
def _cp(ins: Instr) -> Node:
    if ins.parts[1] == "async" and ins.parts[2] != "bulk":
        from emulator import async_copy  # which uses this module

        return async_copy.copy_or_wait(ins)
    if ins.parts[1:3] != ("async", "bulk"):
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    rest = ins.parts[3:]
    if rest[0] == "commit_group":
        return _commit(ins)
    if rest[0] == "wait_group":
        return _wait_group(ins)
    if rest[0] == "prefetch":
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    if rest[0] == "tensor":
        if "bulk_group" in rest:
            return _tensor_store(ins)
        return _tensor_load(ins)
    if rest[:2] == ("shared::cluster", "global"):
        return _bulk_load(ins)
    if rest[:2] == ("global", "shared::cta"):
        return _bulk_store(ins)
    raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")


_LOAD_PARTS = {
    "tensor", "1d", "2d", "3d", "4d", "5d", "shared::cluster", "shared::cta", "global", "tile",
    "mbarrier::complete_tx::bytes", "multicast::cluster", "cta_group::1", "cta_group::2",
    "L2::cache_hint",
}  # fmt: skip


def _parts(ins: Instr, known: set[str]) -> None:
    for part in ins.parts[3:]:
        if part not in known:
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")


def _tensor_load(ins: Instr) -> Node:
    _parts(ins, _LOAD_PARTS)
    dst_of = address_getter(ins.ops[0])
    map_of = address_getter(type(ins.ops[1])(ins.ops[1].base, ins.ops[1].offset))
    coords_of = [getter(c, "s32") for c in ins.ops[1].coords]
    bar_of = address_getter(ins.ops[2])
    mask_of = getter(ins.ops[3], "u16") if ins.has("multicast::cluster") else None
    pair = ins.has("cta_group::2")
    lanes_of = predicated(ins)

    def load(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        for lane in active_lanes(w, g, lanes_of):
            tensor = load_map(w, int(map_of(w)[lane]))
            coords = [int(c(w)[lane]) for c in coords_of]
            found, view, inside, outside = _window(w, tensor, coords)
            if found.pending and not w.dependency_waited:
                raise ProtocolError(f"{found.name} is loaded before griddepcontrol.wait")
            mask = int(mask_of(w)[lane]) if mask_of else None
            targets = _targets(
                w, int(dst_of(w)[lane]), int(bar_of(w)[lane]), mask, pair, tensor.box_bytes, 128
            )

            def source(found=found, view=view, inside=inside, outside=outside, tensor=tensor):
                box = _filled(_box_shape(tensor))
                if found.initialized is not None:
                    if not view(found.initialized)[inside].all():
                        raise UninitializedError(
                            f"the copy engine reads {found.name} where nothing was written"
                        )
                box[outside] = view(found.data)[inside]
                return box.reshape(-1)

            text = f"load of {found.name} at {coords}"
            op = _Copy(w, text, targets, tensor.box_bytes, _span(tensor), source)
            w.cluster.launch_async(op)

    return load


def _bulk_load(ins: Instr) -> Node:
    _parts(ins, _LOAD_PARTS)
    dst_of, src_of = address_getter(ins.ops[0]), address_getter(ins.ops[1])
    size_of, bar_of = getter(ins.ops[2], "u32"), address_getter(ins.ops[3])
    mask_of = getter(ins.ops[4], "u16") if ins.has("multicast::cluster") else None
    lanes_of = predicated(ins)

    def load(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        for lane in active_lanes(w, g, lanes_of):
            size, src = int(size_of(w)[lane]), int(src_of(w)[lane])
            if size % 16 or src % 16 or not size:
                raise OutOfBoundsError(f"bulk copy of {size} bytes from {src:#x}")
            found = w.cluster.machine.memory.find(src, src + size)
            if found.pending and not w.dependency_waited:
                raise ProtocolError(f"{found.name} is loaded before griddepcontrol.wait")
            mask = int(mask_of(w)[lane]) if mask_of else None
            targets = _targets(w, int(dst_of(w)[lane]), int(bar_of(w)[lane]), mask, False, size, 16)
            at = src - found.base

            def source(found=found, at=at, size=size):
                initialized = found.initialized
                if initialized is not None and not initialized[at : at + size].all():
                    raise UninitializedError(
                        f"a bulk copy reads {found.name} where nothing was written"
                    )
                return found.data[at : at + size]

            w.cluster.launch_async(
                _Copy(w, f"bulk load of {found.name} at {at}", targets, size, 0, source)
            )

    return load


def _tensor_store(ins: Instr) -> Node:
    _parts(ins, _LOAD_PARTS | {"bulk_group"})
    map_of = address_getter(type(ins.ops[0])(ins.ops[0].base, ins.ops[0].offset))
    coords_of = [getter(c, "s32") for c in ins.ops[0].coords]
    src_of = address_getter(ins.ops[1])
    lanes_of = predicated(ins)

    def store(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        for lane in active_lanes(w, g, lanes_of):
            tensor = load_map(w, int(map_of(w)[lane]))
            coords = [int(c(w)[lane]) for c in coords_of]
            found, view, inside, outside = _window(w, tensor, coords)
            w.cluster.machine.memory.check_store(w, found)
            _, offset = w.cluster.resolve(w, int(src_of(w)[lane]), False, "store's source")
            if offset % 128:
                raise OutOfBoundsError(f"store from shared {offset:#x}: not 128-byte aligned")
            w.memory.check(offset, offset + tensor.box_bytes, "store")

            def sink(data, found=found, view=view, inside=inside, outside=outside, tensor=tensor):
                w.cluster.machine.memory.check_box(w, found, view(found.writer)[inside])
                view(found.data)[inside] = data.reshape(_box_shape(tensor))[outside]
                view(found.writer)[inside] = w.cta.number + 1
                if found.initialized is not None:
                    view(found.initialized)[inside] = True

            _launch_store(
                w, lane, f"store of {found.name} at {coords}", offset, tensor.box_bytes,
                _span(tensor), sink,
            )  # fmt: skip

    return store


def _bulk_store(ins: Instr) -> Node:
    _parts(ins, _LOAD_PARTS | {"bulk_group"})
    dst_of, src_of = address_getter(ins.ops[0]), address_getter(ins.ops[1])
    size_of = getter(ins.ops[2], "u32")
    lanes_of = predicated(ins)

    def store(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        for lane in active_lanes(w, g, lanes_of):
            size, dst = int(size_of(w)[lane]), int(dst_of(w)[lane])
            _, offset = w.cluster.resolve(w, int(src_of(w)[lane]), False, "store's source")
            if size % 16 or dst % 16 or offset % 16 or not size:
                raise OutOfBoundsError(f"bulk copy of {size} bytes to {dst:#x}")
            found = w.cluster.machine.memory.find(dst, dst + size)
            w.cluster.machine.memory.check_store(w, found)
            w.memory.check(offset, offset + size, "store")
            at = dst - found.base

            def sink(data, found=found, at=at, size=size):
                w.cluster.machine.memory.check_box(w, found, found.writer[at : at + size])
                found.data[at : at + size] = data
                found.writer[at : at + size] = w.cta.number + 1
                if found.initialized is not None:
                    found.initialized[at : at + size] = True

            _launch_store(w, lane, f"bulk store of {found.name}", offset, size, 0, sink)

    return store


def _launch_store(w: Warp, lane: int, text: str, offset: int, size: int, span: int, sink: Any):
    state = _bulk_state(w, lane)
    group = state.groups[-1]
    group.stores += 1
    group.unread += 1
    group.unwritten += 1
    w.cluster.launch_async(_Store(w, text, offset, size, span, sink, group))


def _commit(ins: Instr) -> Node:
    lanes_of = predicated(ins)

    def commit(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        for lane in active_lanes(w, g, lanes_of):
            if w.bulk and lane in w.bulk:
                w.bulk[lane].commit()

    return commit


def _wait_group(ins: Instr) -> Node:
    assert isinstance(ins.ops[0], Imm)
    keep = ins.ops[0].value
    read = ins.has("read")
    lanes_of = predicated(ins)

    def wait(w: Warp, g: Group) -> None:
        lanes = active_lanes(w, g, lanes_of)
        states = [w.bulk[lane] for lane in lanes if w.bulk and lane in w.bulk]
        groups = [group for state in states for group in state.pending(keep)]

        def complete() -> bool:
            return not any(group.unread if read else group.unwritten for group in groups)

        if not complete():
            g.block(complete, f"{len(groups)} bulk groups")
            return
        w.executed += 1
        g.pc += 1
        for group in groups:
            w.clocks.learn(group.slot, group.clock)
        for state in states:
            for group in state.pending(keep):
                state.waited = max(state.waited, group.clock)

    return wait


def check_exit(w: Warp) -> None:
    """A thread must not leave while the copy engine may still read its sources."""
    for state in (w.bulk or {}).values():
        for group in state.groups:
            if group.stores and group.clock > state.waited:
                raise ProtocolError("a warp exits without waiting for the reads of its bulk stores")
