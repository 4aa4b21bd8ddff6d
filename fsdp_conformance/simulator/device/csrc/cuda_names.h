// Whether the program uses the device under CUDA's names (as_cuda.py). Then torch's choices are CUDA's.
#pragma once

namespace sim {

bool cuda_names();
void set_cuda_names(bool on);

}  // namespace sim
