"""Example configurations, environments and tiny models that come with Trireme."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trireme.base.errors import ConfigError

PARTS = ("configs", "environments", "models")
IN_PACKAGE = "shipped"  # where a wheel has them: see hatch_build.py


@dataclass(frozen=True)
class Shipped:
    root: Path
    is_checkout: bool  # of the sources; else an installed package, in which nobody is to write

    @property
    def configs(self) -> Path:
        return self.root / "configs"

    @property
    def environments(self) -> Path:
        return self.root / "environments"

    @property
    def models(self) -> Path:
        return self.root / "models"

    def packages(self) -> list[Path]:
        """Environments, and what they share."""
        return sorted(project.parent for project in self.environments.glob("*/pyproject.toml"))

    def tiny_models(self) -> list[Path]:
        return sorted(config.parent for config in self.models.glob("*/config.json"))

    def examples(self, pattern: str) -> list[Path]:
        """Configurations, relative to the root."""
        return sorted(file.relative_to(self.root) for file in self.configs.glob(pattern))


def find_shipped(package: Path | None = None) -> Shipped:
    """
    Args:
        package: the folder of our modules; this one's where not given.

    Raises: ConfigError where neither a checkout lies around it nor data inside it.
    """
    package = package or Path(__file__).parents[2]
    places = (Shipped(package.parents[1], is_checkout=True), Shipped(package / IN_PACKAGE, is_checkout=False))
    for place in places:
        if all((place.root / part).is_dir() for part in PARTS):
            return place
    raise ConfigError(
        f"the examples of Trireme are in none of {', '.join(str(place.root) for place in places)} - expected "
        f"{', '.join(PARTS)} in a checkout, or in the installed package. Install it again, from a whole checkout."
    )
