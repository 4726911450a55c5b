{{/* Name of the RayCluster, from which KubeRay names the token's Secret and the head's service. */}}
{{- define "baton.rayName" -}}
{{ include "baton.fullname" . }}-ray
{{- end }}

{{/* With certificates it is the name that the head's has: the service's full one. */}}
{{- define "baton.rayAddress" -}}
{{ include "baton.rayName" . }}-head-svc{{ if .Values.kuberay.tls }}.{{ .Release.Namespace }}.svc.cluster.local{{ end }}:6379
{{- end }}

{{/* The Secret with the CA of the launchers' certificates for Ray. */}}
{{- define "baton.rayLauncherCa" -}}
{{ include "baton.rayName" . }}-launcher-ca
{{- end }}

{{/* Ray's environment variables in every pod, in addition to those of KubeRay. */}}
{{- define "baton.rayVariables" -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_worker_niceness
  value: "0"
# A neighbor that fills the host must not end Baton's processes.
- name: RAY_memory_monitor_refresh_ms
  value: "0"
- name: RAY_worker_oom_score_adjustment
  value: "0"
- name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO
  value: "0"
- name: RAY_preload_python_modules
  value: deploy.workers.ray_preload
{{- end }}

{{/* Common parts of all of Ray's pods; the caller sets `command`, `preStop` and `variables`. */}}
{{- define "baton.rayPod" -}}
{{- $root := .root }}
{{- $worker := ne .group "head" }}
{{- $parts := dict "root" $root "settings" .settings "component" "ray" "roles" (ternary (list "worker") (list) $worker) "callsKubernetes" (and (not $worker) $root.Values.kuberay.autoscaling) }}
{{- if not $worker }}{{ $_ := set $parts "cacheSize" "1Gi" }}{{ end }}
metadata:
  labels:
    {{- include "baton.podLabels" $parts | nindent 4 }}
    baton.io/group: {{ .group }}
    {{- if $worker }}
    baton.io/role: {{ .group }}
    {{- end }}
  {{- with .settings.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "baton.podFields" $parts | nindent 2 }}
  # This includes preStop: workers end their requests within drain_deadline_s and 20 s more.
  terminationGracePeriodSeconds: {{ add (include "baton.drainS" $root) 20 $root.Values.shutdown.endingS }}
  {{- if $worker }}
  {{- with include "baton.pulls" $parts }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  {{- end }}
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
        {{- if $worker }}
        {{- include "baton.hubVariables" $root | nindent 8 }}
        {{- end }}
        {{- with $root.Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with .settings.extraEnv }}
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
        {{- include "baton.containerSecurityContext" .settings.capabilities | nindent 8 }}
      volumeMounts:
        {{- include "baton.mounts" $parts | nindent 8 }}
  volumes:
    {{- include "baton.volumes" $parts | nindent 4 }}
{{- end }}
