#include "allocator.h"

#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <iomanip>
#include <map>
#include <mutex>
#include <sstream>
#include <unordered_map>

#include "gpu_trace.h"
#include "pages.h"
#include "pinned.h"
#include "runtime.h"
#include "settle.h"
#include "torch_version.h"

// Since torch 2.9 an accelerator's allocator can answer torch.accelerator's questions about memory.
#if SIM_TORCH_AT_LEAST(2, 9)
#define SIM_HAS_DEVICE_ALLOCATOR 1
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#else
#define SIM_HAS_DEVICE_ALLOCATOR 0
#endif

namespace sim {

namespace {

struct Block {
  BlockId id = 0;
  c10::DataPtr memory;
  size_t nbytes = 0;
  c10::DeviceIndex device = 0;  // for pinned memory: the device that was current
  bool pinned = false;
  int64_t stream = 0;
  bool counted = true;  // false: allocated by a suspended thread; neither counted nor cached
};

using Pool = std::pair<c10::DeviceIndex, int64_t>;  // device, stream

constexpr c10::DeviceIndex kHostMemory = -1;  // where pinned memory is counted

struct Memory {
  std::mutex mutex;
  std::map<Pool, std::unordered_map<size_t, std::vector<Block*>>> cached;
  std::map<const char*, Block*> by_address;  // in use
  std::unordered_map<BlockId, std::string> names;
  std::atomic<size_t> num_names{0};
  std::map<c10::DeviceIndex, MemoryStats> stats;
  std::atomic<size_t> limit{0};
};

Memory& memory() {
  static auto* all = new Memory();
  return *all;
}

void count_allocated(MemoryStats& stats, int64_t nbytes) {
  stats.allocated += nbytes;
  stats.peak_allocated = std::max(stats.peak_allocated, stats.allocated);
  stats.total_allocated += nbytes;
  stats.num_allocations += 1;
  stats.peak_num_allocations = std::max(stats.peak_num_allocations, stats.num_allocations);
  stats.total_num_allocations += 1;
}
void count_freed(MemoryStats& stats, int64_t nbytes) {
  stats.allocated -= nbytes;
  stats.total_freed += nbytes;
  stats.num_allocations -= 1;
  stats.total_num_frees += 1;
}
void count_reserved(MemoryStats& stats, int64_t nbytes) {
  stats.reserved += nbytes;
  stats.peak_reserved = std::max(stats.peak_reserved, stats.reserved);
}

SitePtr site_of_allocation() {
  if (const auto* site = Operation::current()) {
    return *site;
  }
  return checking() ? here_without_waiting("allocate") : nullptr;
}

void give_back(void* context);

/// "80.00 GiB"
std::string size_text(size_t nbytes) {
  const char* const units[] = {" bytes", " KiB", " MiB", " GiB", " TiB"};
  auto size = static_cast<double>(nbytes);
  size_t unit = 0;
  for (; size >= 1024 && unit < 4; ++unit) {
    size /= 1024;
  }
  std::ostringstream text;
  text << std::fixed << std::setprecision(unit == 0 ? 0 : 2) << size << units[unit];
  return text.str();
}

/// Raise if a new block does not fit into the device, even after its cached blocks are freed.
void make_room(c10::DeviceIndex device, size_t nbytes) {
  Memory& all = memory();
  const size_t limit = all.limit.load(std::memory_order_relaxed);
  if (limit == 0) {
    return;
  }
  std::vector<Block*> dropped;
  size_t held = 0;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    auto& stats = all.stats[device];
    if (static_cast<size_t>(stats.reserved) + nbytes <= limit) {
      return;
    }
    for (auto& [pool, sizes] : all.cached) {
      if (pool.first != device) {
        continue;
      }
      for (auto& [size, blocks] : sizes) {
        stats.reserved -= static_cast<int64_t>(size * blocks.size());
        dropped.insert(dropped.end(), blocks.begin(), blocks.end());
      }
      sizes.clear();
    }
    stats.num_alloc_retries += 1;
    held = static_cast<size_t>(stats.reserved);
    stats.num_ooms += held + nbytes > limit ? 1 : 0;
  }
  for (auto* block : dropped) {
    Checker::get().remove_block(block->id);
    delete block;
  }
  // As on CUDA: programs look for "CUDA out of memory." in the text.
  TORCH_CHECK_WITH(
      OutOfMemoryError, held + nbytes <= limit, "CUDA out of memory. Tried to allocate ", size_text(nbytes), ". GPU ",
      static_cast<int>(device), " has a total capacity of ", size_text(limit), " of which ", size_text(limit - held),
      " is free (simulated: --memory sets the capacity).");
}

/// Memory of a new block, full of NaN, which is what a read of uninitialized memory finds.
c10::DataPtr nan_memory(size_t nbytes) {
  if (nbytes >= kLazyBytes) {
    if (auto lazy = lazy_pages(nbytes)) {
      return lazy;
    }
  }
  auto made = c10::GetCPUAllocator()->allocate(nbytes);
  std::memset(made.get(), 0xFF, nbytes);
  return made;
}

/// A block for `nbytes` on the device's current stream: over `fresh` if that is memory, else over cached or new memory.
c10::DataPtr hand_out(c10::DeviceIndex device, size_t nbytes, c10::DataPtr fresh) {
  Memory& all = memory();
  const c10::Stream stream = current_stream(device);
  const Lane lane = lane_of(stream);
  const bool counted = !Checker::suspended();
  SitePtr site = site_of_allocation();
  Block* block = nullptr;
  if (counted) {
    std::lock_guard<std::mutex> lock(all.mutex);
    auto& sizes = all.cached[{device, stream.id()}];
    if (auto found = sizes.find(nbytes); found != sizes.end() && !found->second.empty()) {
      block = found->second.back();
      found->second.pop_back();
    }
  }
  const bool cached = block != nullptr;
  const bool written = static_cast<bool>(fresh);
  if (!cached) {
    if (counted) {
      make_room(device, nbytes);
    }
    block = new Block();
    block->nbytes = nbytes;
    block->device = device;
    block->stream = stream.id();
    block->counted = counted;
  }
  c10::DataPtr replaced;  // freed at the end, without the lock
  if (fresh) {
    replaced = std::move(block->memory);
    block->memory = std::move(fresh);
  } else if (!cached) {
    try {
      block->memory = nan_memory(nbytes);
    } catch (...) {
      delete block;
      throw;
    }
  } else if (nbytes < kLazyBytes) {
    std::memset(block->memory.get(), 0xFF, nbytes);
  } else if (!renew(block->memory, nbytes)) {
    replaced = std::exchange(block->memory, nan_memory(nbytes));
  }
  if (!cached) {
    block->id = Checker::get().add_block(nbytes, device, /*pinned=*/false);
  }
  Checker::get().allocated(block->id, lane, std::move(site), written);
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    all.by_address[static_cast<const char*>(block->memory.get())] = block;
    if (counted) {
      auto& stats = all.stats[device];
      count_allocated(stats, static_cast<int64_t>(nbytes));
      if (!cached) {
        count_reserved(stats, static_cast<int64_t>(nbytes));
      }
    }
  }
  traced(stream, [&](const auto& hooks) {
    hooks.trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(block->memory.get()));
  });
  return {block->memory.get(), block, &give_back, c10::Device(kSim, device)};
}

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  traced(default_stream(block->device), [&](const auto& hooks) {
    hooks.trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(block->memory.get()));
  });
  Memory& all = memory();
  forget(block->memory.get(), block->nbytes);
  Checker::get().freed(block->id, checking() ? here_without_waiting("free") : nullptr);
  std::string name;
  bool keep = false;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    all.by_address.erase(static_cast<const char*>(block->memory.get()));
    if (auto found = all.names.find(block->id); found != all.names.end()) {
      name = std::move(found->second);
      all.names.erase(found);
      all.num_names.store(all.names.size(), std::memory_order_relaxed);
    }
    if (block->counted) {
      count_freed(all.stats[block->device], static_cast<int64_t>(block->nbytes));
      all.cached[{block->device, block->stream}][block->nbytes].push_back(block);
      keep = true;
    }
  }
  if (!keep) {
    Checker::get().remove_block(block->id);
    delete block;
  }
}

