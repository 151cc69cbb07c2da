"""Values that a JSON file claims to hold, checked before anybody relies on them."""

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError


def _text(value: str) -> str:
    value.encode()  # no halves of characters; raises a ValueError
    return value


Name = Annotated[str, Field(max_length=10_000), AfterValidator(_text)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(ge=1, lt=2**63)]


class Stored(BaseModel):
    """Nothing is coerced; keys that are not named may hold anything."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Stored)


def validate(model: type[Model], value: Any) -> Model:
    """The value as that model. Raises ValueError naming the first place that is wrong, in one line."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part)[:60] for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None


def shown(error: Exception) -> str:
    """What an error says, in one short line, of what kind where it would be unclear."""
    text = " ".join(str(error).split())
    text = text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
    return text if len(text) <= 300 else text[:300] + "..."
