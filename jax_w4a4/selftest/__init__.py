"""`python -m jax_w4a4 selftest`: proves the kernels on the GPU at hand (docs/selftest.md).

record.py keeps what a run found and answers whether a kernel may run; runner.py starts and watches
the parts; parts.py has them, probes.py their data.
"""

from jax_w4a4.selftest.record import Identity, UnprovenError, identity, require, unproven

__all__ = ["Identity", "UnprovenError", "identity", "require", "unproven"]
