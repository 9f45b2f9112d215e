"""Operations on gradients, in torch, and where that is ahead in numba on the CPU and on CUDA."""
