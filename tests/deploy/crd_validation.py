"""What an API server does with an object of a CustomResourceDefinition: prune, default, validate, CEL and all."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
from cel_expr_python import cel

Schema = dict[str, Any]

_ENVIRONMENT = cel.NewEnv(variables={"self": cel.Type.DYN, "oldSelf": cel.Type.DYN})
_COMPILED: dict[str, Any] = {}


class Invalid(Exception):  # noqa: N818
    """The object is refused; one line a cause."""


def admit(schema: Schema, new: Any, old: Any = None) -> Any:
    """The object as it would be stored. Invalid when it would be refused."""
    pruned = defaulted(schema, prune(schema, copy.deepcopy(new)))
    causes = [
        f"{_path(error)}: {error.message}"
        for error in jsonschema.Draft202012Validator(plain(schema)).iter_errors(pruned)
    ]
    if not causes:
        causes = list(rules(schema, pruned, old, ""))
    if causes:
        raise Invalid("; ".join(causes))
    return pruned


def prune(schema: Schema, value: Any) -> Any:
    """Drop fields the schema does not know."""
    if isinstance(value, dict) and "properties" in schema:
        return {k: prune(schema["properties"][k], v) for k, v in value.items() if k in schema["properties"]}
    if isinstance(value, dict) and "additionalProperties" in schema:
        return {k: prune(schema["additionalProperties"], v) for k, v in value.items()}
    if isinstance(value, list) and "items" in schema:
        return [prune(schema["items"], one) for one in value]
    return value


def defaulted(schema: Schema, value: Any) -> Any:
    """Fill in defaults of fields of objects that are there."""
    if isinstance(value, dict) and "properties" in schema:
        for name, inner in schema["properties"].items():
            if name not in value and "default" in inner:
                value[name] = copy.deepcopy(inner["default"])
            if name in value:
                value[name] = defaulted(inner, value[name])
    elif isinstance(value, list) and "items" in schema:
        return [defaulted(schema["items"], one) for one in value]
    return value


def plain(schema: Any) -> Any:
    """The schema without Kubernetes' own words."""
    if isinstance(schema, dict):
        return {k: plain(v) for k, v in schema.items() if not k.startswith("x-kubernetes-") and k != "format"}
    return [plain(one) for one in schema] if isinstance(schema, list) else schema


def rules(schema: Schema, value: Any, old: Any, where: str) -> Any:
    """Messages of every CEL rule that does not hold; transition rules only where there is an old value."""
    for rule in schema.get("x-kubernetes-validations", ()):
        text = rule["rule"]
        if "oldSelf" in text and old is None:
            continue
        if text not in _COMPILED:
            _COMPILED[text] = _ENVIRONMENT.compile(text)
        result = _COMPILED[text].eval(data={"self": value, "oldSelf": old}).value()
        if result is not True:
            yield f"{where or '.'}: {rule['message']}" + ("" if result is False else f" ({result})")
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                before = old.get(name) if isinstance(old, dict) else None
                yield from rules(inner, value[name], before, f"{where}.{name}")


def _path(error: jsonschema.ValidationError) -> str:
    return "." + ".".join(str(part) for part in error.absolute_path)
