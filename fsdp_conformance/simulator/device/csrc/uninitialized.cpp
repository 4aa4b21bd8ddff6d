#include "uninitialized.h"

#include <ATen/ops/isnan.h>

#include "host_ops.h"

namespace sim {
namespace {

/// Beyond this many runs, a strided result counts as written.
constexpr int64_t kMostRuns = 4096;

/// Beyond this many slices or elements, a product counts as written.
constexpr int64_t kMostSlices = 4096;
constexpr int64_t kMostElements = 1 << 20;

/// The runs of an extent; nothing if there are too many.
std::vector<std::pair<int64_t, int64_t>> runs_of(const Extent& extent) {
  std::vector<std::pair<int64_t, int64_t>> runs = {{extent.offset, extent.offset + extent.run}};
  for (auto repeat = extent.repeats.rbegin(); repeat != extent.repeats.rend(); ++repeat) {
    const auto& [count, stride] = *repeat;
    if (static_cast<int64_t>(runs.size()) * count > kMostRuns) {
      return {};
    }
    const auto once = runs;
    for (int64_t i = 1; i < count; ++i) {
      for (const auto& [begin, end] : once) {
        runs.emplace_back(begin + i * stride, end + i * stride);
      }
    }
  }
  return runs;
}

bool fill(const std::vector<Unwritten>& bytes, int64_t begin, int64_t end) {
  int64_t reached = begin;
  for (const auto& one : bytes) {
    if (one.begin > reached) {
      return false;
    }
    reached = std::max(reached, one.end);
  }
  return reached >= end;
}

/// The elements of a tensor on the device that are NaN count as unwritten.
void spoil_nans(const at::Tensor& tensor, const OriginPtr& origin) {
  const auto place = bytes_of(tensor);
  if (!place) {
    return;
  }
  const OnHost on_host;
  const at::Tensor nans = at::isnan(host_view(tensor)).contiguous();
  const bool* nan = nans.const_data_ptr<bool>();
  const auto itemsize = static_cast<int64_t>(tensor.itemsize());
  std::vector<int64_t> index(static_cast<size_t>(tensor.dim()), 0);
  std::vector<Unwritten> bytes;
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    if (nan[i]) {
      int64_t begin = place->extent.offset;
      for (size_t dim = 0; dim < index.size(); ++dim) {
        begin += index[dim] * tensor.stride(static_cast<int64_t>(dim)) * itemsize;
      }
      if (!bytes.empty() && bytes.back().end == begin) {
        bytes.back().end += itemsize;
      } else {
        bytes.push_back({begin, begin + itemsize, origin});
      }
    }
    for (auto dim = index.size(); dim-- > 0 && ++index[dim] == tensor.size(static_cast<int64_t>(dim));) {
      index[dim] = 0;
    }
  }
  Checker::get().spoil(place->block, std::move(bytes));
}

void spoil_all(const Bytes& target, const OriginPtr& origin) {
  std::vector<Unwritten> bytes;
  for (const auto& [begin, end] : runs_of(normalized(target.extent))) {
    bytes.push_back({begin, end, origin});
  }
  Checker::get().spoil(target.block, std::move(bytes));
}

}  // namespace

std::optional<Unset> unset_of(const at::Tensor& tensor) {
  if (!Checker::get().any_unwritten() || !on_sim(tensor)) {
    return std::nullopt;
  }
  const auto place = bytes_of(tensor);
  if (!place) {
    return std::nullopt;
  }
  Unset unset;
  unset.bytes = Checker::get().unwritten(place->block, place->extent);
  if (unset.bytes.empty()) {
    return std::nullopt;
  }
  unset.all = fill(unset.bytes, place->extent.offset, end_of(place->extent));
  for (auto& one : unset.bytes) {
    one.begin -= place->extent.offset;
    one.end -= place->extent.offset;
  }
  unset.contiguous = tensor.is_contiguous();
  unset.numel = tensor.numel();
  unset.itemsize = static_cast<int64_t>(tensor.itemsize());
  return unset;
}

