{{/*
Rejects values of deployments that do not work, or that are open without an explicit setting. Each
message says what to do. Every check has a test.
*/}}
{{- define "baton.checks" -}}
{{- range list "http" "grpc" "redis_url" "gcs_store" "keys" "tenants" "require_key" "data_dir" "cluster_id" "tls" "insecure_listen" "insecure_redis" "redis_router_url" "redis_worker_url" }}
{{- if hasKey $.Values.config . }}
{{- fail (printf "config.%s: the chart sets this itself; see redis, gcsStore, auth, kuberay.clusterId and service" .) }}
{{- end }}
{{- end }}
{{- include "baton.checkAuth" . }}
{{- include "baton.checkIngress" . }}
{{- include "baton.checkStore" (dict "name" "redis" "store" .Values.redis) }}
{{- if ne .Values.gcsStore.mode "none" }}
{{- include "baton.checkStore" (dict "name" "gcsStore" "store" .Values.gcsStore) }}
{{- end }}
{{- if and .Values.metrics.serviceMonitor.enabled .Values.auth.requireKey (not .Values.metrics.serviceMonitor.keySecret.name) }}
{{- fail "metrics.serviceMonitor.keySecret: name a Secret with an API key of the metrics scope; without it Prometheus is rejected" }}
{{- end }}
{{- if .Values.networkPolicy.enabled }}
{{- if and .Values.ingress.enabled (not .Values.networkPolicy.clients) }}
{{- fail "networkPolicy.clients: name the ingress controller's pods (namespaceSelector, podSelector); other pods are blocked" }}
{{- end }}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.networkPolicy.monitoring) }}
{{- fail "networkPolicy.monitoring: name Prometheus's pods (namespaceSelector, podSelector); other pods are blocked" }}
{{- end }}
{{- end }}
{{- $ownIndex := and (eq .Values.redis.mode "external") .Values.redis.url }}
{{- $ownGcs := and (eq .Values.gcsStore.mode "external") .Values.gcsStore.url }}
{{- if and $ownIndex $ownGcs (eq (include "baton.serverOf" .Values.redis.url) (include "baton.serverOf" .Values.gcsStore.url)) }}
{{- fail "gcsStore.url: it must be a different server than redis.url, so that one failure cannot lose both" }}
{{- end }}
{{- if and (hasPrefix "/models/" (toString .Values.config.model)) (not .Values.modelVolume) }}
{{- fail (printf "config.model is %s: give modelVolume, which is mounted at /models" .Values.config.model) }}
{{- end }}
{{- if and .Values.metrics.prometheusRule.enabled (not (.Files.Get "files/rules.yaml")) }}
{{- fail "metrics.prometheusRule: the chart has no files/rules.yaml" }}
{{- end }}
{{- if ne (empty .Values.redis.routerUrl) (empty .Values.redis.workerUrl) }}
{{- fail "redis: routerUrl and workerUrl go together" }}
{{- end }}
{{- if and .Values.redis.routerUrl (not .Values.redis.url) }}
{{- fail "redis: routerUrl and workerUrl need url, which is the supervisor's" }}
{{- end }}
{{- if and .Values.tls.ingressSecret (not .Values.tls.secret) }}
{{- fail "tls.ingressSecret: it needs tls.secret; without that routers have no certificate to verify" }}
{{- end }}
{{- if eq .Values.mode "single" }}
{{- include "baton.checkGpus" . }}
{{- else }}
{{- include "baton.checkKuberay" . }}
{{- end }}
{{- end }}

{{- define "baton.checkAuth" -}}
{{- if .Values.existingConfigSecret }}
{{- if or .Values.auth.keys .Values.auth.tenants }}
{{- fail "auth.keys and auth.tenants belong in the file of existingConfigSecret, which is used unchanged" }}
{{- end }}
{{- else if and .Values.auth.requireKey (not .Values.auth.keys) }}
{{- fail "auth.keys: give at least one (name, tenant, and sha256 of printf %s KEY | sha256sum), or set auth.requireKey=false: then every client that reaches the service can use it" }}
{{- end }}
{{- end }}

