"""The base of every section, and the field types that YAML needs help with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict


class Section(BaseModel):
    """A group of settings: unknown keys and wrong types are errors, values never change, docstrings are the documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False)


def reject_bool(value: object) -> object:
    """Keep ``true`` from passing as the number 1 where an enumeration of integers is meant."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def _check_path(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not hold a NUL byte")
    return value


LAYER_CHOICES = ("latter_half", "all")


def _check_layers(value: object) -> object:
    """Accept a named choice or a list of layer numbers; one message for both, instead of one for each branch of a union."""
    if isinstance(value, str) and value in LAYER_CHOICES:
        return value
    if isinstance(value, (list, tuple)) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    raise ValueError(f"must be {', '.join(LAYER_CHOICES)} or a list of 0-based layer numbers")


LayerList = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(False)]
LayerChoice = Annotated[Literal["latter_half", "all"] | LayerList, BeforeValidator(_check_layers)]

PathText = Annotated[str, AfterValidator(_check_path)]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
