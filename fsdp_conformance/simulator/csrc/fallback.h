// Any operation on the device, carried out by the CPU's kernel over the same memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>
#include <vector>

namespace sim {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Carry out `compute` on the current stream as one operation that reads `read`, all on one device. What it returns, on
/// the CPU or undefined, becomes tensors of that device.
std::vector<at::Tensor> on_host(
    const std::string& name, const std::vector<at::Tensor>& read, const std::function<std::vector<at::Tensor>()>& compute);

/// Give the fallback to operations for which torch would take another kernel than the CPU's: see the definition.
void register_fallbacks();

}  // namespace sim
