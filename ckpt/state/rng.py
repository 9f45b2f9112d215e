"""Generators of random numbers of ranks that there were not when a step was captured."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash


def derived_rng(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the states of the generators of a rank that there was not, made of those of rank 0.

    The seed of all is the XXH3-64 of the words of rank 0's generators of Python, NumPy and torch and of "rank <rank>".
    """
    hashed = xxhash.xxh3_64()
    words = state["python"][1], state["numpy"]["state"]["key"]
    for each in (*(word.tobytes() for word in words), bytes(state["torch"].tolist())):
        hashed.update(each)
    hashed.update(f"rank {rank}".encode())
    seed = hashed.intdigest()
    version, numbers, gauss = random.Random(seed).getstate()
    return {
        "python": (version, np.array(numbers, dtype=np.uint32), gauss),
        "numpy": np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]).get_state(legacy=False),
        "torch": torch.Generator("cpu").manual_seed(seed >> 1).get_state(),
        # A seed and an offset of 8 bytes each.
        "cuda": [
            torch.tensor([*((seed >> 1) + index).to_bytes(8, "little"), *bytes(8)], dtype=torch.uint8)
            for index in range(len(state["cuda"]))
        ],
    }
