"""Strategic merge of ``spec.engine.podTemplate`` into the pod that the operator builds.

Lists whose items have a name are merged item by item, as ``kubectl patch`` does it; other lists are
replaced. ``$patch: delete`` in an item removes it, a null value removes a field. A volume is replaced
whole: it has exactly one source, so merging two would make an invalid one.
"""

from collections.abc import Mapping
from typing import Any

from coda_operator.errors import PodTemplateError

_FIELD = "spec.engine.podTemplate"
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
_REPLACED_WHOLE = frozenset({"volumes"})
_DIRECTIVE = "$patch"


def merge_pod_template(template: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``template`` with ``patch`` merged in; neither is changed.

    Raises:
        PodTemplateError: The patch is no pod template, or changes what Coda owns.
    """
    unknown = sorted(set(patch) - {"metadata", "spec"})
    if unknown:
        raise PodTemplateError(f"{_FIELD}.{unknown[0]}: unknown field; a pod template has metadata and spec")
    _refuse_owned_metadata(template, patch)
    _refuse_owned_container_fields(template, patch)
    return _merge_mapping(template, patch, _FIELD)


def _merge_mapping(base: Mapping[str, Any], patch: Mapping[str, Any], path: str) -> dict[str, Any]:
    merged = dict(base)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_value(name, merged.get(name), value, f"{path}.{name}")
    return merged


def _merge_value(name: str, base: Any, patch: Any, path: str) -> Any:
    if isinstance(base, Mapping):
        if not isinstance(patch, Mapping):
            raise PodTemplateError(f"{path}: must be a mapping (given: {patch!r})")
        return _merge_mapping(base, patch, path)
    if name in _MERGE_KEYS and (base is None or isinstance(base, list)):
        if not isinstance(patch, list):
            raise PodTemplateError(f"{path}: must be a list (given: {patch!r})")
        return _merge_named_list(name, base or [], patch, path)
    return patch


def _merge_named_list(name: str, base: list[Any], patch: list[Any], path: str) -> list[Any]:
    key = _MERGE_KEYS[name]
    merged = {item[key]: item for item in base}
    for index, item in enumerate(patch):
        if not isinstance(item, Mapping) or not isinstance(item.get(key), str | int):
            raise PodTemplateError(f"{path}[{index}]: needs {key}, by which it is merged")
        if item.get(_DIRECTIVE) == "delete":
            merged.pop(item[key], None)
        elif item[key] in merged and name not in _REPLACED_WHOLE:
            merged[item[key]] = _merge_mapping(merged[item[key]], item, f"{path}[{index}]")
        else:
            merged[item[key]] = dict(item)
    return list(merged.values())


def _refuse_owned_metadata(template: Mapping[str, Any], patch: Mapping[str, Any]) -> None:
    """The selector finds pods by these labels; another value would orphan them."""
    metadata = _mapping_in(patch, "metadata", _FIELD)
    for label in _mapping_in(metadata, "labels", f"{_FIELD}.metadata"):
        if label in template["metadata"]["labels"]:
            raise PodTemplateError(f"{_FIELD}.metadata.labels: {label} belongs to Coda; use another label")


def _refuse_owned_container_fields(template: Mapping[str, Any], patch: Mapping[str, Any]) -> None:
    """Command line and Coda's variables follow from the rest of the spec (``spec.engine.extraArgs`` adds to them)."""
    engine = template["spec"]["containers"][0]["name"]
    containers = _list_in(_mapping_in(patch, "spec", _FIELD), "containers", f"{_FIELD}.spec")
    for index, container in enumerate(containers):
        if not isinstance(container, Mapping) or container.get("name") != engine:
            continue
        path = f"{_FIELD}.spec.containers[{index}]"
        if container.get(_DIRECTIVE) == "delete":
            raise PodTemplateError(f"{path}: the container {engine} is the engine and cannot be deleted")
        for field in ("command", "args", "image"):
            if field in container:
                instead = "spec.engine.image" if field == "image" else "spec.engine.extraArgs"
                raise PodTemplateError(f"{path}.{field}: belongs to Coda; use {instead}")
        for variable in _list_in(container, "env", path):
            name = str(variable.get("name", "")) if isinstance(variable, Mapping) else ""
            if name.startswith("CODA_") or name == "VLLM_PLUGINS":
                raise PodTemplateError(f"{path}.env: {name} belongs to Coda; remove it")


def _mapping_in(patch: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    """Return a mapping of the patch in which something is Coda's, so that null may not remove it as a whole."""
    value = patch.get(name, {})
    if not isinstance(value, Mapping):
        raise PodTemplateError(f"{path}.{name}: must be a mapping (given: {value!r})")
    return value


def _list_in(patch: Mapping[str, Any], name: str, path: str) -> list[Any]:
    """Return a list of the patch in which something is Coda's, as :func:`_mapping_in` does it."""
    value = patch.get(name, [])
    if not isinstance(value, list):
        raise PodTemplateError(f"{path}.{name}: must be a list (given: {value!r})")
    return value
