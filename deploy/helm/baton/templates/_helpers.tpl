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

{{/* Component of the pods that answer requests: whole clusters, or the routers of mode kuberay. */}}
{{- define "baton.frontComponent" -}}
{{- if eq .Values.mode "single" }}cluster{{ else }}router{{ end }}
{{- end }}

{{- define "baton.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "baton.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The configuration file. */}}
{{- define "baton.toml" -}}
{{- $config := deepCopy .Values.config }}
{{- $_ := set $config "require_key" .Values.auth.requireKey }}
{{- /* Logs go to the container's standard output, for the cluster's collector. */}}
{{- $config = merge $config (dict "log_to" "stdout" "log_format" "json") }}
{{- if .Values.auth.keys }}{{ $_ := set $config "keys" .Values.auth.keys }}{{ end }}
{{- if .Values.auth.tenants }}{{ $_ := set $config "tenants" .Values.auth.tenants }}{{ end }}
{{- toToml $config }}
{{- end }}

{{- define "baton.clusterId" -}}
{{- default (include "baton.fullname" .) .Values.kuberay.clusterId }}
{{- end }}

{{/* The address of the store of registry and index, with its password. */}}
{{- define "baton.indexUrl" -}}
{{- if eq .Values.redis.mode "valkey" -}}
{{ include "baton.storeUserUrl" (dict "root" . "user" "supervisor") }}
{{- else -}}
{{ .Values.redis.url }}
{{- end }}
{{- end }}

{{/* The address of the control store's store, with its password. */}}
{{- define "baton.gcsUrl" -}}
{{- if eq .Values.gcsStore.mode "valkey" -}}
redis://:{{ .Values.gcsStore.password }}@{{ include "baton.fullname" . }}-gcs:6379
{{- else -}}
{{ .Values.gcsStore.url }}
{{- end }}
{{- end }}

{{/* A variable from a Secret of the chart, or of the operator. */}}
{{- define "baton.storeVariable" -}}
- name: {{ .variable }}
  valueFrom:
    secretKeyRef:
      {{- if .store.existingSecret }}
      name: {{ .store.existingSecret }}
      key: {{ .store.existingSecretKey }}
      {{- else }}
      name: {{ include "baton.fullname" .root }}
      key: {{ .key }}
      {{- end }}
{{- end }}

{{- define "baton.configVolume" -}}
- name: config
  secret:
    secretName: {{ default (include "baton.fullname" .) .Values.existingConfigSecret }}
    defaultMode: 0440
    items:
      - key: baton.toml
        path: baton.toml
{{- end }}

{{- define "baton.scratchVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmpSize }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.shmSize }}
{{- with .Values.modelVolume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "baton.scratchMounts" -}}
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
{{- if .Values.modelVolume }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- end }}

{{/* The password in a store's address. */}}
{{- define "baton.passwordOf" -}}
{{- regexReplaceAll "^[^:]*:?" (get (urlParse .) "userinfo") "" }}
{{- end }}

{{/* The kubelet does not verify certificates. */}}
{{- define "baton.probeScheme" -}}
scheme: {{ ternary "HTTPS" "HTTP" (not (empty .Values.tls.secret)) }}
{{- end }}

{{/* Passwords of the users of a Valkey that the chart deploys; letters and digits. */}}
{{- define "baton.storePassword" -}}
{{- printf "%s of %s" .user .password | sha256sum }}
{{- end }}

{{/* The store's addresses with the users of routers and workers, if it has such users. */}}
{{- define "baton.storeUsers" -}}
{{- $own := and (eq .Values.redis.mode "external") .Values.redis.existingSecret }}
{{- $users := or (eq .Values.redis.mode "valkey") .Values.redis.routerUrl }}
{{- if or $users (and $own .Values.redis.existingSecretUsers) }}
{{- range $role := list "router" "worker" }}
- name: BATON_REDIS_{{ upper $role }}_URL
  valueFrom:
    secretKeyRef:
      {{- if $own }}
      name: {{ $.Values.redis.existingSecret }}
      key: {{ $role }}-url
      {{- else }}
      name: {{ include "baton.fullname" $ }}
      key: redis-{{ $role }}-url
      {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* One of these addresses. */}}
{{- define "baton.storeUserUrl" -}}
{{- if eq .root.Values.redis.mode "valkey" -}}
redis://{{ .user }}:{{ include "baton.storePassword" (dict "user" .user "password" .root.Values.redis.password) }}@{{ include "baton.fullname" .root }}-index:6379/0
{{- else -}}
{{ index .root.Values.redis (printf "%sUrl" .user) }}
{{- end }}
{{- end }}

{{/* Certificates, or the settings that allow connections without them. */}}
{{- define "baton.tlsVariables" -}}
{{- if .Values.tls.secret }}
- name: BATON_TLS__FOLDER
  value: /etc/baton-tls
{{- end }}
{{- if not (and .Values.tls.secret (or .Values.auth.requireKey .Values.existingConfigSecret)) }}
# TLS ends at the ingress; auth and networkPolicy limit access.
- name: BATON_INSECURE_LISTEN
  value: "true"
{{- end }}
{{- $clear := or (eq .Values.redis.mode "valkey") .Values.redis.insecure }}
{{- if eq .Values.mode "single" }}
{{- $clear = or $clear (eq .Values.gcsStore.mode "valkey") .Values.gcsStore.insecure }}
{{- end }}
{{- if $clear }}
# The stores that the chart deploys have no TLS; networkPolicy limits access to them.
- name: BATON_INSECURE_REDIS
  value: "true"
{{- end }}
{{- end }}

{{- define "baton.tlsMount" -}}
{{- if .Values.tls.secret }}
- name: tls
  mountPath: /etc/baton-tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "baton.tlsVolume" -}}
{{- if .Values.tls.secret }}
- name: tls
  secret:
    secretName: {{ .Values.tls.secret }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{/* The name that ingress-nginx requires in a router's certificate. */}}
{{- define "baton.ingressVerifies" -}}
{{- if .Values.tls.ingressSecret -}}
nginx.ingress.kubernetes.io/proxy-ssl-secret: {{ .Release.Namespace }}/{{ .Values.tls.ingressSecret }}
nginx.ingress.kubernetes.io/proxy-ssl-verify: "on"
nginx.ingress.kubernetes.io/proxy-ssl-name: {{ include "baton.fullname" . }}.{{ .Release.Namespace }}.svc
nginx.ingress.kubernetes.io/proxy-ssl-server-name: "on"
{{- end }}
{{- end }}
