"""Replaces names in answers to requests without a token: every user of the machine may ask.

Sessions, tenants, paths and addresses get pseudonyms, which stay the same until the daemon ends.
"""

import hashlib
import re
from typing import Any, Final

_PATH: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"]+|(?<![\w/.-])/[^\s'\",:;]+")
"""An address, or an absolute path."""
_DIGITS: Final = 8


class NameHider:
    """Makes pseudonyms that cannot be computed without `secret`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def hidden(self, answer: Any, name: str = "") -> Any:
        """A copy of an answer with pseudonyms. `name` is the field that it is the value of."""
        if isinstance(answer, str):
            return _PATH.sub(lambda found: self._pseudonym("path", found[0]), answer)
        if isinstance(answer, list | tuple):
            return [self.hidden(item) for item in answer]
        if not isinstance(answer, dict):
            return answer
        shown = {key: self.hidden(value, key) for key, value in answer.items()}
        if name == "tenants":
            return {self._pseudonym("tenant", key): value for key, value in shown.items()}
        if "tenant" in answer:
            shown["tenant"] = self._pseudonym("tenant", answer["tenant"])
        if {"name", "namespace"} <= answer.keys():
            whole = f"{answer['namespace']} {answer['name']}"
            shown["name"] = self._pseudonym("session", whole)
        return shown

    def _pseudonym(self, kind: str, name: str) -> str:
        if not name:
            return name
        said = f"{kind} {name}".encode(errors="surrogateescape")
        return f"{kind} {hashlib.blake2b(said, key=self._secret).hexdigest()[:_DIGITS]}"
