"""The CUDA kernels and their FFI handlers on a real device: `pytest -m gpu`."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

import gpu_grouped
import gpu_parity
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jax_w4a4 import _ffi, formats, plan, primitives
from jax_w4a4.grouped import grouped_matmul
from jax_w4a4.matmul import matmul, quantize_activation
from jax_w4a4.quantize import quantize

pytestmark = pytest.mark.gpu

GRID = [
    (format, rank, m)
    for format in gpu_parity.FORMATS
    for rank in gpu_parity.RANKS
    for m in gpu_parity.ROWS
]


def layer(m=64, n=256, k=256, rank=16, format="nvfp4", seed=0):
    kx, kw = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(kx, (m, k), jnp.bfloat16)
    w = quantize(jax.random.normal(kw, (n, k)) / k**0.5, format=format, rank=rank)
    return x, w


class Parity(parameterized.TestCase):
    """Every format, rank and M, ragged N and K, against the float64 model."""

    @parameterized.parameters(*GRID)
    def test_cell(self, format, rank, m):
        for cell in gpu_parity.cells_of(format, rank, m):
            result = gpu_parity.run_cell(cell)
            self.assertEqual(result["failures"], [], msg=str(cell))

    @parameterized.parameters(
        (path, tile_m, cluster)
        for path in gpu_parity.V2_PATHS
        for tile_m in plan.budget.V2_PATHS[path].tiles
        for cluster in (1, 2)
    )
    def test_v2_cell(self, path, tile_m, cluster):
        for cell in gpu_parity.v2_cells_of(path, tile_m, cluster):
            result = gpu_parity.run_cell(cell)
            self.assertEqual(result["failures"], [], msg=str(cell))

    @parameterized.parameters(*gpu_parity.extra_cells())
    def test_extra_cell(self, cell):
        self.assertEqual(gpu_parity.run_cell(cell)["failures"], [])


class GroupedParity(parameterized.TestCase):
    """A sample of the cells of gpu_grouped; the script runs them all."""

    @parameterized.parameters(*([cell] for cell in [*gpu_grouped.cells()][::25]))
    def test_cell(self, grouped):
        self.assertEqual(gpu_grouped.run(grouped)["failures"], [])

    @parameterized.parameters(8, 256)
    def test_driver_reports_the_plan(self, rows):
        weights = jax.vmap(lambda w: quantize(w, "mxfp4", rank=16))(jnp.ones((4, 600, 256)))
        x = jnp.ones((4 * rows, 256), jnp.bfloat16)
        sizes = jnp.full(4, rows)
        grouped_matmul(x, weights, sizes, implementation="cuda").block_until_ready()
        launch = _ffi.last_launch()
        with plan.recording() as plans:
            jax.make_jaxpr(lambda *a: grouped_matmul(*a, precision="fastest"))(x, weights, sizes)
        design = plan.budget.DESIGNS["sm90_grouped"]
        self.assertEqual(launch["dynamic_smem_bytes"], plans[-1].smem_bytes)
        self.assertEqual(launch["local_bytes"], 0, "registers were spilled")
        self.assertEqual(launch["blocks_per_sm"], design.ctas_per_sm(plans[-1].tile_m))


class RawCall:
    """A gemm FFI call whose attributes and operands a test may spoil before it is compiled."""

    target = "jax_w4a4.gemm.v4"

    def __init__(self, m=20, n=40, k=64, rank=16, format="nvfp4", kernel="sm90_v1"):
        x, w = layer(m, n, k, rank, format)
        out_dtype = "bfloat16" if kernel == "sm90_v2" else "float32"
        spec = w.spec(out_dtype)
        cell = gpu_parity.Cell(format, rank, m, n, k, out_dtype=out_dtype, kernel=kernel)
        found = gpu_parity.solve(cell, spec)
        self.plan = dict(found.ffi_attrs())
        self.spec = dict(spec.ffi_attrs())
        for_quantize, for_gemm = gpu_parity.operands_of(w, spec)
        params = {
            "spec": spec,
            "plan": found,
            "implementation": "cuda",
        }
        for_codes = plan.solve(gpu_parity.problem_of(cell, spec, n=0), "sm_90")
        xp, xs, la = primitives.quantize_p.bind(x, *for_quantize, **{**params, "plan": for_codes})
        self.operands = [xp, xs, for_quantize[1], la, *for_gemm]
        self.results = [jax.ShapeDtypeStruct((m, n), out_dtype)]
        self.results += [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in found.workspace(m, "gemm")]
        self.expected = primitives.gemm_p.bind(*self.operands, **params)[0]

    def compile(self):
        def f(*operands):
            call = jax.ffi.ffi_call(self.target, self.results)
            return call(*operands, plan=self.plan, spec=self.spec)

        return jax.jit(f).lower(*self.operands).compile()

    def run(self):
        return jax.block_until_ready(self.compile()(*self.operands))


class HandlerErrors(parameterized.TestCase):
    """What a handler refuses, with which status, and when: at compile where it can be known."""

    def test_unspoiled_call_is_accepted(self):
        call = RawCall()
        np.testing.assert_array_equal(call.run()[0], call.expected)

    @parameterized.parameters(
        ("schema", 1, "INVALID_ARGUMENT", "plan schema 1"),
        ("kernel", 2, "FAILED_PRECONDITION", "kernel 2"),
        ("cc", 100, "FAILED_PRECONDITION", "sm_100"),
        ("tile_m", 48, "INVALID_ARGUMENT", "tile"),
        ("tile_n", 256, "INVALID_ARGUMENT", "tile"),
        ("cluster", 2, "INVALID_ARGUMENT", "cluster 2"),
        ("threads", 128, "INVALID_ARGUMENT", "128 threads"),
        ("main_stages", 3, "INVALID_ARGUMENT", "main 3"),
    )
    def test_plan_errors_surface_at_compile(self, key, value, status, text):
        call = RawCall()
        call.plan[key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s){status}.*{text}"):
            call.compile()

    @parameterized.parameters(
        ("format", 3, "unknown format"),
        ("block_size", 48, "block_size=48"),
        ("k_pad", 65, "k_pad=65"),
        ("act_unsigned", 1, "act_unsigned=1"),
    )
    def test_spec_errors_surface_at_compile(self, key, value, text):
        call = RawCall()
        call.spec[key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s)INVALID_ARGUMENT.*{text}"):
            call.compile()

    @parameterized.parameters(
        ("off_act", 0, "overlap"),
        ("off_act", 64, "128-byte aligned"),
        ("off_aux", 1 << 20, "aux"),
        ("bytes_weight", 128, "weight"),
        ("bytes_lora_up", 128, "lora_up"),
        ("lora_stages", 0, "no LoRA stage"),
        ("smem_bytes", 300_000, "300000"),
        ("smem_bytes", 1024, "inside"),
    )
    def test_regions_that_the_kernel_cannot_honour(self, key, value, text):
        call = RawCall()
        call.plan[key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s)FAILED_PRECON.*{text}"):
            call.run()

    @parameterized.parameters("missing", "surplus")
    def test_attribute_count(self, kind):
        call = RawCall()
        if kind == "missing":
            del call.plan["q_rows"]
        else:
            call.plan["extra"] = 1
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "INVALID_ARGUMENT"):
            call.run()

    @parameterized.parameters(
        (0, lambda a: a.astype(jnp.int8), "activation is"),
        (0, lambda a: a[:, :-1], "activation is"),
        (1, lambda a: a.astype(jnp.float32), "activation scales is"),
        (1, lambda a: a[:-1], "activation scales is"),
        (3, lambda a: a.astype(jnp.float32), "lora_act is"),
        (3, lambda a: a[:, :-1], "lora_act is"),
        (4, lambda a: a[:-1], "scales is"),
        (4, lambda a: a.reshape(-1), "packed is"),
        (8, lambda a: jnp.zeros((3,), jnp.float32), "channel_scale is"),
        (9, lambda a: jnp.zeros((40,), jnp.bfloat16), "bias is"),
        (10, lambda a: jnp.zeros((40, 1), jnp.uint8), "scale_range is"),
    )
    def test_operands_are_checked(self, index, spoil, text):
        call = RawCall()
        call.operands[index] = spoil(call.operands[index])
        with self.assertRaisesRegex(
            jax.errors.JaxRuntimeError, f"(?s)INVALID_ARGUMENT.*{text}.*expected"
        ):
            call.run()

    @parameterized.parameters("mxfp4", "nvfp4")
    def test_unspoiled_v2_call_is_accepted(self, format):
        call = RawCall(m=300, n=264, k=416, format=format, kernel="sm90_v2")
        np.testing.assert_array_equal(call.run()[0], call.expected)

    @parameterized.parameters(
        (lambda r: r[:1], "has 0 results after y; the plan's kernel has 3"),
        (lambda r: [r[0], r[2], r[1], r[3]], "act is"),
        (lambda r: [*r[:2], jax.ShapeDtypeStruct((20,), jnp.float32), r[3]], "token_scale is"),
        (lambda r: [*r[:3], jax.ShapeDtypeStruct((40, 3), jnp.float32)], "rows is"),
        (lambda r: [jax.ShapeDtypeStruct((20, 40), jnp.float32), *r[1:]], "result is"),
    )
    def test_v2_workspace_is_checked(self, spoil, text):
        call = RawCall(format="mxfp4", kernel="sm90_v2")
        call.results = spoil(call.results)
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s)INVALID_ARGUMENT.*{text}"):
            call.run()

    @parameterized.parameters(
        ("off_weight", 0, "overlap"),
        ("off_store", 0, "overlap"),
        ("stage_bytes", 1000, "1024"),
        ("smem_bytes", 300_000, "300000"),
    )
    def test_v2_regions_that_the_kernel_cannot_honour(self, key, value, text):
        call = RawCall(format="mxfp4", kernel="sm90_v2")
        call.plan[key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s)FAILED_PRECON.*{text}"):
            call.run()

    @parameterized.parameters(
        (lambda r: r, None),
        (lambda r: r[:-1], "has 6 results after y; the plan's kernel has 7"),
        (lambda r: [*r[:-1], jax.ShapeDtypeStruct((2 * 17, 32), jnp.float32)], "down_sums is"),
        (lambda r: [*r[:-1], jax.ShapeDtypeStruct((3 * 17, 16), jnp.float32)], "down_sums is"),
        (lambda r: [*r[:-1], jax.ShapeDtypeStruct((3 * 17, 32), jnp.bfloat16)], "down_sums is"),
    )
    def test_sums_of_low_rank_down_are_checked(self, spoil, text):
        """Of a call whose LoRA-down is in the gemm's launch."""
        x, w = layer(17, 40, 4096, 32, "mxfp4")
        spec = w.spec("bfloat16")
        cell = gpu_parity.Cell("mxfp4", 32, 17, 40, 4096, kernel="sm90_decode", down_ahead=4)
        found = gpu_parity.solve(cell, spec)
        for_quantize, for_gemm = gpu_parity.operands_of(w, spec)
        buffers = found.workspace(17, "matmul")
        self.assertEqual(buffers[-1].name, "down_sums")
        results = [jax.ShapeDtypeStruct((17, 40), jnp.bfloat16)]
        results += [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in buffers]

        def f(*operands):
            call = jax.ffi.ffi_call(primitives.FFI_TARGETS["jax_w4a4_matmul"], spoil(results))
            return call(*operands, plan=found.ffi_attrs(), spec=spec.ffi_attrs())

        def run():
            return jax.block_until_ready(jax.jit(f)(x, *for_quantize, *for_gemm))

        if text is None:
            np.testing.assert_array_equal(run()[0], matmul(x, w, implementation="cuda"))
            return
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s)INVALID_ARGUMENT.*{text}"):
            run()

    def test_client_survives_an_error(self):
        call = RawCall()
        call.plan["off_act"] = 0
        with self.assertRaises(jax.errors.JaxRuntimeError):
            call.run()
        np.testing.assert_array_equal(RawCall().run()[0], call.expected)


