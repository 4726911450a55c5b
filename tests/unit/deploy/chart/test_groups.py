"""Workers whose ranks are in several pods: LeaderWorkerSets of mode disaggregated."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from baton.config.cluster import Config
from deploy.workers.pod_group import PodGroup
from tests.support.deploy.baton_commands import parse
from tests.support.deploy.chart import Manifest, of_kind, render, the

GROUPS = "disaggregated-groups-values.yaml"
NAME = "demo-baton-prefill"
SCHEMA = Path(__file__).with_name("leaderworkerset-v1.json")
"""The part of the custom resource's own schema that pods are not in."""
NEWEST = "1.37"


def _set(*more: str) -> Manifest:
    (found,) = of_kind(render(GROUPS, *more), "LeaderWorkerSet")
    return found


def _templates(*more: str) -> tuple[Manifest, Manifest]:
    """Those of rank 0's pod, and of the others."""
    template = _set(*more)["spec"]["leaderWorkerTemplate"]
    return template["leaderTemplate"], template["workerTemplate"]


def test_the_controller_takes_the_set() -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    made = _set()
    assert [error.message for error in validator.iter_errors(made)] == []
    spoilt = json.loads(json.dumps(made))
    spoilt["spec"]["leaderWorkerTemplate"]["sise"] = 3
    assert list(validator.iter_errors(spoilt))


def test_kubernetes_takes_its_pods() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for template in _templates():
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes_validate.validate(pod, NEWEST, strict=True)
        spoilt = json.loads(json.dumps(pod))
        spoilt["spec"]["schedulerNam"] = "volcano"
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(spoilt, NEWEST, strict=True)


def test_a_group_starts_ends_and_is_replaced_as_a_whole() -> None:
    made = _set()
    assert made["metadata"]["name"] == NAME
    spec = made["spec"]
    assert spec["replicas"] == 3
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {
        "maxSurge": 1,
        "maxUnavailable": 0,
    }
    # Pods wait for each other in baton worker, so that their models load at the same time.
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["leaderWorkerTemplate"]["size"] == 2
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_schedulers_get_their_hints() -> None:
    made = _set()
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "serving"
    assert made["metadata"]["annotations"] == {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "example.com/rack",
        "scheduling.volcano.sh/queue-name": "serving",
    }
    assert [pod["spec"]["schedulerName"] for pod in _templates()] == ["volcano"] * 2
    decode = the(render(GROUPS), "Deployment", "demo-baton-decode")
    assert "annotations" not in decode["metadata"]
    assert "schedulerName" not in decode["spec"]["template"]["spec"]
    queue = "--set=workers.decode.labels.kueue\\.x-k8s\\.io/queue-name=serving"
    decode = the(render(GROUPS, queue), "Deployment", "demo-baton-decode")
    assert decode["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "serving"


def test_its_pods_differ_in_the_page_of_metrics_alone() -> None:
    leader, other = json.loads(json.dumps(_templates()))
    ports = [pod["spec"]["containers"][0].pop("ports") for pod in (leader, other)]
    assert leader == other
    assert [[one["name"] for one in some] for some in ports] == [["probes", "metrics"], ["probes"]]


def test_baton_divides_the_ranks_among_the_pods() -> None:
    manifests = render(GROUPS)
    (container,) = _templates()[1]["spec"]["containers"]
    run = parse(container["args"]).parameters
    text = the(manifests, "Secret", "demo-baton-worker")["stringData"]["baton.toml"]
    config = Config(**{name: tomllib.loads(text)[name] for name in ("pools",)})
    (pool,) = [one for one in config.pools if one.name == run["pool"]]
    size = _set()["spec"]["leaderWorkerTemplate"]["size"]
    shares = [PodGroup("a", size, index).ranks_of(pool) for index in range(size)]
    assert [*map(list, shares)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert {len(share) for share in shares} == {gpus}


def test_policies_let_ranks_reach_each_other_at_any_port() -> None:
    manifests = render(GROUPS)
    policy = the(manifests, "NetworkPolicy", "demo-baton-worker")["spec"]
    for pod in _templates():
        labels = pod["metadata"]["labels"].items()
        assert policy["podSelector"]["matchLabels"].items() <= labels
        for rules, side in ((policy["ingress"], "from"), (policy["egress"], "to")):
            reached = [
                rule
                for rule in rules
                for peer in rule.get(side, ())
                if peer.get("podSelector", {}).get("matchLabels", {"": ""}).items() <= labels
            ]
            assert reached
            assert all("ports" not in rule for rule in reached)


def test_a_budget_keeps_whole_workers() -> None:
    """A pod that leaves takes its worker with it, and no two may be of different workers."""
    budget = the(render(GROUPS), "PodDisruptionBudget", NAME)["spec"]
    assert budget["maxUnavailable"] == 1
    assert "minAvailable" not in budget
    scaled = (
        "--set=workers.prefill.autoscaling.enabled=true,workers.prefill.autoscaling.kind=hpa",
    )
    least = (
        "--set=workers.prefill.autoscaling.minReplicas=4,workers.prefill.autoscaling.maxReplicas=8"
    )
    budget = the(render(GROUPS, *scaled, least), "PodDisruptionBudget", NAME)["spec"]
    assert budget["maxUnavailable"] == 2


@pytest.mark.parametrize(
    ("kind", "made"), [("keda", "ScaledObject"), ("hpa", "HorizontalPodAutoscaler")]
)
def test_autoscalers_count_groups(kind: str, made: str) -> None:
    scaled = (
        f"--set=workers.prefill.autoscaling.enabled=true,workers.prefill.autoscaling.kind={kind}",
        "--set=workers.prefill.autoscaling.serverAddress=http://prometheus:9090",
        "--set=workers.prefill.autoscaling.minReplicas=3",
    )
    scaler = the(render(GROUPS, *scaled), made, NAME)["spec"]
    target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": NAME}
    assert scaler["scaleTargetRef"] == target
    assert "replicas" not in _set(*scaled)["spec"]


def test_the_command_to_scale_finds_both_kinds() -> None:
    text = the(render(GROUPS), "Secret", "demo-baton-router")["stringData"]["baton.toml"]
    assert (
        "kubectl --namespace default scale deployments,leaderworkersets --selector "
        "app.kubernetes.io/instance=demo,baton.io/pool={pool} --replicas={count}"
    ) in text
    for one in of_kind(render(GROUPS), "Deployment", "LeaderWorkerSet"):
        labels = one["metadata"]["labels"]
        pool = labels.get("baton.io/pool")
        assert (pool is None) == (labels["app.kubernetes.io/component"] != "worker")