void give_back_pinned(void* context) {
  auto* block = static_cast<Block*>(context);
  Memory& all = memory();
  pinned_memory_freed(block->id);
  Checker::get().freed(block->id, checking() ? here_without_waiting("free") : nullptr);
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    all.by_address.erase(static_cast<const char*>(block->memory.get()));
    all.names.erase(block->id);
    all.num_names.store(all.names.size(), std::memory_order_relaxed);
    auto& stats = all.stats[kHostMemory];
    count_freed(stats, static_cast<int64_t>(block->nbytes));
    stats.reserved -= static_cast<int64_t>(block->nbytes);
  }
  // torch's caching allocator for pinned memory reuses a block only after the copies recorded on it have finished. So
  // the history ends here, and memory that is used again is a new block.
  Checker::get().remove_block(block->id);
  delete block;
}

// As in device.cpp: a test checks that every method overrides something.
#ifdef SIM_FORCE_OVERRIDE
#define SIM_OVERRIDE override
#else
#define SIM_OVERRIDE
#endif

#if SIM_HAS_DEVICE_ALLOCATOR
using AllocatorBase = c10::DeviceAllocator;
using HostAllocatorBase = at::HostAllocator;
#else
using AllocatorBase = c10::Allocator;
using HostAllocatorBase = c10::Allocator;
#endif

