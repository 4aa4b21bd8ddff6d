#include "pages.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "runtime.h"

namespace sim {
namespace {

/// The file of 0xFF that lazy memory is mapped from, again and again. A power of two: it is small beside what it
/// stands for, and the system limits the number of mappings (to 65,530 by default).
constexpr size_t kPatternBytes = size_t{32} << 20;

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t whole_pages(size_t nbytes) {
  return (nbytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

struct Mapping {
  void* begin;
  size_t nbytes;
};

void unmap(void* context) {
  auto* mapping = static_cast<Mapping*>(context);
  munmap(mapping->begin, mapping->nbytes);
  delete mapping;
}

void unmap_lazy(void* context) {
  unmap(context);
}

c10::DataPtr data_of(void* begin, size_t nbytes, c10::DeleterFnPtr deleter) {
  return {begin, new Mapping{begin, nbytes}, deleter, c10::Device(c10::DeviceType::CPU)};
}

/// -1 if the system has no anonymous files.
int pattern_file() {
  static const int file = [] {
    const int made = ::memfd_create("fsdp-conformance NaN", MFD_CLOEXEC);
    if (made < 0) {
      return -1;
    }
    const std::vector<char> pattern(1 << 20, static_cast<char>(0xFF));
    for (size_t written = 0; written < kPatternBytes; written += pattern.size()) {
      if (::write(made, pattern.data(), pattern.size()) != static_cast<ssize_t>(pattern.size())) {
        ::close(made);
        return -1;
      }
    }
    return made;
  }();
  return file;
}

/// Map the pattern over memory of ours, as often as it takes.
bool map_pattern(char* begin, size_t nbytes) {
  for (size_t at = 0; at < nbytes; at += kPatternBytes) {
    const size_t part = std::min(kPatternBytes, nbytes - at);
    const int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    if (mmap(begin + at, part, PROT_READ | PROT_WRITE, flags, pattern_file(), 0) == MAP_FAILED) {
      return false;
    }
  }
  return true;
}

/// The addresses of a guard. The handler reads them without a lock, while others may change them.
struct Guarded {
  std::atomic<char*> begin{nullptr};
  std::atomic<char*> end{nullptr};
  std::atomic<const char*> block_begin{nullptr};
  std::atomic<BlockId> block{0};
  std::atomic<bool> closed{false};
};

constexpr size_t kMostGuards = 512;

struct Guards {
  std::array<Guarded, kMostGuards> slots;
  std::mutex mutex;                    // for taking a slot
  struct sigaction before = {};        // who handled faults before us
  std::atomic<bool> handed_on{false};  // a fault that was not ours
  std::mutex touches_mutex;
  std::vector<Touch> touches;
};

Guards& guards() {
  static auto* all = new Guards();
  return *all;
}

bool is_write([[maybe_unused]] void* context) {
#if defined(__x86_64__)
  return (static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#else
  return false;
#endif
}

/// Runs in the thread that touched the memory, between two instructions of code that is not ours: no lock of ours is
/// held, and no allocation is under way.
void on_fault(int signal, siginfo_t* info, void* context) {
  Guards& all = guards();
  auto* at = static_cast<char*>(info->si_addr);
  for (Guarded& slot : all.slots) {
    char* begin = slot.begin.load(std::memory_order_acquire);
    char* end = slot.end.load(std::memory_order_acquire);
    if (begin == nullptr || at < begin || at >= end) {
      continue;
    }
    const int error = errno;
    const bool first = slot.closed.exchange(false);
    mprotect(begin, static_cast<size_t>(end - begin), PROT_READ | PROT_WRITE);
    if (first) {
      const bool writes = is_write(context);
      Touch touch{slot.block, at - slot.block_begin.load(), writes, nullptr};
      touch.site = here_without_waiting("code outside torch");
      const std::lock_guard<std::mutex> lock(all.touches_mutex);
      all.touches.push_back(std::move(touch));
    }
    errno = error;
    return;  // the instruction runs again
  }
  // A real fault: let whoever was there before us see it, and after that nobody.
  if (all.handed_on.exchange(true)) {
    struct sigaction plain = {};
    plain.sa_handler = SIG_DFL;
    sigaction(signal, &plain, nullptr);
  } else {
    sigaction(signal, &all.before, nullptr);
  }
}

/// Make sure that we see faults first: a program may have enabled its own handler meanwhile.
void handle_faults() {
  Guards& all = guards();
  struct sigaction now = {};
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == &on_fault) {
    return;
  }
  all.before = now;
  struct sigaction ours = {};
  ours.sa_sigaction = &on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &ours, nullptr);
}

}  // namespace

c10::DataPtr own_pages(size_t nbytes) {
  const size_t whole = whole_pages(nbytes);
  void* begin = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(
      OutOfMemoryError, begin != MAP_FAILED, "the system has no ", nbytes, " bytes of memory for pinned memory");
  return data_of(begin, whole, &unmap);
}

c10::DataPtr lazy_pages(size_t nbytes) {
  if (pattern_file() < 0) {
    return {};
  }
  const size_t whole = whole_pages(nbytes);
  void* begin = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) {
    return {};
  }
  if (!map_pattern(static_cast<char*>(begin), whole)) {
    munmap(begin, whole);
    return {};
  }
  return data_of(begin, whole, &unmap_lazy);
}

bool renew(const c10::DataPtr& memory, size_t nbytes) {
  return memory.get_deleter() == &unmap_lazy && map_pattern(static_cast<char*>(memory.get()), whole_pages(nbytes));
}

int guard(BlockId block, const char* block_begin, char* begin, char* end) {
  const auto page = page_bytes();
  auto* from = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page);
  auto* to = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) / page * page);
  if (from >= to) {
    return -1;
  }
  Guards& all = guards();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (size_t i = 0; i < kMostGuards; ++i) {
    Guarded& slot = all.slots[i];
    if (slot.begin.load() != nullptr) {
      continue;
    }
    handle_faults();
    slot.block = block;
    slot.block_begin = block_begin;
    slot.end.store(to, std::memory_order_release);
    slot.begin.store(from, std::memory_order_release);
    slot.closed = true;
    mprotect(from, static_cast<size_t>(to - from), PROT_NONE);
    return static_cast<int>(i);
  }
  return -1;
}

void unguard(int guard) {
  if (guard < 0) {
    return;
  }
  Guarded& slot = guards().slots[static_cast<size_t>(guard)];
  char* begin = slot.begin.load();
  slot.closed = false;
  mprotect(begin, static_cast<size_t>(slot.end.load() - begin), PROT_READ | PROT_WRITE);
  slot.begin.store(nullptr, std::memory_order_release);
}

std::vector<Touch> take_touches() {
  Guards& all = guards();
  const std::lock_guard<std::mutex> lock(all.touches_mutex);
  return std::exchange(all.touches, {});
}

}  // namespace sim
