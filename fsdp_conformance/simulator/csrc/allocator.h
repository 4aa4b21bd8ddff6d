// Memory of the device and pinned memory of the host, in blocks that the checker knows.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <optional>
#include <string>

#include "checker.h"

namespace sim {

/// A piece of memory that one of the two allocators here has given out.
struct Located {
  BlockId block;
  const char* begin;
  size_t nbytes;
  bool pinned;
  int32_t device;  // of pinned memory: the one that was current when it was allocated
};

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
/// Make torch ask them.
void register_allocators();

/// Memory that a CPU kernel has allocated for its result becomes memory of the device, as if it had been allocated
/// there: it takes the place of a cached block of the same size, with that block's history.
c10::DataPtr adopt(c10::DataPtr memory, size_t nbytes, c10::DeviceIndex device);

/// The block that some memory lies in; nothing for memory from elsewhere, and for none.
std::optional<Located> locate(const c10::DataPtr& data);
std::optional<Located> locate(const void* address);

/// Bytes as requested, not rounded: a storage of n bytes counts n.
struct MemoryStats {
  int64_t allocated = 0;
  int64_t peak_allocated = 0;
  int64_t reserved = 0;  // allocated, and cached for reuse
  int64_t peak_reserved = 0;
  int64_t total_allocated = 0;  // all that was ever allocated, and freed
  int64_t total_freed = 0;
  int64_t num_allocations = 0;  // now
  int64_t peak_num_allocations = 0;
  int64_t total_num_allocations = 0;
  int64_t total_num_frees = 0;
};
/// Of a device, or of pinned memory (-1).
MemoryStats memory_stats(c10::DeviceIndex device);
void reset_peak_memory_stats(c10::DeviceIndex device);
void reset_accumulated_memory_stats(c10::DeviceIndex device);
/// Bytes of a device that are free, and all: each device says that it has as much memory as the machine.
std::pair<size_t, size_t> memory_info(c10::DeviceIndex device);
/// Give the cached blocks of all devices back.
void empty_cache();

void set_name(BlockId block, std::string name);
/// Empty: it has none.
std::string name_of(BlockId block);

/// Another size for a storage on the device, with as much of its contents as fits.
void resize_bytes(c10::StorageImpl* storage, size_t nbytes);

}  // namespace sim
