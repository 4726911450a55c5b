{{/* Name of the RayCluster, from which KubeRay names the token's Secret and the head's service. */}}
{{- define "baton.rayName" -}}
{{ include "baton.fullname" . }}-ray
{{- end }}

{{- define "baton.rayAddress" -}}
{{ include "baton.rayName" . }}-head-svc:6379
{{- end }}

{{/* Roles that have a group of pods: those of config.pools, which may have no prefill pool. */}}
{{- define "baton.rolesOf" -}}
{{- $roles := list }}
{{- range $role := list "prefill" "decode" }}
{{- $pools := default (list) $.Values.config.pools }}
{{- range $pools }}
{{- if eq .role $role }}
{{- $roles = append $roles $role }}
{{- end }}
{{- end }}
{{- if or $.Values.existingConfigSecret (not $pools) }}
{{- $roles = append $roles $role }}
{{- end }}
{{- end }}
{{- $roles | uniq | toJson }}
{{- end }}

{{/* Ray's environment variables in every pod, in addition to those of KubeRay. */}}
{{- define "baton.rayVariables" -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_worker_niceness
  value: "0"
- name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO
  value: "0"
- name: RAY_preload_python_modules
  value: deploy.workers.ray_preload
{{- end }}

{{/* Address of the store of registry and index, and prefix of the cluster's keys in it. */}}
{{- define "baton.clusterVariables" -}}
{{ include "baton.storeVariable" (dict "root" . "store" .Values.redis "variable" "BATON_REDIS_URL" "key" "redis-url") }}
{{- include "baton.storeUsers" . }}
{{- include "baton.tlsVariables" . | nindent 0 }}
- name: BATON_CLUSTER_ID
  value: {{ include "baton.clusterId" . | quote }}
{{- end }}

{{/* Common parts of all of Ray's pods; the caller sets `command`, `preStop` and `variables`. */}}
{{- define "baton.rayPod" -}}
{{- $root := .root }}
metadata:
  labels:
    {{- include "baton.labels" $root | nindent 4 }}
    app.kubernetes.io/component: ray
    baton.io/group: {{ .group }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "baton.podSecurityContext" $root | nindent 4 }}
  # This includes preStop: workers end their requests within drain_deadline_s and 20 s more.
  terminationGracePeriodSeconds: {{ add (default 30 $root.Values.config.drain_deadline_s | ceil) 20 $root.Values.shutdown.endingS }}
  containers:
    - name: {{ .container }}
      image: {{ include "baton.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: {{ toJson .command }}
      {{- with .args }}
      args: {{ toJson . }}
      {{- end }}
      env:
        {{- include "baton.rayVariables" $root | nindent 8 }}
        {{- with .variables }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with $root.Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $name, $port := .ports }}
        - name: {{ $name }}
          containerPort: {{ $port }}
        {{- end }}
      # KubeRay's own probes need programs and pages that this image lacks.
      readinessProbe:
        tcpSocket:
          port: {{ .probe }}
        periodSeconds: 5
        failureThreshold: 3
      livenessProbe:
        tcpSocket:
          port: {{ .probe }}
        periodSeconds: 10
        initialDelaySeconds: 60
        failureThreshold: 6
      {{- with .preStop }}
      lifecycle:
        preStop:
          exec:
            command: {{ toJson . }}
      {{- end }}
      resources:
        {{- toYaml .settings.resources | nindent 8 }}
      securityContext:
        {{- include "baton.containerSecurityContext" $root | nindent 8 }}
      volumeMounts:
        - name: cache
          mountPath: /var/cache/baton
        {{- include "baton.tlsMount" $root | nindent 8 }}
        {{- include "baton.scratchMounts" $root | nindent 8 }}
  {{- with .settings.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .settings.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .settings.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .settings.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumes:
    - name: cache
      emptyDir:
        sizeLimit: {{ $root.Values.persistence.cache.size }}
    {{- include "baton.tlsVolume" $root | nindent 4 }}
    {{- include "baton.scratchVolumes" $root | nindent 4 }}
{{- end }}