struct DeviceMemory final : AllocatorBase {
  c10::DataPtr allocate(size_t nbytes) override {
    const auto device = current_device();
    if (nbytes == 0) {
      return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(kSim, device)};
    }
    return hand_out(device, nbytes, {});
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }  // the context is a block, not the memory
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }

#if SIM_HAS_DEVICE_ALLOCATOR
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, stream);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    reset_accumulated_memory_stats(device);
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    reset_peak_memory_stats(device);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const MemoryStats stats = memory_stats(device);
    c10::CachingDeviceAllocator::DeviceStats all;
    const auto bytes = [](auto& stat, int64_t current, int64_t peak, int64_t allocated, int64_t freed) {
      auto& total = stat[0];  // the aggregate over small and large pools
      total.current = current;
      total.peak = peak;
      total.allocated = allocated;
      total.freed = freed;
    };
    bytes(all.allocated_bytes, stats.allocated, stats.peak_allocated, stats.total_allocated, stats.total_freed);
    bytes(all.active_bytes, stats.allocated, stats.peak_allocated, stats.total_allocated, stats.total_freed);
    bytes(all.requested_bytes, stats.allocated, stats.peak_allocated, stats.total_allocated, stats.total_freed);
    bytes(all.reserved_bytes, stats.reserved, stats.peak_reserved, stats.peak_reserved, 0);
    bytes(
        all.allocation, stats.num_allocations, stats.peak_num_allocations, stats.total_num_allocations,
        stats.total_num_frees);
    bytes(
        all.active, stats.num_allocations, stats.peak_num_allocations, stats.total_num_allocations,
        stats.total_num_frees);
    return all;
  }
  /// Free bytes and total bytes. Since torch 2.10.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) SIM_OVERRIDE {
    return memory_info(device);
  }
#endif
};

