"""Training scripts as people write them, for CUDA and torchrun: what `sanitize --as-cuda` is tried on."""
