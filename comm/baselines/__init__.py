"""The sparse all-reduces and compressors that ours are compared with, and what each costs."""
