"""The formats agree bit for bit with an independent numpy model, eagerly and compiled."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import model
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax

from jax_w4a4 import formats
from jax_w4a4.formats import Spec

# format, block_size, scale_dtype, act_unsigned, act_rule
CONFIGS = (
    ("nvfp4", 16, "float8_e4m3fn", False, "rceil"),
    ("mxfp4", 32, "float8_e8m0fnu", False, "rceil"),
    ("mxfp4", 32, "float8_e8m0fnu", False, "floor"),
    ("int4", 64, "float16", False, "rceil"),
    ("int4", 32, "bfloat16", False, "rceil"),
    ("int4", 128, "float32", False, "rceil"),
    ("int4", None, "float32", False, "rceil"),
    ("int4", 64, "float16", True, "rceil"),
    ("int4", None, "bfloat16", True, "rceil"),
    ("int4", 32, "float32", True, "rceil"),
)
TINY = 2.0**-126


quantize = jax.jit(formats.quantize_blocks, static_argnums=1)


@functools.partial(jax.jit, static_argnums=2)
def dequantize(packed, scales, spec):
    return formats.dequantize_blocks(
        packed, scales, spec.format, spec.block_size, unsigned=spec.act_unsigned
    )


def spec_of(config, k):
    format, block, scale_dtype, unsigned, rule = config
    k_pad = formats.padded_k(k, block)
    return Spec(format, k, k_pad, block or k_pad, scale_dtype, unsigned, rule)


def model_of(config, v):
    format, block, scale_dtype, unsigned, rule = config
    codes, bits = model.quantize(
        v, format, block_size=block, scale_dtype=scale_dtype, unsigned=unsigned, rule=rule
    )
    return model.pack(codes), bits


def float_cases(k, rows=16):
    """Named (rows, k) fp32 arrays that together visit every branch and every rounding tie."""
    rng = np.random.default_rng(k)
    normal = rng.standard_normal((rows, k)).astype(np.float32)
    zeros = normal.copy()
    zeros[::2] = 0
    zeros[1::4] = -0.0
    special = normal.copy()
    special[1, 7] = np.nan
    special[2, 9] = np.copysign(np.float32(np.nan), -1)
    special[3, 1] = np.inf
    special[4, 2] = -np.inf
    special[5, :3] = [np.inf, np.nan, -np.inf]
    special[6] = np.inf
    special[7] = np.nan
    ties = (rng.integers(-48, 49, (rows, k)) * 0.125).astype(np.float32)
    ties[:, ::16] = 6.0
    half_integers = (rng.integers(-15, 16, (rows, k)) * 0.5).astype(np.float32)
    half_integers[:, ::16] = 7.0
    any_bits = rng.integers(0, 2**32, (rows, k), np.uint64).astype(np.uint32).view(np.float32)
    powers = rng.choice([1, 1.5, 1.25, -1.75, 1.9999999], (rows, k))
    powers = np.ldexp(powers, rng.integers(-140, 127, (rows, 1))).astype(np.float32)
    return {
        "normal": normal,
        "huge": normal * np.float32(3e37),
        "small": normal * np.float32(4e-3),
        "smaller": normal * np.float32(1e-6),
        "tiny": normal * np.float32(1e-37),
        "subnormal": np.ldexp(normal, -130).astype(np.float32),
        "zeros": zeros,
        "special": special,
        "ties": ties,
        "half_integers": half_integers,
        "any_bits": any_bits,
        "powers": powers,
    }


def scale_bits(scales):
    return np.asarray(scales).view(f"u{np.asarray(scales).dtype.itemsize}")


class BitExactTest(parameterized.TestCase):
    """quantize_blocks against the model: what a kernel's bits are held to."""

    @parameterized.parameters((c, k) for c in CONFIGS for k in (256, 100))
    def test_quantize(self, config, k):
        """Codes and scale bytes are equal for every class of input, compiled or not."""
        spec = spec_of(config, k)
        for name, v in float_cases(k).items():
            want_packed, want_bits = model_of(config, v)
            for f in (formats.quantize_blocks, quantize):
                packed, scales = f(jnp.asarray(v), spec)
                np.testing.assert_array_equal(scale_bits(scales), want_bits, err_msg=name)
                np.testing.assert_array_equal(np.asarray(packed), want_packed, err_msg=name)

    @parameterized.parameters(*CONFIGS)
    def test_dequantize(self, *config):
        """Decoding is codes times scales; only the product is rounded, so fp32 equals float64."""
        spec = spec_of(config, 100)
        for name in ("normal", "small", "special"):
            packed, scales = quantize(jnp.asarray(float_cases(100)[name]), spec)
            got = dequantize(packed, scales, spec)
            want = model.decode(packed, np.asarray(scales), spec.format, spec.act_unsigned)
            np.testing.assert_array_equal(np.asarray(got), want.astype(np.float32), err_msg=name)

    @parameterized.parameters(*CONFIGS)
    def test_round_trip_in_one_program(self, *config):
        """The compiler may not skip the rounding when encode and decode meet in one program."""
        spec = spec_of(config, 256)

        program = jax.jit(lambda v: dequantize(*quantize(v, spec), spec))
        for v in float_cases(256).values():
            v = jnp.asarray(v)
            together, apart = program(v), dequantize(*quantize(v, spec), spec)
            np.testing.assert_array_equal(np.asarray(together), np.asarray(apart))

    @parameterized.parameters(*CONFIGS)
    def test_x64(self, *config):
        """The bits don't depend on jax_enable_x64."""
        v = float_cases(100)["normal"]
        with jax.enable_x64(True):
            packed, scales = quantize(jnp.asarray(v), spec_of(config, 100))
        want_packed, want_bits = model_of(config, v)
        np.testing.assert_array_equal(scale_bits(scales), want_bits)
        np.testing.assert_array_equal(np.asarray(packed), want_packed)

    @parameterized.parameters(*CONFIGS)
    def test_leading_dimensions(self, *config):
        """Any leading dimensions, none included, are rows."""
        spec = spec_of(config, 100)
        v = jnp.asarray(float_cases(100)["normal"])
        packed, scales = quantize(v, spec)
        packed4, scales4 = quantize(v.reshape(2, 4, 2, 100), spec)
        packed1, scales1 = quantize(v[3], spec)
        np.testing.assert_array_equal(packed4.reshape(packed.shape), packed)
        np.testing.assert_array_equal(scale_bits(scales4).reshape(scales.shape), scale_bits(scales))
        np.testing.assert_array_equal(packed1, packed[3])
        np.testing.assert_array_equal(scale_bits(scales1), scale_bits(scales)[3])

    @parameterized.parameters(*CONFIGS)
    def test_error_bound(self, *config):
        """Apart from any model: nothing is off by more than half the widest step of its block."""
        format, _, _, unsigned, rule = config
        spec = spec_of(config, 256)
        v = float_cases(256)["normal"]
        packed, scales = quantize(jnp.asarray(v), spec)
        got = dequantize(packed, scales, spec)
        s = np.repeat(np.asarray(formats.decode_scale(scales)), spec.block_size, axis=1)
        half_step = {"nvfp4": 1.0, "mxfp4": 2.0 if rule == "floor" else 1.0, "int4": 0.51}[format]
        want = np.maximum(v, 0) if unsigned else v
        self.assertLessEqual(np.max(np.abs(np.asarray(got) - want) / s), half_step)


