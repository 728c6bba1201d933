"""The layer shapes that are timed."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """M, K, N and rank of a layer."""

    m: int
    k: int
    n: int
    rank: int

    @property
    def flops(self) -> int:
        """The main product only, so that routes with and without a low-rank branch compare."""
        return 2 * self.m * self.k * self.n

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}r{self.rank}"

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """'MxKxN' or 'MxKxNrR'."""
        dims, _, rank = text.partition("r")
        m, k, n = map(int, dims.split("x"))
        return cls(m, k, n, int(rank or 0))


# Z-Image Turbo at 1024 x 1024 (svdquant-kernels' production shapes), one that divides by no tile
# (Qwen-Image, 83^2 tokens) and a square one.
PREFILL = (
    Shape(4352, 3840, 3072, 128),
    Shape(4352, 3840, 15360, 128),
    Shape(4352, 15360, 3840, 128),
    Shape(4352, 10240, 3072, 32),
    Shape(8192, 8192, 8192, 128),
    Shape(6889, 3072, 12288, 128),
)