class Boundary(parameterized.TestCase):
    """What crosses the FFI boundary: nibbles, alignment, empty operands, no copies."""

    @parameterized.parameters(("nvfp4", 0x2), ("mxfp4", 0x2), ("int4", 0x1))
    def test_even_k_is_the_low_nibble(self, format, one):
        call = RawCall(m=2, n=16, k=128, rank=0, format=format)
        scales = call.operands[1]
        call.operands[1] = jnp.ones(scales.shape, scales.dtype)
        call.operands[5] = jnp.ones(call.operands[5].shape, scales.dtype)
        call.operands[6] = jnp.ones_like(call.operands[6])
        act = np.zeros(call.operands[0].shape, np.uint8)
        act[0, 0], act[1, 0] = one, one << 4  # x[0] = e_0, x[1] = e_1
        weight = np.zeros(call.operands[4].shape, np.uint8)
        codes = np.arange(16, dtype=np.uint8)
        weight[:, 0] = codes | (codes[::-1] << 4)
        call.operands[0], call.operands[4] = jnp.asarray(act), jnp.asarray(weight)
        if format == "int4":
            values = formats.decode_int4(codes)
        else:
            values = formats.decode_e2m1(codes)
        got = np.asarray(call.run()[0])
        np.testing.assert_array_equal(got[0], values)
        np.testing.assert_array_equal(got[1], values[::-1])

    def test_slices_at_any_offset(self):
        # Rows of x have 162 bytes, of codes 48, of scales 6: most slices start at no multiple of
        # 256, many at none of 16, and XLA has to copy those.
        x, w = layer(m=33, n=48, k=81, rank=0)
        full = jax.tree.map(lambda a: a, w)

        @jax.jit
        def part(x, w, start):
            cut = dataclasses.replace(
                w,
                packed=jax.lax.dynamic_slice_in_dim(w.packed, start, 7),
                scales=jax.lax.dynamic_slice_in_dim(w.scales, start, 7),
            )
            return matmul(x, cut, implementation="cuda")

        whole = np.asarray(matmul(x, full, implementation="cuda"))
        for start in range(0, 41, 5):
            np.testing.assert_array_equal(part(x, w, start), whole[:, start : start + 7])
        for offset in (1, 3, 5):
            rows = jax.jit(lambda x, w, o=offset: matmul(x[o:], w, implementation="cuda"))(x, w)
            np.testing.assert_array_equal(rows, whole[offset:])

    def test_empty_m(self):
        x, w = layer()
        before = _ffi.counters()["calls"]
        y = matmul(x[:0], w, implementation="cuda")
        self.assertEqual(y.shape, (0, 256))
        self.assertEqual(_ffi.counters()["calls"], before)

    def test_public_call_runs_the_kernel_by_default(self):
        x, w = layer()
        before = _ffi.counters()["calls"]
        default = matmul(x, w)
        self.assertGreater(_ffi.counters()["calls"], before)
        np.testing.assert_array_equal(default, matmul(x, w, implementation="cuda"))
        xla = matmul(x, w, implementation="xla")
        np.testing.assert_allclose(
            default.astype(jnp.float32), xla.astype(jnp.float32), rtol=2e-2, atol=2e-2
        )

    @parameterized.parameters((17, 16), (64, 32))
    def test_low_rank_down_in_the_launch_takes_nothing_of_the_call_before(self, m, rank):
        """Calls in a loop share a workspace, in which the last one's sums and lora_act lie: what
        waits for this one's must not take them for these."""
        _, w = layer(m, 512, 6144, rank, "mxfp4")
        xs = jax.random.normal(jax.random.key(0), (50, m, 6144), jnp.bfloat16)
        with plan.recording() as plans:
            jax.make_jaxpr(lambda x: matmul(x, w))(xs[0])
        self.assertEqual(plans[-1].ffi_attrs()["down_ahead"], 4)
        loop = jax.jit(lambda xs: jax.lax.map(lambda x: matmul(x, w, implementation="cuda"), xs))
        found = np.asarray(loop(xs).astype(jnp.float32))
        for x, y in zip(xs, found, strict=True):
            want = matmul(x, w, implementation="cuda").astype(jnp.float32)
            np.testing.assert_array_equal(y, want)
        want = jax.vmap(lambda x: matmul(x, w, implementation="xla"))(xs)
        np.testing.assert_allclose(found, want.astype(jnp.float32), rtol=2e-2, atol=0.5)

    @parameterized.parameters("argument", "stack")
    def test_no_copy_of_weights(self, kind):
        # 256 x 512 / 2 bytes of codes and 256 x 32 of scales: slices start at multiples of 256.
        layers = [layer(m=64, n=512, k=512, rank=0, seed=i) for i in range(6)]
        x = layers[0][0]
        weights = [w for _, w in layers]
        if kind == "argument":
            f = jax.jit(lambda x, ws: [matmul(x, w, implementation="cuda") for w in ws])
            compiled = f.lower(x, weights).compile()
            self.assertNotIn(" copy(", compiled.as_text())
        else:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)

            def one(x, ws):
                return matmul(x, jax.tree.map(lambda a: a[3], ws), implementation="cuda")

            compiled = jax.jit(one).lower(x, stacked).compile()
            np.testing.assert_array_equal(
                compiled(x, stacked), matmul(x, weights[3], implementation="cuda")
            )
        # Temporaries hold the quantized activation, never a weight.
        temporary = compiled.memory_analysis().temp_size_in_bytes
        activation = 64 * 512 * 2 + 2048  # in bf16, as the gemm of nvfp4 reads them
        calls = 6 if kind == "argument" else 1
        self.assertLessEqual(temporary, calls * activation)
        self.assertLess(activation, weights[0].nbytes_packed)


