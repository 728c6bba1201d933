// Rows of x sorted by group: which rows are whose, and the tiles that they make.
//
// `bounds` holds groups + 1 row numbers that do not decrease: group g has the rows from bounds[g] up to
// bounds[g + 1]. A row tile belongs to one group and begins at any row; its last rows may be another
// group's and are not its to store.
#pragma once

#include <cstdint>

namespace jax_w4a4::sm90 {

// A row tile of the table that a launch before the gemm writes. The table's first entry holds the number
// of the others in `group`.
struct alignas(16) GroupTile {
  int group;
  int first;       // number of the group's first tile
  int begin, end;  // rows of the group
};

// One warp: the group of a row, -1 if it has none.
__device__ __forceinline__ int find_group(const int* bounds, int groups, int row, int lane) {
  int before = 0;  // groups that end at the row or before
  for (int g = lane; g < groups; g += 32) before += __ldg(bounds + g + 1) <= row;
  before = __reduce_add_sync(0xFFFFFFFFu, before);
  return before < groups && row >= __ldg(bounds) ? before : -1;
}

// One warp walks the groups, 32 at a time: `visit(group, first, begin, end)` in every lane, `first` the
// tiles of `tile` rows before the group's. Returns the number of tiles.
template <class Visit>
__device__ __forceinline__ int walk_groups(const int* bounds, int groups, int tile, int lane,
                                           Visit visit) {
  int before = 0;
  for (int base = 0; base < groups; base += 32) {
    const int group = base + lane;
    const int begin = __ldg(bounds + min(group, groups));
    const int end = __ldg(bounds + min(group + 1, groups));
    const int tiles = (end - begin + tile - 1) / tile;
    int upto = tiles;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, upto, d);
      if (lane >= d) upto += other;
    }
    visit(group, before + upto - tiles, begin, end);
    before += __shfl_sync(0xFFFFFFFFu, upto, 31);
  }
  return before;
}

// One warp writes the table for tiles of `tile` rows.
__device__ __forceinline__ void write_group_table(const int* bounds, int groups, int tile, int lane,
                                                  GroupTile* table) {
  const int tiles = walk_groups(bounds, groups, tile, lane, [&](int group, int first, int begin,
                                                                int end) {
    const int4 entry = make_int4(group, first, begin, end);
    int4* at = reinterpret_cast<int4*>(table) + 1 + first;
    for (int row = begin; row < end; row += tile) *at++ = entry;
  });
  if (lane == 0) *reinterpret_cast<int4*>(table) = make_int4(tiles, 0, 0, 0);
}

}  // namespace jax_w4a4::sm90
