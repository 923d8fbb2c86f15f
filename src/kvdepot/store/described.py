"""Namespaces known by their descriptions on the drives, registered or not."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvdepot.config.settings import TenantConfig
from kvdepot.core.block import TAG_BYTES
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.core.requests import BlockSize
from kvdepot.errors import ConfigError

_PARSED_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Described:
    """A namespace read from its description."""

    layout: KVLayout
    tenant: str
    namespace: Namespace | None
    """None if its secret is not known here."""


class DescribedNamespaces:
    """The namespaces described on the drives, registered or not."""

    def __init__(
        self, descriptions: Callable[[], dict[bytes, bytes]], tenants: Mapping[str, TenantConfig]
    ) -> None:
        self._descriptions = descriptions
        self._tenants = tenants
        self._parsed: dict[bytes, Described | None] = {}
        """Parsed namespaces by description; None for an invalid one."""

    def all(self) -> dict[bytes, Described]:
        """All described namespaces by tag."""
        found: dict[bytes, Described] = {}
        for tag, text in self._descriptions().items():
            if text not in self._parsed:
                if len(self._parsed) >= _PARSED_MAX:
                    self._parsed.clear()
                self._parsed[text] = self._parse(text)
            known = self._parsed[text]
            if known is not None:
                found[tag] = known
        return found

    def size_of(self, tag: int) -> BlockSize | None:
        """The size of a namespace's blocks, by the first word of its keys; None if unknown."""
        known = self.all().get(tag.to_bytes(TAG_BYTES, "little"))
        return (
            None if known is None else BlockSize(known.layout.block_bytes, known.layout.chunk_bytes)
        )

    def _parse(self, text: bytes) -> Described | None:
        try:
            fields = json.loads(text)
            layout = KVLayout.from_description(fields["layout"])
            tenant = str(fields["tenant"])
        except (ValueError, KeyError, TypeError):
            return None
        known = self._tenants.get(tenant)
        try:
            secret = known.secret() if known is not None else b""
            return Described(layout, tenant, Namespace.from_description(fields, secret))
        except ConfigError:
            return Described(layout, tenant, None)
