// Runs any operation on the device with the CPU's kernel, over the same memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>
#include <vector>

namespace sim {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Run `compute` on the current stream as one operation that reads the tensors `read`, all on one device. The tensors
/// that it returns (on the CPU, or undefined) become tensors of that device.
std::vector<at::Tensor> on_host(
    const std::string& name, const std::vector<at::Tensor>& read,
    const std::function<std::vector<at::Tensor>()>& compute);

/// For its lifetime, operations of this thread do not make the host wait, although it needs to know a result: they
/// belong to something that runs on the device alone.
class NoHostWait {
 public:
  NoHostWait();
  ~NoHostWait();
  NoHostWait(const NoHostWait&) = delete;
  NoHostWait& operator=(const NoHostWait&) = delete;
  static bool active();

 private:
  bool before_;
};

/// Register the fallback by name for operations for which torch would not choose the CPU's kernel: see the definition.
void register_fallbacks();

}  // namespace sim
