// Records of waits that end (cuda/watch.h), in memory of the emulated device.
#include "watch.h"

namespace {
jax_w4a4::WaitRecord* g_records;
}

namespace jax_w4a4 {
WaitRecord* WaitRecords() { return g_records; }
}  // namespace jax_w4a4

extern "C" {

void emulator_set_wait_records(jax_w4a4::WaitRecord* records) {
  g_records = records;
}

int emulator_wait_records_bytes() {
  return sizeof(jax_w4a4::WaitRecord) * jax_w4a4::kWaitCtas *
         jax_w4a4::kWaitWarps;
}

// One a line; `records` is a copy.
const char* emulator_stuck_waits(const jax_w4a4::WaitRecord* records) {
  static std::string text;
  text.clear();
  for (const std::string& one : jax_w4a4::StuckWaits(
           records, jax_w4a4::kWaitCtas * jax_w4a4::kWaitWarps)) {
    text += one + "\n";
  }
  return text.c_str();
}

}  // extern "C"
