"""One frozen configuration, from the command line to the artifact.

A *scheme* says how one matrix lies on its grid; `SCHEMES` is the whole list. A
`QuantizationConfig` says which scheme each kind of tensor of a model gets. Defaults live here
and nowhere else; the artifact carries the configuration it was made with.
"""

from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from llmq.errors import ConfigError

#: Group sizes tried, largest first, when the user did not name one.
AUTO_GROUP_SIZES = (128, 64, 32)

#: Input features that share a scale.
GroupSize = Annotated[int, Field(ge=8, multiple_of=8)]

T = TypeVar("T", bound=BaseModel)

#: Policy value that keeps a tensor in its source type.
KEEP = "none"


class Granularity(StrEnum):
    """What shares one scale: a whole row, or a group of consecutive input features."""

    PER_CHANNEL = "per_channel"
    BLOCKWISE = "blockwise"


class Frozen(BaseModel):
    """A value object: immutable, compared by value, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Scheme(Frozen):
    """How one matrix lies on its grid.

    Attributes:
        num_bits: Bits per code; codes span [-2^(b-1), 2^(b-1) - 1].
        granularity: What shares a scale.
        symmetric: No `zero` when true.
        group_size: Input features per scale; None means the whole row.
        scale_dtype: Type of `scale` and `zero`.
    """

    num_bits: Literal[4, 8]
    granularity: Granularity
    symmetric: bool
    group_size: int | None = None
    scale_dtype: Literal["bfloat16", "float32"] = "bfloat16"

    @property
    def qmin(self) -> int:
        """Smallest code."""
        return -(1 << (self.num_bits - 1))

    @property
    def qmax(self) -> int:
        """Largest code."""
        return (1 << (self.num_bits - 1)) - 1

    def __str__(self) -> str:
        group = f" g{self.group_size}" if self.group_size else ""
        return f"int{self.num_bits}_{self.granularity}{group} {'sym' if self.symmetric else 'asym'}"


#: Every scheme by name. Symmetry is the default of the name: int4 gains more from a zero
#: (perplexity 32.4 against 32.8 on SmolLM2-135M at group 64) than a byte-wide grid does.
SCHEMES: MappingProxyType[str, Scheme] = MappingProxyType(
    {
        "int8_per_channel": Scheme(num_bits=8, granularity=Granularity.PER_CHANNEL, symmetric=True),
        "int4_per_channel": Scheme(num_bits=4, granularity=Granularity.PER_CHANNEL, symmetric=False),
        "int8_blockwise": Scheme(num_bits=8, granularity=Granularity.BLOCKWISE, symmetric=True),
        "int4_blockwise": Scheme(num_bits=4, granularity=Granularity.BLOCKWISE, symmetric=False),
    }
)

#: Names other tools use for the same rows.
SYNONYMS: MappingProxyType[str, str] = MappingProxyType({"w4a16": "int4_blockwise", "w8a16": "int8_per_channel"})


def scheme_name(value: str, *, keep: bool = False) -> str:
    """The canonical name of a scheme.

    Args:
        value: A key of `SCHEMES` or `SYNONYMS`.
        keep: Accept ``none`` as well.

    Returns:
        The key of `SCHEMES`, or ``none``.

    Raises:
        ValueError: `value` is neither.
    """
    name = SYNONYMS.get(value, value)
    if name in SCHEMES or (keep and name == KEEP):
        return name
    choices = [*SCHEMES, KEEP] if keep else [*SCHEMES]
    raise ValueError(f"must be one of {', '.join(choices)}")


class Override(Frozen):
    """A scheme for the modules that a pattern matches.

    Attributes:
        pattern: A glob over module names, or a regular expression after ``re:``.
        scheme: A key of `SCHEMES`, or ``none`` to keep the weight as it is.
        group_size: Input features per scale of a blockwise scheme; None follows the configuration's.
    """

    pattern: str = Field(min_length=1)
    scheme: str
    group_size: GroupSize | None = None

    @field_validator("scheme")
    @classmethod
    def _known(cls, value: str) -> str:
        return scheme_name(value, keep=True)

    @model_validator(mode="after")
    def _group_size_fits(self) -> Self:
        blockwise = self.scheme != KEEP and SCHEMES[self.scheme].granularity is Granularity.BLOCKWISE
        if self.group_size is not None and not blockwise:
            raise ValueError(f"group_size={self.group_size}: {self.scheme} has no groups; leave it out")
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an override from the command line.

        Args:
            text: As in ``PATTERN=SCHEME`` or ``PATTERN=SCHEME:GROUPSIZE``.

        Returns:
            The override.

        Raises:
            ConfigError: There is no ``=``, the pattern is empty or the scheme unknown.
        """
        pattern, _, scheme = text.rpartition("=")
        if not pattern:
            raise ConfigError(f"override {text!r}: must read PATTERN=SCHEME, as in 're:.*down_proj=int8_per_channel'.")
        scheme, *size = scheme.split(":", 1)
        return validated(cls, pattern=pattern, scheme=scheme, **({"group_size": size[0]} if size else {}))


