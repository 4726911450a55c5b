#!/usr/bin/env bash
# Installs the chart on a Kubernetes cluster in containers (kind), and asks it for an answer:
#
#     make kind-test
#
# It needs docker, kind, kubectl, helm and curl, 16 GiB of memory, 30 GiB of disk, and the Internet: for the
# images of kind, Valkey, cert-manager and KubeRay, and for the demo model. The cluster is deleted at the end;
# KEEP=1 leaves it for a look.
set -euo pipefail
cd "$(dirname "$0")/.."

CLUSTER=baton-test
IMAGE=baton:kind
ROUTER=baton:kind-router
CHART=deploy/helm/baton
CERT_MANAGER=${CERT_MANAGER:-v1.18.2}
KUBERAY=${KUBERAY:-1.7.0}
WAIT=${WAIT:-20m}
COMMON=(--set image.repository="${IMAGE%:*}" --set image.tag="${IMAGE#*:}"
  --set image.routerTag="${ROUTER#*:}" --set image.pullPolicy=Never)
SMALL=(--set router.replicas=2 --set router.resources.requests.cpu=100m)
for role in prefill decode; do
  SMALL+=(--set workers.$role.resources.requests.cpu=500m --set workers.$role.resources.requests.memory=2Gi)
done

for program in docker kind kubectl helm curl; do
  command -v "$program" >/dev/null || { echo "$program is not installed; see the head of $0" >&2; exit 2; }
done
docker info >/dev/null 2>&1 || { echo "docker does not answer: start it, or join its group" >&2; exit 2; }

finish() {
  local code=$?
  if [ $code -ne 0 ]; then
    kubectl --context "kind-$CLUSTER" get pods --all-namespaces || true
    kubectl --context "kind-$CLUSTER" get events --sort-by=.lastTimestamp | tail -30 || true
  fi
  [ "${KEEP:-}" = 1 ] || kind delete cluster --name "$CLUSTER"
  exit $code
}
trap finish EXIT

docker build --target cpu --tag "$IMAGE" .
docker build --target router --tag "$ROUTER" .
kind create cluster --name "$CLUSTER" --wait 120s
kubectl config use-context "kind-$CLUSTER"
kind load docker-image "$IMAGE" "$ROUTER" --name "$CLUSTER"
helm install cert-manager oci://quay.io/jetstack/charts/cert-manager --version "$CERT_MANAGER" \
  --namespace cert-manager --create-namespace --set crds.enabled=true --wait --timeout 5m
helm install kuberay-operator kuberay-operator --repo https://ray-project.github.io/kuberay-helm \
  --version "$KUBERAY" --wait --timeout 5m \
  --set 'featureGates[0].name=RayClusterMTLS' --set 'featureGates[0].enabled=true'

# install NAME VALUES ARGUMENTS…: installs a release, runs its own test, asks it, and removes it.
install() {
  local name=$1 values=$2 port_forward
  shift 2
  helm install "$name" "$CHART" --values "$CHART/ci/$values" "${COMMON[@]}" "${SMALL[@]}" "$@"
  kubectl rollout status "deployment/$name-baton-router" --timeout "$WAIT"
  helm test "$name" --timeout 5m
  kubectl port-forward "service/$name-baton" 18000:8000 >/dev/null &
  port_forward=$!
  curl --retry 20 --retry-connrefused --retry-delay 1 --max-time 120 --insecure --fail --silent --show-error \
    "https://127.0.0.1:18000/v1/completions" --header 'content-type: application/json' \
    --data '{"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 8}'
  echo
  kill "$port_forward"
  wait "$port_forward" 2>/dev/null || true
  helm uninstall "$name" --wait
}

CERTIFICATES=(--set tls.insecure=false --set tls.certManager.enabled=true)
install plain disaggregated-plain-values.yaml "${CERTIFICATES[@]}"
install ray kuberay-plain-values.yaml "${CERTIFICATES[@]}" --set kuberay.tls=true --set clusterSecret.existingSecret= \
  --set redis.mode=valkey --set redis.existingSecret= --set redis.password=example-index
echo "both modes were installed and answered"
