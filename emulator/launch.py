"""The machine: clusters of CTAs, and launches on them."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator import memory, mma, ptx, races, shared, tcgen05, tma, wgmma  # noqa: F401  (instruction tables)
from emulator.barriers import ClusterBarrier, NamedBarrier
from emulator.compile import Code
from emulator.errors import EmulationError, OutOfBoundsError, ProtocolError
from emulator.scheduler import Scheduler
from emulator.warp import Warp

REGISTER_FILE = 65536
MAX_SHARED = 232448  # opt-in bytes per CTA, static and dynamic


@dataclasses.dataclass(frozen=True)
class Options:
    """How a launch is run, and how strict it is.

    Attributes:
      policy: schedule, one of scheduler.POLICIES.
      seed: of every random choice.
      races: check shared memory for data races.
      spurious_wait: probability that a try_wait gives up at once.
      random_elect: elect.sync picks any lane instead of the first.
      pieces: into how many parts a copy may be torn.
      numerics: "exact" rounds the sum of an MMA once; "hopper" aligns and truncates as reported.
      strict_ld: registers of tcgen05.ld may not be used before tcgen05.wait::ld.
      strict_cp: only documented orders between tcgen05 instructions.
      strict_fence: tcgen05 instructions of different threads are ordered by a barrier only with
        tcgen05.fence::before_thread_sync and after_thread_sync around it.
      strict_init: other CTAs and the copy engine use an mbarrier only after fence.mbarrier_init,
        and a relaxed arrival carries only what a fence released before it.
      strict_exit: a CTA exits only after the sources of its bulk stores have been read.
      max_steps: scheduling steps of a cluster after which it counts as stuck.
      trace: called with one line per event.
    """

    policy: str = "random"
    seed: int = 0
    races: bool = True
    spurious_wait: float = 0.1
    random_elect: bool = True
    pieces: tuple[int, ...] = (1, 2, 4)
    numerics: str = "exact"
    strict_ld: bool = True
    strict_cp: bool = False
    strict_fence: bool = True
    strict_init: bool = True
    strict_exit: bool = True
    max_steps: int = 5_000_000
    trace: Callable[[str], None] | None = None


class CTA:
    def __init__(self, cluster: Cluster, rank: int):
        self.cluster = cluster
        self.rank = rank
        machine = cluster.machine
        self.number = cluster.number * cluster.size + rank
        self.name = f"cta {rank}"
        self.memory = memory.SharedMemory(machine.shared_bytes)
        self.mbarriers: dict[int, Any] = {}
        self.barriers: dict[int, NamedBarrier] = {}
        self.wgmma_queues: dict[int, Any] = {}
        # What ptxas may use where so many CTAs are to share an SM.
        ctas = max(1, int(machine.code.kernel.directives.get("minnctapersm") or 1))
        self.launch_registers = min(255, REGISTER_FILE // (ctas * machine.threads) // 8 * 8)
        self.free_registers = 0
        self.exited = False
        self.tmem: Any = None
        self.symbols = machine.symbols(rank)
        self.warps = [Warp(self, i, machine.code, machine.threads) for i in range(machine.warps)]

    def named_barrier(self, number: int) -> NamedBarrier:
        if number not in self.barriers:
            self.barriers[number] = NamedBarrier(self.cluster.slots.capacity)
        return self.barriers[number]

    def threads_of(self, w: Warp) -> int:
        return min(32, self.cluster.machine.threads - 32 * w.index)

    def check_alive(self, what: str) -> None:
        if self.exited:
            raise ProtocolError(f"{what} reaches {self.name}, which has exited")

    def warp_exited(self, w: Warp) -> None:
        if self.cluster.machine.options.strict_exit:
            tma.check_exit(w)
        if w.wgmma is not None and w.wgmma.queue.executed < w.wgmma.issued:
            raise ProtocolError("a warp exits before its wgmma are complete")
        self.cluster.barrier.leave(w, self.threads_of(w))
        if all(other.live == 0 for other in self.warps):
            for op in self.cluster.in_flight:
                if op.touches(self):
                    raise ProtocolError(f"{self.name} exits while {op.name} is in flight")
            self.exited = True
            self._check_exit()
            if self.tmem is not None:
                self.tmem.check_exit()

    def _check_exit(self) -> None:
        machine = self.cluster.machine
        machine.dependency_waited |= any(w.dependency_waited for w in self.warps)
        for number, barrier in self.barriers.items():
            if barrier.arrived and machine.options.strict_exit:
                raise ProtocolError(
                    f"{self.name} exits with {barrier.arrived} of {barrier.expected} threads at "
                    f"barrier {number}"
                )


class Cluster:
    warp_class = Warp

    def __init__(self, machine: Machine, number: int):
        self.machine = machine
        self.number = number
        self.size = machine.cluster
        self.version = 0
        self.progress = 0
        self.poll_rounds = 0
        self.nanoseconds = 0
        self.trace = machine.options.trace
        # Per warp itself, bulk stores, loads and stores of tensor memory; wgmma queues, mbarriers.
        capacity = 16 + self.size * (4 * machine.warps + machine.warps // 4 + 80)
        self.slots = races.Slots(capacity)
        self.detector = races.Detector(self.slots, machine.options.races)
        self.copy_clocks: dict[int, int] = {}
        self.copy_slots: dict[tuple[int, int], int] = {}
        self.in_flight: list[tma.AsyncOp] = []
        self.barrier = ClusterBarrier(self)
        self.pipes: dict[tuple[int, int], Any] = {}
        self.allocating: dict[int, Any] = {}
        self.freeing: dict[int, Any] = {}
        self.ctas: list[CTA] = []
        for rank in range(self.size):
            self.ctas.append(CTA(self, rank))
        self.warps = [w for cta in self.ctas for w in cta.warps]

    def free(self) -> None:
        """Lets go of everything at once: a cluster is full of cycles, and large."""
        for cta in self.ctas:
            for w in cta.warps:
                vars(w).clear()
            vars(cta).clear()
        vars(self).clear()

    def changed(self) -> None:
        self.version += 1
        self.progress += 1

    def copy_slot(self, cta: CTA, offset: int) -> int:
        key = (cta.rank, offset)
        if key not in self.copy_slots:
            slot = self.slots.add(f"copies to {cta.name} mbarrier {offset:#x}")
            self.copy_slots[key] = slot
            self.copy_clocks[slot] = 0
        return self.copy_slots[key]

    def launch_async(self, op: tma.AsyncOp) -> None:
        op.priority = self.machine.rng.random()
        self.in_flight.append(op)
        self.version += 1
        if self.trace:
            self.trace(f"issued: {op.name}")

    def check_ranks(self, ranks: np.ndarray) -> None:
        if ranks.size and int(ranks.max()) >= self.size:
            raise OutOfBoundsError(f"CTA {int(ranks.max())} of a cluster of {self.size}")

    def cta(self, w: Warp, rank: int, remote: bool, what: str) -> CTA:
        """The CTA that an address names."""
        if rank != w.cta.rank and not remote:
            raise OutOfBoundsError(f"{what} with an address of CTA {rank}")
        if rank >= self.size:
            raise OutOfBoundsError(f"{what} in CTA {rank} of a cluster of {self.size}")
        found = self.ctas[rank]
        found.check_alive(what)
        return found

    def resolve(self, w: Warp, address: int, remote: bool, what: str) -> tuple[CTA, int]:
        """CTA and offset of a shared address, generic ones included."""
        if address >= memory.SHARED_WINDOW:
            address -= memory.SHARED_WINDOW
        cta = self.cta(w, address >> memory.RANK_SHIFT, remote, what)
        return cta, address & memory.OFFSET_MASK


class Machine:
    """One launch."""

    def __init__(
        self,
        device: Device,
        code: Code,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: int,
        dynamic_shared: int,
        parameters: bytes,
        options: Options,
        dependent: bool = False,
    ):
        self.dependent = dependent
        self.memory = device.memory
        self.code = code
        self.grid, self.block, self.cluster = grid, block, cluster
        self.threads = block[0] * block[1] * block[2]
        self.warps = (self.threads + 31) // 32
        self.dynamic_shared = dynamic_shared
        self.parameters = memory.Parameters(parameters)
        self.options = options
        self.rng = random.Random(options.seed)
        self.elected = self.rng.randrange(32 * 31 * 29)
        kernel = code.kernel
        dynamic = [v for v in kernel.variables.values() if v.space == "shared" and v.size == 0]
        align = max([v.align for v in dynamic], default=1)
        self.shared_bytes = (kernel.static_shared + align - 1) // align * align + dynamic_shared
        if self.shared_bytes > MAX_SHARED:
            raise EmulationError(
                f"{self.shared_bytes} bytes of shared memory; at most {MAX_SHARED}"
            )
        if parameters and len(parameters) < kernel.param_bytes:
            raise EmulationError(
                f"{kernel.name} takes {kernel.param_bytes} parameter bytes, got {len(parameters)}"
            )
        limit = kernel.directives.get("maxntid")
        if limit and self.threads > np.prod([int(v) for v in limit.split(",")]):
            raise EmulationError(f"{self.threads} threads; {kernel.name} allows {limit}")
        self.dependency_waited = False
        self._globals: dict[str, int] = device.globals_of(kernel)

    def symbols(self, rank: int) -> dict[str, np.ndarray]:
        """Addresses of variables and parameters as seen by a CTA."""
        kernel = self.code.kernel
        out = {}
        for name, variable in kernel.variables.items():
            if variable.space == "shared":
                value = (rank << memory.RANK_SHIFT) + memory.SHARED_RESERVED + variable.offset
            else:
                value = self._globals[name]
            out[name] = np.full(32, value, np.uint64)
        for param in kernel.params:
            out[param.name] = np.full(32, memory.PARAM_BASE + param.offset, np.uint64)
        return out

    def run(self) -> int:
        """Executes the grid, cluster by cluster; returns the warp instructions executed."""
        total = self.grid[0] * self.grid[1] * self.grid[2]
        if self.grid[0] % self.cluster:
            raise EmulationError(f"grid of {self.grid} CTAs in clusters of {self.cluster}")
        executed = 0
        with np.errstate(all="ignore"):
            for number in range(total // self.cluster):
                if self.options.trace:
                    self.options.trace(f"cluster {number}")
                cluster = Cluster(self, number)
                warps = list(cluster.warps)
                scheduler = Scheduler(
                    cluster, self.options.policy, self.rng, self.options.max_steps
                )
                scheduler.run()
                executed += sum(w.executed for w in warps)
                cluster.free()
        if self.dependent and not self.dependency_waited:
            raise ProtocolError(
                f"no CTA of {self.code.kernel.name}, a dependent launch, executes "
                "griddepcontrol.wait: what waits for this launch would not wait for the one before"
            )
        return executed


@dataclasses.dataclass(frozen=True)
class LaunchRecord:
    kernel: str
    grid: tuple[int, int, int]
    cluster: int
    instructions: int
    seconds: float


class Device:
    """Global memory and the kernels that were loaded."""

    def __init__(self, options: Options | None = None):
        self.options = options or Options()
        self.memory = memory.GlobalMemory()
        self.launches: list[LaunchRecord] = []
        self._globals: dict[str, int] = {}

    def empty(self, size: int, name: str, poison: int | None = None) -> memory.Allocation:
        """Uninitialised bytes; with `poison` reads of unwritten bytes are errors all the same."""
        made = self.memory.allocate(size, name)
        made.data[:] = 0xFF if poison is None else poison
        return made

    def array(self, value: np.ndarray, name: str) -> memory.Allocation:
        """An input."""
        made = self.memory.allocate(max(1, value.nbytes), name)
        made.write_host(value)
        made.initialized = None
        made.read_only = True
        return made

    def globals_of(self, kernel: ptx.Kernel) -> dict[str, int]:
        for variable in kernel.variables.values():
            if variable.space in ("global", "const") and variable.name not in self._globals:
                made = self.memory.allocate(max(1, variable.size), variable.name)
                made.initialized = None
                if variable.init:
                    made.write_host(np.frombuffer(variable.init, np.uint8))
                self._globals[variable.name] = made.base
        return self._globals

    def launch(
        self,
        code: Code,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        parameters: bytes,
        *,
        cluster: int = 1,
        dynamic_shared: int = 0,
        options: Options | None = None,
        dependent: bool = False,
    ) -> LaunchRecord:
        machine = Machine(
            self,
            code,
            grid,
            block,
            cluster,
            dynamic_shared,
            parameters,
            options or self.options,
            dependent,
        )
        start = time.perf_counter()
        if machine.options.trace:
            machine.options.trace(
                f"launch {code.kernel.name}: grid {grid}, {machine.threads} threads, clusters of "
                f"{cluster}, {machine.shared_bytes} B shared{', dependent' * dependent}"
            )
        executed = machine.run()
        record = LaunchRecord(
            code.kernel.name, grid, cluster, executed, time.perf_counter() - start
        )
        self.launches.append(record)
        return record
