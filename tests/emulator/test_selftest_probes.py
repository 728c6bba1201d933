"""The self-test's probes in the emulator: right machines pass, a wrong one fails the probe of what
is wrong with it and no other."""

import contextlib
from unittest import mock

import numpy as np
import pytest
import selftest_emulator as machine
from absl.testing import parameterized

from emulator import (
    Options,
    compile,
    formats,
    product,
    tensor_pipe,
    tma,
    tmem_access,
    toolchain,
    wgmma,
)
from emulator.scheduler import POLICIES
from jax_w4a4.selftest import probes

pytestmark = pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc")

NAMES = tuple(probe.name for probe in probes.PROBES)
SM90_KINDS = probes.KINDS
SM100_KINDS = tuple(k for k in probes.KINDS if k.format != "int4" and not k.precision)
SM100_NAMES = tuple(name for name in NAMES if name not in machine.SM100_LACKS)
NVFP4, MXFP4 = SM100_KINDS
INT4_ROW = probes.Kind("int4", None)


def swapped(array, axis, a=2, b=3):
    out = array.copy()
    for i, j in ((a, b), (b, a)):
        to = [slice(None)] * array.ndim
        to[axis] = i
        of = [slice(None)] * array.ndim
        of[axis] = j
        out[tuple(to)] = array[tuple(of)]
    return out


class RightMachine(parameterized.TestCase):
    @parameterized.parameters(*NAMES)
    def test_sm90(self, name):
        self.assertEqual(machine.failures(probes.BY_NAME[name], MXFP4, machine.on_sm90), [])

    @parameterized.parameters(*NAMES)
    def test_decode(self, name):
        self.assertEqual(machine.failures(probes.BY_NAME[name], MXFP4, machine.on_decode), [])

    @parameterized.parameters(*SM100_NAMES)
    def test_sm100(self, name):
        self.assertEqual(machine.failures(probes.BY_NAME[name], NVFP4, machine.on_sm100, 2), [])


@pytest.mark.slow
class RightMachineEverywhere(parameterized.TestCase):
    @parameterized.product(kind=SM90_KINDS, name=NAMES, cluster=(1, 2), policy=POLICIES)
    def test_sm90(self, kind, name, cluster, policy):
        probe, options = probes.BY_NAME[name], Options(policy, 1)
        found = machine.failures(probe, kind, machine.on_sm90, cluster, options)
        self.assertEqual(found, [])

    @parameterized.product(kind=SM100_KINDS, name=SM100_NAMES, group=(1, 2), policy=POLICIES)
    def test_sm100(self, kind, name, group, policy):
        probe, options = probes.BY_NAME[name], Options(policy, 1)
        found = machine.failures(probe, kind, machine.on_sm100, group, options)
        self.assertEqual(found, [])


# ---- Wrong machines. Each patches one thing that the machine does. ----


def no_zero_fill():
    """What lies outside of a tensor is not zero."""
    return mock.patch.object(tma, "_filled", lambda shape: np.full(shape, 0x44, np.uint8))


def halves_of_k(rows_of):
    """The B operand of an MMA has its two 16-byte halves of K exchanged."""

    def operand(self, memory, descriptor, rows, trans):
        raw = right(self, memory, descriptor, rows, trans)
        b = descriptor == next(iter(self.parts.values()))[0][1]
        return np.roll(raw, 16, axis=1) if b and rows_of(self.shape) else raw

    right = wgmma._Mma._operand
    return mock.patch.object(wgmma._Mma, "_operand", operand)


def weight_fragments():
    """A fragments in registers: rows 2 and 3 of sixteen exchanged."""
    right = wgmma._fragment_rows
    return mock.patch.object(wgmma, "_fragment_rows", lambda regs: swapped(right(regs), 0))


def token_rows():
    """The B operand: rows 2 and 3 exchanged."""

    def operand(self, memory, descriptor, rows, trans):
        raw = right(self, memory, descriptor, rows, trans)
        return swapped(raw, 0) if self.shape.a_registers else raw

    right = wgmma._Mma._operand
    return mock.patch.object(wgmma._Mma, "_operand", operand)


