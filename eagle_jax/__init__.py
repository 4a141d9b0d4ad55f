"""EAGLE speculative decoding in JAX: the drafter changes the speed, never the output."""

from eagle_jax.config import PLAIN, Sampling, TreeShape
from eagle_jax.decode.generate import Generation, Piece, Stats, generate, stream
from eagle_jax.drafters.load import LoadedDrafter, load_drafter
from eagle_jax.errors import DownloadError, EagleError, FormatError, InputError
from eagle_jax.target.load import Target, load_target

__version__ = "0.1.0"

__all__ = [
    "PLAIN",
    "DownloadError",
    "EagleError",
    "FormatError",
    "Generation",
    "InputError",
    "LoadedDrafter",
    "Piece",
    "Sampling",
    "Stats",
    "Target",
    "TreeShape",
    "generate",
    "load_drafter",
    "load_target",
    "stream",
]
