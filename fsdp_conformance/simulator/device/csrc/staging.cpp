#include "staging.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <utility>

namespace sim {

namespace {

constexpr size_t kUnit = size_t{1} << 20;
/// Free memory that is kept.
constexpr size_t kMostKept = size_t{256} << 20;
constexpr size_t kAlignment = 64;

struct Kept {
  std::mutex mutex;
  std::multimap<size_t, void*> by_size;
  size_t nbytes = 0;
};

Kept& kept() {
  static auto* all = new Kept();  // never destroyed: a transport's threads may release memory while the process exits
  return *all;
}

void* take(size_t nbytes) {
  {
    Kept& all = kept();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (const auto found = all.by_size.find(nbytes); found != all.by_size.end()) {
      void* memory = found->second;
      all.by_size.erase(found);
      all.nbytes -= nbytes;
      return memory;
    }
  }
  void* memory = std::aligned_alloc(kAlignment, nbytes);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

void give_back(void* memory, size_t nbytes) {
  Kept& all = kept();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.nbytes + nbytes > kMostKept) {
    std::free(memory);
    return;
  }
  all.by_size.emplace(nbytes, memory);
  all.nbytes += nbytes;
}

}  // namespace

at::Tensor staging(int64_t numel, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype);
  const auto asked = static_cast<size_t>(numel) * c10::elementSize(dtype);
  if (asked < kUnit) {
    return at::empty({numel}, options);
  }
  const size_t nbytes = (asked + kUnit - 1) / kUnit * kUnit;
  return at::from_blob(take(nbytes), {numel}, [nbytes](void* memory) { give_back(memory, nbytes); }, options);
}

int64_t free_staging() {
  Kept& all = kept();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& [nbytes, memory] : all.by_size) {
    std::free(memory);
  }
  all.by_size.clear();
  return static_cast<int64_t>(std::exchange(all.nbytes, 0));
}

void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_contiguous() && from.is_contiguous()) {
    if (to.nbytes() > 0) {
      std::memcpy(to.data_ptr(), from.data_ptr(), to.nbytes());
    }
    return;
  }
  at::Tensor target = to;
  target.copy_(from);
}

}  // namespace sim
