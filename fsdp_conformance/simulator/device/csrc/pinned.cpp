#include "pinned.h"

#include <ATen/ops/empty.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>

#include "allocator.h"
#include "host_ops.h"
#include "pages.h"
#include "runtime.h"

namespace sim {

namespace {

/// The addresses of a tensor's elements: no handle of torch may be touched under the lock.
struct Place {
  char* begin = nullptr;
  int64_t itemsize = 1;
  bool contiguous = true;
  int64_t nbytes = 0;  // of all elements without gaps
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // in bytes

  explicit Place(const at::Tensor& tensor)
      : begin(static_cast<char*>(tensor.data_ptr())),
        itemsize(static_cast<int64_t>(tensor.itemsize())),
        contiguous(tensor.is_contiguous()),
        nbytes(tensor.numel() * itemsize),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()) {
    for (auto& stride : strides) {
      stride *= itemsize;
    }
  }

  /// Call `visit(address, nbytes)` for every run of elements, in order.
  template <typename Visit>
  void each_run(Visit visit) const {
    if (nbytes == 0) {
      return;
    }
    if (contiguous) {
      return visit(begin, nbytes);
    }
    walk(begin, 0, visit);
  }

 private:
  template <typename Visit>
  void walk(char* at, size_t dim, Visit& visit) const {
    if (dim == sizes.size()) {
      return visit(at, itemsize);
    }
    for (int64_t i = 0; i < sizes[dim]; ++i) {
      walk(at + i * strides[dim], dim + 1, visit);
    }
  }
};

std::vector<char> packed(const Place& place) {
  std::vector<char> bytes(place.nbytes);
  char* to = bytes.data();
  place.each_run([&](char* from, int64_t n) {
    std::memcpy(to, from, n);
    to += n;
  });
  return bytes;
}
void unpack(const std::vector<char>& bytes, const Place& place) {
  const char* from = bytes.data();
  place.each_run([&](char* to, int64_t n) {
    std::memcpy(to, from, n);
    from += n;
  });
}
void fill_with_nan(const Place& place) {
  place.each_run([](char* to, int64_t n) { std::memset(to, 0xFF, n); });
}

struct Arriving {
  BlockId block;
  Place place;
  std::vector<char> bytes;
  Clock clock;
  const char* block_begin;
  size_t block_bytes;
  int guard = -1;

  /// One past the last byte, with the rest of the block's last page: nothing else lies there.
  char* end() const {
    char* last = place.begin + place.nbytes;
    return last == block_begin + block_bytes ? last + 4095 : last;
  }
};

struct Leaving {
  BlockId block;
  Place place;
  Extent extent;
  std::vector<char> bytes;  // what the source must hold while the copy is in flight
  Clock clock;
  SitePtr site;
  bool overwritten = false;  // by the host; the device has overwritten that since
};

struct Kept {
  Clock clock;
  std::vector<c10::Storage> storages;
};

struct InFlight {
  std::mutex mutex;
  std::deque<Arriving> arriving;
  std::deque<Leaving> leaving;
  std::deque<Kept> kept;
  int revealed = 0;
  std::atomic<size_t> count{0};  // arriving and leaving

  void recount() {
    const auto before = count.exchange(arriving.size() + leaving.size(), std::memory_order_acq_rel);
    const auto now = count.load(std::memory_order_relaxed);
    if ((before == 0) != (now == 0)) {
      watch_all_threads(now > 0);
    }
  }
};

InFlight& in_flight() {
  static auto* all = new InFlight();
  return *all;
}

/// Write the contents of copies in flight into place, or remove them again. Block 0 means all blocks.
void reveal(InFlight& all, BlockId block) {
  for (const auto& copy : all.arriving) {
    if (block == 0 || copy.block == block) {
      unpack(copy.bytes, copy.place);
    }
  }
}
void hide(InFlight& all, BlockId block) {
  if (all.revealed > 0) {
    return;
  }
  for (const auto& copy : all.arriving) {
    if (block == 0 || copy.block == block) {
      fill_with_nan(copy.place);
    }
  }
}

// While a copy is in flight, its bytes are guarded: what NumPy or a system call does to them is noticed.

/// Before we touch a block ourselves. Block 0 means all blocks.
void uncover(InFlight& all, BlockId block) {
  for (auto& copy : all.arriving) {
    if (block == 0 || copy.block == block) {
      unguard(std::exchange(copy.guard, -1));
    }
  }
}
void cover(InFlight& all, BlockId block) {
  if (all.revealed > 0) {
    return;
  }
  for (auto& copy : all.arriving) {
    if ((block == 0 || copy.block == block) && copy.guard < 0 && copy.place.contiguous && copy.place.nbytes > 0) {
      copy.guard = guard(copy.block, copy.block_begin, copy.place.begin, copy.end());
    }
  }
}

/// The bytes of the copy in flight that a touch hit; nothing if it hit none.
std::optional<Extent> hit(InFlight& all, const Touch& touch) {
  for (const auto& copy : all.arriving) {
    const int64_t begin = copy.place.begin - copy.block_begin;
    if (copy.block == touch.block && begin <= touch.offset && touch.offset < begin + copy.place.nbytes) {
      return Extent{begin, copy.place.nbytes, {}};
    }
  }
  return std::nullopt;
}

}  // namespace

