#include "extents.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace sim {
namespace {

int64_t floor_div(int64_t a, int64_t b) {
  return a / b - static_cast<int64_t>(a % b != 0 && (a < 0) != (b < 0));
}

int64_t ceil_div(int64_t a, int64_t b) {
  return -floor_div(-a, b);
}

int64_t floor_mod(int64_t a, int64_t b) {
  return a - floor_div(a, b) * b;
}

/// Whether k * step lies in [low, high] for some k in [first, last].
bool has_multiple(int64_t step, int64_t first, int64_t last, int64_t low, int64_t high) {
  return std::max(first, ceil_div(low, step)) <= std::min(last, floor_div(high, step));
}

/// The smallest x >= 0 with low <= a*x mod m <= high, or -1. 0 <= a < m, 0 <= low <= high < m. Works like Euclid's
/// algorithm.
int64_t first_in_range(int64_t a, int64_t m, int64_t low, int64_t high) {
  if (low == 0) {
    return 0;
  }
  if (a == 0) {
    return -1;
  }
  const int64_t x = ceil_div(low, a);
  if (x <= floor_div(high, a)) {
    return x;
  }
  // No multiple of a in [low, high]: the first turn y around m after which one is in [m*y + low, m*y + high].
  const int64_t y = first_in_range(m % a, a, a - high % a, a - low % a);
  if (y < 0) {
    return -1;
  }
  const auto target = static_cast<__int128>(m) * y + low;
  return static_cast<int64_t>((target + a - 1) / a);
}

/// One summand x * stride of the distance between two runs, with x in [first, last].
struct Term {
  int64_t stride;
  int64_t first;
  int64_t last;
};

/// The possible distances between the runs of two strided extents: sums of terms, one for each stride.
class Distances {
 public:
  explicit Distances(std::vector<Term> terms) : terms_(std::move(terms)), below_(terms_.size() + 1) {
    for (size_t k = terms_.size(); k-- > 0;) {
      const Term& term = terms_[k];
      const Rest& rest = below_[k + 1];
      Rest& here = below_[k];
      here.least = rest.least + term.stride * term.first;
      here.most = rest.most + term.stride * term.last;
      here.divisor = std::gcd(rest.divisor, term.stride);
      // If the step is no wider than the span of the rest, the sums include every multiple of the divisor in their
      // range.
      here.gapless = rest.gapless && (rest.divisor == 0 || rest.divisor == here.divisor) &&
          term.stride <= rest.most - rest.least + here.divisor;
    }
  }

  bool reach(int64_t low, int64_t high) const {
    return reach(0, low, high);
  }

 private:
  /// The sums that a suffix of the terms can have.
  struct Rest {
    int64_t least = 0;
    int64_t most = 0;
    int64_t divisor = 0;
    bool gapless = true;
  };

  bool reach(size_t k, int64_t low, int64_t high) const {
    const Rest& here = below_[k];
    low = std::max(low, here.least);
    high = std::min(high, here.most);
    if (low > high) {
      return false;
    }
    if (k == terms_.size()) {
      return true;  // least == most == 0
    }
    if (floor_div(high, here.divisor) * here.divisor < low) {
      return false;
    }
    if (here.gapless) {
      return true;
    }
    const Term& term = terms_[k];
    const Rest& rest = below_[k + 1];
    const int64_t first = std::max(term.first, ceil_div(low - rest.most, term.stride));
    const int64_t last = std::min(term.last, floor_div(high - rest.least, term.stride));
    if (last - first >= 8 && k + 2 == terms_.size()) {
      return reach_with_two(term, terms_[k + 1], first, last, low, high);
    }
    for (int64_t x = first; x <= last; ++x) {
      if (reach(k + 1, low - x * term.stride, high - x * term.stride)) {
        return true;
      }
    }
    return false;
  }

