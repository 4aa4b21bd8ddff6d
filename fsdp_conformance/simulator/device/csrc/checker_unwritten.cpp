// Memory that nothing has written: the bytes of each block, and what happens when they are used.
#include "checker_state.h"

namespace sim {

bool Checker::tracks_unwritten() const {
  return state_->tracks_unwritten;
}

void Checker::track_unwritten(bool on) {
  state_->tracks_unwritten = on;
}

bool Checker::any_unwritten() const {
  return state_->num_unwritten.load(std::memory_order_relaxed) > 0;
}

std::vector<Unwritten> Checker::unwritten(BlockId id, const Extent& extent) const {
  if (!any_unwritten()) {
    return {};
  }
  const Extent asked = normalized(extent);
  const int64_t end = end_of(asked);
  std::vector<Unwritten> found;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  for (const Unwritten& bytes : state_->block(id).unwritten) {
    const Unwritten part{std::max(bytes.begin, asked.offset), std::min(bytes.end, end), bytes.origin};
    if (part.begin < part.end && overlap_of_normalized(asked, {part.begin, part.end - part.begin, {}})) {
      found.push_back(part);
    }
  }
  return found;
}

void Checker::written(BlockId id, const Extent& extent) {
  if (!any_unwritten()) {
    return;
  }
  const Extent now = normalized(extent);
  if (now.run <= 0) {
    return;
  }
  State::Trash trash;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  Block& block = state_->block(id);
  if (block.unwritten.empty()) {
    return;
  }
  // Strided writes usually fill the gaps of earlier ones: a list of runs would grow without bound, so they count as a
  // whole. That can hide an unwritten byte, and never invents one.
  const int64_t end = end_of(now);
  std::vector<Unwritten> rest;
  for (const Unwritten& bytes : block.unwritten) {
    if (bytes.begin < now.offset) {
      rest.push_back({bytes.begin, std::min(bytes.end, now.offset), bytes.origin});
    }
    if (bytes.end > end) {
      rest.push_back({std::max(bytes.begin, end), bytes.end, bytes.origin});
    }
  }
  state_->set_unwritten(block, std::move(rest), trash);
}

void Checker::spoil(BlockId id, std::vector<Unwritten> bytes) {
  if (bytes.empty() || suspended()) {
    return;
  }
  State::Trash trash;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  Block& block = state_->block(id);
  std::move(block.unwritten.begin(), block.unwritten.end(), std::back_inserter(bytes));
  std::sort(bytes.begin(), bytes.end(), [](const Unwritten& a, const Unwritten& b) { return a.begin < b.begin; });
  std::vector<Unwritten> merged;
  for (Unwritten& one : bytes) {
    one.begin = std::max(one.begin, merged.empty() ? int64_t{0} : merged.back().end);
    one.end = std::min(one.end, static_cast<int64_t>(block.bytes));
    if (one.begin >= one.end) {
      trash.unwritten.push_back(std::move(one));
    } else if (!merged.empty() && merged.back().end == one.begin && merged.back().origin == one.origin) {
      merged.back().end = one.end;
      trash.unwritten.push_back(std::move(one));
    } else {
      merged.push_back(std::move(one));
    }
  }
  state_->set_unwritten(block, std::move(merged), trash);
}

std::optional<Hazard> Checker::use_unwritten(
    BlockId id, const Extent& extent, Lane lane, const SitePtr& site, const Unwritten& first) {
  if (suspended() || state_->mode.load() == Mode::Off) {
    return std::nullopt;
  }
  const Origin& origin = *first.origin;
  std::vector<Hazard> found(1);
  Hazard& hazard = found.front();
  hazard.kind = HazardKind::UninitializedRead;
  hazard.then = {Kind::Write,      origin.lane,      0, {0, static_cast<int64_t>(origin.bytes), {}},
                 origin.allocated, origin.allocation};
  hazard.now = {Kind::Read, lane, 0, normalized(extent), site, 0};
  hazard.allocated = origin.allocated;
  hazard.tenant_lane = origin.lane;
  hazard.then_block = origin.block;
  hazard.then_bytes = origin.bytes;
  hazard.count = 1;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    const Block& block = state_->block(id);
    hazard.block = block.number;
    hazard.bytes = block.bytes;
    hazard.device = block.device;
    hazard.pinned = block.pinned;
    hazard.now.allocation = block.tenant->allocation;
  }
  written(id, extent);
  state_->fold(found);
  return found.front();
}

void Checker::State::set_unwritten(Block& block, std::vector<Unwritten> bytes, Trash& trash) {
  if (block.unwritten.empty() != bytes.empty()) {
    num_unwritten += bytes.empty() ? -1 : 1;
  }
  std::move(block.unwritten.begin(), block.unwritten.end(), std::back_inserter(trash.unwritten));
  block.unwritten = std::move(bytes);
}

}  // namespace sim
