// The process group of the simulated accelerator, "simccl": what ProcessGroupNCCL does with streams, events, memory and
// the host, over a transport in host memory.
//
// As NCCL's of torch 2.8 and newer (of 2.6 and 2.7, where torch is older):
// - async_op=True: runs on a stream of the group, which first waits for the current one; `Work.wait()` makes the stream
//   that is current then wait for it. async_op=False: runs on the current stream. The host waits only in a barrier, or
//   in `Work.wait(timeout)`.
// - The Work holds the storages of inputs and outputs until it is waited for or the host knows that it has ended; no
//   `record_stream`, but for send and recv.
// - The future is complete at once, on the stream: whoever waits for it makes a stream wait. It holds a list of
//   tensors.
// - Collectives of one group run in the order in which they are issued. `send` and `recv` outside of a batch run on a
//   stream for each pair of ranks, unless the group is bound to a device.
// - dtypes, reductions, sizes, contiguity are refused where NCCL refuses them, and the tensor is named.
//
// Sums are made by gloo between processes, so that they are those of the CPU bit for bit, and in the order of ranks
// between threads. An average is the sum, divided by the size, as gloo's own.
#pragma once

#include <pybind11/pybind11.h>

namespace sim {

void register_collectives(pybind11::module_& module);

}  // namespace sim
