"""The tests of a project that knows nothing of this package, to be copied somewhere and run with pytest."""
