"""Operations on gradients, each with three implementations: torch, numba on the CPU, numba on CUDA."""
