{{/* The configuration file of a component. That of workers has only what workers read (the fields of
baton/config/worker_fields.py, which a test compares): nothing else replaces their pods. */}}
{{- define "baton.toml" -}}
{{- $root := .root }}
{{- $config := deepCopy $root.Values.config }}
{{- /* Logs go to the container's standard output, for the cluster's collector. */}}
{{- $config = merge $config (dict "log_to" "stdout" "log_format" "json") }}
{{- $sized := list }}
{{- range include "baton.pools" $root | fromJsonArray }}
{{- if eq $.component "worker" }}
{{- $sized = append $sized (omit . "count") }}
{{- else if eq $root.Values.mode "disaggregated" }}
{{- $sized = append $sized (set . "count" (include "baton.podsOf" (dict "root" $root "pool" .) | int)) }}
{{- else }}
{{- $sized = append $sized . }}
{{- end }}
{{- end }}
{{- $_ := set $config "pools" $sized }}
{{- if eq .component "worker" }}
{{- $shares := list }}
{{- range $root.Values.auth.tenants }}
{{- if hasKey . "max_pinned_fraction" }}{{ $shares = append $shares (pick . "name" "max_pinned_fraction") }}{{ end }}
{{- end }}
{{- with $config.advanced }}
{{- $_ := set $config "advanced" (pick . "heartbeat_s" "registry_ttl_s" "lease_s" "hang_s" "index_mib" "transfer_window_mib" "standby") }}
{{- end }}
{{- $config = pick $config "model" "revision" "served_model_name" "max_model_len" "dtype" "quantization" "kv_dtype" "deterministic" "drafter" "draft_model" "draft_revision" "pools" "block_size" "slo_tpot_s" "transport" "data_network" "shm_folder" "kv_host_mib" "kv_disk_mib" "kv_disk_path" "max_pinned_fraction" "drain_deadline_s" "advanced" "log_level" "log_format" "log_to" "otlp_endpoint" "trace_ratio" "vllm_metrics" }}
{{- with $shares }}{{ $_ := set $config "tenants" . }}{{ end }}
{{- else }}
{{- $_ := set $config "require_key" $root.Values.auth.requireKey }}
{{- with $root.Values.auth.keys }}{{ $_ := set $config "keys" . }}{{ end }}
{{- with $root.Values.auth.tenants }}{{ $_ := set $config "tenants" . }}{{ end }}
{{- if eq $root.Values.mode "disaggregated" }}
{{- $_ := set $config "scale_command" (include "baton.scaleCommand" $root) }}
{{- end }}
{{- end }}
{{- toToml $config }}
{{- end }}

{{/* Name of the Secret with the configuration and the addresses of a component. */}}
{{- define "baton.secretName" -}}
{{ include "baton.fullname" .root }}{{ if ne .component "cluster" }}-{{ .component }}{{ end }}
{{- end }}

{{/* What is in it; a pod's annotation has its checksum. */}}
{{- define "baton.secretData" -}}
{{- $root := .root }}
{{- $values := $root.Values }}
{{- if not $values.existingConfigSecret }}
baton.toml: |
  {{- include "baton.toml" . | nindent 2 }}
{{- end }}
{{- if and (ne $values.redis.mode "embedded") (not $values.redis.existingSecret) }}
{{- $own := get (dict "router" "router" "worker" "worker") .component | default "supervisor" }}
redis-url: {{ include "baton.storeUrl" (dict "root" $root "user" $own) | quote }}
{{- if and (eq $own "supervisor") (include "baton.hasStoreUsers" $root) }}
redis-router-url: {{ include "baton.storeUrl" (dict "root" $root "user" "router") | quote }}
redis-worker-url: {{ include "baton.storeUrl" (dict "root" $root "user" "worker") | quote }}
{{- end }}
{{- end }}
{{- if and (include "baton.hasClusterSecret" $root) (not $values.clusterSecret.existingSecret) }}
cluster-secret: {{ default (printf "cluster secret of %s" $values.redis.password | sha256sum) $values.clusterSecret.value | quote }}
{{- end }}
{{- if and (eq .component "cluster") (has $values.gcsStore.mode (list "valkey" "external")) (not $values.gcsStore.existingSecret) }}
gcs-url: {{ include "baton.gcsUrl" $root | quote }}
{{- end }}
{{- if eq .component "launcher" }}
gcs-password: {{ include "baton.passwordOf" (include "baton.gcsUrl" $root) | quote }}
{{- end }}
{{- end }}

