"""Schemas of the kinds of other projects that manifests and hooks use.

Written from their API references (cert-manager.io, monitoring.coreos.com, ray.io, argoproj.io), as far
as somebody who edits these manifests may go: every field is closed, so that a misspelt or misplaced one is refused here
as an API server with their definitions would refuse it under `kubectl apply --validate=strict`.
"""

from __future__ import annotations

from typing import Any, Final

import jsonschema

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_FLAG: Final[Schema] = {"type": "boolean"}
_TEXTS: Final[Schema] = {"type": "array", "items": _TEXT, "minItems": 1}
_TEXT_MAP: Final[Schema] = {"type": "object", "additionalProperties": {"type": "string"}}
_GO_DURATION: Final[Schema] = {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$"}
_PROM_DURATION: Final[Schema] = {
    "type": "string",
    "pattern": r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$",
    "minLength": 1,
}


def _closed(required: str = "", /, **fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def _list(item: Schema, least: int = 1) -> Schema:
    return {"type": "array", "items": item, "minItems": least}


def _kind(api_version: str, kind: str, spec: Schema) -> Schema:
    named = {"name": _TEXT, "generateName": _TEXT, "namespace": _TEXT, "labels": _TEXT_MAP, "annotations": _TEXT_MAP}
    metadata = {**_closed("", **named), "oneOf": [{"required": ["name"]}, {"required": ["generateName"]}]}
    return _closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


_SELECTOR: Final = _closed(
    matchLabels=_TEXT_MAP,
    matchExpressions=_list(
        _closed(
            "key operator",
            key=_TEXT,
            operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
            values={"type": "array", "items": {"type": "string"}},
        )
    ),
)
_SECRET_KEY: Final = _closed("key", name=_TEXT, key=_TEXT, optional=_FLAG)

# --- cert-manager.io/v1 ----------------------------------------------------------------------------------------------

_USAGES: Final = [
    *("signing", "digital signature", "content commitment", "key encipherment", "key agreement", "data encipherment"),
    *("cert sign", "crl sign", "encipher only", "decipher only", "any", "server auth", "client auth", "code signing"),
    *("email protection", "s/mime", "ipsec end system", "ipsec tunnel", "ipsec user", "timestamping", "ocsp signing"),
    *("microsoft sgc", "netscape sgc"),
]

_CERTIFICATE: Final = _closed(
    "secretName issuerRef",
    secretName=_TEXT,
    issuerRef=_closed("name", name=_TEXT, kind={"enum": ["Issuer", "ClusterIssuer"]}, group=_TEXT),
    commonName={"type": "string", "minLength": 1, "maxLength": 64},
    dnsNames=_TEXTS,
    ipAddresses=_TEXTS,
    uris=_TEXTS,
    emailAddresses=_TEXTS,
    duration=_GO_DURATION,
    renewBefore=_GO_DURATION,
    renewBeforePercentage={"type": "integer"},
    isCA=_FLAG,
    usages=_list({"enum": _USAGES}),
    privateKey=_closed(
        algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
        encoding={"enum": ["PKCS1", "PKCS8"]},
        rotationPolicy={"enum": ["Never", "Always"]},
        size={"type": "integer"},
    ),
    secretTemplate=_closed(labels=_TEXT_MAP, annotations=_TEXT_MAP),
    revisionHistoryLimit={"type": "integer", "minimum": 1},
)

_ISSUER: Final = {
    **_closed(
        selfSigned=_closed(crlDistributionPoints=_TEXTS),
        ca=_closed("secretName", secretName=_TEXT, crlDistributionPoints=_TEXTS, ocspServers=_TEXTS),
        acme={"type": "object"},
        vault={"type": "object"},
        venafi={"type": "object"},
    ),
    "minProperties": 1,
    "maxProperties": 1,
}

# --- monitoring.coreos.com/v1 ----------------------------------------------------------------------------------------

_RELABELING: Final = _closed(
    sourceLabels=_TEXTS,
    separator={"type": "string"},
    targetLabel=_TEXT,
    regex={"type": "string"},
    modulus={"type": "integer"},
    replacement={"type": "string"},
    action={
        "enum": [
            *("replace", "keep", "drop", "hashmod", "labelmap", "labeldrop", "labelkeep"),
            *("lowercase", "uppercase", "keepequal", "dropequal"),
        ]
    },
)

_POD_ENDPOINT: Final = _closed(
    port=_TEXT,
    portNumber={"type": "integer", "minimum": 1, "maximum": 65535},
    path={"type": "string", "pattern": "^/"},
    scheme={"enum": ["http", "https", "HTTP", "HTTPS"]},
    params={"type": "object"},
    interval=_PROM_DURATION,
    scrapeTimeout=_PROM_DURATION,
    honorLabels=_FLAG,
    honorTimestamps=_FLAG,
    relabelings=_list(_RELABELING),
    metricRelabelings=_list(_RELABELING),
    followRedirects=_FLAG,
    filterRunning=_FLAG,
    bearerTokenSecret=_SECRET_KEY,
    tlsConfig={"type": "object"},
    authorization={"type": "object"},
    basicAuth={"type": "object"},
)

_POD_MONITOR: Final = _closed(
    "selector podMetricsEndpoints",
    selector=_SELECTOR,
    podMetricsEndpoints=_list(_POD_ENDPOINT),
    namespaceSelector=_closed(any=_FLAG, matchNames=_TEXTS),
    jobLabel=_TEXT,
    podTargetLabels=_TEXTS,
    sampleLimit={"type": "integer", "minimum": 0},
    targetLimit={"type": "integer", "minimum": 0},
    labelLimit={"type": "integer", "minimum": 0},
    attachMetadata=_closed(node=_FLAG),
)

_RULE: Final = {
    **_closed(
        "expr",
        record=_TEXT,
        alert=_TEXT,
        expr={"type": ["string", "integer"]},
        labels=_TEXT_MAP,
        annotations=_TEXT_MAP,
        keep_firing_for=_PROM_DURATION,
        **{"for": _PROM_DURATION},
    ),
    "oneOf": [{"required": ["record"]}, {"required": ["alert"]}],
}

_PROMETHEUS_RULE: Final = _closed(
    groups=_list(
        _closed(
            "name",
            name=_TEXT,
            labels=_TEXT_MAP,
            interval=_PROM_DURATION,
            query_offset=_PROM_DURATION,
            limit={"type": "integer"},
            partial_response_strategy={"type": "string", "pattern": "^(?i:(abort|warn)?)$"},
            rules=_list(_RULE),
        )
    )
)

SCHEMAS: Final = {
    "Certificate": _kind("cert-manager.io/v1", "Certificate", _CERTIFICATE),
    "Issuer": _kind("cert-manager.io/v1", "Issuer", _ISSUER),
    "PodMonitor": _kind("monitoring.coreos.com/v1", "PodMonitor", _POD_MONITOR),
    "PrometheusRule": _kind("monitoring.coreos.com/v1", "PrometheusRule", _PROMETHEUS_RULE),
}


# --- ray.io/v1 -------------------------------------------------------------------------------------------------------

_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_POD_TEMPLATE: Final = _closed(
    "spec", metadata=_closed(labels=_TEXT_MAP, annotations=_TEXT_MAP), spec={"type": "object"}
)
"""What is in the pod is for Kubernetes' own schemas."""

_RAY_CLUSTER: Final = _closed(
    "headGroupSpec",
    suspend=_FLAG,
    managedBy=_TEXT,
    autoscalerOptions={"type": "object"},
    headServiceAnnotations=_TEXT_MAP,
    enableInTreeAutoscaling=_FLAG,
    gcsFaultToleranceOptions={"type": "object"},
    headGroupSpec=_closed(
        "rayStartParams template",
        template=_POD_TEMPLATE,
        headService={"type": "object"},
        enableIngress=_FLAG,
        rayStartParams=_TEXT_MAP,
        serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    ),
    rayVersion=_TEXT,
    workerGroupSpecs=_list(
        _closed(
            "groupName rayStartParams template",
            suspend=_FLAG,
            groupName=_TEXT,
            replicas=_COUNT,
            minReplicas=_COUNT,
            maxReplicas=_COUNT,
            idleTimeoutSeconds=_COUNT,
            rayStartParams=_TEXT_MAP,
            template=_POD_TEMPLATE,
            scaleStrategy=_closed(workersToDelete=_TEXTS),
            numOfHosts=_COUNT,
        )
    ),
)

_RAY_JOB: Final = _closed(
    "entrypoint rayClusterSpec",
    activeDeadlineSeconds={"type": "integer", "minimum": 1},
    backoffLimit=_COUNT,
    rayClusterSpec=_RAY_CLUSTER,
    submitterPodTemplate=_POD_TEMPLATE,
    metadata=_TEXT_MAP,
    clusterSelector=_TEXT_MAP,
    submitterConfig=_closed(backoffLimit=_COUNT),
    managedBy=_TEXT,
    deletionStrategy={"type": "object"},
    entrypoint=_TEXT,
    runtimeEnvYAML=_TEXT,
    jobId=_TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
    entrypointResources=_TEXT,
    entrypointNumCpus={"type": "number"},
    entrypointNumGpus={"type": "number"},
    ttlSecondsAfterFinished=_COUNT,
    shutdownAfterJobFinishes=_FLAG,
    suspend=_FLAG,
)

# --- argoproj.io/v1alpha1 --------------------------------------------------------------------------------------------

_WORKFLOW: Final = _closed(
    "entrypoint templates",
    entrypoint=_TEXT,
    serviceAccountName=_TEXT,
    activeDeadlineSeconds=_COUNT,
    ttlStrategy=_closed(secondsAfterCompletion=_COUNT, secondsAfterSuccess=_COUNT, secondsAfterFailure=_COUNT),
    templates=_list(
        _closed(
            "name",
            name=_TEXT,
            steps=_list(_list(_closed("name template", name=_TEXT, template=_TEXT, when=_TEXT))),
            container={"type": "object"},
            resource=_closed(
                "action",
                action={"enum": ["get", "create", "apply", "delete", "replace", "patch"]},
                mergeStrategy={"enum": ["strategic", "merge", "json"]},
                manifest=_TEXT,
                setOwnerReference=_FLAG,
                successCondition=_TEXT,
                failureCondition=_TEXT,
                flags=_TEXTS,
            ),
        )
    ),
)

HOOK_SCHEMAS: Final = {
    "RayJob": _kind("ray.io/v1", "RayJob", _RAY_JOB),
    "Workflow": _kind("argoproj.io/v1alpha1", "Workflow", _WORKFLOW),
}


def problems(manifest: dict[str, Any]) -> list[str]:
    """What their API server would say; empty when it takes it. KeyError for a kind that is not among them."""
    validator = jsonschema.Draft202012Validator({**SCHEMAS, **HOOK_SCHEMAS}[manifest["kind"]])
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(manifest)]
