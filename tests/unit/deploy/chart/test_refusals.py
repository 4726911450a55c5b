"""Values that do not work, or are open by accident, are refused; the message says what to do."""

from __future__ import annotations

import json
import re
from difflib import SequenceMatcher

import pytest

from baton.config.access import KeyConfig, TenantConfig
from tests.support.deploy.chart import CHART, KEY, refusal, render

INGRESS = ("--set=ingress.enabled=true", "--set=ingress.host=a.example.com")
PLAIN = "disaggregated-plain-values.yaml"
ASKED = "--set=metrics.serviceMonitor.enabled=true"
STANDALONE = [
    (("--set=auth.requireKey=true",), "auth.keys: give at least one"),
    (("--set=existingConfigSecret=a", KEY), "auth.keys and auth.tenants belong"),
    (("--set=config.http=0.0.0.0:1",), "config.http: the chart sets this itself"),
    (("--set=config.gcs_store=embedded",), "config.gcs_store: the chart sets this itself"),
    (("--set=config.model=/models/a",), "give modelVolume"),
    (("--set=redis.mode=external",), "mode external needs url or existingSecret"),
    (("--set=redis.mode=external,redis.existingSecret=a,redis.url=redis://b",), "not both"),
    (("--set=redis.url=redis://a",), "need mode external, but it is embedded"),
    (("--set=redis.mode=external,redis.url=redis://:a@b",), "or set redis.insecure=true"),
    (
        ("--set=redis.mode=external,redis.url=rediss://a,redis.routerUrl=rediss://b",),
        "routerUrl and workerUrl go together",
    ),
    (
        (
            "--set=redis.mode=external,redis.existingSecret=a,redis.routerUrl=rediss://b",
            "--set=redis.workerUrl=rediss://c",
        ),
        "routerUrl and workerUrl need url",
    ),
    (("--set=gcsStore.mode=external,gcsStore.url=redis://b",), "gcsStore.insecure=true"),
    (("--set=gcsStore.mode=valkey",), "gcsStore.password: mode valkey needs one"),
    (
        (
            "--set=redis.mode=external,redis.url=rediss://:a@b:6379/0",
            "--set=gcsStore.mode=external,gcsStore.url=rediss://:c@b:6379",
        ),
        "a different server than redis.url",
    ),
    (
        ("--set=config.pools[1].resources.GPU=1,config.pools[1].count=2",),
        "some workers would never start",
    ),
    (("--set=ingress.enabled=true",), "ingress.host: set the public"),
    ((*INGRESS, "--set=ingress.tlsSecret=a"), "set ingress.insecure=true"),
    ((*INGRESS, "--set=auth.requireKey=true", KEY), "set ingress.insecure=true"),
    (("--set=ingress.grpc.enabled=true", "--set=ingress.grpc.host=a"), "ingress.grpc: needs"),
    ((*INGRESS, "--set=ingress.insecure=true"), "networkPolicy.clients: name"),
    ((ASKED,), "networkPolicy.monitoring: name"),
    ((ASKED, "--set=auth.requireKey=true", KEY), "metrics.serviceMonitor.keySecret: name"),
    (("--set=config.otlp_endpoint=http://a:4317",), "networkPolicy.otlp.peers: name"),
    (("--set=tls.ingressSecret=a",), "tls.ingressSecret: it needs tls.secret"),
    (("--set=tls.secret=a,tls.certManager.enabled=true",), "secret or certManager.enabled, not"),
    (("--set=tls.certManager.issuerRef.kind=Issuer",), "issuerRef: it needs a name"),
    (("--set=mode=single",), "mode: single is now standalone"),
    (("--set=mode=ray",), "none of standalone, disaggregated, kuberay"),
    (("--set=standalone.replicas=two",), "standalone.replicas"),
    (("--set=standalone.replica=2",), "replica"),
    (("--set=redis.password=a b",), "redis.password"),
    (("--set=redis.passwordSecret=a",), "redis.passwordSecret needs mode external"),
    (("--set=redis.previousPassword=a",), "redis.previousPassword: it is the one before"),
    (
        (
            "--set=redis.mode=external,redis.url=rediss://a@b:6379/0",
            "--set=redis.passwordSecret=c",
        ),
        "end the addresses with ?password_file=/etc/baton-store/",
    ),
    (("--set=env[0].name=BATON_HTTP",), "env.0.name"),
]
BY_PART = [
    (("--set=tls.insecure=false",), "tls: mode disaggregated sends prompts, KV"),
    (("--set=redis.mode=embedded,redis.password=",), "needs a store that all pods can reach"),
    (
        ("--set=redis.mode=external,redis.password=,redis.existingSecret=a",),
        "clusterSecret: without certificates, give value",
    ),
    (
        (f"--set=clusterSecret.existingSecret=a,clusterSecret.value={'a' * 32}",),
        "clusterSecret: give value or existingSecret, not both",
    ),
    (("--set=clusterSecret.value=short",), "clusterSecret.value"),
    (("--set=gcsStore.mode=valkey,gcsStore.password=a",), "mode disaggregated has no Ray"),
    (("--set=config.ray_address=a:1",), "config.ray_address: the chart sets this itself"),
    (("--set=config.scale_command=a",), "config.scale_command: the chart sets this itself"),
    (("--set=config.pools[0].resources.GPU=1",), "resources, which only Ray reads"),
    (
        ("--set=config.pools[0].rank_placement=spread",),
        "set workers.prefill.podsPerWorker, or leave",
    ),
    (
        ("--set=config.pools[0].device=cuda,config.pools[0].tp=2",),
        "needs 2 GPUs in a pod, but workers",
    ),
    (("--set=config.pools[0].name=Prefill_1",), "part of a Deployment's name"),
    (("--set=config.pools[0].name=router",), "part of a Deployment's name"),
    (("--set=workers.decode.replicas=0",), "needs at least one pod"),
    (
        ("--set=workers.decode.podDisruptionBudget.enabled=true",),
        "minAvailable 1 of 1 pods would block every drain",
    ),
    (("--set=workers.decode.autoscaling.enabled=true",), "serverAddress: give the address"),
    (
        ("--set=workers.decode.autoscaling.enabled=true,config.pools[1].count=2",),
        "leave count out",
    ),
    (
        (
            "--set=workers.decode.autoscaling.enabled=true,workers.decode.autoscaling.kind=hpa",
            "--set=workers.decode.autoscaling.minReplicas=5",
        ),
        "minReplicas is above maxReplicas",
    ),
    (
        (
            "--set=workers.decode.autoscaling.enabled=true,workers.decode.autoscaling.kind=hpa",
            "--set=config.pools[2].name=more,config.pools[2].role=decode",
        ),
        "which has the pools decode, more",
    ),
    (("--set=gateway.enabled=true",), "gateway.parentRefs: name the Gateway"),
    (
        ("--set=gateway.enabled=true,gateway.parentRefs[0].name=a",),
        "or set gateway.insecure=true",
    ),
    (
        ("--set=gateway.enabled=true,gateway.parentRefs[0].name=a,tls.secret=b",),
        "gateway.caConfigMap: name a ConfigMap",
    ),
    (
        ("--set=gateway.enabled=true,gateway.parentRefs[0].name=a,gateway.insecure=true",),
        "networkPolicy.clients: name",
    ),
    (("--set=router.extraEnv[0].name=BATON_REDIS_URL",), "extraEnv.0.name"),
    (("--set=workers.decode.capabilities[0]=ipc lock",), "capabilities"),
]
KUBERAY = [
    (("--set=tls.secret=",), "tls: mode kuberay sends prompts"),
    (("--set=redis.mode=embedded,redis.password=",), "needs a store that all pods can reach"),
    (("--set=gcsStore.mode=none,gcsStore.url=",), "needs one for Ray's head"),
    (("--set=config.leave_workers=true",), "config.leave_workers: the chart sets this itself"),
    (("--set=config.pools[0].resources.baton_prefill=2",), "needs resources.baton_prefill: 1"),
    (("--set=config.pools[0].resources.CPU=1",), "requires CPU, which Ray"),
    (("--set=config.pools[1].resources.GPU=2",), "require more than its 2"),
    (("--set=config.pools[0].count=9",), "have no room for the 9 workers"),
    (("--set=config.pools[0].cp=4",), "needs 4 in one pod for its ranks"),
    (
        ("--set=kuberay.autoscaling=false,workers.prefill.podDisruptionBudget.enabled=false",),
        "1 pods with 1 places have no room",
    ),
    (("--set=workers.decode.autoscaling.enabled=true",), "in mode kuberay set kuberay.autoscaling"),
    (("--set=workers.prefill.minReplicas=1",), "would block every drain of a node"),
    *[
        ((f"--set=workers.decode.{value}",), "are for mode disaggregated; mode kuberay has rank_")
        for value in ("podsPerWorker=2", "schedulerName=volcano", "labels.a=b")
    ],
]
GROUPS = [
    (("--set=workers.prefill.podsPerWorker=3",), "cannot be divided among 3 pods"),
    (("--set=workers.prefill.podsPerWorker=0",), "podsPerWorker"),
    (("--set=workers.prefill.podsPerWorker=1",), "set workers.prefill.podsPerWorker, or leave"),
    (("--set=config.pools[0].rank_placement=strict_pack",), "set rank_placement to pack"),
    (("--set=workers.decode.exclusiveTopology=a",), "it is for workers in several pods"),
    (("--set=config.pools[0].tp=16",), "prefill needs 8 GPUs in a pod"),
    (
        ("--set=fullnameOverride=a-name-that-has-forty-letters-in-all-now",),
        "too long: at most 46 characters",
    ),
    (("--set=workers.prefill.podDisruptionBudget.minAvailable=3",), "would block every drain"),
    (("--set-json=env=[]",), "ranks exchange layers unencrypted between pods"),
]