class DegenerateBlocksTest(parameterized.TestCase):
    """The table of docs/numerics.md, by hand: what zero, tiny, NaN and Inf blocks become."""

    def block(self, config, *leading):
        """Scale (as fp32 and bits) and codes of a block that begins with `leading`, then zeros."""
        spec = spec_of(config, 32)
        v = np.zeros((1, spec.block_size), np.float32)
        v[0, : len(leading)] = leading
        packed, scales = quantize(
            jnp.asarray(v), spec.replace(k=spec.block_size, k_pad=max(32, spec.block_size))
        )
        scale = float(np.asarray(formats.decode_scale(scales))[0, 0])
        codes = np.asarray(formats.unpack(packed))[0]
        return scale, int(scale_bits(scales)[0, 0]), codes

    @parameterized.parameters(*CONFIGS)
    def test_zero(self, *config):
        """A zero block, of either sign, has scale bits 0 and codes 0."""
        scale, bits, codes = self.block(config, -0.0, 0.0, -0.0)
        self.assertEqual((scale, bits), (0.0, 0))
        np.testing.assert_array_equal(codes, 0)

    @parameterized.parameters(
        (CONFIGS[0], 5.8e-3, 5.9e-3),  # 6 * 2^-10, half the smallest e4m3 scale
        (CONFIGS[1], 6.9e-38, 7.2e-38),  # 6 * 2^-126
        (CONFIGS[2], 6.9e-38, 7.2e-38),
        (CONFIGS[3], 2.0e-7, 2.1e-7),  # 7 * 2^-25
        (CONFIGS[4], 8.1e-38, 8.3e-38),  # 7 * 2^-126
        (CONFIGS[5], 8.1e-38, 8.3e-38),
        (CONFIGS[7], 4.4e-7, 4.5e-7),  # 15 * 2^-25
    )
    def test_underflow(self, config, lost, kept):
        """Below the documented limit the whole block is lost: scale bits 0 and codes 0."""
        _, bits, codes = self.block(config, lost, lost)
        self.assertEqual(bits, 0)
        np.testing.assert_array_equal(codes, 0)
        scale, bits, codes = self.block(config, kept, kept)
        self.assertGreater(scale, 0)
        self.assertGreater(codes[0], 0)

    @parameterized.parameters(*CONFIGS)
    def test_subnormal(self, *config):
        """fp32 subnormals are zeros, whatever the backend would do with them."""
        _, bits, codes = self.block(config, 1e-39, -1e-39)
        self.assertEqual(bits, 0)
        np.testing.assert_array_equal(codes, 0)

    @parameterized.parameters(*CONFIGS)
    def test_nan(self, *config):
        """A NaN of either sign makes the scale the canonical NaN and all codes 0."""
        bits_of = {"float8_e4m3fn": 0x7F, "float8_e8m0fnu": 0xFF, "float16": 0x7E00}
        bits_of |= {"bfloat16": 0x7FC0, "float32": 0x7FC00000}
        for nan in (np.nan, np.copysign(np.nan, -1)):
            scale, bits, codes = self.block(config, 1.0, nan, np.inf, 3.0)
            self.assertTrue(np.isnan(scale))
            self.assertEqual(bits, bits_of[config[2]])
            np.testing.assert_array_equal(codes, 0)

    @parameterized.parameters(
        (CONFIGS[0], 448.0, (7, 15)),
        (CONFIGS[1], 2.0**125, (7, 15)),
        (CONFIGS[2], 2.0**125, (7, 15)),
        (CONFIGS[3], 65504 / 8, (7, 8)),
        (CONFIGS[4], float(ml_dtypes.finfo("bfloat16").max) / 8, (7, 8)),
        (CONFIGS[7], 65504 / 16, (15, 0)),
        (CONFIGS[8], float(ml_dtypes.finfo("bfloat16").max) / 16, (15, 0)),
    )
    def test_infinity(self, config, largest, codes):
        """Inf saturates scale and code (+6 and -6, +7 and -8, 15); the product stays finite."""
        scale, _, got = self.block(config, np.inf, -np.inf, largest, 0.0)
        self.assertEqual(scale, largest)
        np.testing.assert_array_equal(got[:2], codes)
        self.assertGreater(got[2], 0)
        np.testing.assert_array_equal(got[3:], 0)
        top = {"int4": 15.0 if config[3] else 8.0}.get(config[0], 6.0)
        self.assertTrue(np.isfinite(np.float32(scale) * np.float32(top)))

    def test_fp32_scale_is_capped(self):
        """The cap is below max / 8 after rounding to 19 bits too: the product is finite."""
        for config, code, top in ((CONFIGS[5], 7, 8), (CONFIGS[9], 15, 15)):
            scale, _, codes = self.block(config, np.inf, 1.0)
            self.assertEqual(codes[0], code)
            self.assertTrue(np.isfinite(np.float32(scale) * np.float32(top)))

    def test_negative_zero_code(self):
        """Negative values that round to zero keep the sign bit, as the hardware does."""
        _, _, codes = self.block(CONFIGS[0], 6.0, -0.1, 0.1, -0.0)
        np.testing.assert_array_equal(codes[:5], [7, 8, 0, 8, 0])

    def test_nan_stays_in_its_block(self):
        """Neighbouring blocks of the row keep their codes."""
        v = np.tile(np.float32([6, 3, 1, -2]), (1, 16))
        v[0, 17] = np.nan
        spec = spec_of(CONFIGS[0], 64)
        packed, scales = quantize(jnp.asarray(v), spec)
        clean = quantize(jnp.asarray(np.nan_to_num(v, nan=1.0)), spec)[0]
        np.testing.assert_array_equal(scale_bits(scales)[0] == 0x7F, [False, True, False, False])
        keep = np.r_[0:8, 16:32]
        np.testing.assert_array_equal(np.asarray(packed)[0, keep], np.asarray(clean)[0, keep])


