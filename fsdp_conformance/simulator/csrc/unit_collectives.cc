// One translation unit: torch's headers take most of the compiler's time, so they are read once for all of these.
#include "arguments.cpp"
#include "collectives.cpp"
#include "deliveries.cpp"
#include "transport_gloo.cpp"
#include "transport_threads.cpp"
#include "work.cpp"
