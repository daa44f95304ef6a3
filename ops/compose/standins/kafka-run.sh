#!/bin/bash
# What /etc/kafka/docker/run of the official image does: each KAFKA_A_B=value becomes a.b=value in
# server.properties (two underscores: one underscore; three: a dash), then format once and serve.
set -euo pipefail
properties=/tmp/server.properties
: >"$properties"
while IFS='=' read -r -d '' name value; do
    case $name in
        KAFKA_HEAP_OPTS | KAFKA_OPTS | KAFKA_LOG4J_*) continue ;;
        KAFKA_*) key=${name#KAFKA_} ;;
        *) continue ;;
    esac
    key=${key,,}
    key=${key//___/-}
    key=${key//__/$'\1'}
    key=${key//_/.}
    printf '%s=%s\n' "${key//$'\1'/_}" "$value" >>"$properties"
done < <(env -0)
classpath='/opt/kafka/libs/*'
java -cp "$classpath" kafka.tools.StorageTool format --ignore-formatted \
    -t "${CLUSTER_ID:-5L6g3nShT-eMCtK--X86sw}" -c "$properties"
# shellcheck disable=SC2086 # several options in one variable, as in the official image
exec java ${KAFKA_HEAP_OPTS:-} -XX:+UseSerialGC -cp "$classpath" kafka.Kafka "$properties"
