// The bytes that accesses touch, and whether two accesses have a byte in common.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace sim {

/// The bytes of a block that an access touches: runs of `run` bytes from `offset`, repeated by (count, stride in
/// bytes).
struct Extent {
  int64_t offset = 0;
  int64_t run = 0;
  std::vector<std::pair<int64_t, int64_t>> repeats;  // strides are positive, outermost first
};

/// The same bytes with as few repeats as possible: strides sorted, adjacent and overlapping runs joined.
Extent normalized(const Extent& extent);
/// Whether two extents have a byte in common: exact for strided extents, however many runs they have.
bool overlap(const Extent& a, const Extent& b);
/// The same for extents that are normalized already.
bool overlap_of_normalized(const Extent& a, const Extent& b);

/// One past the last byte.
inline int64_t end_of(const Extent& extent) {
  int64_t end = extent.offset + extent.run;
  for (const auto& [count, stride] : extent.repeats) {
    end += (count - 1) * stride;
  }
  return end;
}

/// Whether `a` contains every byte of `b`. May be false for strided extents that do; an access is then kept for longer.
inline bool covers(const Extent& a, const Extent& b) {
  if (a.repeats.empty()) {
    return a.offset <= b.offset && end_of(b) <= a.offset + a.run;
  }
  return a.offset <= b.offset && b.offset + b.run <= a.offset + a.run && a.repeats == b.repeats;
}

}  // namespace sim
