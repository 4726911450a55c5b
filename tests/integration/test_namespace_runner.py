"""The runner of rendered manifests: pods, probes, Services, rollouts and policies."""

from __future__ import annotations

import asyncio
import copy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from tests.support.kubernetes.cluster import Cluster, Connection, cluster

pytestmark = pytest.mark.long
DEADLINE_S = 90.0
SOON_S = 0.6
"""More than a Service needs to learn which pods are ready."""
SERVER = """
import http.server, os, pathlib, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = not pathlib.Path("/data/refuse").exists()
        text = " ".join([os.environ["NAME"], os.environ["PLANTED"], str(os.getuid()),
                         pathlib.Path("/etc/planted/file").read_text()]).encode()
        self.send_response(200 if ready else 503)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""
CLIENT = """
import http.client, sys, time
while True:
    try:
        connection = http.client.HTTPConnection(sys.argv[1], 8000, timeout=5)
        connection.request("GET", "/")
        print(connection.getresponse().read().decode(), flush=True)
        time.sleep(1.5)
    except OSError as error:
        print(error, flush=True)
        time.sleep(0.2)
"""
MANIFESTS = """
apiVersion: v1
kind: Secret
metadata: {name: planted}
stringData: {word: planted-word, file: of-a-secret}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports: [{port: 8000, targetPort: http}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 5
      securityContext: {runAsUser: 10001, runAsGroup: 10001}
      containers:
        - name: web
          command: [python, -c, SERVER]
          env:
            - name: NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            - name: PLANTED
              valueFrom: {secretKeyRef: {name: planted, key: word}}
          ports: [{name: http, containerPort: 8000}]
          readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
          securityContext: {readOnlyRootFilesystem: true}
          volumeMounts:
            - {name: planted, mountPath: /etc/planted, readOnly: true}
            - {name: data, mountPath: /data}
      volumes:
        - name: planted
          secret: {secretName: planted, defaultMode: 288, items: [{key: file, path: file}]}
        - name: data
          emptyDir: {}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: caller}
spec:
  replicas: 1
  selector: {matchLabels: {app: caller}}
  template:
    metadata: {labels: {app: caller}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
        - name: caller
          command: [python, -uc, CLIENT, web.default.svc]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress]
  ingress:
    - from: [{podSelector: {matchLabels: {app: ALLOWED}}}]
      ports: [{port: http}]
"""


def manifests(allowed: str = "caller") -> list[dict[str, Any]]:
    found = list(yaml.safe_load_all(MANIFESTS.replace("ALLOWED", allowed)))
    for one in found:
        if one["kind"] in ("Deployment", "StatefulSet"):
            (container,) = one["spec"]["template"]["spec"]["containers"]
            words = {"SERVER": SERVER, "CLIENT": CLIENT}
            container["command"] = [words.get(word, word) for word in container["command"]]
    return found


GET = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], 8000, timeout=5)
connection.request("GET", "/")
print(connection.getresponse().read().decode())
"""


async def ask(there: Cluster) -> list[str]:
    """The words of an answer of the Service, as the node gets it."""
    command = there.node.command(sys.executable, "-c", GET, there.address("web"))
    asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await asked.communicate()
    assert asked.returncode == 0
    return said.decode().split()


async def answering(there: Cluster) -> set[str]:
    """The pods that answer."""
    await asyncio.sleep(SOON_S)
    return {(await ask(there))[0] for _ in range(4)}


@pytest.mark.timeout(300)
async def test_pods_run_as_manifests_say_and_follow_them() -> None:
    with TemporaryDirectory(prefix="baton-k", dir="/tmp") as folder:
        async with cluster(Path(folder)) as there:
            await there.apply(manifests())
            await there.until_ready(DEADLINE_S)
            first = there.pods_of("web")
            assert await answering(there) == {pod.name for pod in first}
            assert (await ask(there))[1:] == ["planted-word", "10001", "of-a-secret"]
            assert "planted-word" in there.pods_of("caller")[0].text()
            # One that is not ready gets no connections.
            (first[0].folder / "volumes" / "data" / "refuse").touch()
            await there.until(lambda: not first[0].is_ready, "it stays ready", DEADLINE_S)
            assert await answering(there) == {first[1].name}
            (first[0].folder / "volumes" / "data" / "refuse").unlink()
            await there.until_ready(DEADLINE_S)
            # A pod that is lost, and a container that ends, are replaced.
            await there.kill(first[0])
            await there.until_ready(DEADLINE_S)
            assert first[0].name not in {pod.name for pod in there.pods_of("web")}
            first[1].machine.terminate(first[1].running["web"].process)
            await there.until(lambda: not first[1].is_ready, "it stays ready", DEADLINE_S)
            await there.until_ready(DEADLINE_S)
            # Another template replaces pods one by one; another size adds and removes some.
            changed = copy.deepcopy(manifests())
            changed[2]["spec"]["template"]["metadata"]["labels"]["more"] = "1"
            before = {pod.name for pod in there.pods_of("web")}
            await there.apply(changed)
            fewest = 2
            while not there.is_ready("web"):
                fewest = min(fewest, sum(pod.is_ready for pod in there.pods_of("web")))
                await asyncio.sleep(0.05)
            assert fewest == 1
            assert not before & {pod.name for pod in there.pods_of("web")}
            await there.scale("web", 3)
            await there.until_ready(DEADLINE_S)
            assert len(there.pods_of("web")) == 3
            # What is observed is allowed, until the policies change.
            seen = Connection("caller", "web", 8000)
            assert (seen, True) in there.connections
            assert there.violations() == []
            await there.apply(manifests("nobody"))
            await there.until(lambda: seen in there.violations(), "nothing is seen", DEADLINE_S)
