// How the ranks of one group hand each other bytes in host memory: through gloo between processes, through a common
// object between threads of one process. Nothing of devices, streams or the checker in here.
//
// `start` does not block. What the caller gives is its own copy, which nobody else writes; what it takes is made by the
// transport. So a collective needs nothing of the program between its start and the moment somebody needs the result.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace sim {

enum class Op : uint8_t {
  AllReduce,      // gives tensors, takes as many
  Reduce,         // gives one; the root takes one
  ReduceScatter,  // gives the parts of all ranks, one after another in one tensor; takes its own part
  AllGather,      // gives one; takes one of every rank
  Broadcast,      // the root gives one; the others take one
  Gather,         // gives one; the root takes one of every rank
  Scatter,        // the root gives one for every rank; takes one
  AllToAll,       // gives one for every rank, takes one of every rank; sizes as agreed pairwise
  Send,           // gives one to the peer
  Recv,           // takes one from the peer
};

/// What a rank asks of the others. All ranks of a group put the same request, but for Send, Recv and the rank's part.
struct Request {
  Op op;
  at::ScalarType dtype = at::kByte;                        // of all tensors; whatever is only moved goes as bytes
  c10d::ReduceOp::RedOpType reduce = c10d::ReduceOp::SUM;  // SUM, PRODUCT, MIN or MAX
  int root = 0;                                            // for Send and Recv the peer
  bool list = false;             // reduce-scatter of a list of tensors: gloo has another method for it
  std::vector<at::Tensor> give;  // 1D, in host memory, of nobody else
  std::vector<int64_t> take;     // the numbers of elements
  std::string call;              // "all_reduce(SUM, 12 Float)", for messages
};

using Deadline = std::chrono::steady_clock::time_point;

/// A request under way.
class Exchange {
 public:
  virtual ~Exchange() = default;
  /// Whether the results are there, or never will be. Does not block.
  virtual bool done() = 0;
  /// Block until done. False at the deadline; nothing given: until the transport's own. Throws why it failed.
  /// Without the GIL.
  virtual bool wait(std::optional<Deadline> deadline) = 0;
  /// After `wait`: one tensor for each number in `take`. The caller may read them, not write them.
  virtual std::vector<at::Tensor> results() = 0;
  /// Make `wait` of another thread end with an error, where the transport can.
  virtual void abort(const std::string& reason) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::shared_ptr<Exchange> start(Request request) = 0;
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  /// The transport of a part of the group: the group ranks in `ranks`, of which this rank is one.
  virtual std::shared_ptr<Transport> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks, const std::string& name,
      std::chrono::milliseconds timeout) = 0;
  /// Every request under way and every later one fails with this reason.
  virtual void abort(const std::string& reason) = 0;
};

/// A gloo backend of so many ranks that meet at the store, which is theirs alone.
using MakeGloo = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout)>;

/// Over gloo, whose reductions and their order are those of a program on the CPU.
std::shared_ptr<Transport> gloo_transport(
    MakeGloo make, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout);

/// Between threads: the ranks that name the same group in the same world meet. Reductions add in the order of ranks.
std::shared_ptr<Transport> thread_transport(
    const std::string& world, const std::string& group, int rank, int size, std::chrono::milliseconds timeout);

/// Every group of a world of threads fails with this reason, also those that are made later: one of its ranks has died.
void abort_thread_world(const std::string& world, const std::string& reason);
/// Called where a thread would block, for ranks that take turns: returns once the first says so, throws if it never will.
/// The second says what is waited for. Without the GIL. Empty: threads block.
using Waiter = std::function<void(const std::function<bool()>& ready, const std::function<std::string()>& describe)>;
void set_thread_waiter(Waiter waiter);
/// Whether there is one, so that each rank of this process is a thread with a device of its own.
bool threads_take_turns();
/// The world has ended: its groups are forgotten.
void forget_thread_world(const std::string& world);

/// Plain CPU kernels: no autograd, no Python modes, no functionalization, whatever the caller of an op has switched on.
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
