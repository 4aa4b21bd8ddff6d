#include "outcomes.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <sstream>
#include <unordered_map>

#include "pages.h"

namespace sim {

namespace {

std::atomic<bool> only_ordering{false};

/// From this size on, zeros take no memory before they are written.
constexpr size_t kOwnPages = size_t{1} << 20;

/// A program whose shapes never repeat must not fill the host's memory.
constexpr size_t kMaxKnown = 100'000;

}  // namespace

/// A result: one of the arguments, or a new tensor.
struct Result {
  int argument = -1;
  bool defined = true;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;
  size_t nbytes = 0;
  caffe2::TypeMeta dtype;
};

namespace {

/// One value that a call returns: a tensor or a list of them.
struct Returned {
  bool is_list = false;
  std::vector<Result> tensors;
};

/// What one kind of call returns; nothing if its kernel always has to run.
using Known = std::optional<std::vector<Returned>>;

/// Per thread, so that no lock is needed.
std::unordered_map<std::string, Known>& known() {
  thread_local std::unordered_map<std::string, Known> outcomes;
  return outcomes;
}

bool is_number(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

template <typename Number>
void append(std::string& text, Number number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

std::string shape_of(const at::Tensor& tensor) {
  std::string text;
  append(text, tensor.dim());
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    append(text, tensor.size(dim));
    append(text, tensor.stride(dim));
  }
  append(text, tensor.storage_offset());
  append(text, tensor.storage().nbytes());
  append(text, tensor.scalar_type());
  append(text, tensor.is_conj());
  append(text, tensor.is_neg());
  append(text, tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return text;
}

/// What a value that is no tensor says about the results. No shape depends on a floating-point number, and some differ
/// in every step, such as Adam's step size.
std::string text_of(const c10::IValue& value, bool for_lists) {
  if (value.isDouble()) {
    return "d;";
  }
  if (for_lists && value.isList()) {  // a number for each tensor
    std::string text = "[";
    for (const c10::IValue& item : value.toListRef()) {
      text += text_of(item, for_lists);
    }
    return text;
  }
  std::ostringstream text;
  text << value << ';';
  return text.str();
}

at::Tensor zeros_of(const Result& result) {
  c10::DataPtr memory;
  if (result.nbytes >= kOwnPages) {
    memory = own_pages(result.nbytes);
  } else {
    memory = c10::GetCPUAllocator()->allocate(result.nbytes);
    std::memset(memory.get(), 0, result.nbytes);
  }
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), result.nbytes, std::move(memory), c10::GetCPUAllocator(), true),
      c10::DispatchKeySet(c10::DispatchKey::CPU), result.dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes, result.strides, result.offset);
  return tensor;
}

/// A result as it is to be remembered; nothing if a call cannot be replaced because of it.
std::optional<Result> described(const at::Tensor& tensor, const std::vector<at::Tensor>& arguments) {
  Result result;
  if (!tensor.defined()) {
    result.defined = false;
    return result;
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (tensor.is_same(arguments[i])) {
      result.argument = static_cast<int>(i);
      return result;
    }
  }
  if (!tensor.is_cpu() || tensor.layout() != c10::kStrided || !is_number(tensor) || tensor.storage().use_count() != 1 ||
      tensor.is_conj() || tensor.is_neg()) {
    return std::nullopt;
  }
  result.sizes = tensor.sizes().vec();
  result.strides = tensor.strides().vec();
  result.offset = tensor.storage_offset();
  result.nbytes = tensor.storage().nbytes();
  result.dtype = tensor.dtype();
  return result;
}

std::optional<Returned> described(const c10::IValue& value, const std::vector<at::Tensor>& arguments) {
  Returned returned;
  const auto add = [&](const at::Tensor& tensor) {
    if (auto result = described(tensor, arguments)) {
      returned.tensors.push_back(std::move(*result));
      return true;
    }
    return false;
  };
  if (value.isTensor()) {
    return add(value.toTensor()) ? std::optional<Returned>(std::move(returned)) : std::nullopt;
  }
  if (!value.isTensorList()) {
    return std::nullopt;
  }
  returned.is_list = true;
  for (const c10::IValue& item : value.toListRef()) {
    if (!add(item.toTensor())) {
      return std::nullopt;
    }
  }
  return returned;
}

}  // namespace

