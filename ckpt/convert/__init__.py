"""What other ranks captured, put together: for another number of ranks, for plain PyTorch, and of imports."""
