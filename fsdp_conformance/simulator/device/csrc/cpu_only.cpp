#include "cpu_only.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>
#include <unordered_set>

namespace sim {

namespace {

struct CpuOnly {
  std::mutex mutex;
  std::unordered_set<std::string> operations;
  std::atomic<bool> any{false};
};

CpuOnly& cpu_only() {
  static auto* const all = new CpuOnly();
  return *all;
}

}  // namespace

void add_cpu_only(const std::string& operation) {
  std::lock_guard<std::mutex> lock(cpu_only().mutex);
  cpu_only().operations.insert(operation);
  cpu_only().any.store(true, std::memory_order_release);
}

void clear_cpu_only() {
  std::lock_guard<std::mutex> lock(cpu_only().mutex);
  cpu_only().operations.clear();
  cpu_only().any.store(false, std::memory_order_release);
}

void check_not_cpu_only(const std::string& operation) {
  if (!cpu_only().any.load(std::memory_order_acquire)) {
    return;
  }
  std::lock_guard<std::mutex> lock(cpu_only().mutex);
  TORCH_CHECK_NOT_IMPLEMENTED(
      cpu_only().operations.count(operation) == 0, "Could not run '", operation,
      "' with arguments from the 'CUDA' backend: the program has registered a kernel for the CPU, and none for CUDA.");
}

}  // namespace sim