std::optional<Unset> part_of(const Unset& unset, int64_t first, int64_t numel) {
  const int64_t begin = first * unset.itemsize;
  const int64_t end = begin + numel * unset.itemsize;
  Unset part{{}, false, unset.contiguous, numel, unset.itemsize};
  for (const auto& one : unset.bytes) {
    if (one.begin < end && begin < one.end) {
      part.bytes.push_back({std::max(one.begin, begin) - begin, std::min(one.end, end) - begin, one.origin});
    }
  }
  if (part.bytes.empty()) {
    return std::nullopt;
  }
  part.all = fill(part.bytes, 0, end - begin);
  return part;
}

void spread(const Unset& from, const at::Tensor& to, Flow flow, int64_t shift) {
  const auto target = on_sim(to) ? bytes_of(to) : std::nullopt;
  if (!target || flow == Flow::Places) {
    return;
  }
  const OriginPtr& origin = from.bytes.front().origin;
  const bool one_of_all = flow == Flow::Reduces && to.numel() == 1;
  const bool of_scalar = flow == Flow::Elementwise && from.numel == 1;
  if (one_of_all || of_scalar) {
    return spoil_all(*target, origin);
  }
  if (flow == Flow::Pieces || (flow == Flow::Elementwise && from.numel == to.numel())) {
    if (!from.contiguous || !to.is_contiguous()) {
      return from.all && flow == Flow::Elementwise ? spoil_all(*target, origin) : void();
    }
    const auto itemsize = static_cast<int64_t>(to.itemsize());
    std::vector<Unwritten> bytes;
    for (const auto& one : from.bytes) {
      const int64_t begin = one.begin / from.itemsize * itemsize;
      const int64_t end = (one.end + from.itemsize - 1) / from.itemsize * itemsize;
      bytes.push_back({target->extent.offset + shift + begin, target->extent.offset + shift + end, one.origin});
    }
    return Checker::get().spoil(target->block, std::move(bytes));
  }
  if (from.all) {
    spoil_all(*target, origin);
  }
}

void spread_product(const at::Tensor& operand, const std::vector<int64_t>& kept, const at::Tensor& result) {
  if (!on_sim(result) || !at::isFloatingType(result.scalar_type()) || result.numel() > kMostElements) {
    return;
  }
  int64_t num_slices = 1;
  for (const int64_t dim : kept) {
    if (dim >= operand.dim() || dim >= result.dim() || operand.size(dim) != result.size(dim)) {
      return;  // not the result proper, but attention's logarithms, or fewer heads of keys than of queries
    }
    num_slices *= operand.size(dim);
  }
  if (num_slices > kMostSlices) {
    return;
  }
  const OnHost on_host;
  for (int64_t number = 0; number < num_slices; ++number) {
    at::Tensor from = operand;
    at::Tensor to = result;
    int64_t rest = number;
    for (auto dim = kept.rbegin(); dim != kept.rend(); ++dim) {  // from the last, so that the others keep their places
      const int64_t index = rest % operand.size(*dim);
      rest /= operand.size(*dim);
      from = from.select(*dim, index);
      to = to.select(*dim, index);
    }
    if (const auto unset = unset_of(from)) {
      spoil_nans(to, unset->bytes.front().origin);
    }
  }
}

bool note_use(const at::Tensor& tensor, const Unset& unset, Lane lane, const SitePtr& site) {
  const auto place = bytes_of(tensor);
  if (!place || !checking()) {
    return false;
  }
  const auto hazard = Checker::get().use_unwritten(
      place->block, place->extent, lane, with_name(site, place->block), unset.bytes.front());
  return hazard && act_on(*hazard);
}

void mark_written(const at::Tensor& tensor) {
  if (!Checker::get().any_unwritten() || !on_sim(tensor)) {
    return;
  }
  if (const auto place = bytes_of(tensor)) {
    Checker::get().written(place->block, place->extent);
  }
}

}  // namespace sim