struct PinnedMemory final : HostAllocatorBase {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::DeviceType::CPU)};
    }
    auto* block = new Block();
    block->nbytes = nbytes;
    block->device = current_device();
    block->pinned = true;
    // Pages of its own, so that they can be guarded.
    block->memory = nbytes >= kLazyBytes ? lazy_pages(nbytes) : own_pages(nbytes);
    if (!block->memory) {
      block->memory = own_pages(nbytes);
    }
    if (nbytes < kLazyBytes) {
      std::memset(block->memory.get(), 0xFF, nbytes);
    }
    block->id = Checker::get().add_block(nbytes, block->device, /*pinned=*/true);
    Checker::get().allocated(block->id, kHost, site_of_allocation());
    Memory& all = memory();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.by_address[static_cast<const char*>(block->memory.get())] = block;
    count_allocated(all.stats[kHostMemory], static_cast<int64_t>(nbytes));
    count_reserved(all.stats[kHostMemory], static_cast<int64_t>(nbytes));
    return {block->memory.get(), block, &give_back_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }

#if SIM_HAS_DEVICE_ALLOCATOR
  bool record_event(void* memory, void* /*context*/, c10::Stream stream) override {
    const auto located = locate(static_cast<const void*>(memory));
    if (!located || !located->pinned) {
      return false;
    }
    Checker::get().record_stream(located->block, lane_of(stream));
    return true;
  }
  void empty_cache() override {}  // nothing is cached
  at::HostStats get_stats() override {
    const MemoryStats stats = memory_stats(kHostMemory);
    at::HostStats all;
    for (auto* count : {&all.active_requests, &all.allocations}) {
      count->current = stats.num_allocations;
      count->peak = stats.peak_num_allocations;
      count->allocated = stats.total_num_allocations;
      count->freed = stats.total_num_frees;
    }
    for (auto* bytes : {&all.active_bytes, &all.allocated_bytes}) {
      bytes->current = stats.allocated;
      bytes->peak = stats.peak_allocated;
      bytes->allocated = stats.total_allocated;
      bytes->freed = stats.total_freed;
    }
    all.num_host_alloc = stats.total_num_allocations;
    all.num_host_free = stats.total_num_frees;
    return all;
  }
  void reset_accumulated_stats() override {
    reset_accumulated_memory_stats(kHostMemory);
  }
  void reset_peak_stats() override {
    reset_peak_memory_stats(kHostMemory);
  }
#endif
};

Located located(const Block& block) {
  return {block.id, static_cast<const char*>(block.memory.get()), block.nbytes, block.pinned, block.device};
}

}  // namespace

c10::Allocator* device_allocator() {
  static auto* allocator = new DeviceMemory();
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedMemory();
  return allocator;
}

void register_allocators() {
  c10::SetAllocator(kSim, device_allocator());
#if SIM_HAS_DEVICE_ALLOCATOR
  at::setHostAllocator(kSim, static_cast<PinnedMemory*>(pinned_allocator()));
#endif
}

void set_memory_limit(size_t nbytes) {
  memory().limit.store(nbytes);
}

std::pair<size_t, size_t> memory_info(c10::DeviceIndex device) {
  static const auto machine =
      static_cast<size_t>(sysconf(_SC_PAGE_SIZE)) * static_cast<size_t>(sysconf(_SC_PHYS_PAGES));
  const size_t limit = memory().limit.load();
  const size_t total = limit > 0 ? limit : machine;
  const auto reserved = static_cast<size_t>(memory_stats(device).reserved);
  return {total > reserved ? total - reserved : 0, total};
}

c10::DataPtr adopt(c10::DataPtr memory, size_t nbytes, c10::DeviceIndex device) {
  if (nbytes == 0 || !memory) {
    return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(kSim, device)};
  }
  return hand_out(device, nbytes, std::move(memory));
}

std::optional<Located> locate(const c10::DataPtr& data) {
  const auto deleter = data.get_deleter();
  if (deleter == &give_back || deleter == &give_back_pinned) {
    return located(*static_cast<Block*>(data.get_context()));
  }
  return locate(data.get());  // memory of a block under another owner: a storage made from an address
}

