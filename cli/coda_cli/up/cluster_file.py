"""Reading the YAML file: the same CodaCluster that ``kubectl apply`` takes."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coda_cli.errors import PreflightError
from coda_engine.contract.errors import DocumentError
from coda_operator.desired.cluster import Cluster, Images
from coda_operator.desired.engines import engine_deployment
from coda_operator.errors import PodTemplateError
from coda_operator.spec import API_VERSION, CLUSTER_KIND, MAX_NAME_CHARS, NAME_PATTERN, NAME_RULE, CodaClusterSpec

_TOP_LEVEL = ("apiVersion", "kind", "metadata", "spec", "status")


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """A CodaCluster as read.

    Attributes:
        path: The file.
        name: ``metadata.name``.
        spec: The validated specification.
    """

    path: Path
    name: str
    spec: CodaClusterSpec


def read_cluster_file(path: Path) -> ClusterFile:
    """Return the one CodaCluster in a YAML file; other kinds beside it are left alone.

    Raises:
        PreflightError: The file cannot be read, is not YAML, has no or several CodaClusters, or a field of it is
            unknown, mistyped or impossible; one line for each problem, each naming its field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PreflightError(f"-f {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    cluster = _only_cluster(path, _documents(path, text))
    problems = _envelope_problems(cluster)
    spec: CodaClusterSpec | None = None
    try:
        spec = CodaClusterSpec.parse(cluster.get("spec"))
        # What no schema says, a cluster's operator would refuse only when it builds the pods.
        engine_deployment(Cluster("any", "any", "any", spec, Images("any", "any", "any")))
    except (DocumentError, PodTemplateError) as error:
        problems += str(error).splitlines()
    if problems or spec is None:
        raise PreflightError("\n".join(f"{path}: {problem}" for problem in problems))
    return ClusterFile(path, cluster["metadata"]["name"], spec)


def _documents(path: Path, text: str) -> list[Any]:
    try:
        return [document for document in yaml.load_all(text, Loader=_StrictLoader) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise PreflightError(f"{path}:{where} is not YAML: {getattr(error, 'problem', None) or error}") from error
    except RecursionError as error:
        raise PreflightError(f"{path}: is nested too deeply") from error
    except (ValueError, KeyError, AttributeError) as error:
        # How the library fails on a value that is not of the type that its form or tag says, such as 2024-13-45.
        raise PreflightError(f"{path}: has a date or tagged value that cannot be: {error}; quote it") from error


def _only_cluster(path: Path, documents: list[Any]) -> dict[str, Any]:
    clusters = [item for item in documents if isinstance(item, dict) and item.get("kind") == CLUSTER_KIND]
    if len(clusters) == 1:
        return clusters[0]
    if clusters:
        raise PreflightError(f"{path}: has {len(clusters)} documents of kind {CLUSTER_KIND}; keep one in the file")
    kinds = [str(item.get("kind", "none")) if isinstance(item, dict) else type(item).__name__ for item in documents]
    found = ", ".join(kinds) or "nothing"
    raise PreflightError(f"{path}: kind: needs one document of kind {CLUSTER_KIND} (found: {found})")


def _envelope_problems(cluster: dict[str, Any]) -> list[str]:
    problems = [
        f"{field}: unknown field; remove it or check its spelling (allowed: {', '.join(_TOP_LEVEL[:4])})"
        for field in cluster
        if field not in _TOP_LEVEL
    ]
    if cluster.get("apiVersion") != API_VERSION:
        problems.append(f"apiVersion: must be {API_VERSION} (given: {cluster.get('apiVersion')!r})")
    metadata = cluster.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or not re.fullmatch(NAME_PATTERN, name):
        problems.append(f"metadata.name: {NAME_RULE} (given: {name!r})")
    if "spec" not in cluster:
        problems.append("spec: is missing; see examples/smollm2-cpu.yaml")
    return problems


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key may not be given twice: the last one would silently win."""


def _mapping_without_duplicates(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key_node.value} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)
