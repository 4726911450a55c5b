{{/*
Rejects values of deployments that do not work, or that are open without an explicit setting. Each
message says what to do. Every check has a test.
*/}}
{{- define "baton.checks" -}}
{{- if eq .Values.mode "single" }}
{{- fail "mode: single is now standalone, and its values (replicas, resources, nodeSelector, …) are under standalone; kuberay.prefill, .decode and .router are workers.prefill, workers.decode and router" }}
{{- end }}
{{- if not (has .Values.mode (list "standalone" "disaggregated" "kuberay")) }}
{{- fail (printf "mode: %s is none of standalone, disaggregated, kuberay" .Values.mode) }}
{{- end }}
{{- range list "http" "grpc" "admin_http" "metrics_port" "scale_command" "redis_url" "gcs_store" "keys" "tenants" "require_key" "data_dir" "cluster_id" "cluster_secret" "tls" "insecure_listen" "insecure_redis" "redis_router_url" "redis_worker_url" }}
{{- if hasKey $.Values.config . }}
{{- fail (printf "config.%s: the chart sets this itself; see redis, gcsStore, auth, tls, clusterId, clusterSecret and service" .) }}
{{- end }}
{{- end }}
{{- include "baton.checkAuth" . }}
{{- include "baton.checkTls" . }}
{{- include "baton.checkIngress" . }}
{{- include "baton.checkGateway" . }}
{{- if and .Values.networkPolicy.enabled (or .Values.ingress.enabled .Values.gateway.enabled) (not .Values.networkPolicy.clients) }}
{{- fail "networkPolicy.clients: name the pods of the ingress controller or the Gateway (namespaceSelector, podSelector); other pods are blocked" }}
{{- end }}
{{- include "baton.checkStore" (dict "name" "redis" "store" .Values.redis) }}
{{- if and .Values.redis.passwordSecret (ne .Values.redis.mode "external") }}
{{- fail (printf "redis.passwordSecret needs mode external, but it is %s" .Values.redis.mode) }}
{{- end }}
{{- if and .Values.redis.passwordSecret .Values.redis.url (not (contains "password_file=/etc/baton-store/" .Values.redis.url)) }}
{{- fail "redis.passwordSecret: end the addresses with ?password_file=/etc/baton-store/ and the name of a key" }}
{{- end }}
{{- with .Values.redis.previousPassword }}
{{- if or (ne $.Values.redis.mode "valkey") (eq . $.Values.redis.password) }}
{{- fail "redis.previousPassword: it is the one before redis.password, of mode valkey" }}
{{- end }}
{{- end }}
{{- if ne .Values.gcsStore.mode "none" }}
{{- include "baton.checkStore" (dict "name" "gcsStore" "store" .Values.gcsStore) }}
{{- end }}
{{- include "baton.checkMonitoring" . }}
{{- $ownIndex := and (eq .Values.redis.mode "external") .Values.redis.url }}
{{- $ownGcs := and (eq .Values.gcsStore.mode "external") .Values.gcsStore.url }}
{{- if and $ownIndex $ownGcs (eq (include "baton.serverOf" .Values.redis.url) (include "baton.serverOf" .Values.gcsStore.url)) }}
{{- fail "gcsStore.url: it must be a different server than redis.url, so that one failure cannot lose both" }}
{{- end }}
{{- if and (hasPrefix "/models/" (toString .Values.config.model)) (not .Values.modelVolume) }}
{{- fail (printf "config.model is %s: give modelVolume, which is mounted at /models" .Values.config.model) }}
{{- end }}
{{- if ne (empty .Values.redis.routerUrl) (empty .Values.redis.workerUrl) }}
{{- fail "redis: routerUrl and workerUrl go together" }}
{{- end }}
{{- if and .Values.redis.routerUrl (not .Values.redis.url) }}
{{- fail "redis: routerUrl and workerUrl need url, which is the supervisor's" }}
{{- end }}
{{- if eq .Values.mode "standalone" }}
{{- include "baton.checkGpus" . }}
{{- else }}
{{- include "baton.checkApart" . }}
{{- if eq .Values.mode "disaggregated" }}
{{- include "baton.checkDisaggregated" . }}
{{- else }}
{{- include "baton.checkKuberay" . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.checkTls" -}}
{{- $tls := .Values.tls }}
{{- if and $tls.secret $tls.certManager.enabled }}
{{- fail "tls: give secret or certManager.enabled, not both" }}
{{- end }}
{{- if and $tls.certManager.issuerRef (not (get $tls.certManager.issuerRef "name")) }}
{{- fail "tls.certManager.issuerRef: it needs a name, or leave it empty for a private CA" }}
{{- end }}
{{- if and $tls.ingressSecret (not (include "baton.hasTls" .)) }}
{{- fail "tls.ingressSecret: it needs tls.secret or tls.certManager; without them routers have no certificate to verify" }}
{{- end }}
{{- if and (ne .Values.mode "standalone") (not (include "baton.hasTls" .)) (not $tls.insecure) }}
{{- fail (printf "tls: mode %s sends prompts, KV and operators' calls between pods: set tls.certManager.enabled, or give tls.secret (baton certs init), or set tls.insecure=true: then they cross the network in the clear" .Values.mode) }}
{{- end }}
{{- end }}

{{- define "baton.checkMonitoring" -}}
{{- $monitor := .Values.metrics.serviceMonitor }}
{{- if and $monitor.enabled .Values.auth.requireKey (not $monitor.keySecret.name) }}
{{- fail "metrics.serviceMonitor.keySecret: name a Secret with an API key of the metrics scope; without it Prometheus is rejected" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled $monitor.enabled (not .Values.networkPolicy.monitoring) }}
{{- fail "networkPolicy.monitoring: name Prometheus's pods (namespaceSelector, podSelector); other pods are blocked" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled .Values.config.otlp_endpoint (not .Values.networkPolicy.otlp.peers) }}
{{- fail "networkPolicy.otlp.peers: name the pods of the collector of config.otlp_endpoint; other pods are blocked" }}
{{- end }}
{{- if and .Values.metrics.prometheusRule.enabled (not (.Files.Get "files/rules.yaml")) }}
{{- fail "metrics.prometheusRule: the chart has no files/rules.yaml" }}
{{- end }}
{{- if and .Values.metrics.dashboards.enabled (not (.Files.Glob "files/dashboards/*.json")) }}
{{- fail "metrics.dashboards: the chart has no files/dashboards" }}
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

{{- define "baton.checkGateway" -}}
{{- if .Values.gateway.enabled }}
{{- if not .Values.gateway.parentRefs }}
{{- fail "gateway.parentRefs: name the Gateway to which the routes attach" }}
{{- end }}
{{- if and (include "baton.hasTls" .) (not .Values.gateway.caConfigMap) }}
{{- fail "gateway.caConfigMap: name a ConfigMap with the CA of the pods' certificates under ca.crt, by which the Gateway checks them" }}
{{- end }}
{{- if and (not .Values.auth.requireKey) (not .Values.existingConfigSecret) (not .Values.gateway.insecure) }}
{{- fail "gateway: keep auth.requireKey, or set gateway.insecure=true: then everybody who reaches the Gateway can use the API" }}
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
{{- $given := get (default (dict) .Values.standalone.resources.limits) "nvidia.com/gpu" | default 0 | float64 }}
{{- if gt $asked $given }}
{{- fail (printf "config.pools require %v GPUs, but standalone.resources.limits has %v nvidia.com/gpu: some workers would never start" $asked $given) }}
{{- end }}
{{- end }}

{{/* Both modes with workers in pods of their own. */}}
{{- define "baton.checkApart" -}}
{{- $mode := .Values.mode }}
{{- if eq .Values.redis.mode "embedded" }}
{{- fail (printf "redis: mode %s needs a store that all pods can reach: set redis.mode to valkey (with redis.password) or external" $mode) }}
{{- end }}
{{- if and (eq .Values.redis.mode "external") (not (include "baton.hasTls" .)) (not (include "baton.hasClusterSecret" .)) (not .Values.existingConfigSecret) }}
{{- fail "clusterSecret: without certificates, give value (openssl rand -hex 32) or existingSecret, by which routers and workers know each other" }}
{{- end }}
{{- if and .Values.clusterSecret.value .Values.clusterSecret.existingSecret }}
{{- fail "clusterSecret: give value or existingSecret, not both" }}
{{- end }}
{{- range list "ray_address" "leave_workers" }}
{{- if hasKey $.Values.config . }}
{{- fail (printf "config.%s: the chart sets this itself in mode %s" . $mode) }}
{{- end }}
{{- end }}
{{- range $role := include "baton.roles" . | fromJsonArray }}
{{- with index $.Values.workers $role }}
{{- $least := ternary .minReplicas .replicas (and (eq $mode "kuberay") $.Values.kuberay.autoscaling) }}
{{- if eq $mode "disaggregated" }}
{{- $least = include "baton.workersOfRole" (dict "root" $ "role" $role) | int }}
{{- end }}
{{- if and .podDisruptionBudget.enabled (ge (int .podDisruptionBudget.minAvailable) (int $least)) }}
{{- fail (printf "workers.%s.podDisruptionBudget: minAvailable %v of %v pods would block every drain of a node: lower it, or add pods" $role .podDisruptionBudget.minAvailable $least) }}
{{- end }}
{{- if and (eq $mode "kuberay") .autoscaling.enabled }}
{{- fail (printf "workers.%s.autoscaling: it is for mode disaggregated; in mode kuberay set kuberay.autoscaling" $role) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.checkDisaggregated" -}}
{{- if has .Values.gcsStore.mode (list "valkey" "external") }}
{{- fail "gcsStore: mode disaggregated has no Ray: leave gcsStore as it is" }}
{{- end }}
{{- $roles := dict }}
{{- range $pool := include "baton.pools" . | fromJsonArray }}
{{- $group := index $.Values.workers $pool.role }}
{{- $_ := set $roles $pool.role (append (default (list) (get $roles $pool.role)) $pool.name) }}
{{- if or (not (regexMatch "^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$" $pool.name)) (has $pool.name (list "router" "index" "admin")) }}
{{- fail (printf "config.pools: %s is part of a Deployment's name: use at most 20 small letters, digits and -, and not router, index or admin" $pool.name) }}
{{- end }}
{{- if $pool.resources }}
{{- fail (printf "config.pools: %s has resources, which only Ray reads: set workers.%s.resources" $pool.name $pool.role) }}
{{- end }}
{{- $ranks := mul (default 1 $pool.tp) (default 1 $pool.cp) }}
{{- $placement := default "strict_pack" $pool.rank_placement }}
{{- if gt (int $group.podsPerWorker) 1 }}
{{- include "baton.checkGroups" (dict "root" $ "pool" $pool "ranks" $ranks "placement" $placement) }}
{{- $ranks = div $ranks (int $group.podsPerWorker) }}
{{- else if ne $placement "strict_pack" }}
{{- fail (printf "config.pools: %s: with rank_placement %s the ranks of a worker are in several pods: set workers.%s.podsPerWorker, or leave rank_placement out" $pool.name $placement $pool.role) }}
{{- end }}
{{- if and $group.exclusiveTopology (le (int $group.podsPerWorker) 1) }}
{{- fail (printf "workers.%s.exclusiveTopology: it is for workers in several pods: set podsPerWorker" $pool.role) }}
{{- end }}
{{- $gpus := get (default (dict) $group.resources.limits) "nvidia.com/gpu" | default 0 | int }}
{{- if and (eq (default "auto" $pool.device) "cuda") (gt (int $ranks) $gpus) }}
{{- fail (printf "config.pools: %s needs %v GPUs in a pod, but workers.%s.resources.limits has %v nvidia.com/gpu" $pool.name $ranks $pool.role $gpus) }}
{{- end }}
{{- if and $group.autoscaling.enabled (hasKey $pool "count") }}
{{- fail (printf "config.pools: %s has a count, but workers.%s.autoscaling sets the number of pods: leave count out" $pool.name $pool.role) }}
{{- end }}
{{- if and (eq $pool.role "decode") (lt (include "baton.podsOf" (dict "root" $ "pool" $pool) | int) 1) }}
{{- fail (printf "config.pools: %s needs at least one pod: raise its count, workers.decode.replicas or autoscaling.minReplicas" $pool.name) }}
{{- end }}
{{- end }}
{{- range $role, $names := $roles }}
{{- with (index $.Values.workers $role).autoscaling }}
{{- if .enabled }}
{{- if gt (len $names) 1 }}
{{- fail (printf "workers.%s.autoscaling: needed workers are counted by role, which has the pools %s: use one pool, or no autoscaling" $role (join ", " $names)) }}
{{- end }}
{{- if and (eq .kind "keda") (not .serverAddress) }}
{{- fail (printf "workers.%s.autoscaling.serverAddress: give the address of Prometheus, or set kind to hpa" $role) }}
{{- end }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
{{- fail (printf "workers.%s.autoscaling: minReplicas is above maxReplicas" $role) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Workers whose ranks are in several pods: of `root`, `pool`, `ranks` and `placement`. */}}
{{- define "baton.checkGroups" -}}
{{- $pool := .pool }}
{{- $size := int (index .root.Values.workers $pool.role).podsPerWorker }}
{{- if mod .ranks $size }}
{{- fail (printf "workers.%s.podsPerWorker: the %v ranks of %s cannot be divided among %v pods: set tp of config.pools to a multiple" $pool.role .ranks $pool.name $size) }}
{{- end }}
{{- if eq .placement "strict_pack" }}
{{- fail (printf "config.pools: %s: its ranks are in %v pods (workers.%s.podsPerWorker): set rank_placement to pack" $pool.name $size $pool.role) }}
{{- end }}
{{- /* A LeaderWorkerSet's pods and revisions have longer names than it has itself. */}}
{{- $name := printf "%s-%s" (include "baton.fullname" .root) $pool.name }}
{{- if gt (len $name) 46 }}
{{- fail (printf "config.pools: %s makes the LeaderWorkerSet's name %s too long: at most 46 characters, with fullnameOverride" $pool.name $name) }}
{{- end }}
{{- $clear := false }}
{{- range .root.Values.env }}
{{- if eq .name "BATON_TLS__CLEAR_KV" }}{{ $clear = true }}{{ end }}
{{- end }}
{{- if and (include "baton.hasTls" .root) (not $clear) (not .root.Values.existingConfigSecret) }}
{{- fail (printf "workers.%s.podsPerWorker: ranks exchange layers unencrypted between pods, although there are certificates: if only you use that network, add BATON_TLS__CLEAR_KV with the value true to env" $pool.role) }}
{{- end }}
{{- end }}

{{- define "baton.checkKuberay" -}}
{{- if or (has .Values.gcsStore.mode (list "none" "embedded")) .Values.gcsStore.existingSecret }}
{{- fail "gcsStore: mode kuberay needs one for Ray's head: set mode valkey, or external with url" }}
{{- end }}
{{- if not .Values.existingConfigSecret }}
{{- range default (list) .Values.config.pools }}
{{- $asked := default (dict) .resources }}
{{- $role := printf "baton_%s" .role }}
{{- if ne (get $asked $role | default 0 | int) 1 }}
{{- fail (printf "config.pools: %s needs resources.%s: 1, so that Ray places its workers in that group" .name $role) }}
{{- end }}
{{- if get $asked "CPU" }}
{{- fail (printf "config.pools: %s requires CPU, which Ray does not schedule in the pods: set requests of workers.%s.resources" .name .role) }}
{{- end }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- $group := index $.Values.workers $role }}
{{- if or (gt (int $group.podsPerWorker) 1) $group.exclusiveTopology $group.schedulerName $group.labels $group.annotations }}
{{- fail (printf "workers.%s: podsPerWorker, exclusiveTopology, schedulerName, labels and annotations are for mode disaggregated; mode kuberay has rank_placement of config.pools, and kuberay.labels and .annotations" $role) }}
{{- end }}
{{- $pods := ternary $group.maxReplicas $group.replicas $.Values.kuberay.autoscaling }}
{{- $gpus := get (default (dict) $group.resources.limits) "nvidia.com/gpu" | default 0 | float64 }}
{{- $workers := 0 }}
{{- range default (list) $.Values.config.pools }}
{{- if eq .role $role }}
{{- $ranks := mul (default 1 .tp) (default 1 .cp) }}
{{- $workers = add $workers (mul (include "baton.countOf" . | int) $ranks) }}
{{- if and (gt (int $ranks) (int $group.workersPerPod)) (eq (default "strict_pack" .rank_placement) "strict_pack") }}
{{- fail (printf "workers.%s: a pod has %v places, and %s needs %v in one pod for its ranks: raise workersPerPod and the limit of nvidia.com/gpu" $role $group.workersPerPod .name $ranks) }}
{{- end }}
{{- $each := get (default (dict) .resources) "GPU" | default 0 | float64 }}
{{- if gt (mulf $each $group.workersPerPod) $gpus }}
{{- fail (printf "workers.%s: %v workers in a pod require more than its %v nvidia.com/gpu" $role $group.workersPerPod $gpus) }}
{{- end }}
{{- end }}
{{- end }}
{{- if gt (int $workers) (mul $pods $group.workersPerPod | int) }}
{{- fail (printf "workers.%s: %v pods with %v places have no room for the %v workers of config.pools" $role $pods $group.workersPerPod $workers) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
