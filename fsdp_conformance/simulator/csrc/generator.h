// Random numbers on the device: the CPU's, so that a seed gives there what it gives on the CPU.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace sim {

/// A device's own. By default it draws from the CPU's default generator, so that a program draws the same numbers in
/// the same order as on the CPU, whichever of its tensors are on the device.
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

/// Ranks that are threads of one process would take each other's numbers: with this on, every device's default
/// generator is one of its own, which gives the CPU's sequence for its seed. It starts in the CPU's present state.
void set_separate_generators(bool on);
bool separate_generators();

/// The CPU generator that a kernel is to use in place of one of the device; nothing: the CPU's default one.
std::optional<at::Generator> cpu_generator(const std::optional<at::Generator>& generator, c10::DeviceIndex device);

}  // namespace sim