  /// Whether x*s + y*t can lie in [low, high] with x in [first, last], without trying each x.
  static bool reach_with_two(
      const Term& s_term, const Term& t_term, int64_t first, int64_t last, int64_t low, int64_t high) {
    const int64_t s = s_term.stride;
    const int64_t t = t_term.stride;
    if (high - low + 1 >= t) {
      return first <= last;  // The caller's bounds on x leave a y for every x.
    }
    // First the smallest and the largest y, then the x for which y is unbounded.
    for (const int64_t y : {t_term.first, t_term.last}) {
      if (has_multiple(s, first, last, low - t * y, high - t * y)) {
        return true;
      }
    }
    first = std::max(first, ceil_div(high - t * t_term.last, s));
    last = std::min(last, floor_div(low - t * t_term.first, s));
    if (first > last) {
      return false;
    }
    // A multiple of t lies in [low - s*x, high - s*x] if (high - s*x) mod t <= high - low.
    const int64_t window = high - low;
    const int64_t a = floor_mod(-s, t);
    const int64_t base = floor_mod(high - s * first, t);
    const int64_t from = floor_mod(-base, t);
    const int64_t to = from + window;
    if (to >= t || from == 0) {
      return true;  // x = first
    }
    const int64_t x = first_in_range(a, t, from, to);
    return x >= 0 && x <= last - first;
  }

  std::vector<Term> terms_;  // by decreasing stride
  std::vector<Rest> below_;
};
}  // namespace

Extent normalized(const Extent& extent) {
  const bool is_empty = extent.run <= 0 ||
      std::any_of(extent.repeats.begin(), extent.repeats.end(), [](const auto& repeat) { return repeat.first <= 0; });
  if (is_empty) {
    return {extent.offset, 0, {}};
  }
  Extent result{extent.offset, extent.run, {}};
  if (extent.repeats.empty()) {
    return result;
  }
  auto repeats = extent.repeats;
  std::sort(repeats.begin(), repeats.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  // By increasing stride; `result.repeats` is reversed at the end.
  for (const auto& [count, stride] : repeats) {
    if (count == 1 || stride == 0) {
      continue;
    }
    if (result.repeats.empty() && stride <= result.run) {
      result.run += (count - 1) * stride;
    } else if (
        !result.repeats.empty() && stride % result.repeats.back().second == 0 &&
        stride / result.repeats.back().second <= result.repeats.back().first) {
      result.repeats.back().first += (count - 1) * (stride / result.repeats.back().second);
    } else {
      result.repeats.emplace_back(count, stride);
    }
  }
  std::reverse(result.repeats.begin(), result.repeats.end());
  return result;
}
bool overlap_of_normalized(const Extent& a, const Extent& b) {
  if (a.run <= 0 || b.run <= 0 || a.offset >= end_of(b) || b.offset >= end_of(a)) {
    return false;
  }
  if (a.repeats.empty() && b.repeats.empty()) {
    return true;
  }
  // A run of `a` starts at a.offset + sum(i*s), one of `b` at b.offset + sum(j*t); they have a byte in common if the
  // first starts less than b.run after and less than a.run before the second. Equal strides make one term: i - j.
  std::vector<Term> terms;
  auto left = a.repeats.begin();
  auto right = b.repeats.begin();
  while (left != a.repeats.end() || right != b.repeats.end()) {
    const int64_t left_stride = left == a.repeats.end() ? 0 : left->second;
    const int64_t stride = std::max(left_stride, right == b.repeats.end() ? 0 : right->second);
    Term term{stride, 0, 0};
    if (left != a.repeats.end() && left->second == stride) {
      term.last = left->first - 1;
      ++left;
    }
    if (right != b.repeats.end() && right->second == stride) {
      term.first = -(right->first - 1);
      ++right;
    }
    terms.push_back(term);
  }
  const int64_t apart = b.offset - a.offset;
  return Distances(std::move(terms)).reach(apart - a.run + 1, apart + b.run - 1);
}
bool overlap(const Extent& a, const Extent& b) {
  return overlap_of_normalized(normalized(a), normalized(b));
}

}  // namespace sim