void set_ordering_only(bool on) {
  only_ordering.store(on, std::memory_order_relaxed);
}

bool ordering_only() {
  return only_ordering.load(std::memory_order_relaxed);
}

Outcome::Outcome(const Traits& traits, torch::jit::Stack* stack)
    : traits_(traits), stack_(stack), begin_(stack->size() - traits.arguments.size()) {
  if (!ordering_only() || !traits.only_numbers) {
    return;
  }
  for (size_t i = begin_; i < stack->size(); ++i) {
    each_tensor((*stack)[i], [&](const at::Tensor& tensor) { arguments_.push_back(tensor); });
  }
  if (may_be_left_out()) {
    describe_arguments();
  }
}

bool Outcome::may_be_left_out() const {
  bool reads_numbers = false;
  for (size_t i = 0; i < traits_.arguments.size(); ++i) {
    const Usage use = traits_.arguments[i];
    bool fits = true;
    each_tensor((*stack_)[begin_ + i], [&](const at::Tensor& tensor) {
      fits &= tensor.is_cpu() && tensor.layout() == c10::kStrided;
      if (use == Usage::Read) {
        reads_numbers |= is_number(tensor);
      } else {
        fits &= use == Usage::ReadWrite && is_number(tensor);
        reads_numbers = true;
      }
    });
    if (!fits) {
      return false;
    }
  }
  return reads_numbers;
}

void Outcome::describe_arguments() {
  key_ = traits_.name;
  size_t next = 0;
  for (size_t i = begin_; i < stack_->size(); ++i) {
    const c10::IValue& value = (*stack_)[i];
    if (!value.isTensor() && !value.isTensorList() && !value.isOptionalTensorList()) {
      key_ += text_of(value, traits_.over_lists);
      continue;
    }
    // Which elements of a list are missing is part of what decides about the results.
    if (value.isOptionalTensorList()) {
      for (const c10::IValue& item : value.toListRef()) {
        key_ += item.isNone() ? '-' : '+';
      }
    }
    key_ += value.isTensor() ? (value.toTensor().defined() ? 'T' : 'U') : 'L';
    each_tensor(value, [&](const at::Tensor& tensor) {
      shapes_.push_back(shape_of(tensor));
      key_ += shapes_.back();
      // Arguments that are the same tensor, or share memory.
      for (size_t other = 0; other < next; ++other) {
        if (arguments_[other].storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
          append(key_, other);
        }
      }
      ++next;
    });
    key_ += '|';
  }
}

at::Tensor Outcome::tensor_of(const Result& result) const {
  if (!result.defined) {
    return {};
  }
  return result.argument < 0 ? zeros_of(result) : arguments_[static_cast<size_t>(result.argument)];
}

bool Outcome::replace_kernel() {
  if (key_.empty()) {
    return false;
  }
  const auto found = known().find(key_);
  if (found == known().end()) {
    return false;
  }
  if (!found->second) {
    key_.clear();  // learned already: this one has to run
    return false;
  }
  stack_->erase(stack_->begin() + static_cast<std::ptrdiff_t>(begin_), stack_->end());
  for (const Returned& returned : *found->second) {
    if (!returned.is_list) {
      stack_->emplace_back(tensor_of(returned.tensors.front()));
      continue;
    }
    c10::List<at::Tensor> list;
    for (const Result& result : returned.tensors) {
      list.push_back(tensor_of(result));
    }
    stack_->emplace_back(std::move(list));
  }
  return true;
}

void Outcome::learn() {
  if (key_.empty()) {
    return;
  }
  Known results(std::in_place);
  for (size_t i = 0; i < arguments_.size() && results; ++i) {
    if (shape_of(arguments_[i]) != shapes_[i]) {
      results.reset();  // it was resized, or got other memory
    }
  }
  for (size_t i = begin_; i < stack_->size() && results; ++i) {
    if (auto returned = described((*stack_)[i], arguments_)) {
      results->push_back(std::move(*returned));
    } else {
      results.reset();
    }
  }
  if (known().size() >= kMaxKnown) {
    known().clear();
  }
  known().insert_or_assign(key_, std::move(results));
}

}  // namespace sim
