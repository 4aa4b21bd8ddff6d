#include "sync_debug.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace sim {

namespace {

std::atomic<int> chosen_sync_debug_mode{0};

}  // namespace

void set_sync_debug_mode(int mode) {
  TORCH_CHECK(mode >= 0 && mode <= 2, "invalid value of debug_mode, expected one of 0,1,2");
  chosen_sync_debug_mode.store(mode, std::memory_order_relaxed);
}

int sync_debug_mode() {
  return chosen_sync_debug_mode.load(std::memory_order_relaxed);
}

void warn_or_fail_on_sync() {
  const int mode = sync_debug_mode();
  TORCH_CHECK(mode != 2, "called a synchronizing CUDA operation");
  if (mode == 1) {
    TORCH_WARN("called a synchronizing CUDA operation");
  }
}

}  // namespace sim
