{{/*
A Valkey that the chart deploys. That of the index stores nothing on disk, since the index fills
again, unless it also has the state of files and batches; that of Ray's control store does.
*/}}
{{- define "baton.valkey" -}}
{{- $root := .root }}
{{- $full := printf "%s-%s" (include "baton.fullname" $root) .name }}
{{- $isIndex := eq .name "index" }}
{{- $keeps := or (not $isIndex) (not (empty $root.Values.config.batch_store)) }}
---
apiVersion: v1
kind: Secret
metadata:
  name: {{ $full }}
  labels:
    {{- include "baton.labels" $root | nindent 4 }}
type: Opaque
stringData:
  password: {{ .password | quote }}
  {{- if $isIndex }}
  {{- range $user := list "router" "worker" "supervisor" }}
  {{ $user }}: {{ include "baton.storePassword" (dict "user" $user "password" $.password) | quote }}
  {{- end }}
  {{- end }}
  valkey.conf: |
    requirepass {{ .password }}
    {{- if $isIndex }}
    {{- $rules := $root.Files.Get "files/users.acl" }}
    {{- range $user := list "router" "worker" "supervisor" }}
    {{- $hashes := list }}
    {{- range $password := compact (list $.password $root.Values.redis.previousPassword) }}
    {{- $hashes = append $hashes (include "baton.storePassword" (dict "user" $user "password" $password) | sha256sum) }}
    {{- end }}
    {{- $rules = replace (printf "@%s@" (upper $user)) (join " #" $hashes) $rules }}
    {{- end }}
    {{- $rules | trim | nindent 4 }}
    {{- end }}
    save ""
    appendonly {{ ternary "yes" "no" $keeps }}
    appendfsync everysec
    maxmemory {{ int $root.Values.valkey.memoryMib }}mb
    maxmemory-policy noeviction
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $full }}
  labels:
    {{- include "baton.labels" $root | nindent 4 }}
spec:
  selector:
    {{- include "baton.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
  ports:
    - name: valkey
      port: 6379
      targetPort: valkey
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $full }}
  labels:
    {{- include "baton.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
spec:
  serviceName: {{ $full }}
  replicas: 1
  selector:
    matchLabels:
      {{- include "baton.selectorLabels" $root | nindent 6 }}
      app.kubernetes.io/component: {{ .name }}
  template:
    metadata:
      labels:
        {{- include "baton.labels" $root | nindent 8 }}
        app.kubernetes.io/component: {{ .name }}
        baton.io/store: "true"
      annotations:
        checksum/password: {{ printf "%s %s" .password (ternary $root.Values.redis.previousPassword "" $isIndex) | sha256sum }}
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false
      securityContext:
        runAsNonRoot: true
        runAsUser: 999
        runAsGroup: 1000
        fsGroup: 1000
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: valkey
          image: {{ $root.Values.valkey.image }}
          command: ["valkey-server", "/etc/valkey/valkey.conf"]
          env:
            - name: REDISCLI_AUTH
              valueFrom:
                secretKeyRef:
                  name: {{ $full }}
                  key: password
          ports:
            - name: valkey
              containerPort: 6379
          readinessProbe:
            exec:
              command: ["sh", "-c", "valkey-cli ping | grep -q PONG"]
            periodSeconds: 5
            timeoutSeconds: 3
          livenessProbe:
            tcpSocket:
              port: valkey
            periodSeconds: 10
            failureThreshold: 6
          resources:
            requests:
              cpu: 250m
              memory: {{ int $root.Values.valkey.memoryMib }}Mi
            limits:
              memory: {{ div (mul (int $root.Values.valkey.memoryMib) 3) 2 }}Mi
          securityContext:
            {{- include "baton.containerSecurityContext" (list) | nindent 12 }}
          volumeMounts:
            - name: config
              mountPath: /etc/valkey
              readOnly: true
            - name: data
              mountPath: /data
          workingDir: /data
      volumes:
        - name: config
          secret:
            secretName: {{ $full }}
            defaultMode: 0440
            items:
              - key: valkey.conf
                path: valkey.conf
        {{- if not $keeps }}
        - name: data
          emptyDir: {}
        {{- end }}
  {{- if $keeps }}
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $root.Values.valkey.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ $root.Values.valkey.storage }}
  {{- end }}
{{ end }}
