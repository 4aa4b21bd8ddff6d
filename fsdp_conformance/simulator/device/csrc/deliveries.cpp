#include "deliveries.h"

#include <Python.h>

#include <ATen/ops/div.h>
#include <ATen/ops/from_blob.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "runtime.h"
#include "staging.h"

namespace sim {

namespace {

/// One past the last byte of a strided tensor in host memory.
const char* end_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return static_cast<const char*>(tensor.data_ptr());
  }
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return static_cast<const char*>(tensor.data_ptr()) + (last + 1) * static_cast<int64_t>(tensor.itemsize());
}

struct Owed {
  Target* target;
  std::shared_ptr<CollectiveCall> call;
};

/// A call, as an operation on a stream.
struct Started {
  c10::DeviceIndex device;
  Lane lane;
  uint64_t tick;
  std::shared_ptr<CollectiveCall> call;

  bool in(const Clock& clock) const {
    // All ranks of a process share the host's clock, but a host never waits for a call that another rank started.
    if (threads_take_turns() && device != current_device()) {
      return false;
    }
    return tick == 0 || (static_cast<size_t>(lane) < clock.size() && clock[lane] >= tick);
  }
};

struct Registry {
  std::mutex mutex;
  std::vector<Started> started;  // unfinished calls, in the order in which they were started
  // Keyed by the end of the target. Targets of different calls never overlap: issuing a call settles what it will
  // write.
  std::multimap<const char*, Owed> owed;
  std::atomic<size_t> num_owed{0};
  std::atomic<size_t> num_started{0};

  void recount() {
    num_owed.store(owed.size(), std::memory_order_release);
    num_started.store(started.size(), std::memory_order_release);
  }

  /// The calls for which `chosen` is true.
  template <typename Choose>
  std::vector<std::shared_ptr<CollectiveCall>> calls(Choose chosen) {
    std::vector<std::shared_ptr<CollectiveCall>> found;
    if (num_started.load(std::memory_order_acquire) == 0) {
      return found;
    }
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& one : started) {
      if (chosen(one)) {
        found.push_back(one.call);
      }
    }
    return found;
  }

  /// Call it under the lock.
  template <typename Visit>
  void each(const char* begin, const char* end, Visit visit) {
    for (auto entry = owed.upper_bound(begin); entry != owed.end() && entry->second.target->begin < end; ++entry) {
      visit(entry->second);
    }
  }
};

Registry& registry() {
  static auto* all = new Registry();  // Outlives the tensors of a process that exits abruptly.
  return *all;
}

std::atomic<int> main_waits{0};
std::atomic<int> other_waits{0};
std::atomic<uint64_t> num_waits{0};

/// For its lifetime, this thread waits for peers.
class InWait {
 public:
  InWait() : count_(gettid() == getpid() ? main_waits : other_waits) {
    ++count_;
    ++num_waits;
  }
  ~InWait() {
    --count_;
  }
  InWait(const InWait&) = delete;
  InWait& operator=(const InWait&) = delete;

 private:
  std::atomic<int>& count_;
};

void finish(const std::vector<std::shared_ptr<CollectiveCall>>& calls) {
  if (calls.empty()) {
    return;
  }
  WithoutGil released;
  for (const auto& call : calls) {
    call->finish(std::nullopt);
  }
}

}  // namespace

Waiting waiting() {
  return {main_waits, other_waits, num_waits};
}

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) {
    state_ = PyEval_SaveThread();
  }
}

WithoutGil::~WithoutGil() {
  if (state_) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
  }
}

Target::Target(at::Tensor place)
    : place(std::move(place)), begin(static_cast<const char*>(this->place.data_ptr())), end(end_of(this->place)) {}

void CollectiveCall::add(Part part) {
  parts_.push_back(std::move(part));
}

void CollectiveCall::hold(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    held_.push_back(tensor.storage());
  }
}

void CollectiveCall::publish(c10::DeviceIndex device, Lane lane, uint64_t tick) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.started.push_back({device, lane, tick, shared_from_this()});
  for (const auto& part : parts_) {
    for (const auto& target : part.targets) {
      if (target->begin < target->end) {
        all.owed.insert({target->end, {target.get(), shared_from_this()}});
      }
    }
  }
  all.recount();
}

void CollectiveCall::unpublish() {
  const auto self = shared_from_this();  // so that nothing is destroyed under the lock
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.started.erase(
      std::remove_if(all.started.begin(), all.started.end(), [&](const Started& one) { return one.call == self; }),
      all.started.end());
  for (const auto& part : parts_) {
    for (const auto& target : part.targets) {
      auto [entry, last] = all.owed.equal_range(target->end);
      while (entry != last) {
        entry = entry->second.target == target.get() ? all.owed.erase(entry) : std::next(entry);
      }
    }
  }
  all.recount();
}