def _pools(values: tuple[str, ...]) -> tuple[str, ...]:
    """The default pools, where values change a field of one: Helm replaces lists as a whole."""
    if not any("config.pools[" in value for value in values):
        return ()
    return (
        "--set=config.pools[0].name=prefill,config.pools[0].role=prefill",
        "--set=config.pools[1].name=decode,config.pools[1].role=decode",
    )


@pytest.mark.parametrize(("values", "message"), STANDALONE)
def test_what_would_not_work_is_refused(values: tuple[str, ...], message: str) -> None:
    assert message in refusal("open-values.yaml", *_pools(values), *values)


@pytest.mark.parametrize(("values", "message"), BY_PART)
def test_a_disaggregated_cluster_is_refused_what_it_cannot_have(
    values: tuple[str, ...], message: str
) -> None:
    assert message in refusal(PLAIN, *_pools(values), *values)


@pytest.mark.parametrize(("values", "message"), KUBERAY)
def test_kuberay_is_refused_what_it_cannot_have(values: tuple[str, ...], message: str) -> None:
    assert message in refusal("kuberay-values.yaml", *values)


@pytest.mark.parametrize(("values", "message"), GROUPS)
def test_workers_in_several_pods_are_refused_what_they_cannot_have(
    values: tuple[str, ...], message: str
) -> None:
    assert message in refusal("disaggregated-groups-values.yaml", *values)


