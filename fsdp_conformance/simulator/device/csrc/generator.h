// Random numbers on the device: the CPU's, so that a seed gives the same numbers on both.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace sim {

/// A device's default generator. Unless they are separate, it draws from the CPU's default generator, so that a program
/// draws the same numbers in the same order as on the CPU, whichever of its tensors are on the device.
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

/// Ranks that are threads of one process would consume each other's random numbers. With separate generators, every
/// device has its own default generator, which gives the CPU's sequence for its seed. It starts in the CPU generator's
/// current state.
void set_separate_generators(bool on);
bool separate_generators();

/// The CPU generator that a kernel uses in place of a device's generator; nothing for the CPU's default generator.
std::optional<at::Generator> cpu_generator(const std::optional<at::Generator>& generator, c10::DeviceIndex device);

}  // namespace sim
