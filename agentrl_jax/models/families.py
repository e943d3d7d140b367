"""Which module speaks which `model_type` of config.json."""

from __future__ import annotations

from types import ModuleType

from agentrl_jax.errors import UserError
from agentrl_jax.models import llama

FAMILIES: dict[str, ModuleType] = {name: module for module in (llama,) for name in module.MODEL_TYPES}


def family_of(model_type: str | None, where: str = "config.json") -> ModuleType:
    """The family's module: `MODEL_TYPES`, `config_from_json`, `config_to_json`, `tensors`.

    Raises `UserError` naming the known ones; `where` is the file that says `model_type`.
    """
    if model_type not in FAMILIES:
        raise UserError(f"{where}: model_type is {model_type!r}, expected one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