class CodesTest(parameterized.TestCase):
    """The sixteen codes and their order in a byte."""

    def test_e2m1_table(self):
        """All codes, against the values of the OCP MX specification and of ml_dtypes."""
        got = np.asarray(formats.decode_e2m1(jnp.arange(16, dtype=jnp.uint8)))
        half = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        np.testing.assert_array_equal(got, half + [-v for v in half])
        self.assertTrue(np.signbit(got[8]))
        as_f4 = np.arange(16, dtype=np.uint8).view(np.uint8).astype(ml_dtypes.uint4)
        as_f4 = as_f4.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        np.testing.assert_array_equal(got, as_f4)

    def test_e2m1_ties(self):
        """Ties go to the even code and beyond 6 saturates, as cvt.rn.satfinite.e2m1x2 does."""
        v = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 7.0, np.inf])
        want = [0, 2, 2, 4, 4, 6, 6, 7, 7, 7]
        np.testing.assert_array_equal(formats.encode_e2m1(jnp.asarray(v)), want)
        np.testing.assert_array_equal(formats.encode_e2m1(jnp.asarray(-v)), [c + 8 for c in want])

    @parameterized.parameters(False, True)
    def test_e2m1_neighbours(self, jit):
        """One fp32 step to either side of every tie decides."""
        ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        encode = jax.jit(formats.encode_e2m1) if jit else formats.encode_e2m1
        above = encode(jnp.asarray(np.nextafter(ties, np.float32(9))))
        below = encode(jnp.asarray(np.nextafter(ties, np.float32(0))))
        np.testing.assert_array_equal(above, range(1, 8))
        np.testing.assert_array_equal(below, range(7))

    def test_int4_tables(self):
        """Two's complement and unsigned."""
        codes = jnp.arange(16, dtype=jnp.uint8)
        signed = list(range(8)) + list(range(-8, 0))
        np.testing.assert_array_equal(formats.decode_int4(codes), signed)
        np.testing.assert_array_equal(formats.decode_int4(codes, unsigned=True), range(16))

    def test_nibble_order(self):
        """Even k lies in the low nibble, as JAX stores four-bit arrays."""
        packed = formats.pack(jnp.asarray([[1, 2, 15, 0]], jnp.uint8))
        np.testing.assert_array_equal(packed, [[0x21, 0x0F]])
        np.testing.assert_array_equal(formats.unpack(packed), [[1, 2, 15, 0]])
        values = lax.bitcast_convert_type(packed, jnp.uint4).reshape(1, 4)
        np.testing.assert_array_equal(values.astype(jnp.uint8), [[1, 2, 15, 0]])


