"""What can be asked, and how the answers look: the source of the OpenAPI description."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Attention = Annotated[
    Literal["encoder", "decoder", "cross"] | None, Field(description="The stack; null: the first one.")
]
Layer = Annotated[int, Field(ge=0, le=10_000)]
Head = Annotated[int, Field(ge=0, le=10_000)]
Query = Annotated[int, Field(ge=0, le=100_000, description="The position of the token that attends.")]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TraceRequest(_Asked):
    """A text for a model."""

    model: Name
    text: Annotated[str, Field(min_length=1, max_length=1_000_000)]
    text_pair: Annotated[str | None, Field(max_length=1_000_000)] = None
    target: Annotated[
        str | None, Field(max_length=1_000_000, description="What an encoder–decoder's decoder reads.")
    ] = None
    continuation: Annotated[
        str | None, Field(max_length=1_000_000, description="The answer after this prompt, for models that write.")
    ] = None
    max_new_tokens: Annotated[
        int | None, Field(ge=1, le=256, description="Let the model write so many tokens after the prompt.")
    ] = None
    chat: Annotated[bool, Field(description="Put the text through the model's chat template.")] = False
    epsilon: Annotated[float, Field(gt=0, lt=1, description="How far a weight may be uncertain and still be read.")] = (
        0.05
    )


class RowRequest(_Asked):
    """One attention row."""

    layer: Layer
    head: Head
    query: Query
    attention: Attention = None


class CertifyRequest(RowRequest):
    """Which weights of the row to certify."""

    top: Annotated[int, Field(ge=1, le=16)] = 5
    tolerance: Annotated[float, Field(ge=0, le=0.5)] = 0.0


class StackRequest(_Asked):
    """One stack of a trace."""

    attention: Attention = None


class MethodRequest(_Asked):
    """A method by its name."""

    method: Name


class JobAnswer(BaseModel):
    """A job: where it stands and, when it is done, what came out."""

    id: str
    kind: str
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    progress: float
    message: str
    result: Any = None
    error: str | None = None


class Problem(BaseModel):
    """Why a request was refused."""

    detail: str


class ModelAnswer(BaseModel):
    """A model that can be asked."""

    name: str
    loaded: bool


class MethodAnswer(BaseModel):
    """A method that can be computed on demand."""

    name: str
    title: str


class LimitsAnswer(BaseModel):
    """How much can be asked at once."""

    text: int
    tokens: int
    jobs: int
    seconds: float


class ModelsAnswer(BaseModel):
    """What this server has."""

    models: list[ModelAnswer]
    methods: list[MethodAnswer]
    attributions: list[MethodAnswer]
    limits: LimitsAnswer
    runs: list[dict[str, Any]]
    pair: str | None
    versions: dict[str, str]


class Health(BaseModel):
    """Whether the server works."""

    status: Literal["ok"]
    version: str
    jobs: int
