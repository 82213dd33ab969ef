{{/* What all objects are called, and how they are found. */}}
{{- define "weft.name" -}}
{{- if contains "weft" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-weft{{ end }}
{{- end }}

{{- define "weft.selector" -}}
app.kubernetes.io/name: weft
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "weft.labels" -}}
{{ include "weft.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* weft.toml. */}}
{{- define "weft.settings" -}}
metrics_port = {{ .Values.front.metricsPort }}
{{ .Values.settings }}
{{- end }}

{{/* Of a pod, by its values (.of): where it runs, as whom, and its folders. */}}
{{- define "weft.pod" -}}
automountServiceAccountToken: {{ .root.Values.serviceAccount.automountToken }}
{{- with .root.Values.serviceAccount.name }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
terminationGracePeriodSeconds: {{ .of.terminationGracePeriodSeconds }}
{{- with .of.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: data
{{- if .root.Values.data.claim }}
    persistentVolumeClaim: {claimName: {{ .root.Values.data.existingClaim | default (printf "%s-data" (include "weft.name" .root)) }}}
{{- else }}
    emptyDir: {sizeLimit: {{ .root.Values.data.ephemeralSize }}}
{{- end }}
  - {name: config, configMap: {name: {{ include "weft.name" .root }}}}
  - {name: tmp, emptyDir: {}}
  - {name: cache, emptyDir: {}}
{{- with .root.Values.volumes }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- end }}

{{/* Of a container: image, environment, rights, folders. Its name, command and ports stand before. */}}
{{- define "weft.container" -}}
image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
env:
  - name: WEFT_DATABASE_URL
    valueFrom: {secretKeyRef: {{ toJson .root.Values.secrets.databaseUrl }}}
  - name: WEFT_REDIS_URL
    valueFrom: {secretKeyRef: {{ toJson .root.Values.secrets.redisUrl }}}
  - {name: WEFT_FRONT__TRUSTED_PROXIES, value: {{ toJson .root.Values.trustedProxies | quote }}}
  - {name: WEFT_TRAINER__RANKS, value: {{ .root.Values.trainer.ranks | quote }}}
{{- with .root.Values.env }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .root.Values.secrets.environment }}
envFrom:
  - secretRef: {name: {{ . }}, optional: {{ $.root.Values.secrets.environmentOptional }}}
{{- end }}
volumeMounts:
  - {name: data, mountPath: /data}
  - {name: config, mountPath: /etc/weft, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  - {name: cache, mountPath: /home/weft/.cache}
{{- with .root.Values.volumeMounts }}
{{ toYaml . | indent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- end }}

{{/* What a worker may take: with `gpus` so many of them. */}}
{{- define "weft.resources" -}}
{{- $resources := deepCopy .of.resources }}
{{- if .of.gpus }}
{{- $limits := set (default dict $resources.limits) .of.gpuResource .of.gpus }}
{{- $_ := set $resources "limits" $limits }}
{{- end }}
resources: {{ toJson $resources }}
{{- end }}
