// What the records of watch.h say.
#include "watch.h"

#include <algorithm>
#include <iterator>

namespace jax_w4a4 {
namespace {

struct RingRoles {
  const char *kernel, *ring, *fills, *empties;
};
constexpr RingRoles kRings[] = {
#define W4A4_RING(id, kernel, ring, fills, empties) {kernel, ring, fills, empties},
    W4A4_RINGS(W4A4_RING)
#undef W4A4_RING
};

std::string Text(const WaitRecord& record) {
  const uint32_t ring = record.what >> 8 & 0xff;
  if (ring >= std::size(kRings)) return "a wait of an unknown ring";
  const RingRoles& names = kRings[ring];
  const bool full = record.what & 2;
  const auto number = [](uint32_t v) { return std::to_string(v); };
  return std::string(names.kernel) + ": role " +
         (full ? names.empties : names.fills) + " waits for barrier " +
         names.ring + (full ? " full" : " empty") + ", stage " +
         number(record.where >> 16) + ", parity " + number(record.what & 1) +
         " (CTA " + number(record.cta) + ", " + number(record.where & 0xff) +
         " of its cluster, warp " + number(record.where >> 8 & 0xff) + ")";
}

}  // namespace

std::vector<std::string> StuckWaits(const WaitRecord* records, int count) {
  std::vector<WaitRecord> found;
  for (int i = 0; i < count; ++i) {
    const WaitRecord record = records[i];
    if ((record.what & 0xffff0000u) == kWaitMagic) found.push_back(record);
  }
  // All began within seconds of each other: the sign of a difference is right
  // although the timer's half wraps.
  std::stable_sort(found.begin(), found.end(),
                   [](const WaitRecord& a, const WaitRecord& b) {
                     return static_cast<int32_t>(a.since - b.since) < 0;
                   });
  std::vector<std::string> texts;
  for (const WaitRecord& record : found) texts.push_back(Text(record));
  return texts;
}

}  // namespace jax_w4a4