def odd_mantissas(name, wrong):
    """1.5, 3 and 6 are read as 1.25, 2.5 and 5."""
    right = formats.decode

    def decode(raw, of):
        values = right(raw, of)
        if of != name:
            return values
        fraction, exponent = np.frexp(values)
        return np.where(np.abs(fraction) == 0.75, np.ldexp(fraction * wrong, exponent), values)

    return mock.patch.object(formats, "decode", decode)


def bulk_words():
    """Bulk copies exchange their third and fourth word."""

    def step(self):
        if self.data is None and self.name.startswith("bulk"):
            self.data = swapped(self.source().view(np.uint32), 0).view(np.uint8)
        right(self)

    right = tma._Copy.step
    return mock.patch.object(tma._Copy, "step", step)


@contextlib.contextmanager
def cut_results():
    """Conversion to bf16 cuts."""

    def cut(x):
        return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)

    # Kernels are compiled once per host.
    product.host.cache_clear()
    with mock.patch.dict(compile._NAMESPACE, round_bf16=cut):
        yield
    product.host.cache_clear()


def stores_in_pairs():
    """Tensor stores exchange the columns of each pair."""

    def step(self):
        before = self.data is None
        right(self)
        if before:
            self.data = self.data.view(np.uint16).reshape(-1, 2)[:, ::-1].reshape(-1).view(np.uint8)

    right = tma._Store.step
    return mock.patch.object(tma._Store, "step", step)


def no_multicast():
    """A multicast reaches the issuer only."""

    def targets(w, dst, bar, mask, *rest):
        return right(w, dst, bar, mask and 1 << w.cta.rank, *rest)

    right = tma._targets
    return mock.patch.object(tma, "_targets", targets)


def scale_lanes(which):
    """Block scales of one operand: lanes 2 and 3 exchanged."""

    def scale(self, cta, of, rows, known):
        found = right(self, cta, of, rows, known)
        return swapped(found, 0) if of == which else found

    right = tensor_pipe.Mma._scale
    return mock.patch.object(tensor_pipe.Mma, "_scale", scale)


def descriptor_words(blocks):
    """tcgen05.mma exchanges 8 bytes of K in B, of block-scaled or of 16-bit kinds."""

    def execute(self, known):
        if bool(self.kind.block) == blocks:
            b, order = self.b, [2, 3, 0, 1, 6, 7, 4, 5]
            self.b = mock.Mock(k_major=lambda rows: np.take(b.k_major(rows), order, axis=1))
        right(self, known)

    right = tensor_pipe.Mma.execute
    return mock.patch.object(tensor_pipe.Mma, "execute", execute)


def fresh_accumulator():
    """A 16-bit MMA starts the accumulator anew."""

    def execute(self, known):
        self.accumulate = self.accumulate and bool(self.kind.block)
        right(self, known)

    right = tensor_pipe.Mma.execute
    return mock.patch.object(tensor_pipe.Mma, "execute", execute)


def loaded(axis):
    """tcgen05.ld exchanges lanes (1) or columns (0) 2 and 3 of what it reads."""

    def step(self):
        right(self)
        self.result = {w: swapped(v, axis) for w, v in self.result.items()}

    right = tmem_access._Load.step
    return mock.patch.object(tmem_access._Load, "step", step)


def b_of_the_pair():
    """In a pair, rows 2 and 3 of the half of B that the second CTA holds are exchanged."""

    def read(self, cta, index, known):
        raw = right(self, cta, index, known)
        second = len(self.ctas) == 2 and cta is self.ctas[1]
        return swapped(raw, 0) if second and len(index) == self.n // 2 else raw

    right = tensor_pipe.Mma.read_shared
    return mock.patch.object(tensor_pipe.Mma, "read_shared", read)


