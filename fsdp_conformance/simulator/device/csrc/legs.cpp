#include "legs.h"

#include <cstring>

#include "settle.h"
#include "staging.h"

namespace sim {

using Tensors = std::vector<at::Tensor>;

namespace {

/// A copy of the elements of several tensors, one after another, as elements of `dtype`.
at::Tensor copy_of(const Tensors& places, at::ScalarType dtype) {
  int64_t nbytes = 0;
  for (const auto& place : places) {
    settle(place);
    nbytes += static_cast<int64_t>(place.nbytes());
  }
  auto copy = staging(nbytes / static_cast<int64_t>(c10::elementSize(dtype)), dtype);
  auto* to = static_cast<char*>(copy.data_ptr());
  for (const auto& place : places) {
    copy_bytes(at::from_blob(to, place.sizes(), place.options()), place);
    to += place.nbytes();
  }
  return copy;
}

/// An exchange without peers: a copy on the stream.
class LocalExchange : public Exchange {
 public:
  explicit LocalExchange(Tensors results) : results_(std::move(results)) {}
  bool done() override {
    return true;
  }
  bool wait(std::optional<Deadline>) override {
    return true;
  }
  Tensors results() override {
    return results_;
  }
  void abort(const std::string&) override {}

 private:
  const Tensors results_;
};

}  // namespace

at::Tensor raw(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), {tensor.numel()}, at::TensorOptions().dtype(tensor.scalar_type()));
}

at::Tensor strided(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.scalar_type()));
}

Tensors pieces(const at::Tensor& tensor, const std::vector<int64_t>& numels) {
  Tensors result;
  auto* begin = static_cast<char*>(tensor.data_ptr());
  for (int64_t numel : numels) {
    result.push_back(at::from_blob(begin, {numel}, at::TensorOptions().dtype(tensor.scalar_type())));
    begin += numel * static_cast<int64_t>(tensor.itemsize());
  }
  return result;
}

Tensors equal_pieces(const at::Tensor& tensor, int count) {
  return pieces(tensor, std::vector<int64_t>(count, tensor.numel() / count));
}

std::vector<int64_t> numels_of(const at::Tensor& tensor, const std::vector<int64_t>& rows, int size) {
  if (rows.empty()) {
    return std::vector<int64_t>(size, tensor.numel() / size);
  }
  std::vector<int64_t> numels;
  const int64_t row = tensor.dim() > 0 && tensor.size(0) > 0 ? tensor.numel() / tensor.size(0) : 0;
  for (int64_t count : rows) {
    numels.push_back(count * row);
  }
  return numels;
}

Part start(Leg leg, bool gives_poison, bool takes_poison, Transport& transport) {
  PlainKernels plain;
  auto& request = leg.request;
  Part part;
  if (leg.stays && !gives_poison && !takes_poison) {
    for (const auto& place : leg.take) {
      settle(place);
    }
    part.exchange = std::make_shared<LocalExchange>(Tensors{});
    return part;
  }
  for (const auto& places : leg.give) {
    auto given = copy_of(places, request.dtype);
    if (leg.factor.defined()) {
      settle(leg.factor);
      given.mul_(strided(leg.factor));
    } else if (leg.scalar_factor != 1) {
      given.mul_(leg.scalar_factor);
    }
    if (gives_poison) {
      std::memset(given.data_ptr(), 0xFF, given.nbytes());
    }
    request.give.push_back(std::move(given));
  }
  for (auto& place : leg.take) {
    settle(place);  // First deliver the results of earlier collectives to this memory.
    request.take.push_back(static_cast<int64_t>(place.nbytes() / c10::elementSize(request.dtype)));
    part.targets.push_back(std::make_unique<Target>(std::move(place)));
    part.targets.back()->poisoned = takes_poison;
  }
  part.divisor = leg.divisor;
  if (leg.local) {
    part.exchange = std::make_shared<LocalExchange>(std::move(request.give));
  } else {
    WithoutGil released;
    part.exchange = transport.start(std::move(request));
  }
  return part;
}

}  // namespace sim