std::optional<Located> locate(const void* address) {
  if (address == nullptr) {
    return std::nullopt;
  }
  const auto* at = static_cast<const char*>(address);
  Memory& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto next = all.by_address.upper_bound(at);
  if (next == all.by_address.begin()) {
    return std::nullopt;
  }
  const Block& block = *std::prev(next)->second;
  const auto* begin = static_cast<const char*>(block.memory.get());
  if (at >= begin + block.nbytes) {
    return std::nullopt;
  }
  return located(block);
}

MemoryStats memory_stats(c10::DeviceIndex device) {
  Memory& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.stats[device];
}

void reset_peak_memory_stats(c10::DeviceIndex device) {
  Memory& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& stats = all.stats[device];
  stats.peak_allocated = stats.allocated;
  stats.peak_reserved = stats.reserved;
  stats.peak_num_allocations = stats.num_allocations;
}

void reset_accumulated_memory_stats(c10::DeviceIndex device) {
  Memory& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& stats = all.stats[device];
  stats.total_allocated = stats.total_freed = stats.total_num_allocations = stats.total_num_frees = 0;
}

void empty_cache() {
  Memory& all = memory();
  std::vector<Block*> given_back;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    for (auto& [pool, sizes] : all.cached) {
      for (auto& [nbytes, blocks] : sizes) {
        all.stats[pool.first].reserved -= static_cast<int64_t>(nbytes * blocks.size());
        given_back.insert(given_back.end(), blocks.begin(), blocks.end());
      }
    }
    all.cached.clear();
  }
  for (auto* block : given_back) {
    Checker::get().remove_block(block->id);
    delete block;
  }
}

void set_name(BlockId block, std::string name) {
  Memory& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.names[block] = std::move(name);
  all.num_names.store(all.names.size(), std::memory_order_relaxed);
}

std::string name_of(BlockId block) {
  Memory& all = memory();
  if (all.num_names.load(std::memory_order_relaxed) == 0) {
    return {};
  }
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.names.find(block);
  return found == all.names.end() ? std::string() : found->second;
}

namespace {

/// The first bytes of one block have been copied to another.
void hand_on_unwritten(const c10::DataPtr& from, const c10::DataPtr& to, size_t nbytes) {
  const auto source = locate(from);
  const auto target = locate(to);
  if (!Checker::get().any_unwritten() || !source || !target) {
    return;
  }
  const Extent extent{0, static_cast<int64_t>(nbytes), {}};
  auto bytes = Checker::get().unwritten(source->block, extent);
  Checker::get().written(target->block, extent);
  Checker::get().spoil(target->block, std::move(bytes));
}

}  // namespace

void resize_bytes(c10::StorageImpl* storage, size_t nbytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  const auto before = storage->nbytes();
  if (before == nbytes) {
    return;
  }
  const auto device = storage->device().index();
  c10::DataPtr fresh = nbytes == 0
      ? c10::DataPtr(nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(kSim, device))
      : hand_out(device, nbytes, {});
  const auto kept = std::min(before, nbytes);
  bool spoilt = false;
  if (kept > 0) {
    // A copy on the current stream, as on CUDA.
    settle(storage->data(), kept);
    std::memcpy(fresh.get(), storage->data(), kept);
    hand_on_unwritten(storage->data_ptr(), fresh, kept);
    if (checking()) {
      const Lane lane = lane_of(current_stream(device));
      const SitePtr site = here("resize_");
      Checker::get().submit(lane);
      const Extent extent{0, static_cast<int64_t>(kept), {}};
      const auto note = [&](const c10::DataPtr& data, Kind kind) {
        const auto block = locate(data);
        const auto hazard = block ? Checker::get().access(block->block, kind, extent, lane, site) : std::nullopt;
        if (hazard && act_on(*hazard)) {
          spoilt = true;
        }
      };
      note(storage->data_ptr(), Kind::Read);
      note(fresh, Kind::Write);
      if (spoilt) {
        std::memset(fresh.get(), 0xFF, kept);
      }
    }
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

}  // namespace sim
