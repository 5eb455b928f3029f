"""The Helm chart, rendered by Helm, and the example of a training job, checked with the schemas of Kubernetes.

No cluster is here: what a cluster does with the objects is not tested.
"""

from __future__ import annotations

import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from holdfast_server.core.access import HEALTH_CHECKS

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "holdfast"
JOB = ROOT / "deploy" / "examples" / "training-job.yaml"
KUBERNETES = ("1.27", "1.32", "1.37")
"""The oldest that the chart declares, the newest whose schemas are here, and one between."""
USER = 10001
EVERYTHING: dict[str, Any] = {
    "image": {"digest": f"sha256:{'0' * 64}"},
    "imagePullSecrets": [{"name": "registry"}],
    "replicas": 3,
    "database": {"kind": "postgresql", "existingSecret": "database"},
    "auth": {"existingSecret": "secret"},
    "address": "https://holdfast.example",
    "allowedHosts": ["other.example"],
    "trustedProxies": "*",
    "alerts": {"webhooks": True, "smtp": {"host": "mail", "from": "a@b.example", "existingSecret": "mail"}},
    "extraEnv": [{"name": "HOLDFAST_OIDC_ISSUER", "value": "https://id.example"}],
    "extraEnvFrom": [{"secretRef": {"name": "oidc"}}],
    "service": {"annotations": {"a": "b"}},
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "certificate", "annotations": {"a": "b"}},
    "networkPolicy": {
        "from": [{"namespaceSelector": {}}],
        "egress": [{"ports": [{"port": 5432, "protocol": "TCP"}]}],
    },
    "metrics": {
        "scrapeAnnotations": True,
        "serviceMonitor": {"enabled": True, "existingSecret": "key", "labels": {"release": "prometheus"}},
    },
    "serviceAccount": {"annotations": {"a": "b"}},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "vision"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "high",
}
VARIANTS = {"default": {}, "everything": EVERYTHING, "claim": {"persistence": {"existingClaim": "mine"}}}
variants = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())


def rendered(values: dict[str, Any], release: str = "holdfast") -> dict[str, str]:
    with helm_python.Chart.load(str(CHART)) as chart:
        found = chart.render(values, name=release, namespace="training")
    return {Path(name).name: text for name, text in found.items()}


def objects(values: dict[str, Any], release: str = "holdfast") -> dict[str, dict[str, Any]]:
    """By kind, of which there is one each."""
    files = [text for name, text in rendered(values, release).items() if name.endswith(".yaml")]
    found = [each for text in files for each in yaml.safe_load_all(text) if each]
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def pod(values: dict[str, Any]) -> dict[str, Any]:
    return objects(values)["Deployment"]["spec"]["template"]["spec"]


def environment(values: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in pod(values)["containers"][0]["env"]}


@variants
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_of_the_chart_fits_the_schema_of_kubernetes(values: dict[str, Any], version: str) -> None:
    found = objects(values)
    assert {"Deployment", "Service", "ServiceAccount", "NetworkPolicy"} <= found.keys()
    for kind, each in found.items():
        if kind != "ServiceMonitor":  # of the Prometheus operator
            kubernetes_validate.validate(each, version, strict=True)


# The schema of 1.27 demands pod conditions of every rule for failed pods, which its documentation denies.
@pytest.mark.parametrize("version", KUBERNETES[1:])
def test_the_example_job_fits_the_schema_of_kubernetes(version: str) -> None:
    for each in yaml.safe_load_all(JOB.read_text()):
        kubernetes_validate.validate(each, version, strict=True)


def test_helm_lint_finds_nothing(tmp_path: Path) -> None:
    found = helm_python.lint(str(CHART), strict=True)
    assert found["errors"] == []
    assert [each["error"] for each in found["messages"]] == ["icon is recommended"]
    assert helm_python.package(str(CHART), destination=str(tmp_path)).endswith(".tgz")


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize("manifest", ["chart", "job"])
def test_pods_run_as_a_user_without_rights_on_a_read_only_root(manifest: str) -> None:
    job = next(iter(yaml.safe_load_all(JOB.read_text())))
    spec = pod({}) if manifest == "chart" else job["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == USER
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert f"--uid {USER}" in (ROOT / "Dockerfile").read_text()


def test_one_server_has_the_sqlite_file_and_several_the_postgresql_database() -> None:
    sqlite, postgresql = objects({}), objects(EVERYTHING)
    assert sqlite["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    assert sqlite["PersistentVolumeClaim"]["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert environment({})["HOLDFAST_DB"] == "/data/holdfast.db"
    assert "PersistentVolumeClaim" not in postgresql
    assert environment(EVERYTHING)["HOLDFAST_DB"] == {"secretKeyRef": {"name": "database", "key": "url"}}
    claims = [each["persistentVolumeClaim"]["claimName"] for each in pod(VARIANTS["claim"])["volumes"][1:]]
    assert claims == ["mine"]


def test_no_secret_is_in_an_object() -> None:
    assert "Secret" not in objects(EVERYTHING)
    for name, value in environment(EVERYTHING).items():
        if name.endswith(("TOKEN", "PASSWORD")):
            assert value.keys() == {"secretKeyRef"}


def test_the_service_leads_to_the_pod_under_every_name_that_the_server_accepts() -> None:
    found = objects({"allowedHosts": ["other.example"]}, release="blue")
    assert (
        found["Service"]["spec"]["selector"].items()
        <= found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    )
    env = {
        each["name"]: each.get("value")
        for each in found["Deployment"]["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    name = "blue-holdfast"
    assert found["Service"]["metadata"]["name"] == name
    assert env["HOLDFAST_HOSTS"].split() == [
        name, f"{name}.training", f"{name}.training.svc", f"{name}.training.svc.cluster.local", "other.example",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replicas": 2}, "replicas is above 1: several servers need database.kind=postgresql"),
        ({"database": {"kind": "postgresql"}}, "set database.existingSecret"),
        ({"metrics": {"serviceMonitor": {"enabled": True}}}, "set metrics.serviceMonitor.existingSecret"),
        ({"replica": 1}, "additional properties 'replica' not allowed"),
        ({"address": "holdfast.example"}, "does not match pattern"),
    ],
)
def test_values_that_cannot_work_are_refused_with_the_remedy(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm_python.HelmError, match=words):
        rendered(values)


def test_the_notes_say_how_to_go_on() -> None:
    assert "link for the first administrator" in rendered({})["NOTES.txt"]
    assert "https://holdfast.example" in rendered(EVERYTHING)["NOTES.txt"]
    assert "refuses the host name" in rendered({"ingress": {"enabled": True}})["NOTES.txt"]


@pytest.mark.processes
def test_the_server_of_the_pod_starts_and_answers_its_probes(spawn_server, tmp_path: Path) -> None:
    """The command and the environment of the container, on this machine: only port and file are others."""
    (container,) = pod({"allowedHosts": ["other.example"]})["containers"]
    command = [word.replace("7117", "0") for word in container["args"]]
    assert command[:2] == ["holdfast", "serve"]
    env = {each["name"]: each["value"] for each in container["env"]} | {
        "HOLDFAST_DB": str(tmp_path / "holdfast.db")
    }
    server = spawn_server(*command[2:], **env)
    server.wait_for_address()
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        path = container[probe]["httpGet"]["path"]
        assert path in HEALTH_CHECKS
        with urllib.request.urlopen(server.url + path) as reply:
            assert reply.status == 200
    assert "/setup#" in server.output
