"""Weights and inputs that anyone can make again, so that a test needs only the numbers another implementation gave.

A tensor is drawn by NumPy's RandomState, whose streams never change, seeded with the CRC-32 of its name.
"""

import zlib

import numpy as np


def draw(name: str, *shape: int) -> np.ndarray:
    """Standard normal numbers (float64) for the tensor called ``name``."""
    return np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)


def weight(name: str, *shape: int) -> np.ndarray:
    """A parameter: vectors of standard deviation 0.3, others of 1 / sqrt(the elements of a row)."""
    scale = 0.3 if len(shape) == 1 else np.prod(shape[1:]) ** -0.5
    return draw(name, *shape) * scale


def digest(name: str, values: np.ndarray) -> list[float]:
    """Four numbers that stand for an array: its products with four arrays drawn by the rule."""
    return [float((values * draw(f"digest {i} of {name}", *values.shape)).sum()) for i in range(4)]
