{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "baton.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "baton.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "baton.selectorLabels" -}}
app.kubernetes.io/name: {{ include "baton.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "baton.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "baton.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "baton.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}

{{- define "baton.routerImage" -}}
{{- printf "%s:%s" .Values.image.repository (default (printf "%s-router" .Chart.AppVersion) .Values.image.routerTag) }}
{{- end }}

{{/* Component of the pods that answer requests: whole clusters, or routers. */}}
{{- define "baton.frontComponent" -}}
{{ ternary "cluster" "router" (eq .Values.mode "standalone") }}
{{- end }}

{{- define "baton.clusterId" -}}
{{- default (include "baton.fullname" .) .Values.clusterId }}
{{- end }}

{{/* Seconds that requests have to end. */}}
{{- define "baton.drainS" -}}
{{- default 30 .Values.config.drain_deadline_s | ceil }}
{{- end }}

{{/* Seconds that the requests of a leaving worker have to end. The last worker of a model ends all that it runs. */}}
{{- define "baton.workerDrainS" -}}
{{- max (include "baton.drainS" . | int) (default 300 .Values.config.request_deadline_s | ceil | int) }}
{{- end }}

{{/* The pools of the configuration, as JSON; without any they are Baton's own. */}}
{{- define "baton.pools" -}}
{{- $own := list (dict "name" "prefill" "role" "prefill") (dict "name" "decode" "role" "decode") }}
{{- default $own .Values.config.pools | toJson }}
{{- end }}

{{/* Roles that have pods of workers: those of the pools. */}}
{{- define "baton.roles" -}}
{{- $roles := list }}
{{- range include "baton.pools" . | fromJsonArray }}{{ $roles = append $roles .role }}{{ end }}
{{- $roles | uniq | sortAlpha | reverse | toJson }}
{{- end }}

{{/* Number of workers of all pools of a role at the start, in mode disaggregated: of `root` and `role`. */}}
{{- define "baton.workersOfRole" -}}
{{- $found := 0 }}
{{- range include "baton.pools" .root | fromJsonArray }}
{{- if eq .role $.role }}{{ $found = add $found (include "baton.podsOf" (dict "root" $.root "pool" .) | int) }}{{ end }}
{{- end }}
{{- $found }}
{{- end }}

{{/* Number of workers of a pool at the start, in mode disaggregated: of `root` and `pool`. Each is a pod, or a
group of pods. */}}
{{- define "baton.podsOf" -}}
{{- $group := index .root.Values.workers .pool.role }}
{{- if $group.autoscaling.enabled -}}
{{ $group.autoscaling.minReplicas }}
{{- else -}}
{{ ternary .pool.count $group.replicas (hasKey .pool "count") }}
{{- end }}
{{- end }}

{{/* Fields of a pod that `settings` and the values of all pods give. `spreads` names the component whose
pods are spread over hosts unless the settings say otherwise. */}}
{{- define "baton.podFields" -}}
{{- $root := .root }}
{{- $settings := .settings }}
{{- if not .callsKubernetes }}
automountServiceAccountToken: false
{{- end }}
# A service with the name baton would set BATON_… variables in every pod.
enableServiceLinks: false
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- range $name := list "priorityClassName" "runtimeClassName" }}
{{- with get $settings $name }}
{{ $name }}: {{ . }}
{{- end }}
{{- end }}
{{- if get $settings "hostIPC" }}
hostIPC: true
{{- end }}
{{- range $name := list "nodeSelector" "affinity" }}
{{- with get $settings $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- $tolerations := default (list) (get $settings "tolerations") }}
{{- if ne $root.Values.mode "standalone" }}
{{- range list "not-ready" "unreachable" }}
{{- $tolerations = append $tolerations (dict "key" (printf "node.kubernetes.io/%s" .) "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" (int $root.Values.nodeLostS)) }}
{{- end }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with get $settings "topologySpreadConstraints" }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- else }}
{{- with .spreads }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selectorLabels" $root | nindent 8 }}
        app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Without the versions of chart and Baton, whose change alone must not replace pods. */}}
{{- define "baton.podLabels" -}}
{{ include "baton.selectorLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with .settings.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of a list of capabilities. */}}
{{- define "baton.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
{{- end }}

{{/* Resources of a container that downloads a model: those of the pod without its devices. */}}
{{- define "baton.plainResources" -}}
{{- range $kind := list "requests" "limits" }}
{{- with pick (default (dict) (get $ $kind)) "cpu" "memory" "ephemeral-storage" }}
{{ $kind }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* Variables of all processes of Baton in pods: of `root` and `component`. */}}
{{- define "baton.variables" -}}
{{- $root := .root }}
{{- $values := $root.Values }}
{{- $tls := include "baton.hasTls" $root }}
{{- include "baton.storeVariables" . }}
{{- if ne $values.mode "standalone" }}
- name: BATON_CLUSTER_ID
  value: {{ include "baton.clusterId" $root | quote }}
{{- if ne .component "router" }}
- name: BATON_METRICS_PORT
  value: {{ include "baton.metricsPort" $root | quote }}
{{- end }}
{{- if include "baton.hasClusterSecret" $root }}
- name: BATON_CLUSTER_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ default (include "baton.secretName" .) $values.clusterSecret.existingSecret }}
      key: {{ ternary $values.clusterSecret.existingSecretKey "cluster-secret" (not (empty $values.clusterSecret.existingSecret)) }}
{{- end }}
{{- end }}
{{- if $tls }}
- name: BATON_TLS__FOLDER
  value: /etc/baton-tls
{{- end }}
{{- $fronts := has .component (list "cluster" "router") }}
{{- $keys := or $values.auth.requireKey $values.existingConfigSecret }}
{{- if or (not $tls) (and $fronts (not $keys)) }}
# Without certificates or keys; networkPolicy limits access.
- name: BATON_INSECURE_LISTEN
  value: "true"
{{- end }}
{{- $clear := or (eq $values.redis.mode "valkey") $values.redis.insecure }}
{{- if eq $values.mode "standalone" }}
{{- $clear = or $clear (eq $values.gcsStore.mode "valkey") $values.gcsStore.insecure }}
{{- end }}
{{- if $clear }}
# The stores that the chart deploys have no TLS; networkPolicy limits access to them.
- name: BATON_INSECURE_REDIS
  value: "true"
{{- end }}
{{- include "baton.hubVariables" $root }}
{{- with $values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What downloads from the Hugging Face hub need. */}}
{{- define "baton.hubVariables" -}}
{{- with .Values.huggingFace.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end }}

{{/* The supervisor's metrics page; workers have the ports after it. */}}
{{- define "baton.metricsPort" -}}
9400
{{- end }}

{{/* The listeners of pods that answer requests. */}}
{{- define "baton.frontVariables" -}}
- name: BATON_HTTP
  value: 0.0.0.0:8000
- name: BATON_GRPC
  value: 0.0.0.0:8001
- name: BATON_ADMIN_HTTP
  value: 0.0.0.0:8002
{{- end }}

{{- define "baton.frontPorts" -}}
- name: http
  containerPort: 8000
- name: grpc
  containerPort: 8001
- name: admin
  containerPort: 8002
{{- end }}

{{/* Probes of pods that answer requests. /live answers when the model is there and the routers are up,
/health when workers serve. */}}
{{- define "baton.frontProbes" -}}
{{- $probes := dict "startupProbe" (dict "path" "/live" "periodSeconds" 5 "failureThreshold" (div .Values.probes.startupS 5)) "readinessProbe" (dict "path" "/health" "periodSeconds" 5 "failureThreshold" 2) "livenessProbe" (dict "path" "/live" "periodSeconds" 10 "failureThreshold" 6) }}
{{- range $kind, $probe := $probes }}
{{ $kind }}:
  httpGet:
    path: {{ $probe.path }}
    port: http
    # The kubelet does not verify certificates.
    scheme: {{ ternary "HTTPS" "HTTP" (not (empty (include "baton.hasTls" $))) }}
  periodSeconds: {{ $probe.periodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ $probe.failureThreshold }}
{{- end }}
{{- end }}

{{/* Volumes of a pod: of `root`, `settings`, `component`, and `role`, whose key the pod gets. `config` and
`data` tell whether it has those volumes, `claims` which ones a StatefulSet brings. */}}
{{- define "baton.volumes" -}}
{{- $root := .root }}
{{- $claims := default (list) .claims }}
- name: tmp
  emptyDir:
    sizeLimit: {{ $root.Values.tmpSize }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ $root.Values.shmSize }}
{{- if not (has "cache" $claims) }}
- name: cache
  {{- if .cacheSize }}
  emptyDir:
    sizeLimit: {{ .cacheSize }}
  {{- else if $root.Values.modelCache.volume }}
  {{- toYaml $root.Values.modelCache.volume | nindent 2 }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $root.Values.modelCache.size }}
  {{- end }}
{{- end }}
{{- if and .dataSize (not (has "data" $claims)) }}
- name: data
  emptyDir:
    sizeLimit: {{ .dataSize }}
{{- end }}
{{- if .config }}
- name: config
  secret:
    secretName: {{ default (include "baton.secretName" .) $root.Values.existingConfigSecret }}
    defaultMode: 0440
    items:
      - key: baton.toml
        path: baton.toml
{{- end }}
{{- with include "baton.tlsVolume" (dict "root" $root "roles" .roles) }}
{{ . }}
{{- end }}
{{- with include "baton.storeFiles" (dict "root" $root "component" .component "roles" .roles) | fromJsonArray }}
- name: store
  secret:
    secretName: {{ default (printf "%s-index" (include "baton.fullname" $root)) $root.Values.redis.passwordSecret }}
    defaultMode: 0440
    items:
      {{- range . }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}
{{- with $root.Values.modelVolume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with get .settings "extraVolumes" }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Where these volumes are in the container. */}}
{{- define "baton.mounts" -}}
{{- $root := .root }}
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
- name: cache
  mountPath: /var/cache/baton
{{- if .dataSize }}
- name: data
  mountPath: /var/lib/baton
{{- end }}
{{- if .config }}
- name: config
  mountPath: /etc/baton
  readOnly: true
{{- end }}
{{- if include "baton.hasTls" $root }}
- name: tls
  mountPath: /etc/baton-tls
  readOnly: true
{{- end }}
{{- if include "baton.storeFiles" (dict "root" $root "component" .component "roles" .roles) | fromJsonArray }}
- name: store
  mountPath: /etc/baton-store
  readOnly: true
{{- end }}
{{- if $root.Values.modelVolume }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- with get .settings "extraVolumeMounts" }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Containers that download the models before a worker's own start, of `root` and `settings`: its probes
then need not wait for them, and a volume of the node has one download. Empty for models of a volume. */}}
{{- define "baton.pulls" -}}
{{- $root := .root }}
{{- $config := $root.Values.config }}
{{- $resources := .settings.resources }}
{{- if not $root.Values.existingConfigSecret }}
{{- range $name, $revision := dict "model" "revision" "draft_model" "draft_revision" }}
{{- $model := toString (default "" (get $config $name)) }}
{{- if and $model (not (hasPrefix "/" $model)) }}
{{- $args := list "model" "pull" $model }}
{{- with get $config $revision }}{{ $args = concat $args (list "--revision" .) }}{{ end }}
- name: pull-{{ $name | replace "_" "-" }}
  image: {{ include "baton.image" $root }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: ["tini", "--", "baton"]
  args: {{ toJson $args }}
  {{- with printf "%s\n%s" (include "baton.hubVariables" $root) (empty $root.Values.env | ternary "" (toYaml $root.Values.env)) | trim }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  resources:
    {{- include "baton.plainResources" $resources | nindent 4 }}
  securityContext:
    {{- include "baton.containerSecurityContext" (list) | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: cache
      mountPath: /var/cache/baton
{{- end }}
{{- end }}
{{- end }}
{{- end }}
