"""The systemd unit and the Kubernetes manifest use only options that `ark serve` has."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import httpx
import pytest
import yaml

from ark.cli import build_parser
from tests.server.running import Running

FOLDER = Path(__file__).resolve().parents[2] / "examples/serve"


def parsed(words: list[str]) -> argparse.Namespace:
    assert words[0].endswith("ark") and words[1] == "serve"
    return build_parser(words[1:]).parse_args(words[1:])


def test_unit() -> None:
    text = (FOLDER / "ark.service").read_text()
    settings = dict(re.findall(r"^(\w+)=(.*)$", text, re.M))
    args = parsed(settings["ExecStart"].split())
    assert args.drain < int(settings["TimeoutStopSec"])
    # systemd gives up after five starts in ten seconds.
    assert settings["Restart"] == "on-failure" and int(settings["RestartSec"]) > 2
    assert args.api_key == [] and "EnvironmentFile" in settings


def test_manifest_follows_the_schemas_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    documents = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
    for document in documents:
        validator.validate(document, validator.latest_version(), strict=True)
    (container,) = documents[0]["spec"]["template"]["spec"]["containers"]
    assert "readinessProbe" in container
    container["readinessProbe"]["httpGet"]["paths"] = "/health"
    with pytest.raises(validator.ValidationError):
        validator.validate(documents[0], validator.latest_version(), strict=True)


def test_manifest(server: Running) -> None:
    deployment, service = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = parsed(container["args"])
    assert args.drain < pod["terminationGracePeriodSeconds"]
    (port,) = container["ports"]
    assert (
        args.port == port["containerPort"] and service["spec"]["ports"][0]["targetPort"] == "http"
    )
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = container[kind]["httpGet"]["path"]
        assert httpx.get(server.url + path).status_code == 200
    # If the engine fails, the process ends, and Kubernetes restarts it. The liveness probe must
    # allow for the time to drain.
    assert pod.get("restartPolicy", "Always") == "Always"
    liveness = container["livenessProbe"]
    assert args.drain < liveness["periodSeconds"] * liveness["failureThreshold"]
    assert args.directory in [m["mountPath"] for m in container["volumeMounts"]]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
