#include "arguments.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace sim {

using c10d::ReduceOp;

std::vector<Argument> named(const std::vector<at::Tensor>& tensors, const std::string& name) {
  std::vector<Argument> arguments;
  for (size_t i = 0; i < tensors.size(); ++i) {
    arguments.push_back({tensors[i], c10::str(name, "[", i, "]")});
  }
  return arguments;
}

std::string describe(const Argument& argument) {
  const auto& tensor = argument.tensor;
  if (!tensor.defined()) {
    return argument.name + ", which is undefined";
  }
  if (tensor.layout() != at::kStrided) {
    return c10::str(argument.name, " of layout ", tensor.layout(), " on ", tensor.device());
  }
  return c10::str(
      argument.name, " of shape ", tensor.sizes(), ", strides ", tensor.strides(), ", ", tensor.scalar_type(), " on ",
      tensor.device());
}

bool is_raw(const at::Tensor& tensor) {
  return tensor.is_contiguous(tensor.suggest_memory_format());
}

void check_device(const Argument& argument, c10::DeviceType type) {
  const bool fits =
      argument.tensor.defined() && argument.tensor.layout() == at::kStrided && argument.tensor.device().type() == type;
  TORCH_CHECK_WITH(
      ValueError, fits, "Tensors must be on ", c10::DeviceTypeName(type, /*lower_case=*/true), " and dense, got the ",
      describe(argument));
}

void check_dense(const Argument& argument, c10::Device device) {
  check_device(argument, device.type());
  TORCH_CHECK_WITH(
      ValueError, argument.tensor.device() == device, "Tensors must be on the same device, ", device, ", got the ",
      describe(argument));
}

void check_contiguous(const Argument& argument, c10::Device device) {
  check_dense(argument, device);
  TORCH_CHECK_WITH(ValueError, is_raw(argument.tensor), "Tensors must be contiguous, got the ", describe(argument));
}

void check_dtype(const Argument& argument) {
  switch (argument.tensor.scalar_type()) {
    case at::kChar:
    case at::kByte:
    case at::kFloat:
    case at::kDouble:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBool:
    case at::kBFloat16:
      return;
    default:
      TORCH_CHECK_WITH(
          TypeError, c10::isFloat8Type(argument.tensor.scalar_type()),
          "Input tensor data type is not supported for NCCL process group, nor for simccl: ", describe(argument));
  }
}

void check_same_dtype(const Argument& argument, const Argument& other) {
  TORCH_CHECK_WITH(
      TypeError, argument.tensor.scalar_type() == other.tensor.scalar_type(),
      "output tensor must have the same type as input tensor, got the ", describe(argument), " and the ",
      describe(other));
}

void check_same_sizes(const Argument& argument, const Argument& other) {
  TORCH_CHECK_WITH(
      ValueError, argument.tensor.sizes() == other.tensor.sizes(), "tensors must have the same size, got the ",
      describe(argument), " and the ", describe(other));
}

void check_numel(const Argument& argument, int64_t numel, const std::string& whose) {
  TORCH_CHECK_WITH(
      ValueError, argument.tensor.numel() == numel, describe(argument), ": expected ", numel, " elements, got ",
      argument.tensor.numel(), "; ", whose);
}

void check_length(const std::vector<at::Tensor>& list, int size, const char* name, const char* collective) {
  TORCH_CHECK_WITH(
      ValueError, static_cast<int>(list.size()) == size, "len(", name, ") must be ", size,
      ", the size of the process group, got ", list.size(), " [", collective, "]");
}

void check_rank(int rank, int size, const char* what, const char* collective) {
  TORCH_CHECK_WITH(
      ValueError, rank >= 0 && rank < size, "invalid ", what, " rank: ", rank, ", must be in [0, ", size, ") [",
      collective, "]");
}

bool same_sizes(const std::vector<at::Tensor>& tensors) {
  return std::all_of(
      tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) { return tensor.sizes() == tensors[0].sizes(); });
}

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

at::Tensor as_real(const at::Tensor& tensor, const ReduceOp& reduce, const char* collective) {
  const bool linear = reduce.op_ == ReduceOp::SUM || reduce.op_ == ReduceOp::AVG || reduce.op_ == ReduceOp::PREMUL_SUM;
  TORCH_CHECK(
      linear || !tensor.defined() || !tensor.is_complex(), collective,
      " does not support this reduction on complex tensors");
  return as_real(tensor);
}

Reduction reduction_of(const ReduceOp& reduce, const Argument& argument, int size) {
  check_dtype(argument);
  const auto dtype = argument.tensor.scalar_type();
  TORCH_CHECK(
      !c10::isFloat8Type(dtype), "Unsupported Float8 type for NCCL reduction, and for simccl's: ", describe(argument));
  Reduction result{dtype, reduce.op_, 1, {}, 1, ""};
  switch (reduce.op_) {
    case ReduceOp::SUM:
      result.name = "SUM";
      break;
    case ReduceOp::AVG:
      TORCH_CHECK_WITH(
          TypeError, dtype != at::kBool, "Cannot use ReduceOp.AVG with boolean inputs: ", describe(argument));
      result.op = ReduceOp::SUM;
      result.divisor = size;
      result.name = "AVG";
      break;
    case ReduceOp::PRODUCT:
      result.name = "PRODUCT";
      break;
    case ReduceOp::MIN:
      result.name = "MIN";
      break;
    case ReduceOp::MAX:
      result.name = "MAX";
      break;
    case ReduceOp::PREMUL_SUM: {
      TORCH_CHECK_WITH(
          TypeError, at::isFloatingType(dtype),
          "PreMulSum Data type must be half, float, bfloat16 or double: ", describe(argument));
      const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(reduce.supplement_.get());
      TORCH_CHECK(
          factor != nullptr,
          "ReduceOp.PREMUL_SUM without a factor: make it by torch.distributed._make_nccl_premul_sum");
      result.op = ReduceOp::SUM;
      result.factor = factor->tensor_factor;
      result.scalar_factor = factor->double_factor;
      result.name = "PREMUL_SUM";
      break;
    }
    case ReduceOp::BAND:
      C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BAND with NCCL, nor with simccl");
    case ReduceOp::BOR:
      C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BOR with NCCL, nor with simccl");
    case ReduceOp::BXOR:
      C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BXOR with NCCL, nor with simccl");
    default:
      C10_THROW_ERROR(ValueError, "Unhandled ReduceOp");
  }
  if (dtype == at::kBool) {
    // NCCL has no bool. bools travel as bytes, and a sum of bools is a logical or: the maximum of the bytes.
    result.dtype = at::kByte;
    result.op = result.op == ReduceOp::SUM ? ReduceOp::MAX : result.op;
  }
  return result;
}

}  // namespace sim
