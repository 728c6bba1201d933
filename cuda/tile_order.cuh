// The order in which the persistent kernels take the tiles of a product.
#pragma once

namespace jax_w4a4 {

struct TileIndex {
  int m, n;
};

// m fastest inside a group of group_m m-tiles, so that what runs at one time shares few weight rows
// (each read once from HBM) and the group's activations stay in L2.
__device__ __forceinline__ TileIndex tile_index(int index, int m_tiles, int n_tiles, int group_m) {
  const int group_tiles = group_m * n_tiles;
  const int group = index / group_tiles;
  const int first_m = group * group_m;
  const int height = min(group_m, m_tiles - first_m);
  const int rest = index - group * group_tiles;
  const int n = rest / height;
  return {first_m + rest - n * height, n};
}

}  // namespace jax_w4a4
