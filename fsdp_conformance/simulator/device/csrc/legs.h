// One exchange of a collective: where its bytes come from, and where its results go.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "deliveries.h"
#include "transport.h"

namespace sim {

// Memory of the device, as CPU tensors over it.

/// The elements of a tensor in memory order, as one dimension.
at::Tensor raw(const at::Tensor& tensor);
at::Tensor strided(const at::Tensor& tensor);
/// Consecutive pieces with these numbers of elements.
std::vector<at::Tensor> pieces(const at::Tensor& tensor, const std::vector<int64_t>& numels);
std::vector<at::Tensor> equal_pieces(const at::Tensor& tensor, int count);
/// The numbers of elements in these numbers of rows of the first dimension; without rows: `size` equal parts.
std::vector<int64_t> numels_of(const at::Tensor& tensor, const std::vector<int64_t>& rows, int size);

/// An exchange that has not been started.
struct Leg {
  Request request;
  std::vector<std::vector<at::Tensor>> give;  // the tensors of one entry become one tensor of the request
  std::vector<at::Tensor> take;
  bool local = false;     // the input is the output; no peers take part
  bool stays = false;     // ... and they are the same memory
  std::string reduction;  // "SUM", "AVG", ...: what the program asked for; empty if data is only moved
  int64_t divisor = 1;
  at::Tensor factor;  // undefined: scalar_factor
  double scalar_factor = 1;

  bool empty() const {
    const auto no_elements = [](const at::Tensor& place) { return place.numel() == 0; };
    return std::all_of(take.begin(), take.end(), no_elements) &&
        std::all_of(give.begin(), give.end(), [&](const std::vector<at::Tensor>& places) {
             return std::all_of(places.begin(), places.end(), no_elements);
           });
  }
};

/// Start the exchange of a leg. What is poisoned becomes NaN: the bytes that it gives, or the results.
Part start(Leg leg, bool gives_poison, bool takes_poison, Transport& transport);

}  // namespace sim
