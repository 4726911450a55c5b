{{/* The parts that all of Ray's pods have. */}}
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
  terminationGracePeriodSeconds: {{ add (default 30 $root.Values.config.drain_deadline_s | ceil) $root.Values.shutdown.endingS }}
  containers:
    - name: {{ .container }}
      image: {{ include "baton.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      env:
        - name: RAY_USAGE_STATS_ENABLED
          value: "0"
        - name: RAY_worker_niceness
          value: "0"
        - name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO
          value: "0"
        {{- with $root.Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $name, $port := .ports }}
        - name: {{ $name }}
          containerPort: {{ $port }}
        {{- end }}
      # KubeRay's own ask for programs and pages that this image has not.
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
      resources:
        {{- toYaml .settings.resources | nindent 8 }}
      securityContext:
        {{- include "baton.containerSecurityContext" $root | nindent 8 }}
      volumeMounts:
        - name: cache
          mountPath: /var/cache/baton
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
    {{- include "baton.scratchVolumes" $root | nindent 4 }}
{{- end }}