{{/* Processes without certificates show each other a secret. With certificates, routers alone use one, for
the names of cached blocks, and keep it in the store. */}}
{{- define "baton.hasClusterSecret" -}}
{{- if and (ne .Values.mode "standalone") (not (include "baton.hasTls" .)) (or .Values.clusterSecret.value .Values.clusterSecret.existingSecret (eq .Values.redis.mode "valkey")) }}true{{ end }}
{{- end }}

{{/* Passwords of the users of a Valkey that the chart deploys; letters and digits. */}}
{{- define "baton.storePassword" -}}
{{- printf "%s of %s" .user .password | sha256sum }}
{{- end }}

{{/* Whether routers and workers have users of their own in the store. */}}
{{- define "baton.hasStoreUsers" -}}
{{- $redis := .Values.redis }}
{{- if or (eq $redis.mode "valkey") (and (eq $redis.mode "external") (or $redis.routerUrl (and $redis.existingSecret $redis.existingSecretUsers))) }}true{{ end }}
{{- end }}

{{/* The store's address for one of its users. */}}
{{- define "baton.storeUrl" -}}
{{- $redis := .root.Values.redis }}
{{- if eq $redis.mode "valkey" -}}
redis://{{ .user }}@{{ include "baton.fullname" .root }}-index:6379/0?password_file=/etc/baton-store/{{ .user }}
{{- else -}}
{{ default $redis.url (get $redis (printf "%sUrl" .user)) }}
{{- end }}
{{- end }}

{{/* The addresses of the store that a component may know: its own, and for the supervisor's all. */}}
{{- define "baton.storeVariables" -}}
{{- $root := .root }}
{{- $redis := $root.Values.redis }}
{{- if ne $redis.mode "embedded" }}
{{- $users := include "baton.hasStoreUsers" $root }}
{{- $own := get (dict "router" "router-url" "worker" "worker-url") .component }}
{{- $variables := dict "BATON_REDIS_URL" (dict "own" "redis-url" "theirs" (ternary $own $redis.existingSecretKey (and (not (empty $own)) (not (empty $users))))) }}
{{- if and $users (not $own) }}
{{- range list "router" "worker" }}
{{- $_ := set $variables (printf "BATON_REDIS_%s_URL" (upper .)) (dict "own" (printf "redis-%s-url" .) "theirs" (printf "%s-url" .)) }}
{{- end }}
{{- end }}
{{- range $variable, $key := $variables }}
- name: {{ $variable }}
  valueFrom:
    secretKeyRef:
      {{- if $redis.existingSecret }}
      name: {{ $redis.existingSecret }}
      key: {{ $key.theirs }}
      {{- else }}
      name: {{ include "baton.secretName" $ }}
      key: {{ $key.own }}
      {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Names of the files in /etc/baton-store with the passwords that a pod may know, as JSON: of `root`,
`component` and `roles`. Processes read them for each connection, so that a new password replaces no pod. */}}
{{- define "baton.storeFiles" -}}
{{- $redis := .root.Values.redis }}
{{- $files := list }}
{{- if or (eq $redis.mode "valkey") (and (eq $redis.mode "external") $redis.passwordSecret) }}
{{- if has .component (list "router" "worker") }}
{{- $files = list .component }}
{{- else if ne .component "ray" }}
{{- $files = list "supervisor" "router" "worker" }}
{{- else if has "worker" .roles }}
{{- $files = list "worker" }}
{{- end }}
{{- if and $files (not (include "baton.hasStoreUsers" .root)) }}
{{- $files = list "password" }}
{{- end }}
{{- end }}
{{- toJson $files }}
{{- end }}

{{/* The address of the control store's store, with its password. */}}
{{- define "baton.gcsUrl" -}}
{{- if eq .Values.gcsStore.mode "valkey" -}}
redis://:{{ .Values.gcsStore.password }}@{{ include "baton.fullname" . }}-gcs:6379
{{- else -}}
{{ .Values.gcsStore.url }}
{{- end }}
{{- end }}

{{/* The password in a store's address. */}}
{{- define "baton.passwordOf" -}}
{{- regexReplaceAll "^[^:]*:?" (get (urlParse .) "userinfo") "" }}
{{- end }}