class ScaleTest(parameterized.TestCase):
    """Scale types: every representable value, every midpoint, the ends."""

    @parameterized.parameters("float8_e4m3fn", "float16", "bfloat16")
    def test_decode_is_exact(self, dtype):
        """All bit patterns decode to what ml_dtypes says, subnormal fp32 results flushed."""
        dt = model.dtype_of(dtype)
        bits = np.arange(256**dt.itemsize, dtype=f"u{dt.itemsize}")
        with np.errstate(all="ignore"):
            want = model.flush(bits.view(dt).astype(np.float32))
        got = np.asarray(formats.decode_scale(jnp.asarray(bits.view(dt))))
        np.testing.assert_array_equal(got, want)

    def test_decode_e8m0(self):
        """2^(byte - 127), 255 is NaN, and byte 0 (subnormal) reads as zero."""
        bytes_ = np.arange(256, dtype=np.uint8)
        scales = lax.bitcast_convert_type(jnp.asarray(bytes_), jnp.float8_e8m0fnu)
        want = np.ldexp(1.0, bytes_.astype(np.int32) - 127)
        want[0], want[255] = 0, np.nan
        np.testing.assert_array_equal(np.asarray(formats.decode_scale(scales)), want)

    def points(self, values):
        """All values of a type, the midpoints between them and their fp32 neighbours."""
        values = values.astype(np.float32)
        middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
        points = np.concatenate([values, middle])
        up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))
        return model.flush(np.concatenate([points, up, down]))

    def test_e4m3(self):
        """Nearest, ties to even, through subnormals up to saturation at 448."""
        points = self.points(np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn))
        # Up to 464 numpy's cast rounds as the contract does; above it gives NaN.
        want = np.minimum(points, 448).astype(ml_dtypes.float8_e4m3fn)
        got = formats.encode_scale(jnp.asarray(points), "nvfp4")
        np.testing.assert_array_equal(scale_bits(got), scale_bits(want))
        over = jnp.asarray(np.float32([449, 465, 1e30, np.inf]))
        np.testing.assert_array_equal(scale_bits(formats.encode_scale(over, "nvfp4")), 0x7E)

    @parameterized.parameters(
        (dtype, jit) for dtype in ("float16", "bfloat16") for jit in (False, True)
    )
    def test_round_to(self, dtype, jit):
        """As the cast of numpy: both signs, subnormals, overflow to infinity, NaN."""
        dt = model.dtype_of(dtype)
        top = {"float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
        points = self.points(np.arange(top, dtype=np.uint16).view(dt))
        points = np.concatenate([points, np.float32([65519.9, 65520, 3.3e38, np.inf])])
        points = np.concatenate([points, -points, np.float32([np.nan])])
        with np.errstate(over="ignore"):
            want = points.astype(dt)
        if dtype == "bfloat16":
            want = np.where(np.abs(points) < TINY, np.copysign(0, points), want).astype(dt)
        f = jax.jit(formats.round_to, static_argnums=1) if jit else formats.round_to
        got = np.asarray(f(jnp.asarray(points), dtype))
        np.testing.assert_array_equal(got.view(np.uint16)[:-1], want.view(np.uint16)[:-1])
        self.assertTrue(np.isnan(got[-1].astype(np.float32)))

    def test_fp32_scale_keeps_thresholds_exact(self):
        """An int4 fp32 scale has 19 significant bits, within 2^-19 of amax / 7."""
        rng = np.random.default_rng(0)
        v = np.exp(rng.uniform(-60, 60, (64, 1))) * rng.uniform(-1, 1, (64, 128))
        spec = spec_of(CONFIGS[5], 128)
        _, scales = quantize(jnp.asarray(v.astype(np.float32)), spec)
        self.assertEqual(int(np.max(scale_bits(scales) & 0x1F)), 0)
        want = np.max(np.abs(v), axis=1, keepdims=True) / 7
        np.testing.assert_allclose(np.asarray(scales), want, rtol=2.0**-19)

    def test_mxfp4_rules(self):
        """rceil never clips, floor clips (6, 8) times the power of two, as the OCP rule does."""
        v = np.zeros((3, 32), np.float32)
        v[:, 0] = [6.0, np.nextafter(np.float32(6), np.float32(7)), 7.9]
        for rule, exponents in (("rceil", [0, 1, 1]), ("floor", [0, 0, 0])):
            spec = spec_of(("mxfp4", 32, "float8_e8m0fnu", False, rule), 32)
            _, scales = quantize(jnp.asarray(v), spec)
            np.testing.assert_array_equal(scale_bits(scales)[:, 0] - 127.0, exponents)


class BitsTest(parameterized.TestCase):
    """Widening and reciprocals, the remaining rounding points."""

    @parameterized.parameters("bfloat16", "float16", "float32")
    def test_to_f32(self, dtype):
        """Exact for every bit pattern of the narrow types; fp32 subnormals are flushed."""
        dt = model.dtype_of(dtype)
        if dtype == "float32":
            values = float_cases(64)["any_bits"]
        else:
            values = np.arange(65536, dtype=np.uint16).view(dt)
        with np.errstate(all="ignore"):
            want = model.flush(values.astype(np.float32))
        for f in (formats.to_f32, jax.jit(formats.to_f32)):
            got = np.asarray(f(jnp.asarray(values)))
            np.testing.assert_array_equal(got, want)
            zero = want == 0
            np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))

    def test_to_f32_keeps_a_preceding_rounding(self):
        """A rounding to bfloat16 in the same program is not optimized away."""
        v = jnp.asarray(float_cases(64)["normal"])
        got = jax.jit(lambda v: formats.to_f32((v * 1.5).astype(jnp.bfloat16)))(v)
        want = (np.asarray(v) * np.float32(1.5)).astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(got, want)

    def test_reciprocal(self):
        """Rounded once, and zero where the exact result is subnormal; also of a constant."""
        x = np.float32([1, 3, -7, 1e38, 3e38, TINY, 0.1, np.inf])
        with np.errstate(all="ignore"):
            want = model.flush(np.float32(1) / x)
        np.testing.assert_array_equal(formats.reciprocal(jnp.asarray(x)), want)
        np.testing.assert_array_equal(jax.jit(lambda: formats.reciprocal(jnp.asarray(x)))(), want)


