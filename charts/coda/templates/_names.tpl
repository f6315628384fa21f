{{/* Name of the operator's objects. */}}
{{- define "coda.name" -}}
{{- printf "%s-operator" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of the operator's objects. */}}
{{- define "coda.labels" -}}
app.kubernetes.io/name: coda-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Labels by which the Deployment finds its pod. */}}
{{- define "coda.selector" -}}
app.kubernetes.io/name: coda-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/*
What the operator may do, and why. It cannot give what it does not have: the last two rules are what it
hands to the profiling Jobs and routers.
*/}}
{{- define "coda.rules" -}}
- apiGroups: [coda-serving.dev]
  resources: [codaclusters]
  verbs: [get, list, watch]
- apiGroups: [coda-serving.dev]
  resources: [codaclusters/status]
  verbs: [patch]
# Children that are watched.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
# Children that are read by name only: no right to list anybody's Secrets or ConfigMaps.
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts]
  verbs: [get, create, patch, delete]
# Made once and never changed: no right to change anybody's Secrets.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
# Handed on to the profiling Job.
- apiGroups: [coda-serving.dev]
  resources: [codaprofiles]
  verbs: [get, list, watch, create, patch]
# Handed on to the router.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
{{- end -}}
