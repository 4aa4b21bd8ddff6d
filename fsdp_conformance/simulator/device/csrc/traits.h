// Properties of an operation and its arguments, read from its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <utility>
#include <vector>

#include "flow.h"

namespace sim {

enum class Usage : uint8_t { Other, Read, Write, ReadWrite };

struct Traits {
  std::string name;              // "aten::add_.Tensor"
  std::vector<Usage> arguments;  // how arguments that hold tensors are used
  int generator = -1;            // index of the argument, or -1
  int indices = -1;              // of `tensor[...]`: index of the argument with the indices, or -1
  int training = -1;             // index of the argument `training`, or -1
  std::vector<size_t> updated_in_training;
  bool returns_view = false;        // no memory is touched
  bool host_waits = false;          // the host needs the result: shapes or values depend on the data
  bool over_lists = false;          // `aten::_foreach_...`
  bool mixes_devices = false;       // accepts CPU tensors beside device tensors
  bool only_numbers = false;        // may be left out where only the order counts: see outcomes.h
  bool adds_up_in_float32 = false;  // a convolution: see wide.h
  int learning_rate = -1;           // index of a fused optimizer's learning rate, which may be on the CPU, or -1
  int beta = -1;                    // index of the argument; where it is 0, the first argument is not read
  Flow flow = Flow::Selects;
  // For Flow::Product, by argument: the dimensions that the operand and the result have in common. The result at an
  // index depends on the operand only where it has the same index in these.
  std::vector<std::pair<size_t, std::vector<int64_t>>> kept;
  bool decides_by_mask = false;  // the first argument does not decide about the shape of the result
};

/// Read once per operation and thread.
const Traits& traits_of(const c10::OperatorHandle& op);

bool starts_with(const std::string& text, const char* prefix);

/// Call `visit` for each defined tensor of an argument: a tensor, a list of them, or a list of optional ones.
template <typename Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      visit(value.toTensor());
    }
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor() && item.toTensor().defined()) {
        visit(item.toTensor());
      }
    }
  }
}

}  // namespace sim
