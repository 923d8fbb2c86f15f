"""The fields of request bodies and queries, and their limits.

FastAPI checks requests against these classes and describes them in /openapi.json.
"""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from kvdepot.cluster.messages import TOKENS_MAX
from kvdepot.core.block import KEY_BYTES
from kvdepot.policy.placing.write_mode import WriteMode

LISTED_MAX: Final = 1000
_KEYS_MAX: Final = 8192


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("must be absolute: the daemon runs in another directory")
    return path


_Printable = AfterValidator(_printable)
Name = Annotated[str, StringConstraints(min_length=1, max_length=200), _Printable]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=4096), _Printable]
DrivePath = Annotated[ModelName, AfterValidator(_absolute)]
Tag = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
HexKey = Annotated[str, StringConstraints(pattern=rf"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]
Limit = Annotated[int, Field(ge=1, le=LISTED_MAX)]
HintSeconds = Annotated[float, Field(ge=0, le=3600)]
Tokens = Annotated[
    list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(min_length=1, max_length=TOKENS_MAX)
]


class Body(BaseModel):
    """A JSON object. Unknown fields, and text in place of a number or a number
    of text, are errors.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DriveBody(Body):
    """A drive of a tier."""

    path: DrivePath = Field(description="an absolute directory or block device")


class CapacityBody(Body):
    """The capacity of a tier."""

    capacity: Annotated[Name, StringConstraints(max_length=32)] = Field(
        description="of all its drives together, such as 100TiB"
    )


class Mode(Body):
    """The write mode of a tier: when blocks are written to it."""

    mode: Annotated[WriteMode, Field(strict=False)]


class SessionName(Body):
    """A session by its name."""

    session: Name
    namespace: Tag | None = Field(
        None, description="default: all namespaces that have a session of that name"
    )


class SessionTold(SessionName):
    """The new state of a session."""

    state: Literal["alive", "pending", "closed"] = Field(
        description="closed: it will not come back"
    )


class PinBody(SessionName):
    """The end or the duration of a pin; default: one week."""

    until_s: Annotated[float, Field(ge=0, le=1e11)] | None = Field(
        None, description="seconds since 1970"
    )
    for_s: Annotated[float, Field(ge=0, le=1e9)] | None = None


class Prefetch(SessionName):
    """A session to prefetch, and the time until its blocks are needed."""

    deadline_s: HintSeconds = 10.0


class HintBody(Body):
    """Blocks that will be needed: those of a session, of keys, or of a prompt's tokens."""

    session: Name | None = None
    namespace: Tag | None = None
    keys: Annotated[list[HexKey], Field(min_length=1, max_length=_KEYS_MAX)] | None = Field(
        None, description="keys of one prompt, head first"
    )
    tokens: Tokens | None = None
    model: ModelName | None = Field(None, description="model of the tokens; default: every model")
    deadline_s: HintSeconds = Field(description="seconds until they are needed")


class PrefixQuestion(Body):
    """The tokens of a prompt, and the namespaces to search."""

    token_ids: Tokens
    model: Name | None = Field(None, description="search this model only")
    tenant: Name | None = Field(None, description="search blocks of this tenant")
    namespace: Tag | None = Field(
        None, description="search this namespace only; model and tenant are ignored"
    )


class Query(BaseModel):
    """A query. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class SessionList(Query):
    """The order of the sessions, and the number of them."""

    order: Literal["busy", "cold", "recent"] = "recent"
    limit: Limit = 100


class ExportQuery(Query):
    """The namespace, if several have a session of the name."""

    namespace: Tag | None = None
