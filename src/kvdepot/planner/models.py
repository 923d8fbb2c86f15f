"""Models, by name from the table of well-known models, or by their config.json.

The table, models.toml, has the numbers that KV and prefill depend on, with their sources. Use a
config.json if you have it.
"""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

from kvdepot.core.hf_config import AttentionCost, attention_costs, model_layout, read_config
from kvdepot.core.layout import DEFAULT_BLOCK_TOKENS, DType, ModelLayout
from kvdepot.errors import ConfigError

Family = Literal["dense", "moe", "sliding", "mla", "hybrid"]


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    source: str
    """The source of the numbers."""
    config: Mapping[str, Any]
    parameters: float | None = None
    """All weights; None for a config.json, which does not have the number."""
    active_parameters: float | None = None
    """Weights that are used for one token."""
    family: Family | None = None
    repository: str = ""
    """Its name at huggingface.co; empty for a config.json."""
    aliases: tuple[str, ...] = ()

    def layout(
        self, *, dtype: DType | None = None, block_tokens: int = DEFAULT_BLOCK_TOKENS
    ) -> ModelLayout:
        return model_layout(self.config, dtype=dtype, block_tokens=block_tokens)

    def attention_costs(self) -> tuple[AttentionCost, ...]:
        return attention_costs(self.config)


_SHAPE: Final = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")


def _known_model(repository: str, types: Mapping[str, Any], facts: dict[str, Any]) -> Model:
    """One line of models.toml; the file describes the fields."""
    family, aliases = facts.pop("family"), tuple(facts.pop("aliases", ()))
    whole, *active = facts.pop("billions")
    sizes = dict(zip(_SHAPE, facts.pop("shape"), strict=True))
    nulls = dict.fromkeys(facts.pop("null", ()))
    config = {**types.get(facts["model_type"], {}), **sizes, "dtype": "bfloat16", **nulls, **facts}
    if kinds := config.get("layer_types"):
        config["layer_types"] = kinds * (sizes["num_hidden_layers"] // len(kinds))
    name, source = repository.rpartition("/")[2], f"huggingface.co/{repository} config.json"
    parameters = whole * 1e9, (active or [whole])[0] * 1e9
    return Model(name, source, config, *parameters, family, repository, aliases)


def _shipped() -> tuple[Model, ...]:
    text = resources.files(__package__).joinpath("models.toml").read_text("utf-8")
    table = tomllib.loads(text)
    return tuple(_known_model(name, table["types"], it) for name, it in table["models"].items())


KNOWN_MODELS: Final = _shipped()


_TUNED: Final = ("-instruct", "-chat", "-base", "-it", "-hf", "-pt")
"""Endings of names that have no effect on KV."""


def find_model(text: str) -> Model:
    """`text` is a config.json, a directory with one, or a well-known name.

    Raises ConfigError for a file that cannot be read and, with the nearest names, for an unknown
    name.
    """
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json" or path.is_file():
        return Model(text, str(path), read_config(path))
    named = _by_name()
    for wanted in (_plain(text), _plain(text.rpartition("/")[2])):
        if wanted in named:
            return named[wanted]
    names = [name for known in KNOWN_MODELS for name in (*known.aliases, known.name)]
    shown = {_plain(name): name for name in names}
    near = difflib.get_close_matches(_plain(text.rpartition("/")[2]), shown, n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(shown[name] for name in near)}; " if near else ""
    raise ConfigError(
        "model",
        f"{text!r} is neither a file nor a well-known model",
        hint=f"{hint}kvdepot size --models lists all; any config.json works",
    )


def _by_name() -> dict[str, Model]:
    return {
        _plain(name): known
        for known in KNOWN_MODELS
        for name in (known.repository, known.name, *known.aliases)
    }


def _plain(name: str) -> str:
    """`name` for comparing: lower case, without separators, dates and endings."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-").removesuffix("-2507")
    for ending in _TUNED:
        plain = plain.removesuffix(ending)
    return plain.replace("-", "")