class SpecTest(parameterized.TestCase):
    """Static descriptions: identity, attributes of the FFI call, names."""

    def test_hash_and_replace(self):
        spec = spec_of(CONFIGS[0], 100)
        self.assertEqual(hash(spec), hash(spec_of(CONFIGS[0], 100)))
        self.assertNotEqual(spec, spec.replace(act_rule="floor"))
        self.assertEqual(spec.blocks, 8)

    def test_ffi_attrs(self):
        """The handlers decode exactly these integers."""
        spec = spec_of(CONFIGS[8], 100).replace(lora_smoothed=True)
        want = {
            "format": 2,
            "k": 100,
            "k_pad": 128,
            "block_size": 128,
            "act_unsigned": 1,
            "act_rule": 0,
            "lora_smoothed": 1,
        }
        self.assertEqual(spec.ffi_attrs(), want)
        self.assertEqual(spec_of(CONFIGS[2], 64).ffi_attrs()["act_rule"], 1)
        self.assertEqual(spec_of(CONFIGS[2], 64).ffi_attrs()["format"], 1)

    @parameterized.parameters(
        (1, 16, 32),
        (32, 16, 32),
        (33, 16, 64),
        (48, 32, 64),
        (65, 64, 128),
        (129, 128, 256),
        (1, None, 32),
        (100, None, 128),
    )
    def test_padded_k(self, k, block, k_pad):
        self.assertEqual(formats.padded_k(k, block), k_pad)

    @parameterized.parameters("fp4", "NVFP4", None, 4)
    def test_unknown_format(self, name):
        with self.assertRaisesRegex(
            ValueError, r"jax_w4a4\.f: unknown format .*; expected one of 'nvfp4', 'mxfp4', 'int4'"
        ):
            formats.get_format(name, "f")

    @parameterized.parameters(("nvfp4", 32), ("mxfp4", None), ("int4", 16), ("int4", True))
    def test_bad_block_size(self, name, block_size):
        with self.assertRaisesRegex(
            ValueError, rf"jax_w4a4\.f: block_size={block_size} does not exist for format '{name}'"
        ):
            formats.check_block_size(formats.get_format(name, "f"), block_size, "f")