def _common(one: str, other: str) -> int:
    """Length of the longest text that both have."""
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    return matcher.find_longest_match().size


def test_every_refusal_has_a_test() -> None:
    text = (CHART / "templates" / "_checks.tpl").read_text()
    messages = re.findall(r'fail (?:\(printf )?"([^"]*)"', text)
    assert len(messages) > 40
    known = [message for _, message in (*STANDALONE, *BY_PART, *KUBERAY, *GROUPS)]

    def is_tested(message: str) -> bool:
        """Whether a test expects a piece of it, which has no variable parts."""
        return any(_common(message, expected) >= 15 for expected in known)

    # The chart always has its files.
    untested = [one for one in messages if not is_tested(one) and "the chart has no" not in one]
    assert untested == []


def test_an_empty_pool_needs_no_gpu() -> None:
    empty = (
        "--set=config.pools[0].name=prefill,config.pools[0].role=prefill,config.pools[0].count=0",
        "--set=config.pools[1].name=decode,config.pools[1].role=decode",
        "--set=config.pools[0].resources.GPU=1",
    )
    assert render("open-values.yaml", *empty)


@pytest.mark.parametrize(("name", "model"), [("keys", KeyConfig), ("tenants", TenantConfig)])
def test_the_schema_knows_every_field_of_keys_and_tenants(
    name: str, model: type[KeyConfig | TenantConfig]
) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["auth"]["properties"][name]["items"]["properties"]
    assert known.keys() == model.model_fields.keys()
