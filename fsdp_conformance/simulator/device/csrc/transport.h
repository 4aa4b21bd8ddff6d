// How the ranks of a group exchange bytes in host memory: through gloo between processes, through a shared object
// between threads of one process. Transports know nothing of devices, streams or the checker.
//
// `start` does not block. The caller gives copies that nothing else writes, and the transport allocates the results. So
// a collective needs nothing from the program between its start and the moment its result is needed.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace sim {

enum class Op : uint8_t {
  AllReduce,      // gives tensors, takes the same number
  Reduce,         // gives one; the root takes one
  ReduceScatter,  // gives the parts of all ranks, one after another in one tensor; takes its own part
  AllGather,      // gives one; takes one from every rank
  Broadcast,      // the root gives one; the others take one
  Gather,         // gives one; the root takes one from every rank
  Scatter,        // the root gives one for every rank; takes one
  AllToAll,       // gives one for every rank, takes one from every rank; each pair agrees on the sizes
  Send,           // gives one to the peer
  Recv,           // takes one from the peer
};

/// A rank's part of an exchange. All ranks of a group make the same request, except for Send, Recv and their own data.
struct Request {
  Op op;
  at::ScalarType dtype = at::kByte;                        // of all tensors; data that is only moved travels as bytes
  c10d::ReduceOp::RedOpType reduce = c10d::ReduceOp::SUM;  // SUM, PRODUCT, MIN or MAX
  int root = 0;                                            // the peer, for Send and Recv
  bool list = false;             // reduce-scatter of a list of tensors, for which gloo has a separate method
  std::vector<at::Tensor> give;  // 1D, in host memory, not shared
  std::vector<int64_t> take;     // numbers of elements
  std::string call;              // "all_reduce(SUM, 12 Float)", for messages
};

using Deadline = std::chrono::steady_clock::time_point;

/// A request in progress.
class Exchange {
 public:
  virtual ~Exchange() = default;
  /// Whether the results are there or never will be. Does not block.
  virtual bool done() = 0;
  /// Block until done. False at the deadline, which defaults to the transport's. Throws if it failed. Call it without
  /// the GIL.
  virtual bool wait(std::optional<Deadline> deadline) = 0;
  /// After `wait`: one tensor for each number in `take`. The caller may read but not write them.
  virtual std::vector<at::Tensor> results() = 0;
  /// Make another thread's `wait` fail, if the transport can.
  virtual void abort(const std::string& reason) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::shared_ptr<Exchange> start(Request request) = 0;
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  /// The transport of a subgroup of the group ranks in `ranks`, which include this rank.
  virtual std::shared_ptr<Transport> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks, const std::string& name,
      std::chrono::milliseconds timeout) = 0;
  /// Every pending and every later request fails with this reason.
  virtual void abort(const std::string& reason) = 0;
};

/// Makes a gloo backend whose ranks meet at the store, which they share with no one else.
using MakeGloo = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout)>;

/// Over gloo, which reduces in the same order as for a program on the CPU.
std::shared_ptr<Transport> gloo_transport(
    MakeGloo make, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout);

/// Says why an exchange over gloo has failed, if more is known than gloo says; else "". Called without the GIL.
using Explainer = std::function<std::string()>;
void set_failure_explainer(Explainer explainer);

/// Between threads: ranks that name the same group in the same world meet. Reductions run in the order of ranks.
std::shared_ptr<Transport> thread_transport(
    const std::string& world, const std::string& group, int rank, int size, std::chrono::milliseconds timeout);

/// A rank has died: every group of its world, including those made later, fails with this reason.
void abort_thread_world(const std::string& world, const std::string& reason);
/// Called where a thread would block, for ranks that take turns: returns when `ready` returns true, throws if that will
/// never happen. `describe` says what it waits for. Called without the GIL. If empty, threads block.
using Waiter = std::function<void(const std::function<bool()>& ready, const std::function<std::string()>& describe)>;
void set_thread_waiter(Waiter waiter);
/// Whether there is one: then each rank of this process is a thread with its own device.
bool threads_take_turns();
/// The world has ended: forget its groups.
void forget_thread_world(const std::string& world);

/// What an error says, without C++ frames.
inline std::string message_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch ? of_torch->what_without_backtrace() : error.what();
}

/// Plain CPU kernels: no autograd, Python modes or functionalization, whatever is active in the caller.
class PlainKernels {
 private:
  c10::impl::ExcludeDispatchKeyGuard guard_{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::functorch_transforms_ks |
      c10::DispatchKeySet(
          {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize,
           c10::DispatchKey::PreDispatch})};
};

}  // namespace sim
