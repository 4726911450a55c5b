{{- define "baton.hasTls" -}}
{{- if or .Values.tls.secret .Values.tls.certManager.enabled }}true{{ end }}
{{- end }}

{{/* The Secret of cert-manager with a role's certificate. */}}
{{- define "baton.roleSecret" -}}
{{ include "baton.fullname" .root }}-{{ .role }}-tls
{{- end }}

{{/* A volume with the CA, and with the certificates and keys of `roles` alone, under the names that
`baton certs init` gives them. Without roles it has the CA alone. */}}
{{- define "baton.tlsVolume" -}}
{{- $root := .root }}
{{- $roles := .roles }}
{{- if include "baton.hasTls" $root -}}
- name: tls
  projected:
    defaultMode: 0440
    sources:
      {{- if $root.Values.tls.secret }}
      - secret:
          name: {{ $root.Values.tls.secret }}
          items:
            - {key: ca.pem, path: ca.pem}
            {{- range $roles }}
            - {key: {{ . }}.pem, path: {{ . }}.pem}
            - {key: {{ . }}.key, path: {{ . }}.key}
            {{- end }}
      {{- else }}
      {{- range $at, $role := default (list "router") $roles }}
      - secret:
          name: {{ include "baton.roleSecret" (dict "root" $root "role" $role) }}
          items:
            {{- if eq $at 0 }}
            - {key: ca.crt, path: ca.pem}
            {{- end }}
            {{- if $roles }}
            - {key: tls.crt, path: {{ $role }}.pem}
            - {key: tls.key, path: {{ $role }}.key}
            {{- end }}
      {{- end }}
      {{- end }}
{{- end }}
{{- end }}

{{/* How Prometheus connects to `role`: by its name, since it calls pods by their addresses. `shows` tells
whether it must show its own certificate. */}}
{{- define "baton.scrapeTls" -}}
{{- $root := .root }}
{{- $own := $root.Values.tls.secret }}
{{- $secret := default (include "baton.roleSecret" (dict "root" $root "role" "monitor")) $own -}}
serverName: {{ .role }}.baton.internal
ca:
  secret:
    name: {{ $secret }}
    key: {{ ternary "ca.pem" "ca.crt" (not (empty $own)) }}
{{- if .shows }}
cert:
  secret:
    name: {{ $secret }}
    key: {{ ternary "monitor.pem" "tls.crt" (not (empty $own)) }}
keySecret:
  name: {{ $secret }}
  key: {{ ternary "monitor.key" "tls.key" (not (empty $own)) }}
{{- end }}
{{- end }}
