"""What a request may say: the fields of bodies and queries, and their limits.

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
    """A JSON object without other fields. Text is not taken for a number, nor a number for text."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DriveBody(Body):
    """A drive of a tier."""

    path: DrivePath = Field(description="an absolute directory or block device")


class CapacityBody(Body):
    """The room of a tier."""

    capacity: Annotated[Name, StringConstraints(max_length=32)] = Field(
        description="of all its drives, as 100TiB"
    )


class Mode(Body):
    """When blocks come to a tier."""

    mode: Annotated[WriteMode, Field(strict=False)]


class SessionName(Body):
    """A session."""

    session: Name
    namespace: Tag | None = Field(
        None, description="left out, all namespaces that have a session of that name"
    )


class SessionTold(SessionName):
    """What becomes of a session."""

    state: Literal["alive", "pending", "closed"] = Field(
        description="closed: it will not come back"
    )


class PinBody(SessionName):
    """Until when a session's blocks are kept; without an end for a week."""

    until_s: Annotated[float, Field(ge=0, le=1e11)] | None = Field(
        None, description="seconds since 1970"
    )
    for_s: Annotated[float, Field(ge=0, le=1e9)] | None = None
    through_turn: Literal["yes", "no"] = Field(
        "no", description="yes: only until its next turn, if that comes before"
    )


class Warm(SessionName):
    """When a session comes back."""

    deadline_s: HintSeconds = 10.0


class HintBody(Body):
    """Blocks that will be wanted: those of a session, of keys, or of a prompt's tokens."""

    session: Name | None = None
    namespace: Tag | None = None
    keys: Annotated[list[HexKey], Field(min_length=1, max_length=_KEYS_MAX)] | None = Field(
        None, description="keys of one prompt, head first"
    )
    tokens: Tokens | None = None
    model: ModelName | None = Field(None, description="of the tokens; left out, every model")
    deadline_s: HintSeconds = Field(description="seconds until they will be wanted")


class PrefixQuestion(Body):
    """The tokens of a prompt, and which namespaces are meant."""

    token_ids: Tokens
    model: Name | None = Field(None, description="of this model only")
    tenant: Name | None = Field(None, description="blocks of this tenant")
    namespace: Tag | None = Field(
        None, description="of this namespace only, whatever its model and tenant"
    )


class Query(BaseModel):
    """A query without other fields."""

    model_config = ConfigDict(extra="forbid")


class SessionList(Query):
    """Which sessions come first, and how many."""

    order: Literal["busy", "cold", "recent"] = "recent"
    limit: Limit = 100


class PrefixList(Query):
    """Which prefixes come first, and how many."""

    order: Literal["busy", "cold"] = "busy"
    limit: Limit = 100


class ExportQuery(Query):
    """Which of several sessions of one name."""

    namespace: Tag | None = None
