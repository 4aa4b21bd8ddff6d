// One translation unit: torch's headers take most of the compiler's time, so they are read once for all of these.
#include "checker.cpp"
#include "checker_accesses.cpp"
#include "checker_bindings.cpp"
#include "checker_reuse.cpp"
#include "checker_unwritten.cpp"
#include "extents.cpp"
