"""Strict JAX settings for every test: what survives here survives a user's strict program."""

import os
import warnings

# Threads of OpenBLAS spin while they wait, so with two of them in each worker of pytest-xdist a
# product of small matrices can take five times as long. Set before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax  # noqa: E402
import pytest  # noqa: E402

# Sharding tests need several devices; set before any backend starts.
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def pytest_collection_modifyitems(config, items):
    if not any("gpu" in item.keywords for item in items) or _has_gpu():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _package_warnings_are_errors():
    """A warning raised from this package's own lines is a defect unless the test asks for it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module=r"jax_w4a4(\..*)?")
        yield