void note_touches(bool may_raise) {
  static auto* noting = new std::mutex();
  std::optional<Hazard> first;
  {
    // Held to the end, so that no other thread waits for the copies in between. Nothing here waits for the interpreter.
    const std::lock_guard<std::mutex> lock(*noting);
    for (const Touch& touch : take_touches()) {
      std::optional<Extent> extent;
      {
        InFlight& all = in_flight();
        std::lock_guard<std::mutex> in_flight_lock(all.mutex);
        extent = hit(all, touch);
      }
      if (!extent) {
        continue;
      }
      const auto kind = touch.writes ? Kind::Write : Kind::Read;
      const auto hazard =
          Checker::get().access_without_waiting(touch.block, kind, *extent, kHost, with_name(touch.site, touch.block));
      first = first ? first : hazard;
    }
  }
  if (first && may_raise) {
    act_on(*first);
  }
}

void expose_pinned(const at::Tensor& tensor) {
  if (!pinned_copies_in_flight() || !tensor.is_cpu() || !tensor.has_storage()) {
    return;
  }
  if (const auto located = locate(tensor.storage().data_ptr()); located && located->pinned) {
    InFlight& all = in_flight();
    std::lock_guard<std::mutex> lock(all.mutex);
    uncover(all, located->block);
  }
}

bool pinned_copies_in_flight() {
  return in_flight().count.load(std::memory_order_acquire) > 0;
}

namespace {

/// The bytes of a tensor in its block.
Extent extent_in(const Located& located, const at::Tensor& tensor) {
  Extent extent = extent_of(tensor);
  extent.offset += static_cast<const char*>(tensor.storage().data_ptr().get()) - located.begin;
  return extent;
}

/// Copies out of a block that are in flight and read some of these bytes.
std::vector<Leaving*> readers_of(InFlight& all, BlockId block, const Extent& extent) {
  std::vector<Leaving*> readers;
  for (auto& copy : all.leaving) {
    if (copy.block == block && overlap(copy.extent, extent)) {
      readers.push_back(&copy);
    }
  }
  return readers;
}

/// The device will overwrite what these copies read, so that their sources no longer tell a write of the host by their
/// contents. Those that the host has written to already are marked.
void expect_new_contents(InFlight& all, const std::vector<Leaving*>& readers, const Arriving& written) {
  reveal(all, written.block);
  for (auto* copy : readers) {
    copy->overwritten = copy->overwritten || packed(copy->place) != copy->bytes;
  }
  unpack(written.bytes, written.place);
  for (auto* copy : readers) {
    copy->bytes = packed(copy->place);
  }
  hide(all, written.block);
}

/// Note writes of the host, by code that torch does not see, to what unfinished copies read; `only`: to this block. The
/// contents tell, and not who has written them when: some time since the copy, or since the last look.
void note_overwritten(std::optional<BlockId> only, const char* op) {
  std::vector<Leaving> written;
  {
    InFlight& all = in_flight();
    std::lock_guard<std::mutex> lock(all.mutex);
    for (auto copy = all.leaving.begin(); copy != all.leaving.end();) {
      const BlockId block = copy->block;
      if ((only && *only != block) || Checker::get().host_knows(copy->clock)) {
        ++copy;
        continue;  // after_host_wait removes those that have finished
      }
      uncover(all, block);
      reveal(all, block);
      const bool same = !copy->overwritten && packed(copy->place) == copy->bytes;
      hide(all, block);
      cover(all, block);
      if (same) {
        ++copy;
      } else {
        written.push_back(std::move(*copy));
        copy = all.leaving.erase(copy);
      }
    }
    all.recount();
  }
  for (const auto& copy : written) {
    const SitePtr site = here(op);
    if (const auto hazard = Checker::get().access(copy.block, Kind::Write, copy.extent, kHost, site)) {
      act_on(*hazard);
    }
  }
}

}  // namespace

void copy_to_pinned(const at::Tensor& target, const at::Tensor& value, c10::Stream stream) {
  const auto located = locate(target.storage().data_ptr());
  const Place place(target);
  Arriving copy{located->block, place,          packed(Place(value)), Checker::get().snapshot(lane_of(stream)),
                located->begin, located->nbytes};
  {
    InFlight& all = in_flight();
    std::lock_guard<std::mutex> lock(all.mutex);
    const BlockId block = copy.block;
    uncover(all, block);
    if (const auto readers = readers_of(all, block, extent_in(*located, target)); !readers.empty()) {
      expect_new_contents(all, readers, copy);
    }
    if (all.revealed == 0) {
      fill_with_nan(copy.place);
    } else {
      unpack(copy.bytes, copy.place);
    }
    all.arriving.push_back(std::move(copy));
    cover(all, block);
    all.recount();
  }
  watch_host_kernels();
}

