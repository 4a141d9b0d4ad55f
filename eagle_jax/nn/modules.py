"""Small helpers around flax nnx: lists of layers, abstract modules, strict filling."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
from flax import nnx

from eagle_jax.errors import FormatError

# flax 0.12 demands nnx.List for modules in a list; flax 0.11 (Colab) has no such name.
module_list = getattr(nnx, "List", list)


def parameter_shapes(build: Callable[[], nnx.Module]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that `build()` would create, by dotted path; allocates nothing."""
    state = nnx.state(nnx.eval_shape(build), nnx.Param)
    return {
        _dotted(path): jax.tree.leaves(leaf)[0].shape for path, leaf in nnx.to_flat_state(state)
    }


def fill(build: Callable[[], nnx.Module], arrays: Mapping[str, jax.Array]) -> nnx.Module:
    """The module of `build()` holding the given arrays instead of freshly drawn ones.

    Args:
      build: a function that makes the module; it is traced, never run.
      arrays: every parameter by dotted path, e.g. `layers.0.mlp.down.weight`.

    Raises:
      FormatError: a parameter is missing, unknown, or of another shape.
    """
    expected = parameter_shapes(build)
    missing, extra = (
        sorted(expected.keys() - arrays.keys()),
        sorted(arrays.keys() - expected.keys()),
    )
    if missing or extra:
        raise FormatError(
            f"weights do not fit the model: missing {missing[:4]}, unknown {extra[:4]}"
        )
    for name, shape in expected.items():
        if tuple(arrays[name].shape) != tuple(shape):
            raise FormatError(
                f"weight {name}: expected shape {tuple(shape)}, found {tuple(arrays[name].shape)}"
            )
    graph, state = nnx.split(nnx.eval_shape(build))
    flat = [(path, leaf.replace(arrays[_dotted(path)])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def parameters(module: nnx.Module) -> dict[str, jax.Array]:
    """The parameters of a module by dotted path, as `fill` takes them."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {_dotted(path): jax.tree.leaves(leaf)[0] for path, leaf in flat}


def _dotted(path: tuple) -> str:
    return ".".join(str(part) for part in path)
