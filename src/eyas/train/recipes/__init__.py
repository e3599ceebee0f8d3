"""What each kind of head learns from a batch. ``recipe_for`` finds the recipe of a config."""

from __future__ import annotations

from typing import Any

from eyas.heads.config import Eagle3Config, HeadConfig
from eyas.train.recipes.base import Recipe
from eyas.train.recipes.eagle import EagleRecipe
from eyas.train.recipes.eagle3 import Eagle3Recipe


def recipe_for(config: HeadConfig) -> Recipe[Any, Any]:
    """The recipe by which a head of this shape is trained."""
    return Eagle3Recipe() if isinstance(config, Eagle3Config) else EagleRecipe()
