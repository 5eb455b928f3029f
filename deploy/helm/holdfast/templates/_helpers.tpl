{{- define "holdfast.name" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "holdfast" $name) }}{{ $name = printf "%s-holdfast" $name }}{{ end -}}
{{- $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "holdfast.selector" -}}
app.kubernetes.io/name: holdfast
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "holdfast.labels" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "holdfast.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "holdfast.claim" -}}
{{ .Values.persistence.existingClaim | default (include "holdfast.name" .) }}
{{- end -}}

{{/* The names of the service in the cluster, and those of the values. */}}
{{- define "holdfast.hosts" -}}
{{- $name := include "holdfast.name" . -}}
{{- $namespace := .Release.Namespace -}}
{{- $own := list $name (printf "%s.%s" $name $namespace) (printf "%s.%s.svc" $name $namespace) (printf "%s.%s.svc.cluster.local" $name $namespace) -}}
{{- concat $own .Values.allowedHosts | join " " -}}
{{- end -}}

{{- define "holdfast.validate" -}}
{{- if and (eq .Values.database.kind "postgresql") (not .Values.database.existingSecret) -}}
{{- fail "database.kind is postgresql: set database.existingSecret to a Secret with the URL of the database" -}}
{{- end -}}
{{- if and (eq .Values.database.kind "sqlite") (gt (int .Values.replicas) 1) -}}
{{- fail "replicas is above 1: several servers need database.kind=postgresql, as SQLite has one writer" -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.serviceMonitor.existingSecret) -}}
{{- fail "metrics.serviceMonitor.enabled: set metrics.serviceMonitor.existingSecret to a Secret with a key of the scope read" -}}
{{- end -}}
{{- end -}}