at::Tensor contents_of_pinned(const at::Tensor& source) {
  at::Tensor contents =
      at::empty(source.sizes(), source.options().pinned_memory(false).memory_format(c10::MemoryFormat::Contiguous));
  const Place from(source);
  char* to = static_cast<char*>(contents.data_ptr());
  const auto located = locate(source.storage().data_ptr());
  InFlight& all = in_flight();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (located) {
    uncover(all, located->block);
    reveal(all, located->block);
  }
  from.each_run([&](char* at, int64_t n) {
    std::memcpy(to, at, n);
    to += n;
  });
  if (located) {
    hide(all, located->block);
    cover(all, located->block);
  }
  return contents;
}

void copy_from_pinned(const at::Tensor& source, const at::Tensor& contents, c10::Stream stream, const SitePtr& site) {
  const auto located = locate(source.storage().data_ptr());
  if (checking()) {
    note_overwritten(located->block, "code outside torch (noticed at this copy)");
  }
  Leaving copy{
      located->block,
      Place(source),
      extent_in(*located, source),
      packed(Place(contents)),
      Checker::get().snapshot(lane_of(stream)),
      site};
  {
    InFlight& all = in_flight();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.leaving.push_back(std::move(copy));
    all.recount();
  }
  watch_host_kernels();
}

void source_written(BlockId block, const Extent& extent) {
  InFlight& all = in_flight();
  std::vector<Leaving> written;  // its sites are destroyed without the lock
  std::lock_guard<std::mutex> lock(all.mutex);
  for (auto copy = all.leaving.begin(); copy != all.leaving.end();) {
    if (copy->block == block && overlap(copy->extent, extent)) {
      written.push_back(std::move(*copy));
      copy = all.leaving.erase(copy);
    } else {
      ++copy;
    }
  }
  all.recount();
}

void before_host_wait() {
  note_touches(/*may_raise=*/true);
  if (checking() && pinned_copies_in_flight()) {
    note_overwritten(std::nullopt, "code outside torch (noticed at this wait)");
  }
}

void after_host_wait() {
  if (Checker::suspended()) {
    return;
  }
  InFlight& all = in_flight();
  std::vector<Leaving> left;
  std::vector<Kept> released;  // destroyed without the lock: a storage's destruction frees memory
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    const bool off = Checker::get().mode() == Mode::Off;
    const auto known = [&](const Clock& clock) { return off || Checker::get().host_knows(clock); };
    for (auto copy = all.arriving.begin(); copy != all.arriving.end();) {
      if (known(copy->clock)) {
        const auto block = copy->block;
        uncover(all, block);
        unpack(copy->bytes, copy->place);
        copy = all.arriving.erase(copy);
        hide(all, block);  // a later copy into the same bytes may still be in flight
        cover(all, block);
      } else {
        ++copy;
      }
    }
    for (auto copy = all.leaving.begin(); copy != all.leaving.end();) {
      if (known(copy->clock)) {
        left.push_back(std::move(*copy));
        copy = all.leaving.erase(copy);
      } else {
        ++copy;
      }
    }
    for (auto kept = all.kept.begin(); kept != all.kept.end();) {
      if (known(kept->clock)) {
        released.push_back(std::move(*kept));
        kept = all.kept.erase(kept);
      } else {
        ++kept;
      }
    }
    all.recount();
  }
}

void pinned_memory_freed(BlockId block) {
  InFlight& all = in_flight();
  std::vector<Leaving> left;
  note_touches(/*may_raise=*/false);
  std::lock_guard<std::mutex> lock(all.mutex);
  uncover(all, block);
  for (auto copy = all.arriving.begin(); copy != all.arriving.end();) {
    copy = copy->block == block ? all.arriving.erase(copy) : copy + 1;
  }
  for (auto copy = all.leaving.begin(); copy != all.leaving.end();) {
    if (copy->block == block) {
      left.push_back(std::move(*copy));
      copy = all.leaving.erase(copy);
    } else {
      ++copy;
    }
  }
  all.recount();
}

void reveal_pinned() {
  InFlight& all = in_flight();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.revealed++ == 0) {
    uncover(all, 0);
    reveal(all, 0);
  }
}

void hide_pinned() {
  InFlight& all = in_flight();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (--all.revealed == 0) {
    hide(all, 0);
    cover(all, 0);
  }
}

void keep_until_host_knows(Clock clock, std::vector<c10::Storage> storages) {
  InFlight& all = in_flight();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.kept.push_back({std::move(clock), std::move(storages)});
}

}  // namespace sim
