// How values that nothing has written show in an operation's results (uninitialized.h).
#pragma once

#include <cstdint>

namespace sim {

enum class Flow : uint8_t {
  Elementwise,  // an element of the result depends on the same elements of the inputs
  Reduces,      // a result of one element depends on all elements; others as for Selects
  Selects,      // only an input of which nothing is written makes the result unwritten
  Product,      // as for Selects, but each slice of an operand decides about its slice of the result: Traits::kept
  Pieces,       // the inputs lie in the result one after another
  Places,       // the data decide where values go: the result counts as written
};

}  // namespace sim