class SignOrderTest(parameterized.TestCase):
    """The prepared layout of e2m1 codes: the kernels' instructions depend on every bit's place."""

    @parameterized.parameters(((3, 64),), ((2, 5, 16),))
    def test_places(self, shape):
        packed = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        got = np.asarray(formats.sort_signs(packed))
        words, moved = packed.view("<u4"), got.view("<u4")
        np.testing.assert_array_equal(moved & 0x77777777, words & 0x77777777)
        for i in range(4):
            np.testing.assert_array_equal(moved >> (8 * i + 7) & 1, words >> (4 * i + 3) & 1)
            np.testing.assert_array_equal(moved >> (8 * i + 3) & 1, words >> (4 * i + 19) & 1)

    def test_round_trip(self):
        """Both ways, eagerly, compiled and mapped; the model agrees."""
        packed = np.random.default_rng(1).integers(0, 256, (4, 6, 48), np.uint8)
        moved = formats.sort_signs(packed)
        np.testing.assert_array_equal(formats.unsort_signs(moved), packed)
        np.testing.assert_array_equal(model.linear(np.asarray(moved)), packed)
        np.testing.assert_array_equal(jax.vmap(jax.jit(formats.sort_signs))(packed), moved)
        np.testing.assert_array_equal(formats.linear_codes(moved, "sorted"), packed)
        self.assertIs(formats.linear_codes(packed, "linear"), packed)


if __name__ == "__main__":
    absltest.main()