bool CollectiveCall::done() {
  for (const auto& part : parts_) {
    if (!part.exchange->done()) {
      return false;
    }
  }
  return true;
}

bool CollectiveCall::finish(std::optional<Deadline> deadline, bool needs_results) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (delivered_) {
      return true;
    }
  }
  const auto self = shared_from_this();  // The registry may hold the last other reference.
  const InWait in_wait;
  std::vector<std::vector<at::Tensor>> results;
  try {
    for (const auto& part : parts_) {
      if (!part.exchange->wait(deadline)) {
        return false;
      }
      results.push_back(part.exchange->results());
    }
  } catch (const std::exception& error) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      failure_ = message_of(error);
      reported_ |= needs_results;
    }
    if (needs_results) {
      unpublish();  // Reported once, where the bytes were needed; they stay NaN.
    }
    throw;
  }
  deliver(results);
  unpublish();
  return true;
}

void CollectiveCall::deliver(const std::vector<std::vector<at::Tensor>>& results) {
  PlainKernels plain;
  std::lock_guard<std::mutex> lock(mutex_);
  if (delivered_) {
    return;
  }
  for (size_t i = 0; i < parts_.size(); ++i) {
    const auto& part = parts_[i];
    TORCH_INTERNAL_ASSERT(part.targets.size() == results[i].size(), "results without a target");
    for (size_t j = 0; j < part.targets.size(); ++j) {
      const auto& target = *part.targets[j];
      if (target.forgotten.load() || target.begin == target.end) {
        continue;
      }
      at::Tensor result = results[i][j];
      if (part.divisor != 1) {
        result = at::isIntegralType(result.scalar_type(), /*includeBool=*/true) ? at::div(result, part.divisor, "trunc")
                                                                                : at::div(result, part.divisor);
      }
      // The same bytes with the target's dtype: data that is only moved arrives as bytes, complex numbers as two reals.
      const auto typed = at::from_blob(result.data_ptr(), target.place.sizes(), target.place.options());
      if (target.poisoned) {
        std::memset(typed.data_ptr(), 0xFF, typed.nbytes());
      }
      copy_bytes(target.place, typed);
    }
  }
  delivered_ = true;
}

void CollectiveCall::abort(const std::string& reason) {
  for (const auto& part : parts_) {
    part.exchange->abort(reason);
  }
}

std::string CollectiveCall::failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

bool CollectiveCall::has_reported_failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reported_;
}

bool deliveries_pending() {
  return registry().num_owed.load(std::memory_order_acquire) > 0;
}

void settle(const void* begin, size_t nbytes) {
  if (!deliveries_pending() || nbytes == 0) {
    return;
  }
  const auto* from = static_cast<const char*>(begin);
  std::vector<std::shared_ptr<CollectiveCall>> calls;
  {
    Registry& all = registry();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.each(from, from + nbytes, [&](const Owed& owed) {
      if (!owed.target->forgotten.load() && (calls.empty() || calls.back() != owed.call)) {
        calls.push_back(owed.call);
      }
    });
  }
  finish(calls);
}

void settle(const at::Tensor& tensor) {
  if (!deliveries_pending() || !tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) {
    return;
  }
  const auto* begin = static_cast<const char*>(tensor.data_ptr());
  settle(begin, end_of(tensor) - begin);
}

void settle_until(const Clock& clock) {
  finish(registry().calls([&](const Started& one) { return one.in(clock); }));
}

void settle_device(c10::DeviceIndex device) {
  finish(registry().calls([&](const Started& one) { return one.device == device; }));
}

bool settled_until(const Clock& clock) {
  const auto calls = registry().calls([&](const Started& one) { return one.in(clock); });
  return std::all_of(calls.begin(), calls.end(), [](const auto& call) { return call->done(); });
}

void forget(const void* begin, size_t nbytes) {
  if (!deliveries_pending() || nbytes == 0) {
    return;
  }
  const auto* from = static_cast<const char*>(begin);
  std::vector<Owed> found;
  {
    Registry& all = registry();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.each(from, from + nbytes, [&](const Owed& owed) { found.push_back(owed); });
    for (const auto& owed : found) {
      owed.target->forgotten.store(true);
      auto [entry, last] = all.owed.equal_range(owed.target->end);
      while (entry != last) {
        entry = entry->second.target == owed.target ? all.owed.erase(entry) : std::next(entry);
      }
    }
    all.recount();
  }
  for (const auto& owed : found) {
    std::lock_guard<std::mutex> lock(owed.call->mutex_);  // Wait for a delivery in progress.
  }
}

}  // namespace sim