{{- define "baton.checkIngress" -}}
{{- if .Values.ingress.enabled }}
{{- if not .Values.ingress.host }}
{{- fail "ingress.host: set the public host name of the API" }}
{{- end }}
{{- $open := and (not .Values.auth.requireKey) (not .Values.existingConfigSecret) }}
{{- if and (or (not .Values.ingress.tlsSecret) $open) (not .Values.ingress.insecure) }}
{{- fail "ingress: give tlsSecret and keep auth.requireKey, or set ingress.insecure=true: then keys cross the network in the clear, or there are none" }}
{{- end }}
{{- end }}
{{- if .Values.ingress.grpc.enabled }}
{{- if not (and .Values.ingress.enabled .Values.ingress.tlsSecret .Values.ingress.grpc.host) }}
{{- fail "ingress.grpc: needs ingress.enabled, ingress.tlsSecret (HTTP/2) and a separate host" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.checkStore" -}}
{{- if eq .store.mode "external" }}
{{- if not (or .store.url .store.existingSecret) }}
{{- fail (printf "%s: mode external needs url or existingSecret" .name) }}
{{- end }}
{{- if and .store.url .store.existingSecret }}
{{- fail (printf "%s: give url or existingSecret, not both" .name) }}
{{- end }}
{{- if and (hasPrefix "redis://" .store.url) (not .store.insecure) }}
{{- fail (printf "%s.url: redis:// sends its password in the clear: give a rediss:// address, or set %s.insecure=true" .name .name) }}
{{- end }}
{{- else }}
{{- if or .store.url .store.existingSecret }}
{{- fail (printf "%s: url and existingSecret need mode external, but it is %s" .name .store.mode) }}
{{- end }}
{{- if and (eq .store.mode "valkey") (not .store.password) }}
{{- fail (printf "%s.password: mode valkey needs one" .name) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.serverOf" -}}
{{- (splitList "@" (get (urlParse .) "host") | last) }}
{{- end }}

{{- define "baton.countOf" -}}
{{- ternary .count 1 (hasKey . "count") }}
{{- end }}

{{- define "baton.checkGpus" -}}
{{- $asked := 0.0 }}
{{- range default (list) .Values.config.pools }}
{{- $each := get (default (dict) .resources) "GPU" | default 0 | float64 }}
{{- $asked = addf $asked (mulf $each (float64 (include "baton.countOf" .)) (float64 (default 1 .tp)) (float64 (default 1 .cp))) }}
{{- end }}
{{- $given := get (default (dict) .Values.resources.limits) "nvidia.com/gpu" | default 0 | float64 }}
{{- if gt $asked $given }}
{{- fail (printf "config.pools require %v GPUs, but resources.limits has %v nvidia.com/gpu: some workers would never start" $asked $given) }}
{{- end }}
{{- end }}

{{- define "baton.checkKuberay" -}}
{{- if eq .Values.redis.mode "embedded" }}
{{- fail "redis: mode kuberay needs a store that all pods can reach: set mode valkey or external" }}
{{- end }}
{{- if or (has .Values.gcsStore.mode (list "none" "embedded")) .Values.gcsStore.existingSecret }}
{{- fail "gcsStore: mode kuberay needs one for Ray's head: set mode valkey, or external with url" }}
{{- end }}
{{- range list "ray_address" "leave_workers" }}
{{- if hasKey $.Values.config . }}
{{- fail (printf "config.%s: the chart sets this itself in mode kuberay" .) }}
{{- end }}
{{- end }}
{{- if not .Values.existingConfigSecret }}
{{- range default (list) .Values.config.pools }}
{{- $asked := default (dict) .resources }}
{{- $role := printf "baton_%s" .role }}
{{- if ne (get $asked $role | default 0 | int) 1 }}
{{- fail (printf "config.pools: %s needs resources.%s: 1, so that Ray places its workers in that group" .name $role) }}
{{- end }}
{{- if get $asked "CPU" }}
{{- fail (printf "config.pools: %s requires CPU, which Ray does not schedule in the pods: set requests of kuberay.%s.resources" .name .role) }}
{{- end }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- $group := index $.Values.kuberay $role }}
{{- $pods := ternary $group.maxReplicas $group.replicas $.Values.kuberay.autoscaling }}
{{- $gpus := get (default (dict) $group.resources.limits) "nvidia.com/gpu" | default 0 | float64 }}
{{- $workers := 0 }}
{{- range default (list) $.Values.config.pools }}
{{- if eq .role $role }}
{{- $ranks := mul (default 1 .tp) (default 1 .cp) }}
{{- $workers = add $workers (mul (include "baton.countOf" . | int) $ranks) }}
{{- if and (gt (int $ranks) (int $group.workersPerPod)) (eq (default "strict_pack" .rank_placement) "strict_pack") }}
{{- fail (printf "kuberay.%s: a pod has %v places, and %s needs %v in one pod for its ranks: raise workersPerPod and the limit of nvidia.com/gpu" $role $group.workersPerPod .name $ranks) }}
{{- end }}
{{- $each := get (default (dict) .resources) "GPU" | default 0 | float64 }}
{{- if gt (mulf $each $group.workersPerPod) $gpus }}
{{- fail (printf "kuberay.%s: %v workers in a pod require more than its %v nvidia.com/gpu" $role $group.workersPerPod $gpus) }}
{{- end }}
{{- end }}
{{- end }}
{{- if gt (int $workers) (mul $pods $group.workersPerPod | int) }}
{{- fail (printf "kuberay.%s: %v pods with %v places have no room for the %v workers of config.pools" $role $pods $group.workersPerPod $workers) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
