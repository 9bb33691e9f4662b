"""All models of the zoo, library by library."""

from __future__ import annotations

from importlib.util import find_spec

from tests.zoo import (
    arrangement_models,
    diffusers_models,
    map_models,
    neighbour_models,
    open_clip_models,
    peft_models,
    timm_models,
    torch_models,
    torchvision_models,
    transformers_models,
    transformers_other_models,  # noqa: F401 - adds to the shelf of transformers_models
    trap_models,
    vit_pytorch_models,
    x_transformers_models,
)
from tests.zoo.registry import Model, Shelf

SHELVES: tuple[Shelf, ...] = (
    torch_models.SHELF,
    arrangement_models.SHELF,
    map_models.SHELF,
    neighbour_models.SHELF,
    trap_models.SHELF,
    torchvision_models.SHELF,
    timm_models.SHELF,
    transformers_models.SHELF,
    vit_pytorch_models.SHELF,
    x_transformers_models.SHELF,
    diffusers_models.SHELF,
    open_clip_models.SHELF,
    peft_models.SHELF,
)
MODELS: tuple[Model, ...] = tuple(model for shelf in SHELVES for model in shelf.models)

_PACKAGES = {"vit-pytorch": "vit_pytorch", "x-transformers": "x_transformers"}


def installed(library: str) -> bool:
    """Whether the library can be imported; what is written here always can."""
    return library.startswith("written") or find_spec(_PACKAGES.get(library, library)) is not None
