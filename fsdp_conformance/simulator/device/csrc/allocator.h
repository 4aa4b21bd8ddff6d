// Device memory and pinned host memory, in blocks that the checker tracks.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <optional>
#include <string>

#include "checker.h"

namespace sim {

/// Memory that one of the two allocators has handed out.
struct Located {
  BlockId block;
  const char* begin;
  size_t nbytes;
  bool pinned;
  int32_t device;  // for pinned memory: the device that was current when it was allocated
};

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
/// Register both with torch.
void register_allocators();

/// Turn memory that a CPU kernel has allocated for its result into device memory, as if it had been allocated there: it
/// replaces the memory of a cached block of the same size and continues that block's history.
c10::DataPtr adopt(c10::DataPtr memory, size_t nbytes, c10::DeviceIndex device);

/// The block that contains an address; nothing for a null address or for memory from elsewhere.
std::optional<Located> locate(const c10::DataPtr& data);
std::optional<Located> locate(const void* address);

/// Bytes as requested, not rounded: a storage of n bytes counts n.
struct MemoryStats {
  int64_t allocated = 0;
  int64_t peak_allocated = 0;
  int64_t reserved = 0;  // allocated or cached for reuse
  int64_t peak_reserved = 0;
  int64_t total_allocated = 0;  // since the process started; so is total_freed
  int64_t total_freed = 0;
  int64_t num_allocations = 0;  // now
  int64_t peak_num_allocations = 0;
  int64_t total_num_allocations = 0;
  int64_t total_num_frees = 0;
  int64_t num_alloc_retries = 0;  // the cache was emptied to make room
  int64_t num_ooms = 0;
};
/// For a device, or for pinned memory (-1).
MemoryStats memory_stats(c10::DeviceIndex device);
void reset_peak_memory_stats(c10::DeviceIndex device);
void reset_accumulated_memory_stats(c10::DeviceIndex device);
/// The memory of each device; 0 for no limit.
void set_memory_limit(size_t nbytes);
/// Free and total bytes of a device. Without a limit, each device claims as much memory as the machine has.
std::pair<size_t, size_t> memory_info(c10::DeviceIndex device);
/// Free the cached blocks of all devices.
void empty_cache();

void set_name(BlockId block, std::string name);
/// Empty if the block has no name.
std::string name_of(BlockId block);

/// Resize a storage on the device, keeping as much of its contents as fits.
void resize_bytes(c10::StorageImpl* storage, size_t nbytes);

}  // namespace sim