class PlanAndLaunch(parameterized.TestCase):
    """The kernel is launched with what the plan says."""

    @parameterized.product(format=gpu_parity.FORMATS, tile_m=(32, 64, 128), rank=(0, 32))
    def test_driver_reports_the_plan(self, format, tile_m, rank):
        cell = gpu_parity.Cell(
            format, rank, 200, 300, 256, kernel="sm90_v1", tile_m=tile_m, special=False
        )
        self.assertEqual(gpu_parity.run_cell(cell)["failures"], [])
        x, w = layer(200, 300, 256, rank, format)
        found = gpu_parity.solve(cell, w.spec("bfloat16"))
        launch = _ffi.last_launch()
        self.assertEqual(launch["dynamic_smem_bytes"], found.smem_bytes)
        self.assertGreaterEqual(launch["max_dynamic_smem_bytes"], found.smem_bytes)
        self.assertEqual(launch["static_smem_bytes"], 0)
        self.assertEqual(launch["block"], found.threads)
        self.assertEqual(launch["grid"], (-(-200 // tile_m), 3))
        self.assertEqual(launch["local_bytes"], 0, "registers were spilled")
        self.assertGreaterEqual(launch["blocks_per_sm"], 1)

    @parameterized.parameters(
        (path, tile_m, cluster, stages)
        for path in gpu_parity.V2_PATHS
        for tile_m in plan.budget.V2_PATHS[path].tiles
        for cluster in (1, 2)
        for stages in (None, 3)
    )
    def test_driver_reports_the_v2_plan(self, path, tile_m, cluster, stages):
        cell = gpu_parity.Cell(
            rank=32,
            m=1500,
            n=3000,
            k=256,
            kernel="sm90_v2",
            tile_m=tile_m,
            cluster=cluster,
            main_stages=stages,
            special=False,
            **gpu_parity.V2_PATHS[path],
        )
        self.assertEqual(gpu_parity.run_cell(cell)["failures"], [])
        w = gpu_parity.make_weight(cell, np.random.default_rng(0))
        found = gpu_parity.solve(cell, w.spec("bfloat16"))
        launch = _ffi.last_launch()
        self.assertEqual(launch["dynamic_smem_bytes"], found.smem_bytes)
        self.assertEqual(launch["static_smem_bytes"], 0)
        self.assertEqual(launch["block"], found.threads)
        self.assertEqual(launch["cluster"], cluster)
        target = plan.targets.current()
        where = plan.schedule(1500, 3000, tile_m, found.tile_n, cluster, target)
        # Persistent: as many clusters as run at once, and no more than there are tiles.
        self.assertEqual(launch["grid"], (cluster * min(where.groups, where.tiles), 1))
        self.assertEqual(launch["local_bytes"], 0, "registers were spilled")
        self.assertEqual(launch["blocks_per_sm"], 1)

    @parameterized.parameters("mxfp4", "nvfp4")
    def test_prefill_runs_on_v2(self, format):
        """The public call, from x and from a shared activation, picks the fast kernel by itself."""
        x, w = layer(m=512, n=384, k=256, rank=32, format=format)
        y = matmul(x, w, implementation="cuda")
        y.block_until_ready()
        self.assertEqual(_ffi.last_launch()["block"], 384)
        shared = matmul(quantize_activation(x, w), w, implementation="cuda").block_until_ready()
        self.assertEqual(_ffi.last_launch()["block"], 384)
        xla = np.asarray(matmul(x, w, implementation="xla")).astype(np.float32)
        for got in (y, shared):
            got = np.asarray(got).astype(np.float32)
            self.assertLess(np.linalg.norm(got - xla), 4e-3 * np.linalg.norm(xla))
        small = matmul(x[:64], w, implementation="cuda").block_until_ready()
        self.assertEqual(_ffi.last_launch()["block"], 640)
        np.testing.assert_allclose(
            small.astype(jnp.float32), y[:64].astype(jnp.float32), rtol=2e-2, atol=2e-2
        )

    def test_device_is_the_planned_target(self):
        self.assertEqual(plan.targets.current().cc, 90)
        self.assertIn("90a", _ffi.build_info()["cuda_archs"])


def run_child(length, flags, *options):
    script = pathlib.Path(__file__).with_name("gpu_command_buffers.py")
    env = dict(os.environ, XLA_FLAGS=flags, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    child = subprocess.run(
        [sys.executable, str(script), str(length), *options],
        env=env,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout.splitlines()[-1])


class CommandBuffers(parameterized.TestCase):
    """Handlers inside CUDA graphs: right results over moving addresses, replays without calls."""

    def test_default_flags(self):
        report = run_child(8, "")
        self.assertEqual(report["wrong"], 0, report)
        self.assertGreaterEqual(report["addresses"], 17, report)
        # The first run is not captured; every new set of addresses afterwards is.
        self.assertGreaterEqual(report["moving"]["captured"], 8 * 15, report)
        self.assertLess(report["still"]["calls"], 10 * 8, report)
        self.assertGreater(report["alternating"]["captured"], 0, report)

    @parameterized.parameters("mxfp4", "nvfp4")
    def test_prefill_kernel(self, format):
        """Tensor maps hold addresses: a graph that kept old ones would read or write elsewhere."""
        report = run_child(8, "", "300", format)
        self.assertEqual(report["wrong"], 0, report)
        self.assertGreaterEqual(report["addresses"], 17, report)
        self.assertGreaterEqual(report["moving"]["captured"], 8 * 15, report)

    def test_command_buffers_off(self):
        report = run_child(8, "--xla_gpu_enable_command_buffer=")
        self.assertEqual(report["wrong"], 0, report)
        self.assertEqual(report["moving"], {"calls": 160, "captured": 0}, report)
        self.assertEqual(report["still"], {"calls": 80, "captured": 0}, report)

    @parameterized.parameters(1, 3)
    def test_short_chains(self, length):
        report = run_child(length, "--xla_gpu_graph_min_graph_size=1")
        self.assertEqual(report["wrong"], 0, report)
        self.assertGreaterEqual(report["moving"]["captured"], length * 10, report)

    @parameterized.parameters((1, "mxfp4"), (16, "nvfp4"), (64, "mxfp4"), (128, "nvfp4"))
    def test_a_decode_step_is_one_graph(self, rows, format):
        """After the first steps no handler runs: the host starts one graph per step."""
        flags = "--xla_enable_command_buffers_during_profiling=true"
        report = run_child("stack", flags, "16", str(rows), format)
        self.assertEqual(report["kernel"], "sm90_decode", report)
        self.assertEqual(report["wrong"], 0, report)
        self.assertGreaterEqual(report["first"]["captured"], 16, report)
        self.assertEqual(report["replays"], {"calls": 0, "captured": 0}, report)
        self.assertEqual(report["profiled"], {"calls": 0, "captured": 0}, report)
        self.assertEqual((report["graphs"], report["graph_launches"]), (1, 10), report)

    def test_a_decode_step_without_command_buffers(self):
        report = run_child("stack", "--xla_gpu_enable_command_buffer=", "16", "1", "mxfp4")
        self.assertEqual(report["kernel"], "sm90_decode", report)
        self.assertEqual(report["wrong"], 0, report)
        self.assertEqual(report["replays"], {"calls": 160, "captured": 0}, report)
        self.assertEqual(report["graph_launches"], 0, report)


class DependentLaunch(parameterized.TestCase):
    """Quantizer and gemm of one call overlap, also inside a captured graph."""

    def test_overlap_saves_time_under_capture(self):
        layers = [layer(m=16, n=2048, k=2048, rank=16, seed=i) for i in range(2)]
        x, weights = layers[0][0], [w for _, w in layers]

        def timed(enabled):
            _ffi.set_dependent_launch(enabled)

            # A new function each time: a fresh executable, captured under this setting.
            def f(x, ws):
                for i in range(32):
                    x = matmul(x, ws[i % 2], implementation="cuda")
                return x

            compiled = jax.jit(f).lower(x, weights).compile()
            before = _ffi.counters()["captured"]
            for _ in range(5):
                compiled(x, weights).block_until_ready()
            self.assertGreater(_ffi.counters()["captured"], before)
            best = float("inf")
            for _ in range(30):
                start = time.perf_counter()
                compiled(x, weights).block_until_ready()
                best = min(best, time.perf_counter() - start)
            return best, np.asarray(compiled(x, weights)).tobytes()

        try:
            rounds = [(timed(False), timed(True)) for _ in range(3)]
        finally:
            _ffi.set_dependent_launch(True)
        without = min(off[0] for off, _ in rounds)
        dependent = min(on[0] for _, on in rounds)
        self.assertEqual(len({bits for pair in rounds for _, bits in pair}), 1)
        print(
            f"\ndependent launch: {without / 32 * 1e6:.2f} us per call without, "
            f"{dependent / 32 * 1e6:.2f} with"
        )
        self.assertLess(dependent, without)
