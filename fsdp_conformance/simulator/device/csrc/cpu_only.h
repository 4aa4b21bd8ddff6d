// Operations that the program itself implements, for the CPU alone: on CUDA there would be no kernel for them.
#pragma once

#include <string>

namespace sim {

void add_cpu_only(const std::string& operation);
void clear_cpu_only();

/// Raises CUDA's error if the operation ("mylib::op") is one of them.
void check_not_cpu_only(const std::string& operation);

}  // namespace sim
