// Memory in pages of its own: filled only where it is touched, or guarded, so that touching it is noticed.
#pragma once

#include <c10/core/Allocator.h>

#include <vector>

#include "checker.h"

namespace sim {

/// From this size on, device memory is filled with NaN as it is touched.
constexpr size_t kLazyBytes = size_t{64} << 20;

/// Memory in whole pages, zero at first.
c10::DataPtr own_pages(size_t nbytes);

/// Memory full of 0xFF that takes no space before it is written. Nothing if the system has no such memory.
c10::DataPtr lazy_pages(size_t nbytes);
/// Make memory from `lazy_pages` new again; false for other memory.
bool renew(const c10::DataPtr& memory, size_t nbytes);

// Guards. Code that is not ours may read and write guarded memory: that is noted, and the guard removed. A system call
// that is given guarded memory fails with EFAULT. We remove guards before we touch the memory ourselves.

/// Guard the whole pages between two addresses, which belong to a block. Returns the guard, or -1 without one: there
/// is no whole page, or too many guards.
int guard(BlockId block, const char* block_begin, char* begin, char* end);
/// Remove it. -1 is allowed.
void unguard(int guard);

/// What happened to guarded memory.
struct Touch {
  BlockId block = 0;
  int64_t offset = 0;
  bool writes = false;
  SitePtr site;
};
/// What has happened since the last call.
std::vector<Touch> take_touches();

}  // namespace sim