SM90 = (
    ("no zero fill", no_zero_fill, MXFP4, {"tails"}),
    ("K of the main product", lambda: halves_of_k(lambda s: s.a_registers), MXFP4, {"depth"}),
    ("K of the low-rank product", lambda: halves_of_k(lambda s: not s.a_registers), MXFP4,
     {"low-rank"}),
    ("weight fragments", weight_fragments, MXFP4, {"rows"}),
    ("token rows", token_rows, NVFP4, {"tokens"}),
    ("values of codes", lambda: odd_mantissas("e5m2", 5 / 6), MXFP4, {"codes"}),
    ("token scales", bulk_words, INT4_ROW, {"token-scales"}),
    ("rounding", cut_results, MXFP4, {"rounding"}),
    # Which column a cell holds is what both of them ask.
    ("stores", stores_in_pairs, MXFP4, {"store", "rows"}),
)  # fmt: skip
SM100 = (
    ("no zero fill", no_zero_fill, 1, NVFP4, {"tails"}),
    ("scales of A", lambda: scale_lanes(0), 1, NVFP4, {"token-scales"}),
    ("scales of B", lambda: scale_lanes(1), 2, MXFP4, {"weight-scales"}),
    ("K of the block-scaled product", lambda: descriptor_words(True), 1, MXFP4, {"depth"}),
    ("K of the low-rank product", lambda: descriptor_words(False), 2, NVFP4, {"low-rank"}),
    ("accumulator between kinds", fresh_accumulator, 1, MXFP4, {"low-rank", "tails", "epilogue"}),
    ("lanes of the accumulator", lambda: loaded(1), 1, NVFP4, {"tokens"}),
    ("columns of the accumulator", lambda: loaded(0), 1, MXFP4, {"rows"}),
    ("values of codes", lambda: odd_mantissas("e2m1", 5 / 6), 1, NVFP4, {"codes"}),
    # Codes and scales reach tcgen05 on separate ways.
    ("halves of B in a pair", b_of_the_pair, 2, NVFP4, {"rows", "weight-scales"}),
)


# In every run; the rest with -m slow.
FAST_SM90 = {"K of the main product", "token scales", "no zero fill"}
FAST_SM100 = {"K of the block-scaled product"}


def rows(table, names, fast=True):
    return [(r[0].replace(" ", "_"), *r[1:]) for r in table if (r[0] in names) == fast]


class Wrong(parameterized.TestCase):
    def sm90(self, bug, kind, expected):
        with bug():
            self.assertEqual(machine.failing(kind, machine.on_sm90), expected)

    def sm100(self, bug, group, kind, expected):
        with bug():
            found = machine.failing(kind, machine.on_sm100, group, names=SM100_NAMES)
        self.assertEqual(found, expected & set(SM100_NAMES))


@pytest.mark.slow
class WrongMachines(Wrong):
    @parameterized.named_parameters(rows(SM90, FAST_SM90, False))
    def test_sm90(self, *row):
        self.sm90(*row)

    @parameterized.named_parameters(rows(SM100, FAST_SM100, False))
    def test_sm100(self, *row):
        self.sm100(*row)


class WrongMachine(Wrong):
    @parameterized.named_parameters(rows(SM90, FAST_SM90))
    def test_sm90(self, *row):
        self.sm90(*row)

    @parameterized.named_parameters(rows(SM100, FAST_SM100))
    def test_sm100(self, *row):
        self.sm100(*row)

    def test_multicast_stops_pairs_only(self):
        probe = probes.BY_NAME["depth"]
        with no_multicast():
            self.assertEqual(machine.failures(probe, MXFP4, machine.on_sm90, 1), [])
            (text,) = machine.failures(probe, MXFP4, machine.on_sm90, 2)
        self.assertStartsWith(text, "DeadlockError")

    def test_half_b_is_a_matter_of_pairs(self):
        with b_of_the_pair():
            found = machine.failing(NVFP4, machine.on_sm100, 1, names=("rows", "tokens"))
        self.assertEqual(found, set())
