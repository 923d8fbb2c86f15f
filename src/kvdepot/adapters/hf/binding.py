"""A model as the depot knows it: its groups, their namespaces, and the signs of its identity."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvdepot.adapters.hf.groups import (
    Group,
    default_block_tokens,
    extra_of,
    layout_of,
    sort_layers,
)
from kvdepot.adapters.hf.identity import Signs, model_fingerprint, signs_of, tuner_layers
from kvdepot.adapters.hf.probe import probe
from kvdepot.core.depot import Depot
from kvdepot.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `attach` was told."""

    name: str | None = None
    revision: str | None = None
    tenant: str = ""
    secret: bytes | None = None
    block_tokens: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Binding:
    """One model in one state. Another state is another binding."""

    groups: tuple[Group, ...]
    windows: tuple[int | None, ...]
    """Of each layer of the model's cache; None: full attention."""
    device: torch.device
    tokens_max: int | None
    """Beyond this many tokens the K of a token depends on those after it (dynamic rope scaling)."""
    relative: bool
    """Positions enter as rotations only: shifting all of them changes nothing."""
    tuners: tuple[torch.nn.Module, ...]
    signs: Signs

    @property
    def block_tokens(self) -> int:
        return self.groups[0].block_tokens

    def still_holds(self, model: PreTrainedModel) -> bool:
        """Whether the model is, by all signs, what it was."""
        return signs_of(model, self.tuners) == self.signs


def bind(model: PreTrainedModel, store: Depot, options: Options) -> Binding:
    """Find out what the model is and register its groups. Raises ModelError if it cannot be."""
    shapes = probe(model)
    layers = sort_layers(shapes)
    block_tokens = options.block_tokens or default_block_tokens(layers)
    identity = model_fingerprint(model, options.revision)
    groups = [
        Group(
            group[0],
            tuple(shape.index for shape in group),
            store.namespace(
                model=options.name or _default_name(model, options.revision),
                layout=layout_of(group, block_tokens),
                tenant=options.tenant,
                secret=options.secret,
                fingerprint=identity,
                extra=extra_of(group),
            ),
        )
        for group in layers
    ]
    tuners = tuple(tuner_layers(model))
    return Binding(
        tuple(groups),
        tuple(shape.window for shape in shapes),
        shapes[0].device,
        _tokens_max(model.config),
        bool(getattr(model.config, "rope_parameters", None)),
        tuners,
        signs_of(model, tuners),
    )


def check_revision(options: Options) -> None:
    """A revision speaks for the weights as they were when it was given."""
    if options.revision is not None:
        raise ModelError(
            "the model's weights or adapters have changed since it was attached",
            hint="attach it again with the revision it has now, or with none",
        )


def _default_name(model: PreTrainedModel, revision: str | None) -> str:
    """Weights that are fingerprinted need no telling name, and may move to another folder."""
    path = str(getattr(model.config, "_name_or_path", "") or "")
    return path if revision is not None and path else type(model).__name__


def _tokens_max(config: Any) -> int | None:
    limits = []
    for rope in _ropes(getattr(config, "rope_parameters", None) or {}):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            known = (
                rope.get("original_max_position_embeddings"),
                getattr(config, "original_max_position_embeddings", None),
                getattr(config, "max_position_embeddings", None),
            )
            limits += [int(limit) for limit in known if limit]
    # At the limit itself the model may still use the rotation of a longer sequence before.
    return min(limits) - 1 if limits else None


def _ropes(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All descriptions of a rotation: there may be one for each layer type."""
    if "rope_type" in parameters:
        yield parameters
    for value in parameters.values():
        if isinstance(value, dict):
            yield from _ropes(value)
