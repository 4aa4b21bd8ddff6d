// Reuse::WorstCase: a new tenant may have been given the memory of any free block that a caching allocator could have
// chosen instead, so it inherits the unfinished accesses to all of them.
#include <iterator>

#include "checker_state.h"

namespace sim {
namespace {

// As in CUDA's caching allocator: sizes are multiples of 512 bytes, and requests of up to 1 MiB have a pool of their
// own (c10/cuda/CUDACachingAllocator: kMinBlockSize, kSmallSize).
constexpr uint64_t kMinBlockBytes = 512;
constexpr uint64_t kSmallBytes = 1 << 20;

uint64_t rounded(uint64_t bytes) {
  return std::max(kMinBlockBytes, (bytes + kMinBlockBytes - 1) / kMinBlockBytes * kMinBlockBytes);
}

std::vector<Entry> copies(const std::vector<const Entry*>& entries) {
  std::vector<Entry> result;
  result.reserve(entries.size());
  for (const Entry* entry : entries) {
    result.push_back(*entry);
  }
  return result;
}

}  // namespace

std::map<uint64_t, SizeClass>& Checker::State::pool_of(const Block& block) {
  return pools[{block.tenant->lane, rounded(block.bytes) <= kSmallBytes}];
}

void Checker::State::offer(BlockId id, Block& block) {
  std::vector<const Entry*> last;
  for (const Entry& entry : block.history) {
    add_last(last, entry);
  }
  for (const Entry& entry : block.inherited) {
    add_last(last, entry);
  }
  block.unfinished = copies(last);
  if (!block.unfinished.empty()) {
    put_into_pool(id, block);
  }
}

void Checker::State::put_into_pool(BlockId id, const Block& block) {
  SizeClass& size = pool_of(block)[rounded(block.bytes)];
  size.blocks.insert(id);
  for (const Entry& entry : block.unfinished) {
    add_last(size.last, entry);
  }
}

void Checker::State::take_from_pool(BlockId id, const Block& block) {
  auto& pool = pool_of(block);
  const auto size = pool.find(rounded(block.bytes));
  if (size != pool.end() && size->second.blocks.erase(id) > 0) {
    size->second.last.clear();
    size->second.stale = true;
  }
}

void Checker::State::refresh(SizeClass& size) {
  size.last.clear();
  size.stale = false;
  for (auto id = size.blocks.begin(); id != size.blocks.end();) {
    const auto& unfinished = blocks.at(*id).unfinished;
    // Nothing will ever have to wait for what is over.
    const bool is_known =
        std::all_of(unfinished.begin(), unfinished.end(), [&](const Entry& entry) { return is_over(entry); });
    if (is_known) {
      id = size.blocks.erase(id);
      continue;
    }
    for (const Entry& entry : unfinished) {
      add_last(size.last, entry);
    }
    ++id;
  }
}

/// The last of each lane and kind: an access that is ordered after it is ordered after the earlier ones too.
void Checker::State::add_last(std::vector<const Entry*>& last, const Entry& entry) {
  if (is_over(entry) || entry.tenant->excuses(entry.lane, entry.tick)) {
    return;
  }
  for (const Entry*& other : last) {
    if (other->lane == entry.lane && other->kind == entry.kind) {
      if (other->tick < entry.tick) {
        other = &entry;
      }
      return;
    }
  }
  last.push_back(&entry);
}

void Checker::State::inherit(Block& block, Trash& trash) {
  std::vector<const Entry*> last;
  for (const Entry& entry : block.inherited) {
    add_last(last, entry);
  }
  auto& pool = pool_of(block);
  for (auto it = pool.lower_bound(rounded(block.bytes)); it != pool.end();) {
    SizeClass& size = it->second;
    const bool changed = std::any_of(size.last.begin(), size.last.end(), [&](const Entry* entry) {
      return is_over(*entry) || entry->tenant->excuses(entry->lane, entry->tick);
    });
    if (size.stale || changed) {
      refresh(size);
    }
    for (const Entry* entry : size.last) {
      add_last(last, *entry);
    }
    it = size.blocks.empty() ? pool.erase(it) : std::next(it);
  }
  std::vector<Entry> inherited = copies(last);
  throw_away(block.inherited, trash);
  block.inherited = std::move(inherited);
}

}  // namespace sim
