"""The border between our params and a checkpoint's tensors: one record a tensor, in the names of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """One tensor of a Hugging Face checkpoint, and where it lies in our params.

    `params[path][index] = to_ours(theirs)` loads it; `to_theirs(params[path][index])` saves it. Both only
    transpose and reshape: they keep the dtype, and a linear map [out, in] becomes ours [in, ...out].
    """

    name: str  # "model.layers.3.self_attn.q_proj.weight"
    path: tuple[str, ...]  # ("layers", "query")
    layer: int | None  # index on the leading axis [L, ...] of the parameter; None where there is none
    shape: tuple[int, ...]  # theirs
    to_ours: Callable[[np.ndarray], np.ndarray]
    to_theirs: Callable[[np.ndarray], np.ndarray]
    expert: int | None = None  # index on the second axis [L, E, ...] of an expert's parameter

    @property
    def index(self) -> tuple[int, ...]:
        """Where in the parameter at `path`: (), (layer,) or (layer, expert)."""
        return tuple(i for i in (self.layer, self.expert) if i is not None)