class QuantizationConfig(Frozen):
    """Which scheme each kind of tensor gets.

    Attributes:
        scheme: Scheme of the linear weights, a key of `SCHEMES`.
        symmetric: Overrides the scheme's own symmetry for the linear weights.
        group_size: Input features per scale for blockwise schemes; None picks the largest of
            `AUTO_GROUP_SIZES` that divides each layer's input features.
        groupsize_fallback: Let layers that `group_size` does not divide pick as with None.
        scale_dtype: Type of every `scale` and `zero`. float32 gives up bit-equality across
            frameworks, because ``values * scale`` is no longer exact.
        embedding: Scheme of the token embedding (one scale a row), or ``none``.
        lm_head: Scheme of an untied head, or ``none``. A tied head follows `embedding`.
        ignore: Patterns of modules to keep in their source type.
        overrides: Schemes for single modules; the last match wins.
        activation: How linears in int8_per_channel take their inputs: ``int8`` rounds each token to int8, one scale
            a token found as it comes, so that codes are multiplied with codes; ``none`` does not.
    """

    scheme: str
    symmetric: bool = Field(default_factory=lambda data: _scheme_symmetry(data))
    group_size: GroupSize | None = None
    groupsize_fallback: bool = False
    scale_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    embedding: str = "int8_per_channel"
    lm_head: str = "int8_per_channel"
    ignore: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    activation: Literal["none", "int8"] = "none"

    @field_validator("scheme")
    @classmethod
    def _known(cls, value: str) -> str:
        return scheme_name(value)

    @field_validator("embedding", "lm_head")
    @classmethod
    def _known_or_kept(cls, value: str) -> str:
        return scheme_name(value, keep=True)

    @model_validator(mode="after")
    def _group_size_fits(self) -> Self:
        names = [self.scheme, self.embedding, self.lm_head, *(o.scheme for o in self.overrides)]
        blockwise = any(n != KEEP and SCHEMES[n].granularity is Granularity.BLOCKWISE for n in names)
        if self.group_size is not None and not blockwise:
            raise ValueError(
                f"group_size={self.group_size}: {self.scheme} has one scale per row; use a blockwise scheme or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _activation_fits(self) -> Self:
        if self.activation == "int8" and self.scheme != "int8_per_channel":
            raise ValueError(
                f"activation='int8': goes with scheme int8_per_channel, not with {self.scheme}; leave it out"
            )
        return self

    def row(self, name: str) -> Scheme:
        """The scheme called `name`, with this configuration's scale type and symmetry.

        The symmetry applies to rows of the same width as `scheme`: an int8 embedding or override
        beside int4 linears keeps its own.

        Args:
            name: A key of `SCHEMES`.

        Returns:
            The row; `group_size` is still open.
        """
        row = SCHEMES[name]
        symmetric = self.symmetric if row.num_bits == SCHEMES[self.scheme].num_bits else row.symmetric
        return row.model_copy(update={"scale_dtype": self.scale_dtype, "symmetric": symmetric})


def _scheme_symmetry(data: dict[str, Any]) -> bool:
    # An invalid scheme is absent from `data`; its own error is the one the user sees.
    return SCHEMES[data["scheme"]].symmetric if "scheme" in data else True


def validated(cls: type[T], **values: Any) -> T:
    """Build `cls`, telling the first broken rule in one sentence.

    Args:
        cls: The model to build.
        **values: Its fields.

    Returns:
        The validated model.

    Raises:
        ConfigError: A field breaks a rule.
    """
    try:
        return cls(**values)
    except ValidationError as err:
        raise ConfigError(f"{first_error(err)}.") from err


def first_error(err: ValidationError) -> str:
    """The first broken rule of a model, for people to read.

    Args:
        err: What pydantic found.

    Returns:
        As in ``group_size=0: input should be greater than or equal to 8``.
    """
    first = err.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{field}: is missing"
    rule = first["msg"].removeprefix("Value error, ")
    rule = rule[0].lower() + rule[1:]
    value = repr(first["input"])
    return f"{field}={value if len(value) < 80 else value[:77] + '...'}: {rule}" if field else rule
